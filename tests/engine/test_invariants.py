"""What must hold of any timeline, and small schedules worked out by hand."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worlds import World, collective, kernels, steps, worlds
from zsim.engine.simulator import MAX_STEPS, run
from zsim.program.builder import Builder
from zsim.program.ops import (
    ALL_GATHER,
    COMPUTE,
    CPU,
    H2D,
    HOST,
    LANES,
    REDUCE_SCATTER,
    Compute,
    Copy,
    CpuWork,
    HostWait,
    Launch,
    Op,
)


def times(timeline, step=1, rank=0):
    return {r.op.id: (r.start_s, r.end_s) for r in timeline.ops if (r.rank, r.step) == (rank, step)}


def by_event(timeline, rank):
    """(step, event as `Op.waits` names it) -> record that ends it."""
    records = [record for record in timeline.ops if record.rank == rank]
    table = {(record.step, record.op.id): record for record in records}
    for step in {record.step for record in records}:
        for lane in LANES:
            earlier = [r for r in records if r.op.lane == lane and r.step < step]
            table[step, -1 - LANES.index(lane)] = earlier[-1] if earlier else None
    return table


@settings(max_examples=60, deadline=None)
@given(st.booleans().flatmap(worlds), st.lists(steps(), min_size=1, max_size=2))
def test_lanes_keep_their_order_and_ops_their_waits(world, programs):
    timeline = run(world.program(*programs), world.classes, world)
    for rank in {record.rank for record in timeline.ops}:
        events = by_event(timeline, rank)
        free: dict[str, float] = {}
        for record in timeline.ops:
            if record.rank != rank:
                continue
            op = record.op
            before = free.get(op.lane, 0.0)
            ready = [events[record.step, event] for event in op.waits]
            ends = {event: r.end_s for event, r in zip(op.waits, ready, strict=True) if r is not None}
            if op.lane != HOST:
                assert record.start_s == max([before, record.issued_s, *ends.values()])
                reason = {"host": record.issued_s, "lane": before, **ends}[record.blocker]
                assert reason == record.start_s
            assert before <= record.start_s <= record.end_s
            free[op.lane] = record.end_s
            if isinstance(op.work, CpuWork):
                assert record.end_s == record.start_s + world.cpu_seconds(rank, op.work)
            if isinstance(op.work, Compute):
                alone = world.compute_seconds(rank, op.work)
                assert record.end_s - record.start_s >= alone * (1 - 1e-12)
                assert record.stretch_s == pytest.approx(record.end_s - record.start_s - alone, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.lists(steps(memory=True), min_size=1, max_size=2))
def test_the_same_scenario_gives_the_same_timeline(world, programs):
    program = world.program(*programs)
    assert run(program, world.classes, world) == run(program, world.classes, world)


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from(["links", "gpu", "host"]))
def test_faster_parts_never_delay_an_op_where_nothing_contends(builder, part):
    free = World(bus=1e15, dram=1e15, port=1e15, spine=1e15, pcie=1e15, interference=0.0, max_rate=0.5e9)
    change = {"links": {"max_rate": 0.8e9, "latency": 5e-5}, "gpu": {"speed": (1.5, 1.5)}, "host": {"issue": 5e-6}}
    program = free.program(builder)
    slow = times(run(program, free.classes, free))
    faster = dataclasses.replace(free, **change[part])
    fast = times(run(program, free.classes, faster))
    for op, (start, end) in fast.items():
        assert start <= slow[op][0] + 1e-12
        assert end <= slow[op][1] + 1e-12


@settings(max_examples=40, deadline=None)
@given(worlds(), steps(lanes=(COMPUTE,)))
def test_a_lane_idles_only_with_a_reason(world, builder):
    """Work conservation: kernels follow each other unless the host was late."""
    timeline = run(world.program(builder), world.classes, world)
    kernels_only = [record for record in timeline.ops if record.op.lane == COMPUTE]
    for before, after in pairwise(kernels_only):
        assert after.start_s == max(before.end_s, after.issued_s)


def test_a_kernel_runs_slower_exactly_while_a_transfer_is_in_flight():
    world = World(issue=0.0, interference=0.25, latency=1e-3, max_rate=1e9, port=1e12, bus=1e12, spine=1e12)
    builder = Builder()
    first = builder.launch(COMPUTE, "a", "forward", kernels(2e-3))
    long = builder.launch(COMPUTE, "b", "forward", kernels(10e-3))
    builder.stream_wait(ALL_GATHER, first)
    gather = builder.launch(ALL_GATHER, "ag", "forward", collective(4_000_000))
    last = builder.launch(COMPUTE, "c", "forward", kernels(1e-3))
    ops = times(run(world.program(builder), world.classes, world))
    assert ops[gather] == pytest.approx((2e-3, 7e-3), rel=1e-12)  # 1 ms latency, 4 MB at 1e9 bytes/s
    assert ops[long] == pytest.approx((2e-3, 13e-3), rel=1e-12)  # 5 ms do the work of 4, then 6 ms are left
    assert ops[last] == pytest.approx((13e-3, 14e-3), rel=1e-12)


def test_the_host_runs_ahead_until_it_waits():
    world = World(issue=1e-3)
    builder = Builder()
    a = builder.launch(COMPUTE, "a", "forward", kernels(5e-3))
    b = builder.launch(COMPUTE, "b", "forward", kernels(5e-3))
    builder.host_wait(a)
    builder.host_work("hook", "forward", 50)  # 1 ms
    c = builder.launch(COMPUTE, "c", "forward", kernels(5e-3))
    builder.host_wait()
    timeline = run(world.program(builder), world.classes, world)
    records = {record.op.id: record for record in timeline.ops}
    assert (records[a].start_s, records[a].blocker) == (pytest.approx(1e-3), "host")
    assert (records[b].start_s, records[b].blocker) == (pytest.approx(6e-3), "lane")
    assert records[c].issued_s == pytest.approx(8e-3)
    assert (records[c].start_s, records[c].blocker) == (pytest.approx(11e-3), "lane")
    (span,) = timeline.steps
    assert (span.start_s, span.end_s) == (0.0, pytest.approx(16e-3))


def test_a_straggler_makes_its_peers_wait_in_the_collective():
    world = World(issue=0.0, latency=0.0, speed=(1.0, 0.5), interference=0.0)
    builder = Builder()
    builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
    builder.wait_stream(ALL_GATHER, COMPUTE)
    gather = builder.launch(ALL_GATHER, "ag", "forward", collective(900_000))
    timeline = run(world.program(builder), world.classes, world)
    fast, slow = times(timeline, rank=0)[gather], times(timeline, rank=2)[gather]
    assert fast[0] == pytest.approx(1e-3)
    assert slow[0] == pytest.approx(2e-3)
    assert fast[1] == slow[1] == pytest.approx(3e-3)  # 0.9 MB at 0.9e9 bytes/s from the last arrival on
    assert {r.rank: r.stretch_s for r in timeline.ops if r.op.id == gather} == pytest.approx({0: 1e-3, 2: 0.0})


def test_a_step_that_leaves_the_device_idle_is_simulated_once():
    world = World()
    first, later = Builder(), Builder()
    for builder in (first, later):
        builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
        builder.launch(H2D, "b", "forward", Copy(H2D, 1e6))
    first.launch(COMPUTE, "only in the first step", "optimizer", kernels(1e-3))
    first.host_wait()
    later.host_wait()
    timeline = run(world.program(first, later), world.classes, world)
    assert [span.step for span in timeline.steps] == [1, 2]
    assert timeline.steady_step == 1
    timeline = run(world.program(later), world.classes, world)
    assert ([span.step for span in timeline.steps], timeline.steady_step) == ([1], 0)


def test_overlapping_steps_are_simulated_until_they_repeat():
    world = World(issue=1e-6)
    builder = Builder()
    builder.wait_stream(ALL_GATHER, COMPUTE)  # of the step before
    builder.launch(ALL_GATHER, "ag", "forward", collective(900_000))
    builder.wait_stream(COMPUTE, ALL_GATHER)
    builder.launch(COMPUTE, "a", "forward", kernels(2e-3))
    builder.wait_stream(H2D, ALL_GATHER)
    builder.launch(H2D, "prefetch", "forward", Copy(H2D, 900_000))
    timeline = run(world.program(builder), world.classes, world)
    lengths = [span.end_s - span.start_s for span in timeline.steps]
    assert timeline.notes == []
    assert timeline.steady_step == len(lengths) - 2
    assert lengths[-1] == pytest.approx(lengths[-2], rel=1e-9)
    # 1.1 ms of all-gather, then 2 ms of kernels; the copy beside them takes 1.3 ms and slows them by an eighth.
    assert lengths[-1] == pytest.approx(1.1e-3 + 2e-3 + 1.3e-3 / 9, rel=1e-9)
    for one, other in pairwise(timeline.steps):
        assert one.end_s == other.start_s


def test_steps_that_agree_while_the_host_uses_up_its_lead_are_not_the_steady_one():
    world = World(issue=1.5e-3)
    first, later = Builder(), Builder()
    first.launch(COMPUTE, "a", "forward", kernels(3e-3))
    later.launch(COMPUTE, "a", "forward", kernels(1e-3))
    timeline = run(world.program(first, later), world.classes, world)
    lengths = [span.end_s - span.start_s for span in timeline.steps]
    # Issued at 1.5, 3, 4.5 ms ...; until the one of 7.5 ms, the device has work left from the first step.
    assert lengths[:4] == pytest.approx([4.5e-3, 1e-3, 1e-3, 1e-3])
    assert lengths[timeline.steady_step] == pytest.approx(1.5e-3)
    assert timeline.notes == []


def test_a_lane_that_falls_behind_for_ever_is_said_not_to_settle():
    world = World(issue=0.0)
    builder = Builder()
    builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
    builder.launch(CPU, "cpu", "forward", CpuWork("adam", 1, 2.5e6))
    timeline = run(world.program(builder), world.classes, world)
    # Every step ends 2.5 ms after the one before, but its kernels run further and further ahead of that.
    assert len(timeline.steps) == MAX_STEPS
    assert timeline.notes


def test_init_ops_are_step_zero_and_steps_can_wait_for_them():
    world = World(issue=0.0)
    init, builder = Builder(), Builder()
    init.launch(H2D, "load", "init", Copy(H2D, 900_000 * 5.0))
    builder.wait_stream(COMPUTE, H2D)
    op = builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
    builder.host_wait()
    timeline = run(world.program(builder, init=init), world.classes, world)
    load = next(record for record in timeline.ops if record.step == 0)
    kernel = next(record for record in timeline.ops if record.step == 1)
    assert (kernel.op.id, kernel.start_s, kernel.blocker) == (op, load.end_s, -1 - LANES.index(H2D))


def test_broken_programs_are_named():
    world = World()
    builder = Builder()
    builder.instructions.append(Launch(Op(0, COMPUTE, "early", "forward", kernels(1e-3), waits=(7,))))
    with pytest.raises(ValueError, match=r"op 0 \(early\) waits for op 7"):
        run(world.program(builder), world.classes, world)
    builder = Builder()
    builder.instructions.append(HostWait(3))
    with pytest.raises(ValueError, match="the host waits for op 3"):
        run(world.program(builder), world.classes, world)
    builder = Builder()
    builder.instructions.append(Launch(Op(0, HOST, "lost", "forward", kernels(1e-3))))
    with pytest.raises(ValueError, match="Compute cannot run on lane host"):
        run(world.program(builder), world.classes, world)
    builder = Builder()
    builder.launch(REDUCE_SCATTER, "rs", "backward", collective(1000, "pair"))
    program = dataclasses.replace(world.program(builder), groups=world.groups | {"pair": ((0, 1),)})
    with pytest.raises(ValueError, match="rank 2 calls all_gather in pair, of which it is no member"):
        run(program, world.classes, world, fold=False)
