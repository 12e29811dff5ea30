"""Memory over the steady step, as the report draws it."""

import pytest

import zsim
from tests.result import made
from zsim.program.ops import DELAYED_FREES
from zsim.result.critical_path import RankView
from zsim.result.curve import Watched, points
from zsim.result.memory import served
from zsim.result.render.style import CATEGORY_COLORS


@pytest.fixture(scope="module")
def result():
    """The flagship: its host frees far ahead of the streams, and the allocator has to wait for them."""
    return zsim.simulate(made.TOPOLOGIES.parent / "scenarios" / "qwen32b_8xh100.yaml")


def totals(result, allocator):
    view = RankView(result.program, result.timeline, result.gpu.peak_rank)
    for point in points(view, CATEGORY_COLORS, allocator):
        assert point.held[DELAYED_FREES] >= 0
        yield sum(point.held.values()), point.held[DELAYED_FREES]


def test_what_fits_is_drawn_under_its_capacity(result):
    assert result.fits
    assert result.gpu.allocator_retries > 0
    allocator = served(result, Watched)
    curve = list(totals(result, allocator))
    assert max(total for total, _ in curve) <= allocator.limit
    assert max(total - delayed for total, delayed in curve) == result.gpu.peak_allocated_bytes


def test_without_a_limit_nothing_waits(result):
    assert max(total for total, _ in totals(result, Watched())) > served(result, Watched).limit


def test_the_counters_of_a_trace_stay_under_the_capacity_too(result):
    from zsim.result.render import chrome_trace

    view = RankView(result.program, result.timeline, result.gpu.peak_rank)
    counters = [event for event in chrome_trace.trace(result, view)["traceEvents"] if event["ph"] == "C"]
    delayed = [event["args"].get(DELAYED_FREES, 0) for event in counters]
    assert max(delayed) > 0
    assert min(delayed) >= 0
    assert max(sum(event["args"].values()) for event in counters) <= served(result, Watched).limit
