"""A step program prepared for the clock: ops numbered densely, host time as offsets, segments between host waits.

The host runs ahead of the device, so between two waits its clock is plain arithmetic: an op's issue time is
the segment's start plus a constant. All of that is done here, once per distinct step program, whatever the
number of steps and ranks that run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.engine.prices import Prices
from zsim.program.ops import (
    HOST,
    LANES,
    Alloc,
    Collective,
    Compute,
    Copy,
    CpuWork,
    Free,
    HostWork,
    Instruction,
    Launch,
    Op,
)

KERNELS, FIXED, FLOW, ON_HOST = range(4)  # how an op takes its time
_TIMING = {Compute: KERNELS, CpuWork: FIXED, Collective: FLOW, Copy: FLOW, HostWork: ON_HOST}
IDLE = "idle"  # the target of a host wait for the whole device


class Segment(NamedTuple):
    """What the host issues without blocking: ops `first` up to `stop`, then a wait for `target` (None: no wait)."""

    first: int
    stop: int
    lanes: dict[str, list[int]]  # lane -> ops in order
    seconds: float
    target: int | str | None


# An Alloc, a Free, or an op with its temporaries, where it stands in the host's order: segment, seconds since the start
# of that, id of the last op issued (an op counts itself), and what a Free waits for, numbered as in `StepCode.waits`,
# or the number of the op.
MemoryEntry = tuple[int, float, int | None, Alloc | Free | Op, int | None]


@dataclass(slots=True)
class StepCode:
    """Waits and targets >= 0 are ops of this step; negative ones are `-1 - LANES.index(lane)` as in `Op.waits`."""

    ops: list[Op] = field(default_factory=list)
    lane_of: list[str] = field(default_factory=list)
    timing: list[int] = field(default_factory=list)
    offset: list[float] = field(default_factory=list)  # end of the launch since the segment's start
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    memory: list[MemoryEntry] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)  # lane -> its last op
    kernel_lanes: set[str] = field(default_factory=set)


def prepare(instructions: Sequence[Instruction], prices: Prices) -> StepCode:
    """Raises ValueError where something waits for an op that was not issued before it (a bug of the strategy)."""
    code = StepCode()
    ops, lane_of, timings, offsets = code.ops, code.lane_of, code.timing, code.offset
    memory, segments = code.memory, code.segments
    # Equal blocks share their works: how each takes its time, and what the host takes to launch it in a phase.
    known: dict[tuple[int, str], tuple[int, float]] = {}
    number: dict[int, int] = {}
    lanes: dict[str, list[int]] = {}
    clock, first, last_id = 0.0, 0, None

    def resolve(event: int, waiter: Instruction) -> int:
        if event in number:
            return number[event]
        if -len(LANES) <= event < 0:
            return event
        raise ValueError(f"{_name(waiter)} waits for op {event}, which was not issued before it")

    for instruction in instructions:
        if isinstance(instruction, Launch):
            op = instruction.op
            work, lane = op.work, op.lane
            index, last_id = len(ops), op.id
            found = known.get((id(work), op.phase))
            if found is None:
                timing = _TIMING[type(work)]
                seconds = prices.host_seconds(work) if isinstance(work, HostWork) else prices.issue_seconds(op)
                found = known[id(work), op.phase] = timing, seconds
            timing, seconds = found
            if (timing == ON_HOST) != (lane == HOST):
                raise ValueError(f"op {op.id} ({op.label}): {type(work).__name__} cannot run on lane {lane}")
            clock += seconds
            if timing != ON_HOST:
                if lane in lanes:
                    lanes[lane].append(index)
                else:
                    lanes[lane] = [index]
            if timing == KERNELS:
                code.kernel_lanes.add(lane)
                memory.append((len(segments), clock, last_id, op, index))
            if op.waits:
                foreign = []
                for event in op.waits:
                    target = resolve(event, instruction)
                    # An op on the own lane is over anyway, one on the host ended before this was issued.
                    if (LANES[-1 - target] if target < 0 else lane_of[target]) not in (lane, HOST):
                        foreign.append(target)
                if foreign:
                    code.waits[index] = tuple(foreign)
            number[last_id] = index
            ops.append(op)
            lane_of.append(lane)
            timings.append(timing)
            offsets.append(clock)
        elif isinstance(instruction, Alloc):
            memory.append((len(segments), clock, last_id, instruction, None))
        elif isinstance(instruction, Free):
            after = instruction.after
            if after is not None:
                after = resolve(after, instruction)
            memory.append((len(segments), clock, last_id, instruction, after))
        else:
            until = IDLE if instruction.op is None else resolve(instruction.op, instruction)
            segments.append(Segment(first, len(ops), lanes, clock, until))
            clock, first, lanes = 0.0, len(ops), {}
    segments.append(Segment(first, len(ops), lanes, clock, None))
    code.last = {lane: issued[-1] for segment in segments for lane, issued in segment.lanes.items()}
    return code


def _name(waiter: Instruction) -> str:
    if isinstance(waiter, Launch):
        return f"op {waiter.op.id} ({waiter.op.label})"
    return f"the free of {waiter.key}" if isinstance(waiter, Free) else "the host"
