"""Whatever stands in a file: it is read, or refused with one InputError. Nothing else ever escapes."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.document import Document
from zsim.errors import InputError
from zsim.plan import detect
from zsim.scenario.load import check
from zsim.scenario.plans import build_plan

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests/data").glob("*/*"), *(ROOT / "scenarios").glob("*.yaml")])
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, 1e9, float("nan"), float("inf"), 10**30, "", "auto", "x", "5e8", "$X", "True",
    "none", "cpu", [], [1], [None], {}, {"a": 1}, {"enabled": True}, {"device": "cpu"}, {"params": 8e9},
]  # fmt: skip
NAMES: list[Any] = [
    "optimizer",
    "fp16",
    "zero_optimization",
    "stage",
    "fsdp",
    "zero",
    "model",
    "cluster",
    "deepspeed",
    3,
]


def documents() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in FILES:
        try:
            document = detect.parse(path)
            kind = detect.identify(document)
        except InputError:
            continue
        found.append((kind, document.data))
    return found


def sections(data: dict[Any, Any]) -> list[dict[Any, Any]]:
    return [data, *(inner for value in data.values() if isinstance(value, dict) for inner in sections(value))]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A file of ours with up to three fields replaced, renamed or added."""
    kind, original = draw(st.sampled_from(DOCUMENTS))
    data = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from([one for one in sections(data) if one] or [data]))
        value = copy.deepcopy(draw(st.sampled_from(ODD)))
        how = draw(st.sampled_from(["replace", "rename", "add"])) if section else "add"
        name = draw(st.sampled_from(list(section))) if section else "x"
        if how == "replace":
            section[name] = value
        elif how == "rename":
            section[f"{name}x"] = section.pop(name)
        else:
            section[draw(st.sampled_from(NAMES))] = value
    return kind, data


DOCUMENTS = documents()
MODEL: Any = SimpleNamespace(arch=SimpleNamespace(hidden=4096), numel=2, trainable_numel=2)


@settings(max_examples=400, deadline=None)
@given(damaged(), st.sampled_from([1, 3, 8]))
def test_nothing_but_input_errors(case: tuple[str, dict[str, Any]], ranks: int) -> None:
    kind, data = case
    document = Document("file", data)
    with suppress(InputError):
        if kind == "scenario":
            build_plan(check(document, ROOT / "scenarios"), MODEL, ranks, 1)
        else:
            detect.read(document, kind, ranks)


def test_there_is_something_to_damage() -> None:
    kinds = {kind for kind, _ in DOCUMENTS}
    assert {"scenario", "deepspeed", "accelerate", "trainer", "axolotl", "llama_factory", "torchtitan", "neox"} <= kinds


@pytest.mark.parametrize(
    "kind", ["accelerate", "axolotl", "llama_factory", "torchtitan", "trainer", "neox", "deepspeed"]
)
def test_an_empty_file(kind: str) -> None:
    with suppress(InputError):
        detect.read(Document("file", {}), kind)


def bomb() -> str:
    """Nine lines of YAML whose aliases stand for nine to the power of nine values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join(lines)


LARGE = {
    "bomb.yaml": (bomb(), "aliases that multiply"),
    "merge.yaml": ("<<: [1]\nmodel: x\n", "not plain YAML: expected a mapping"),
    "deep.toml": ("a=" + "[" * 10_000, "not TOML: nested too deeply"),
    "long.sh": ("torchrun train.py --model_name_or_path " + "x" * 200_000, ":1: a line of 200,039 characters"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_would_take_for_ever_or_end_in_the_library_is_refused(tmp_path: Path, name: str) -> None:
    text, message = LARGE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        detect.parse(tmp_path / name)


@pytest.mark.parametrize("name", ["many.json", "many.yaml"])
def test_the_time_a_file_takes_grows_with_its_length_alone(tmp_path: Path, name: str) -> None:
    def seconds(count: int) -> float:
        (tmp_path / name).write_text("{" + ", ".join(f'"k{n}": 1' for n in range(count)) + "}")
        begun = time.thread_time()  # which other programs hardly change
        document = detect.parse(tmp_path / name)
        assert document.place(("k7",)) == (tmp_path / name, 1)
        return time.thread_time() - begun

    # 100 times as long where every field looks at all others
    assert min(seconds(40_000) for _ in range(2)) < 40 * min(seconds(4_000) for _ in range(5))


def test_a_date_that_is_none_is_text(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("torchrun t.py --model_name_or_path m --run_name 2024-13-45 --fsdp full_shard\n")
    assert detect.parse(tmp_path / "s.sh").data["run_name"] == "2024-13-45"
