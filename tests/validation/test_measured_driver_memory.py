"""What validation/measured/README.md says of driver_memory.csv is what its rows say."""

import csv
from pathlib import Path
from statistics import linear_regression, median

import pytest

from zsim.cost.driver import MAP_S, UNMAP_S

GIB = 1 << 30
UNITS = {"us": 1e-6, "ms": 1e-3}
MEASURED = Path(__file__).parents[2] / "validation" / "measured"
ROWS = list(csv.DictReader((MEASURED / "driver_memory.csv").open()))
TABLE = [line.strip("|\n").split("|") for line in (MEASURED / "README.md").open() if line.startswith("| ")]
LARGEST = "80 GB, not named (course cluster of H100)"
PAGED = "80 GB, not named (78.4 GiB mapped when full)"


def stated(name: str) -> list[float]:
    """The numbers of a row of the table, in seconds."""
    (row,) = [row for row in TABLE if row[0].strip() == name]
    cells = [cell.split()[-2:] for cell in row[1:3] if cell.strip()]
    return [float(number) * UNITS[unit] for number, unit in cells]


def per_page(call: str, state: str) -> list[float]:
    found = [row for row in ROWS if (row["device"], row["call"], row["state"]) == (PAGED, call, state)]
    return [float(row["seconds"]) / int(row["handles"]) for row in found if row["how"].endswith("alone")]


def test_every_row_has_a_time_and_a_source():
    for row in ROWS:
        assert float(row["seconds"]) > 0
        assert row["source"]
        assert row["kind"] in ("interval", "call", "mean", "median", "claim")
        assert row["state"] in ("fresh", "just freed", "unknown", "")
        assert not row["size_bytes"] or int(row["size_bytes"]) > 0


@pytest.mark.parametrize("name", ["cudaFree, device idle", "cudaMalloc of clean memory"])
def test_a_call_costs_by_count_more_than_by_size(name):
    found = [row for row in ROWS if row["device"] == LARGEST and row["call"] == name.replace(",", "").split()[0]]
    sizes, times = [int(row["size_bytes"]) / GIB for row in found], [float(row["seconds"]) for row in found]
    per_gib, per_call = linear_regression(sizes, times)
    assert stated(name) == [pytest.approx(per_call, rel=0.02), pytest.approx(per_gib, abs=0.05e-3)]


def test_pages_cost_the_same_each():
    fresh, unmapped = per_page("map pages", "fresh"), per_page("unmap pages", "")
    assert stated("map a page of 20 MiB, clean")[0] == pytest.approx(median(fresh), rel=0.02)
    assert stated("unmap it")[0] == pytest.approx(median(unmapped), rel=0.02)
    assert pytest.approx([median(fresh), median(unmapped)], rel=0.02) == [MAP_S, UNMAP_S]
    assert sum(seconds > 87e-6 for seconds in fresh + unmapped) == 1  # an event of six pages


def test_memory_just_given_back_makes_the_next_call_wait():
    (again,) = [row for row in ROWS if row["device"] == PAGED and row["state"] == "just freed"]
    wait = float(again["seconds"]) - int(again["handles"]) * min(per_page("map pages", "fresh"))
    per_gib = wait / (int(again["size_bytes"]) / GIB)
    assert stated("wait for memory just given back") == [pytest.approx(per_gib, rel=0.02)]
