"""User reports: fits, out of memory, host out of memory, and which of two runs is faster."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zsim.validation import cases

ROOT = Path(__file__).parents[2]
DOCUMENT = cases.read(ROOT / "validation" / "cases" / "cases.yaml")
CASES = {case["id"]: case for case in DOCUMENT["cases"]}
CORPUS = ROOT / ".." / "shared" / "reference" / "corpus" / "cases.csv"


@cache
def simulated(name: str) -> tuple[dict[str, cases.Run], list[cases.Order]]:
    runs = {run.name: run for run in cases.outcomes(DOCUMENT, CASES[name])}
    return runs, list(cases.order(CASES[name], runs))


def settings(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: own for name, own in case["runs"].items() if "open" not in own}


@pytest.mark.parametrize("name", CASES)
def test_outcome_is_the_observed_one_or_the_difference_is_explained(name: str) -> None:
    runs, orders = simulated(name)
    for label, own in settings(CASES[name]).items():
        assert runs[label].predicted != "refused", runs[label].detail
        assert runs[label].agrees != bool(own.get("why")), f"{label}: {runs[label].predicted}, {runs[label].detail}"
    explained = {tuple(pair) for pair in CASES[name].get("order_why", {}).get("pairs", ())}
    for order in orders:
        assert order.agrees != ((order.fast, order.slow) in explained), order


def test_nine_of_ten_outcomes_agree() -> None:
    runs = [run for name in CASES for run in simulated(name)[0].values() if not run.open]
    assert len(runs) >= 35
    assert sum(run.agrees for run in runs) >= 0.9 * len(runs)


@pytest.mark.skipif(not CORPUS.exists(), reason="the collected reports are not here")
def test_every_collected_report_is_a_case_or_lacks_something() -> None:
    with CORPUS.open(encoding="utf-8") as file:
        collected = {row["id"] for row in csv.DictReader(file)}
    assert collected == CASES.keys() | DOCUMENT["incomplete"].keys()
    assert not CASES.keys() & DOCUMENT["incomplete"].keys()
