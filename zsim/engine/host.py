"""The issuing thread of a rank, as a SimPy process that yields only where the real one would block.

A real host also blocks when 1,024 launches are pending on the device. That does not change device times (the
queue that holds it back is full of work), so it is left out; the host's own clock may run further ahead here.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zsim.engine.lanes import Rank
from zsim.engine.stepcode import IDLE

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation


@dataclass(slots=True)
class HostStep:
    """One step as the host saw it: its clock after the last instruction, seconds blocked."""

    end: float
    waited: float


def issue_steps(sim: Simulation, rank: Rank, max_steps: int) -> Generator[Any, Any, None]:
    """Init (step 0), then the training steps, until the simulation has seen enough."""
    clock = 0.0
    for step in range(max_steps + 1):
        code = sim.code(step)
        yield from _until_a_lane_runs_dry(sim, rank, code.last)
        if sim.finished.triggered:
            return
        rank.begin_step(code, sim.alone(code, rank))
        waited = 0.0
        for segment in code.segments:
            rank.issue(segment, clock)
            sim.wake(rank, segment.lanes)
            clock += segment.seconds
            for op in targets(rank, segment.target):
                if rank.end[op] > sim.now:
                    done = sim.env.event()
                    sim.watch(rank, op, done.succeed)
                    yield done
                if rank.end[op] > clock:
                    waited += rank.end[op] - clock
                    clock = rank.end[op]
        sim.step_issued(rank, step, HostStep(clock, waited))


def targets(rank: Rank, target: int | str | None) -> list[int]:
    """The ops a host wait waits for."""
    if target is None:
        return []
    if target == IDLE:
        return [lane.queue[-1] for lane in rank.lanes.values() if lane.queue]
    assert isinstance(target, int)
    op = rank.resolve(target)
    return [] if op is None else [op]


def _until_a_lane_runs_dry(sim: Simulation, rank: Rank, lanes: dict[str, int]) -> Generator[Any, Any, None]:
    """Put off a step that nothing can run yet, so that steps after the steady one are not simulated in vain.

    No time passes on the host's own clock, and an op of the new step cannot start before the earlier ones on its lane.
    """
    last = [rank.lanes[name].queue[-1] for name in lanes if rank.lanes[name].queue]
    if len(last) < len(lanes) or any(rank.end[op] <= sim.now for op in last) or not last:
        return
    dry = sim.env.event()
    for op in last:
        sim.watch(rank, op, lambda: None if dry.triggered else dry.succeed())
    yield dry
