"""Experts in 4 bits: parameters, calls, gradients, bytes and FLOPs are those of bitsandbytes' parametrization."""

from __future__ import annotations

import gzip
import json
from math import prod

import pytest

from tests.model import test_families
from tests.model.ledger import Ledger, flops
from tests.model.test_param_lora import MODELS
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import ModelSpec

FILE = test_families.FOLDER / "packed_experts.json.gz"
RECORDED = json.loads(gzip.decompress(FILE.read_bytes()))["models"]["steps"]

# Bytes of the last product's result, which is there in the second run of a block that ends with its experts.
UNSEEN = {"mixtral": 27_664, "olmoe": 32_768}


def packed(name: str, target: str = "o_proj", quantize: str = "nf4", **lora: object) -> ModelSpec:
    tuning = Tuning(Lora(4, (target,), **lora), quantize, experts=True)  # type: ignore[arg-type]
    return tune(from_config(MODELS[name]["config"], name), tuning)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["model"])
def test_a_step_is_the_recorded_one(monkeypatch: pytest.MonkeyPatch, recorded: dict) -> None:  # type: ignore[type-arg]
    """Which has Linear modules in 16 bits."""
    monkeypatch.setattr("zsim.model.lora.QUANTIZED", ())
    spec = packed(recorded["model"])
    theirs = [
        (name.replace("parametrizations.", "").removesuffix(".original"), prod(shape) // (2 if "param" in name else 1))
        for name, shape, _ in recorded["parameters"]
    ]
    assert sorted((p.name, p.numel) for p in spec.parameters) == sorted(theirs)
    for run in recorded["runs"]:
        ledger = Ledger.of_run(spec, run)
        assert [name for name, _ in ledger.calls] == [
            name for name, _ in recorded["calls"] if ".parametrizations." not in name
        ]
        assert ledger.ready == recorded["ready"]
        assert flops(ledger.forward_kernels) == run["flops"]["forward"]
        assert flops(ledger.backward_kernels) == run["flops"]["backward"]
        assert ledger.after_forward == run["after_forward"]
        unseen = UNSEEN.get(recorded["model"], 0) if run["checkpointing"] == "full" else 0
        assert {"forward": ledger.peak_forward, "backward": ledger.peak_backward + unseen} == run["peak"]


def test_maxima_of_blocks_are_kept_beside_them() -> None:
    """mixtral: 4 experts of 3 x 64 x 176 in each of its layers, with a byte per 64 and a float32 per 256 of these."""
    spec = packed("mixtral")
    stacks = [p for p in spec.parameters if ".experts." in p.name]
    layers = spec.arch.layers  # type: ignore[union-attr]
    assert sum(p.numel * p.packed for p in stacks) == layers * 4 * 3 * 64 * 176
    without = tune(from_config(MODELS["mixtral"]["config"], "mixtral"), Tuning(Lora(4, ("o_proj",)), "nf4"))
    blocks = layers * 4 * 3 * 64 * 176 // 64
    assert spec.buffers_bytes - without.buffers_bytes == pytest.approx(blocks + 4 * blocks / 256, abs=4)


@pytest.mark.parametrize(
    ("name", "given", "error", "says"),
    [
        ("llama", {}, InputError, "no tensors that stack experts"),
        ("mixtral", {"quantize": "int8"}, NotModeled, "unpacks to float32"),
        ("mixtral", {"parameters": ("experts.down_proj",)}, NotModeled, "adapters on experts in 4 bits"),
        ("gpt_oss", {}, NotModeled, "GptOssExperts in 4 bits"),
    ],
)
def test_what_is_refused(name: str, given: dict[str, object], error: type[InputError], says: str) -> None:
    with pytest.raises(error, match=says):
        packed(name, **given)  # type: ignore[arg-type]
