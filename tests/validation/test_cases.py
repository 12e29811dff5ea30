"""User reports: fits, out of memory, host out of memory, and which of two runs is faster."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from zsim.validation import cases

ROOT = Path(__file__).parents[2]
DOCUMENT = cases.read(ROOT / "validation" / "cases" / "cases.yaml")
CASES = {case["id"]: case for case in DOCUMENT["cases"]}
CORPUS = ROOT / ".." / "shared" / "reference" / "corpus" / "cases.csv"
BLIND = ROOT / "validation" / "cases" / "blind.yaml"


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


@pytest.mark.parametrize(
    ("name", "outcomes", "orders"),
    [
        ("blind", (67, 83), (10, 12)),
        ("blind2", (14, 18), (0, 0)),
        ("blind3", (36, 54), (1, 2)),
        ("blind4", (63, 88), (5, 6)),
        ("blind5", (48, 62), (1, 1)),
        ("blind6", (64, 79), (2, 3)),
        ("blind7", (57, 85), (6, 9)),
        ("blind8", (75, 98), (5, 5)),
        ("blind9", (46, 54), (2, 4)),
        ("saving", (9, 12), (0, 0)),
    ],
)
def test_what_was_said_of_reports_never_seen_is_kept(
    name: str, outcomes: tuple[int, int], orders: tuple[int, int]
) -> None:
    """So many of so many agreed, whatever is learned from them."""
    reports = cases.read(BLIND.with_name(f"{name}.yaml"))["cases"]
    first = yaml.safe_load(BLIND.with_name(f"{name}_first.yaml").read_text(encoding="utf-8"))
    assert {case["id"]: set(case["runs"]) for case in reports} == {
        name: set(runs) for name, runs in first["outcomes"].items()
    }
    observed = {(case["id"], name): own["observed"] for case in reports for name, own in settings(case).items()}
    agreed = sum(first["outcomes"][case][name] == outcome for (case, name), outcome in observed.items())
    assert (agreed, len(observed)) == outcomes
    assert (sum(factor > 1 for *_, factor in first["orders"]), len(first["orders"])) == orders


# One of each kind that is quick to simulate: fits, out of memory, host out of memory, a difference that is explained.
@pytest.mark.parametrize(
    "name",
    [
        "B04",
        "B12",
        "B20",
        "B46",
        "B53",
        "B57",
        "D07",
        "D11",
        "E01",
        "E06",
        "E08",
        "F02",
        "F22",
        "F33",
        "G04",
        "G14",
        "G16",
        "G33",
        "G40",
        "H02",
        "H11",
        "H25",
        "H34",
        "H42",
        "J09",
        "J16",
        "J26",
        "J38",
        "J43",
        "K02",
        "K05",
        "K16",
        "K23",
        "K24",
        "K30",
        "L04",
        "L05",
        "L09",
        "L14",
        "L18",
        "L28",
        "M01",
        "M05",
        "M11",
        "M20",
        "M21",
        "M23",
    ],
)
def test_reports_never_seen_before_come_out_as_they_are_said_to(name: str) -> None:
    sets = {"B": "blind", "D": "blind2", "E": "saving"} | {each: f"blind{n}" for n, each in enumerate("FGHJKLM", 3)}
    document = cases.read(BLIND.with_name(f"{sets[name[0]]}.yaml"))
    case = next(case for case in document["cases"] if case["id"] == name)
    runs = {run.name: run for run in cases.outcomes(document, case)}
    for label, own in settings(case).items():
        assert runs[label].agrees != bool(own.get("why")), f"{label}: {runs[label].predicted}, {runs[label].detail}"
    assert all(order.agrees for order in cases.order(case, runs))


def test_the_section_on_reports_tells_what_was_said_first_and_what_is_said_now(tmp_path: Path) -> None:
    base = BLIND.parent.resolve() / "cases.yaml"
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    run = {"model": "small", "machine": "1x T4, 25 GB", "framework": "ddp", "seq_len": 64, "precision": "fp16"}
    machine = {"gpu": "T4", "gpus": 1, "cpu": {"sockets": 1, "cores": 4, "dram_gib": 25, "dram_gbps": 50}}
    document = {
        "base": str(base),
        "models": {"small": small},
        "machines": {"1x T4, 25 GB": machine},
        "cases": [
            {
                "id": "X1",
                "source": "nowhere",
                "common": run,
                "runs": {
                    "one": {"micro_batch": 1, "observed": "fits", "measured": {"allocated_gib": 1, "outside_gib": 1}},
                    "two": {
                        "micro_batch": 2,
                        "observed": "out of memory",
                        "why": "made up",
                        "measured": {"reserved_gib": 1},
                    },
                },
                "faster": [["two", "one"]],
            }
        ],
    }
    first = {
        "date": "2026-11-30",
        "commit": "abc",
        "outcomes": {"X1": {"one": "fits", "two": "out of memory"}},
        "orders": [["X1", "two", "one", 0.9]],
    }
    for name, content in (("blind.yaml", document), ("first.yaml", first)):
        (tmp_path / name).write_text(yaml.safe_dump(content), encoding="utf-8")
    text = "\n".join(cases.blind(tmp_path / "blind.yaml", tmp_path / "first.yaml"))
    assert "2 of 2 outcomes with full settings agreed (100%), 0 of 1 orders." in text
    assert "Outcomes: 1 of 2 with full settings agree (50%)." in text
    assert "| X1 | two | out of memory | out of memory | fits |" in text
    assert "| **differs**: made up |" in text
    assert "| X1 | two | one | 0.90 x |" in text
    assert "| outside | 1 | 49% | 49% | 49% |" in text  # 500 MiB of a context
    assert "| X1 | one | outside | 1.00 | 0.49 |" in text
    assert "| X1 | two | reserved" not in text  # what it holds when it fails is not its peak
