"""PYTORCH_ALLOC_CONF as libc10 itself parses it."""

import ctypes
from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.plan.alloc_conf import divisions, parse
from zsim.scenario.load import load

SCENARIO = Path(__file__).parents[2] / "scenarios" / "qwen7b_8xh100.yaml"


@pytest.fixture(scope="module")
def torchs():
    """torch's parser; and the divisions that it makes of a request of so many bytes."""
    torch = pytest.importorskip("torch")
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    found = libc10._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_size_t
    yield torch._C._accelerator_setAllocatorSettings, found
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize(
    "text",
    [
        "4", "1", "[256:1,512:2,1024:4,>:8]", "[64:8,128:2,256:4,512:2,1024:4,>:1]", "[1:2]", "[>:4]", "[65536:4]",
        "[256:1,512:2,1024:4]", "[512:2,256:1]", "[256:0,>:2]",
    ],
)  # fmt: skip
def test_divisions(torchs, text):
    set_, found = torchs
    set_(f"roundup_power2_divisions:{text}")
    assert divisions(text) == tuple(found(2**20 << interval) for interval in range(16))


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true", "expandable_segments:True;max_split_size_mb:64", "max_split_size_mb:10",
        "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "roundup_power2_divisions:3",
        "roundup_power2_divisions:0", "roundup_power2_divisions:[3:2]", "roundup_power2_divisions:[4:3]",
        "max_split_size_mb:abc",
    ],
)  # fmt: skip
def test_what_torch_refuses(torchs, text):
    with pytest.raises((ValueError, RuntimeError)):
        torchs[0](text)
    with pytest.raises(InputError):
        load(SCENARIO, [f'allocator="{text}"']).resolve()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("expandable_segments:True", {"expandable_segments": True}),
        ("max_split_size_mb: 128, expandable_segments: False",
         {"expandable_segments": False, "max_split_size_mb": 128}),
        ("garbage_collection_threshold:0.6,max_split_size_mb:128,",
         {"garbage_collection_threshold": 0.6, "max_split_size_mb": 128}),
        ("roundup_power2_divisions:[256:1,>:8],expandable_segments:True",
         {"roundup_power2_divisions": "[256:1,>:8]", "expandable_segments": True}),
        ("backend:native", {}),
    ],
)  # fmt: skip
def test_what_both_take(torchs, text, found):
    torchs[0](text)
    assert parse(text)[0] == found


def test_a_scenario_takes_the_variable_or_its_settings():
    short = load(SCENARIO, ['allocator="expandable_segments:True,max_split_size_mb:128"']).resolve().plan.allocator
    long = load(SCENARIO, ["allocator={expandable_segments: true, max_split_size_mb: 128}"]).resolve().plan.allocator
    assert short == long
    both = ['allocator="expandable_segments:True"', "allocator.expandable_segments=false"]
    assert not load(SCENARIO, both).resolve().plan.allocator.expandable_segments


def test_what_has_no_effect_is_said():
    setup = load(
        SCENARIO, ['allocator="garbage_collection_threshold:0.8,pinned_use_background_threads:True"']
    ).resolve()
    said = " ".join(setup.assumptions)
    assert "garbage_collection_threshold has no effect" in said
    assert "pinned_use_background_threads has no effect" in said


def test_another_allocator_is_not_modeled():
    with pytest.raises(NotModeled, match="cudaMallocAsync"):
        load(SCENARIO, ['allocator="backend:cudaMallocAsync"'])
