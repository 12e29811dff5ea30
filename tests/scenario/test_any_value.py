"""Whatever stands in a scenario, it gives a result or one clear error, and soon."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zsim
from zsim.errors import InputError
from zsim.model.bare import LEAST
from zsim.scenario.fields import ScenarioFields
from zsim.scenario.kinds import Range, Section
from zsim.scenario.load import SECTION_OF

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199, "max_position_embeddings": 2048,
}  # fmt: skip
# Besides what the field's own type suggests.
ANYTHING = [
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e15, 1e30, 1e300, float("nan"), float("inf"), 10**400, "", "auto",
    "1e30", "8B", "64 GiB", "none", "\x00", "../..", [], [1], [1, 2], [[]], {}, {"a": 1}, "x" * 300,
]  # fmt: skip


def fields(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in section.model_fields.items():
        here = (*path, field.alias or name)
        yield here, (field.annotation, field.metadata)
        for kind in kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from fields(kind, here)


def kinds(annotation: Any) -> Iterator[Any]:
    """What a union is made of."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        for argument in typing.get_args(annotation):
            yield from kinds(argument)
    else:
        yield annotation


def likely(annotation: Any, metadata: Any) -> Iterator[Any]:
    """Values that a field accepts, and those at the ends of its range."""
    for kind in kinds(annotation):
        details = [*metadata, *getattr(kind, "__metadata__", ())]
        if typing.get_origin(kind) is typing.Literal:
            yield from typing.get_args(kind)
        elif kind is bool:
            yield from (True, False)
        for detail in details:
            if isinstance(detail, Range):
                yield from (detail.low, detail.low + 1, 4, 100_000, detail.high, detail.high + 1, detail.low - 1)


FIELDS = dict(fields(ScenarioFields))


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for path in draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4)):
        good = [*likely(*FIELDS[path])] if path != ("grad_accum",) else [1, 2, 3]  # each micro-step takes its time
        value = draw(st.sampled_from(good)) if good and draw(st.integers(0, 2)) else draw(st.sampled_from(ANYTHING))
        found.append((path, value))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def run(path: Path) -> None:
    """Raises what is no result and no clear error."""
    refused = None
    try:
        result = zsim.simulate(path)
    except InputError as error:
        refused = error
    if refused:
        assert refused.message.strip()
        assert "\n" not in refused.message
        assert refused.file is not None
    else:
        assert 0 < result.time.step_s < float("inf")
        json.dumps(result.to_dict(), allow_nan=False)


@settings(max_examples=100, deadline=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(framework=st.sampled_from(sorted(SECTION_OF)), stage=st.integers(0, 3), changed=changes())
def test_any_value_of_any_field(
    folder: Path, framework: str, stage: int, changed: list[tuple[tuple[str, ...], Any]]
) -> None:
    data: dict[str, Any] = {
        "model": {"config": "config.json"},
        "cluster": {"topology": str(ROOT / "topologies/hgx_h100_8.yaml")},
        "framework": {"name": framework},
        "micro_batch": 1,
        "seq_len": 64,
    }
    if framework == "deepspeed":
        data["zero"] = {"stage": stage}
    for path, value in changed:
        section = data
        for name in path[:-1]:
            inner = section.get(name)
            section[name] = inner if isinstance(inner, dict) else {}
            section = section[name]
        section[path[-1]] = copy.deepcopy(value)
    scenario = folder / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(data, allow_unicode=True))
    run(scenario)


def test_every_number_has_a_range() -> None:
    """An unbounded integer could make a simulation of hours."""
    for path, (annotation, metadata) in FIELDS.items():
        for kind in kinds(annotation):
            assert kind is not int or any(isinstance(detail, Range) for detail in metadata), path


def test_the_range_of_a_bare_model() -> None:
    (annotation, metadata) = FIELDS["model", "params"]
    ranges = [d for kind in kinds(annotation) for d in [*metadata, *getattr(kind, "__metadata__", ())]]
    assert [detail.low for detail in ranges if isinstance(detail, Range)] == [LEAST]
