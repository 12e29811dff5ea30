"""What the record of reported runs says of a verdict, and that it is the sum of those in validation/REPORT.md."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.result import made
from zsim.api import simulate
from zsim.result.render import terminal
from zsim.result.reported import BARELY, CLOSE, FITS, OUT, RECORDS, TIGHT, record

ROOT = Path(__file__).parents[2]
REPORT, SCENARIOS = ROOT / "validation" / "REPORT.md", ROOT / "scenarios"
GIB = 1 << 30


@pytest.fixture(scope="module")
def result():
    return made.result()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, FITS),
        ({"peak_allocated_bytes": 79 * GIB}, FITS),
        ({"headroom_bytes": 4 * GIB}, FITS),
        ({"headroom_bytes": 4 * GIB - 1}, CLOSE),
        ({"allocator_retries": 1, "peak_allocated_bytes": 61 * GIB}, TIGHT),
        ({"allocator_retries": 1, "peak_allocated_bytes": 63 * GIB}, BARELY),
        ({"headroom_bytes": -1}, OUT),
        ({"out_of_memory_at": "step 1"}, OUT),
    ],
)
def test_a_run_is_counted_with_those_that_are_like_it(result, change, kind):
    gpu = dataclasses.replace(result.gpu, capacity_bytes=80 * GIB, framework_bytes=GIB, **change)
    assert record(dataclasses.replace(result, gpu=gpu)) is kind


def test_nobody_reported_of_other_devices():
    alone = simulate(SCENARIOS / "llama31_8b_mac_studio.yaml")
    assert record(alone) is None
    assert alone.to_dict()["accuracy"]["gpu_memory"] is None
    assert "GPU memory" not in "".join(terminal.accuracy(alone))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.says)
def test_records_are_the_sums_of_the_report(kind):
    lines = re.findall(rf"^\| {re.escape(kind.says)} \| (\d+) \| (\d+) \|$", REPORT.read_text(encoding="utf-8"), re.M)
    assert len(lines) > 3
    assert (kind.runs, kind.ran_out) == tuple(sum(map(int, column)) for column in zip(*lines, strict=True))


def test_the_tighter_the_verdict_the_more_ran_out():
    shares = [kind.ran_out / kind.runs for kind in RECORDS]
    assert shares == sorted(shares)
