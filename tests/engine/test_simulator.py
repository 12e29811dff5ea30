"""The engine against its own rules said plainly, folded against unfolded, and what must hold of any timeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import naive
from tests.engine.worlds import World, collective, kernels, steps, worlds
from zsim.engine.simulator import MAX_STEPS, run
from zsim.program.builder import Builder
from zsim.program.ops import ALL_GATHER, COMPUTE


def times(timeline, rank=0, step=1):
    return {r.op.id: (r.start_s, r.end_s) for r in timeline.ops if (r.rank, r.step) == (rank, step)}


@settings(max_examples=100, deadline=None)
@given(st.booleans().flatmap(worlds), st.lists(steps(max_ops=12), min_size=1, max_size=2))
def test_agrees_with_the_plain_simulator(world, programs):
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


def test_a_collective_behind_a_kernel_of_no_time_begins_once():
    """Its lane is ready twice at the same moment: the collective before is over, and a step has been issued."""
    world = World(nodes=1, latency=0.0, issue=0.0, interference=0.0, speed=(0.5,))
    builder = Builder()
    builder.launch(ALL_GATHER, "copy", "forward", kernels(0.0))
    builder.launch(ALL_GATHER, "gather", "forward", collective(100_000))
    program = world.program(builder)
    timeline = run(program, world.classes, world)
    expected = naive.simulate(program, world, MAX_STEPS)
    assert all((r.start_s, r.end_s) == pytest.approx(expected[0, r.step, r.op.id]) for r in timeline.ops)


def test_transfers_of_the_init_that_follow_each_other_are_transfers():
    """Folded they need no events; every rank on its own has them. Records and flows are the same."""
    world = World()
    init, builder = Builder(), Builder()
    for index in range(30):
        init.launch(COMPUTE, f"broadcast {index}", "init", collective(100_000 * (index % 4), kind="broadcast"))
    init.launch(COMPUTE, "barrier", "init", collective(1, "node", "barrier"))
    builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
    program = world.program(builder, init=init)
    folded, unfolded = run(program, world.classes, world), run(program, world.classes, world, fold=False)
    assert folded.events < 10 < unfolded.events
    for step in (0, 1):
        assert [*times(folded, step=step).values()] == [
            pytest.approx(each) for each in times(unfolded, step=step).values()
        ]
    assert [(r.op.id, r.algorithm) for r in folded.ops] == [(r.op.id, r.algorithm) for r in unfolded.ops if r.rank == 0]
    flows = {flow.op: flow for flow in folded.flows}
    for flow in unfolded.flows:
        if 0 in flow.ranks:
            assert flows[flow.op].times == pytest.approx(flow.times)
            assert flows[flow.op].rates == pytest.approx(flow.rates)


@given(
    st.lists(st.integers(5, 50), min_size=1, max_size=40),
    st.lists(st.integers(0, 5), min_size=40, max_size=40),
    st.integers(0, 200),
    st.integers(1, 6),
)
def test_a_full_launch_queue_delays_no_kernel(durations, launches, first_ready, depth):
    """Kernels no shorter than a launch, the first of them held up by something: with and without a limit."""

    def starts(depth):
        issued, end, found = 0, first_ready, []
        for index, (launch, duration) in enumerate(zip(launches, durations, strict=False)):
            issued += launch
            if index >= depth:
                issued = max(issued, found[index - depth])
            found.append(max(issued, end))
            end = found[-1] + duration
        return found

    assert starts(depth) == starts(1000)
