"""The figures that predictions are to reach: which rows count for each, and whether it is reached."""

from __future__ import annotations

import pytest

from zsim.validation import aims
from zsim.validation.aims import Aim, table
from zsim.validation.parts import Part
from zsim.validation.published import Prediction, Step
from zsim.validation.rows import Row

GIB = 2**30


def prediction(error: float, gpu: str = "H100-SXM", split: str = "test", fits: bool = True, **cells: str) -> Prediction:
    """Of a step of 10 s, `error` percent off, and 80 GiB."""
    row = Row("rows.csv", 2, {"id": "r", "source": "llm-foundry", "framework": "llm-foundry (Composer)"} | cells)
    step = Step(10 * (1 + error / 100), 0, 0, 0, 0, 80 * GIB, 80 * GIB, 80 * GIB, 0, fits, False)
    return Prediction(row, gpu, split, measured_s=10.0, step=step)


def test_a_bound_is_above_or_below():
    assert Aim("MAPE", 2.0, 2).held
    assert not Aim("MAPE", 2.01, 2).held
    assert Aim("tau", 0.9, 0.9, least=True).held
    assert not Aim("tau", 0.86, 0.9, least=True).held
    lines = list(table([Aim("MAPE", 2.07, 2), Aim("tau", 0.95, 0.9, least=True, unit="")]))
    assert lines[1:] == ["| MAPE | ≤ 2 % | 2.07 % | **missed** |", "| tau | ≥ 0.9 | 0.95 |  |"]


def test_step_times_are_of_rows_that_shaped_nothing():
    known = [
        prediction(+1),
        prediction(-12, gpu="A100-SXM-40GB"),
        prediction(+50, split="fit"),
        prediction(-8, source="torchtitan PR 165", framework="torchtitan"),
    ]
    found = {aim.what: aim for aim in aims.step_times(known, {"H100-SXM": {"mape": 3.2, "median": 3.1}})}
    assert found["llm-foundry, MAPE"].value == pytest.approx(6.5)
    assert found["llm-foundry, rows beyond 10 %"].value == pytest.approx(50)
    assert found["llm-foundry on H100-SXM, MAPE, against seven constants"].value == pytest.approx(1)
    assert found["fms-fsdp and torchtitan, MAPE"].value == pytest.approx(8)
    assert found["all sources, bias either way"].value == pytest.approx(19 / 3)
    assert [aim.what for aim in found.values() if aim.held] == [
        "llm-foundry on H100-SXM, MAPE, against seven constants",
        "llm-foundry on H100-SXM, median, against seven constants",
        "all sources, MAPE",
    ]


def test_memory_is_of_every_row_that_states_it():
    rows = [
        prediction(0, split="fit", peak_mem_gib_reserved="100"),
        prediction(0, source=f"torchtitan {aims.TITAN_8B} https://...", peak_mem_gib_reserved="64"),
        prediction(0, peak_mem_gib_allocated="80", fits=False),
    ]
    found = {aim.what: aim.value for aim in aims.memory(rows)}
    assert found["reserved memory, MAPE"] == pytest.approx(22.5)
    assert found["allocated memory, median"] == pytest.approx(0)
    assert found["memory of torchtitan's 1 rows of Llama-3.1-8B, MAPE"] == pytest.approx(25)
    assert found["called out of memory though they ran"] == 1


def test_parts_and_orders():
    parts = [Part("run", "source", "forward", 10.0, 10.5), Part("run", "source", "update", 4.0, 3.2)]
    assert [aim.value for aim in aims.parts_of_steps(parts)] == [pytest.approx(20)]
    assert [aim.held for aim in aims.orders({"scales": 1.0, "offload": 0.86})] == [True, False]
    assert not [*aims.parts_of_steps([]), *aims.left_out({}), *aims.orders({})]
