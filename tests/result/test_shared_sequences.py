"""Runs whose ranks share sequences, in every output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zsim
from zsim.result import remedies, sensitivity
from zsim.result.compare import compare
from zsim.result.render import chrome_trace, html, terminal
from zsim.result.spec import Result

SCENARIO = Path(__file__).parents[2] / "scenarios" / "qwen7b_8xh100.yaml"


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """Qwen2.5-7B has 28 heads, 4 of them for keys and values."""
    return [zsim.simulate(SCENARIO, ["seq_len=16384", f"sequence_parallel_size={size}"]) for size in (1, 2)]


def test_reports_say_so(results: list[Result], tmp_path: Path) -> None:
    alone, shared = results
    assert "16,384 tokens over 2 GPUs (Ulysses)" in terminal.headline(shared.headline)
    assert "Ulysses" not in terminal.headline(alone.headline)
    assert {cause for cause in shared.time.exposed_by if "to_all" in cause} == {
        "all_to_all/forward", "all_to_all/recompute", "all_to_all/backward",
    }  # fmt: skip
    assert shared.to_dict()["setup"]["workload"]["sequence_parallel_size"] == 2
    html.write(shared, tmp_path / "report.html")
    assert '"sequence_parallel_size": 2' in (tmp_path / "report.html").read_text().replace('":2', '": 2')


def test_compare_names_it_once(results: list[Result]) -> None:
    inputs = {line.name: line.values for line in compare(results).inputs}
    assert inputs["sequence_parallel_size"] == (1, 2)
    assert inputs.keys() == {"sequence_parallel_size", "tokens_per_step"}
    assert inputs["tokens_per_step"] == (131072, 65536)


def test_activations_are_shared_and_states_are_as_they_were(results: list[Result]) -> None:
    kinds = [result.gpu.by_category for result in results]
    for name in ("parameters", "optimizer_states", "master_weights"):
        assert kinds[0][name] == kinds[1][name]
    held = [each["activations"] + each["logits"] for each in kinds]
    assert held[1] < 0.55 * held[0]


def test_traces_hold_the_exchanges(results: list[Result]) -> None:
    events = chrome_trace.trace(results[1], results[1].slowest)["traceEvents"]
    calls = [event for event in events if event.get("args", {}).get("Collective name") == "all_to_all"]
    assert calls
    assert all(event["name"].startswith("ncclDevKernel_SendRecv") for event in calls)
    assert {event["args"]["Group size"] for event in calls} == {2}


def test_what_would_help_knows_it(results: list[Result]) -> None:
    names = {variant.name for variant in sensitivity.settings(results[1])}
    assert {"sequence_parallel_size=1", "sequence_parallel_size=4"} <= names
    assert not any(variant.name.startswith("sequence") for variant in sensitivity.settings(results[0]))
    setup = sensitivity.sharing(results[0].setup, 4)
    assert setup is not None
    assert setup.plan.sequence_parallel_size == setup.workload.sequence_parallel_size == 4  # type: ignore[union-attr]
    assert sensitivity.sharing(results[0].setup, 8) is None  # 28 heads
    fields = replace(results[0].setup, workload=replace(results[0].setup.workload, attention="eager"))
    assert sensitivity.sharing(fields, 4) is None


def test_a_sequence_that_does_not_fit_is_shared() -> None:
    result = zsim.simulate(SCENARIO, ["seq_len=163840", "checkpointing=full", "loss=fused"])
    assert not result.fits
    (found,) = remedies.remedies(result, 1)
    assert found.name == "sequence_parallel_size=2"
    assert found.fits
