"""Bytes by category in the host's order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worlds import World, collective, kernels, steps, worlds
from zsim.engine.simulator import run
from zsim.program.builder import Builder
from zsim.program.ops import ALL_GATHER, COMPUTE, DELAYED_FREES


def ledger(*builders, init=None, world=None):
    world = world or World()
    timeline = run(world.program(*builders, init=init), world.classes, world)
    return [(e.step, e.category, e.nbytes, e.key) for e in timeline.memory], timeline


def test_allocations_and_frees_in_issue_order():
    init, builder = Builder(), Builder()
    init.alloc("weights", "parameters", 1000)
    builder.alloc("grad", "gradients", 10)
    op = builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
    builder.free("grad")
    builder.alloc("pinned", "buffers", 7, device="host")
    builder.free("pinned")
    builder.host_wait()
    events, timeline = ledger(builder, init=init)
    assert events == [
        (0, "parameters", 1000, "weights"),
        (1, "gradients", 10, "grad"),
        (1, "gradients", -10, "grad"),
        (1, "buffers", 7, "pinned"),
        (1, "buffers", -7, "pinned"),
    ]
    assert [event.op for event in timeline.memory] == [None, None, op, op, op]
    assert [event.device for event in timeline.memory] == ["gpu"] * 3 + ["host"] * 2
    assert timeline.memory[2].time_s == pytest.approx(1e-5)  # when the host has launched the op, not when it ended


def test_temporaries_are_a_level():
    builder = Builder()
    for peak, after, category in ((10, 4, "activations"), (9, 9, "activations"), (30, 0, "logits")):
        builder.launch(COMPUTE, "a", "forward", kernels(1e-3), temp_peak=peak, temp_live=after, temp_category=category)
    builder.host_wait()
    events, _ = ledger(builder)
    assert [event[1:3] for event in events] == [
        ("activations", 10), ("activations", -6),
        ("activations", 5),
        ("activations", -9), ("logits", 30), ("logits", -30),
    ]  # fmt: skip


def test_a_saved_tensor_that_becomes_a_gradient_counts_once():
    builder = Builder()
    builder.alloc("saved", "activations", 50)
    builder.launch(COMPUTE, "in place", "backward", kernels(1e-3), temp_peak=8, temp_live=58)
    builder.free("saved")
    builder.launch(COMPUTE, "b", "backward", kernels(1e-3), temp_peak=60, temp_live=0)
    builder.host_wait()
    events, _ = ledger(builder)
    assert [event[2] for event in events] == [50, 8, -50, 52, -60]


def test_a_tensor_another_stream_reads_comes_back_at_the_first_allocation_after_that_op():
    world = World(issue=1e-3, latency=0.0, max_rate=1e9, interference=0.0)
    builder = Builder()
    builder.alloc("buffer", "reduce_buffers", 100)
    op = builder.launch(ALL_GATHER, "ag", "forward", collective(1_500_000))  # from 1 ms to 2.5 ms
    builder.free("buffer", after=op)  # at 1 ms
    builder.launch(COMPUTE, "a", "forward", kernels(0.0))
    builder.alloc("too early", "activations", 1)  # at 2 ms
    builder.launch(COMPUTE, "b", "forward", kernels(0.0))
    builder.alloc("elsewhere", "buffers", 1, device="host")  # at 3 ms, but another allocator
    builder.launch(COMPUTE, "c", "forward", kernels(0.0))
    builder.alloc("late", "activations", 1)  # at 4 ms
    builder.free("too early")
    builder.free("elsewhere")
    builder.free("late")
    builder.host_wait()
    _, timeline = ledger(builder, world=world)
    delayed = [(e.key, e.nbytes, e.time_s) for e in timeline.memory if e.category == DELAYED_FREES]
    assert delayed == [("buffer", 100, pytest.approx(1e-3)), ("buffer", -100, pytest.approx(4e-3))]
    freed = next(e for e in timeline.memory if e.category == "reduce_buffers" and e.nbytes < 0)
    assert freed.time_s == pytest.approx(1e-3)


def test_a_host_far_ahead_waits_for_room_in_the_launch_queue():
    """Every kernel runs 1 ms and is launched in 10 us: the host may be 1,024 kernels ahead of each stream."""
    builder = Builder()
    for index in range(1500):
        op = builder.launch(COMPUTE, "a", "forward", kernels(1e-3))
        if index in (1023, 1024, 1499):
            builder.alloc(f"after {op}", "activations", 1)
    for index in range(1200):
        op = builder.launch(ALL_GATHER, "b", "forward", kernels(1.25e-3))
        if index in (1023, 1199):
            builder.alloc(f"beside {op}", "activations", 1)
    for key in ("after 1023", "after 1024", "after 1499", "beside 2523", "beside 2699"):
        builder.free(key)
    builder.host_wait()
    _, timeline = ledger(builder)
    when = {e.key: e.time_s for e in timeline.memory if e.nbytes > 0}
    begun = {record.op.id: record.start_s for record in timeline.ops if record.step == 1}
    assert when == {
        "after 1023": pytest.approx(1024e-5),  # as fast as it can launch
        "after 1024": pytest.approx(1025e-5),  # the first one has begun
        "after 1499": pytest.approx(begun[475]),
        "beside 2523": pytest.approx(begun[475]),  # it cannot have got here earlier
        "beside 2699": pytest.approx(max(begun[475], begun[1675])),
    }
    assert begun[475] == pytest.approx(0.475, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.lists(steps(memory=True), min_size=1, max_size=2))
def test_nothing_is_held_twice_or_for_ever(world, programs):
    timeline = run(world.program(*programs), world.classes, world)
    held: Counter = Counter()
    for event in timeline.memory:
        held[event.device, event.category] += event.nbytes
        assert min(held.values()) >= 0
    times = [event.time_s for event in timeline.memory]
    assert times == sorted(times)
    # Every step frees what it allocated; only frees that nobody has asked about and the last temporaries are left.
    assert all(not nbytes or category in (DELAYED_FREES, "activations", "logits")
               for (_, category), nbytes in held.items())  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([("free", "x")], "step 1 frees x, which is not allocated"),
        ([("alloc", "x"), ("free", "x"), ("free", "x")], "step 1 frees x, which is not allocated"),
        ([("alloc", "x"), ("alloc", "x")], "step 1 allocates x, which is allocated already"),
    ],
)
def test_a_broken_ledger_names_the_tensor(actions, message):
    builder = Builder()
    for action, key in actions:
        if action == "alloc":
            builder.alloc(key, "gradients", 1)
        else:
            builder.free(key)
    with pytest.raises(ValueError, match=message):
        ledger(builder)
