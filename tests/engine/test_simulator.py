"""The engine against its own rules said plainly, folded against unfolded, and what must hold of any timeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import naive
from tests.engine.worlds import steps, worlds
from zsim.engine.simulator import MAX_STEPS, run


def times(timeline, rank=0, step=1):
    return {r.op.id: (r.start_s, r.end_s) for r in timeline.ops if (r.rank, r.step) == (rank, step)}


@settings(max_examples=60, deadline=None)
@given(worlds(), st.lists(steps(max_ops=12), min_size=1, max_size=2))
def test_agrees_with_the_plain_simulator(world, programs):
    program = world.program(*programs)
    timeline = run(program, world.classes, world)
    expected = naive.simulate(program, world, MAX_STEPS)  # all, since a later step may overlap with an earlier one
    for record in timeline.ops:
        start, end = expected[record.rank, record.step, record.op.id]
        assert (record.start_s, record.end_s) == pytest.approx((start, end), rel=1e-9, abs=1e-10)


@settings(max_examples=60, deadline=None)
@given(worlds(classes=True), st.lists(steps(max_ops=12), min_size=1, max_size=2))
def test_classes_agree_with_the_plain_simulator(world, programs):
    program = world.program(*programs)
    timeline = run(program, world.classes, world)
    expected = naive.simulate(program, world, MAX_STEPS)  # all, since a later step may overlap with an earlier one
    for record in timeline.ops:
        start, end = expected[record.rank, record.step, record.op.id]
        assert (record.start_s, record.end_s) == pytest.approx((start, end), rel=1e-9, abs=1e-10)


@settings(max_examples=100, deadline=None)
@given(st.booleans().flatmap(worlds), st.lists(steps(memory=True), min_size=1, max_size=2))
def test_folded_and_unfolded_runs_agree(world, programs):
    program = world.program(*programs)
    folded = run(program, world.classes, world)
    unfolded = run(program, world.classes, world, fold=False)
    everything = {(r.rank, r.step, r.op.id): r for r in unfolded.ops}
    assert [(s.step, s.rank) for s in folded.steps if s.rank == 0] == [
        (s.step, s.rank) for s in unfolded.steps if s.rank == 0
    ]
    end = max(span.end_s for span in folded.steps)
    members = {ranks[0]: ranks for ranks in folded.rank_classes}
    for record in folded.ops:
        for rank in members[record.rank]:
            other = everything[rank, record.step, record.op.id]
            for name in ("issued_s", "start_s", "end_s", "stretch_s"):
                assert abs(getattr(record, name) - getattr(other, name)) <= 1e-12 * end, (name, record, other)
