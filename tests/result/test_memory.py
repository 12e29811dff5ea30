"""What the allocator does in steps beyond those that are simulated."""

from __future__ import annotations

import pytest

from zsim.api import simulate
from zsim.engine.allocator import CachingAllocator, Replay, Retry
from zsim.engine.repetition import Stretch
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import ALL_GATHER, COMPUTE
from zsim.result.breakdown import REMAPPING
from zsim.result.memory import settled_retries

MIB = 1 << 20


def use(step, size, lane=COMPUTE):
    """A tensor of `size` MiB that comes and goes."""
    come = MemoryEvent(step, 0, 0.0, "gpu", "parameters", size * MIB, f"{size}", 0, lane)
    return [come, come._replace(nbytes=-size * MIB)]


@pytest.mark.parametrize(
    ("steps", "per_step"),
    [
        # The 60 MiB of the first step are in the way once; then both lie in the 80.
        ([use(1, 60), use(2, 60) + use(2, 80)], 0),
        # Blocks of two streams: each is in the other's way.
        ([use(1, 60, ALL_GATHER), use(2, 60, ALL_GATHER) + use(2, 80)], 2),
        # They were in each other's way at the start alone.
        ([use(1, 60) + use(1, 80), use(2, 60) + use(2, 80)], 0),
        # For good in step 3: of the steps before, this one gave back last.
        ([use(1, 60), use(2, 60) + use(2, 80)[:1]], 1),
        # The steady step itself runs out of memory, before it has again what its start gives up.
        ([use(1, 10)[:1], use(2, 10)[1:] + use(2, 80) + use(2, 110) + use(2, 10)[:1]], 1),
    ],
)  # fmt: skip
def test_how_often_a_settled_allocator_gives_memory_back(steps, per_step):
    events = [event for step in steps for event in step]
    replay = Replay(CachingAllocator(100 * MIB))
    assert len(settled_retries(replay, replay.run(events), [Stretch(steps[1])], 2)) == per_step


def test_steps_that_give_back_as_often_as_each_other_are_not_repeated():
    steps = [use(step, 60, ALL_GATHER) + use(step, 80) for step in (1, 2, 3)]
    events = [event for step in steps for event in step]
    replay = Replay(CachingAllocator(100 * MIB))
    run = replay.run(events)
    assert settled_retries(replay, run, [Stretch(steps[2])], 3) == (Retry(3), Retry(3))
    assert len(run.retries) == 5


def test_pages_that_are_mapped_anew_in_every_step_take_time():
    """Of a card that is full, and an allocator that knows pages: 141 us each; the four parts still are the step."""
    sets = ["seq_len=3072", "allocator.expandable_segments=true"]
    result = simulate("scenarios/qwen7b_8x4090.yaml", sets)
    time, seconds = result.time, result.gpu.remapping_s
    assert result.fits
    assert result.gpu.allocator_retries_per_step == 3
    assert seconds == pytest.approx(141e-6 * 744)
    assert time.idle_by[REMAPPING] == seconds
    assert result.bottleneck.path["allocator"] == pytest.approx(seconds / time.step_s)
    assert time.step_s == pytest.approx(time.compute_s + time.exposed_comm_s + time.host_s + time.idle_s)
    assert result.throughput.tokens_per_s_per_gpu == pytest.approx(3072 / time.step_s)
    plain = simulate("scenarios/qwen7b_8x4090.yaml", sets[:1])
    assert plain.gpu.remapping_s is None
    assert result.gpu.first_remapping_s is None  # all of it is new
    full, least = (simulate("scenarios/qwen32b_8xh100.yaml", each) for each in (sets[1:], []))
    assert full.gpu.first_remapping_s == pytest.approx(141e-6 * 1555)
    assert full.time.first_step_s == pytest.approx(least.time.first_step_s + full.gpu.first_remapping_s)
    assert time.step_s == pytest.approx(plain.time.step_s + seconds, rel=1e-3)
