"""The issuing thread of a rank, as a generator that yields only where the real one would block.

What it yields are ops; it goes on when one of them is done, in the same event of the clock. (As a SimPy process it
would cost two more events per wait, and some frameworks wait a thousand times per step.)

A real host also blocks when about 1,000 kernels are pending on a stream. The ledger of memory, where that matters,
puts it in; here it is left out, since it moves a kernel only where more than 1,000 that are shorter than their own
launch are queued behind a long wait. Otherwise the lane that holds the host back has work until the next launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zsim.engine.lanes import Rank
from zsim.engine.stepcode import IDLE

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation


def issue_steps(sim: Simulation, rank: Rank, max_steps: int) -> Iterator[list[int]]:
    """Init (step 0), then the training steps, until the simulation has seen enough."""
    clock, end = 0.0, rank.end
    for step in range(max_steps + 1):
        code = sim.code(step)
        last = [rank.lanes[name].queue[-1] for name in code.last if rank.lanes[name].queue]
        if last and len(last) == len(code.last) and all(end[op] > sim.now for op in last):
            # Put the step off until one of its lanes runs dry, lest steps after the steady one are simulated in vain.
            # The host's own clock stands still, and nothing of the step could start earlier anyway.
            yield last
        if sim.finished.triggered:
            return
        rank.begin_step(code, sim.alone(code, rank))
        if step == 0:
            sim.set_up_alone(rank)
        for segment in code.segments:
            rank.issue(segment, clock)
            sim.wake(rank, segment.lanes)
            clock += segment.seconds
            for op in targets(rank, segment.target):
                if end[op] > sim.now:
                    yield [op]
                clock = max(clock, end[op])
        sim.step_issued(rank, step, clock)


def targets(rank: Rank, target: int | str | None) -> list[int]:
    """The ops that a host wait waits for."""
    if target is None:
        return []
    if target == IDLE:
        return [lane.queue[-1] for lane in rank.lanes.values() if lane.queue]
    assert isinstance(target, int)
    op = rank.resolve(target)
    return [] if op is None else [op]
