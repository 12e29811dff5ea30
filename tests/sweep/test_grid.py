"""Which scenarios a sweep has."""

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.scenario.load import load
from zsim.sweep.expression import condition
from zsim.sweep.grid import Sweep, expand, from_options, is_sweep, read_sweep


def test_options_make_every_combination_in_order(scenario: Path) -> None:
    sweep = from_options([scenario], ["zero.stage=2,3", "micro_batch=1..4*2"])
    assert [case.overrides for case in sweep] == [
        [f"zero.stage={stage}", f"micro_batch={batch}"] for stage in (2, 3) for batch in (1, 2, 4)
    ]
    assert sweep.varied == ("zero.stage", "micro_batch")


def test_a_case_changes_its_own_data_only(scenario: Path) -> None:
    first, second = from_options([scenario], ["cluster.nodes=1,2"])
    topology = first.document.data["cluster"]
    assert first.data["cluster"] == {"topology": topology, "nodes": 1}
    assert second.data["cluster"] == {"topology": topology, "nodes": 2}
    assert isinstance(topology, str)


def test_releases_on_the_command_line_are_text(scenario: Path) -> None:
    sweep = from_options([scenario], ["framework.version=2.6,2.10"])
    assert [case.data["framework"]["version"] for case in sweep] == ["2.6", "2.10"]
    again = load(scenario, next(iter(from_options([scenario], ["framework.version=0.10"]))).overrides)
    assert again.fields.framework.version == "0.10"


def test_bracketed_values_stay_whole(scenario: Path) -> None:
    sweep = from_options([scenario], ["fsdp.mesh=[1, 8],[2, 4]"])
    assert [case.data["fsdp"]["mesh"] for case in sweep] == [[1, 8], [2, 4]]


@pytest.mark.parametrize(
    ("text", "values"),
    [("1..4", [1, 2, 3, 4]), ("1..20*2", [1, 2, 4, 8, 16]), ("0..90+30", [0, 30, 60, 90]), ("7..7", [7])],
)
def test_ranges(text: str, values: list[int]) -> None:
    assert expand(text) == values


@pytest.mark.parametrize("text", ["4..1", "1..8*1", "0..8*2", "1..8+0", "0..99999999999"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(InputError):
        expand(text)


SWEEP = """
scenario: small.yaml
set: {seq_len: 512}
grid:
  zero.stage: [1, 2, 3]
  micro_batch: 1..4
zip:
  checkpointing: [none, full]
  loss: [hf, fused]
list:
  - {grad_accum: 1}
  - {grad_accum: 4, optimizer: sgd}
where: micro_batch * grad_accum <= 8
skip:
  - zero.stage == 1 and micro_batch > 2
  - optimizer == 'sgd' and zero.stage in [2, 3]
"""


def test_sweep_file(scenario: Path) -> None:
    path = scenario.parent / "sweep.yaml"
    path.write_text(SWEEP)
    assert is_sweep(path)
    assert not is_sweep(scenario)
    sweep = read_sweep(path)
    assert sweep.size == 3 * 4 * 2 * 2
    # Stage 1: micro-batches 1 and 2 with either entry of the list; stages 2 and 3: 4 micro-batches without sgd.
    assert len(list(sweep)) == 2 * (2 * 2) + 2 * (2 * 4)
    for case in sweep:
        assert case.data["seq_len"] == 512
        assert (case.data["checkpointing"], case.data["loss"]) in {("none", "hf"), ("full", "fused")}
        assert case.data["micro_batch"] * case.data["grad_accum"] <= 8


def test_shards_are_the_whole(scenario: Path) -> None:
    sweep = from_options([scenario], ["zero.stage=1,2,3", "micro_batch=1..7"])
    parts = [case.position for shard in (1, 2, 3, 4) for case in sweep.part(shard, 4)]
    assert sorted(parts) == [case.position for case in sweep]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grid: {zero.stag: [1]}", "did you mean zero.stage"),
        ("grid: {micro_batch: 3}", "no list of values"),
        ("zip: {micro_batch: [1, 2], seq_len: [1]}", "different lengths"),
        ("list: {micro_batch: 1}", "not a list of mappings"),
        ("where: micro_batch <", "not a condition"),
        ("set: {framework.version: 2.10}", "2.1 is not text"),
        ("gird: {}", "did you mean grid"),
    ],
)
def test_wrong_sweep_files_are_one_error(scenario: Path, text: str, says: str) -> None:
    path = scenario.parent / "sweep.yaml"
    path.write_text(f"scenario: small.yaml\n{text}\n")
    with pytest.raises(InputError, match=says):
        list(read_sweep(path))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("zero.stage == 3 and not micro_batch > 4", True),
        ("framework == 'deepspeed'", True),
        ("zero.reduce_bucket_size >= 5e8", True),
        ("cluster.nodes == null", True),
        ("seq_len // 1000 + 1 in [3, 5]", True),
        ("1 < micro_batch < 3", False),
        ("optimizer.name == 'adamw'", True),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    data = {
        "zero": {"stage": 3, "reduce_bucket_size": "5e8"},
        "micro_batch": 4,
        "seq_len": 4096,
        "framework": "deepspeed",
        "optimizer": "adamw",
        "cluster": "x.yaml",
    }
    assert condition(text, "where")(data) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "zero.__class__",
        "(lambda: 1)()",
        "[x for x in [1]]",
        "micro_batch ** 9",
        "f'{1}'",
    ],
)
def test_conditions_are_no_code(text: str) -> None:
    with pytest.raises(InputError):
        condition(text, "where")


def test_a_condition_on_nothing_says_so() -> None:
    with pytest.raises(InputError, match="not set is null"):
        condition("cluster.nodes > 2", "where")({"cluster": "x.yaml"})


def test_a_million_scenarios_are_never_held(scenario: Path) -> None:
    import tracemalloc

    sweep = from_options([scenario], ["micro_batch=1..1000", "seq_len=1..1000"])
    assert sweep.size == 1_000_000
    cases = iter(sweep)
    next(cases)
    tracemalloc.start()
    for _ in range(5000):
        next(cases)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_no_axes_is_the_scenario_itself(scenario: Path) -> None:
    assert len(list(from_options([scenario], []))) == 1
    assert isinstance(from_options([scenario], []), Sweep)
