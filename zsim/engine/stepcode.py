"""A step program prepared for the clock: ops numbered densely, host time as offsets, segments between host waits.

The host runs ahead of the device, so between two waits its clock is plain arithmetic: an op's issue time is
the segment's start plus a constant. All of that is done here, once per distinct step program, whatever the
number of steps and ranks that run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    HostWait,
    HostWork,
    Instruction,
    Launch,
    Op,
)

KERNELS, FIXED, FLOW, ON_HOST = range(4)  # how an op takes its time
_TIMING = {Compute: KERNELS, CpuWork: FIXED, Collective: FLOW, Copy: FLOW, HostWork: ON_HOST}
IDLE = "idle"  # the target of a host wait for the whole device


@dataclass(slots=True)
class Segment:
    """What the host issues without blocking: ops `first` up to `stop`, then a wait for `target` (None: no wait)."""

    first: int
    stop: int
    lanes: dict[str, list[int]]  # lane -> ops in order
    seconds: float
    target: int | str | None


@dataclass(slots=True)
class MemoryStep:
    """An Alloc, a Free, or an op with a temporary level, where it stands in the host's order."""

    instruction: Alloc | Free | Op
    segment: int
    offset: float
    last_op: int | None
    after: int | None = None  # dense number of `Free.after`


@dataclass(slots=True)
class StepCode:
    """Waits and targets >= 0 are ops of this step; negative ones are `-1 - LANES.index(lane)` as in `Op.waits`."""

    ops: list[Op] = field(default_factory=list)
    timing: list[int] = field(default_factory=list)
    offset: list[float] = field(default_factory=list)  # end of the launch since the segment's start
    cost: list[float] = field(default_factory=list)  # host seconds of the launch
    segment_of: list[int] = field(default_factory=list)
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    memory: list[MemoryStep] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)  # lane -> its last op
    host_busy: float = 0.0


def prepare(instructions: Sequence[Instruction], prices: Prices) -> StepCode:
    """Raises ValueError where an op waits for one that was not issued before it (a bug of the strategy)."""
    code = StepCode()
    number: dict[int, int] = {}
    clock, first = 0.0, 0
    lanes: dict[str, list[int]] = {}

    def close(target: int | str | None) -> None:
        nonlocal clock, first, lanes
        code.segments.append(Segment(first, len(code.ops), lanes, clock, target))
        clock, first, lanes = 0.0, len(code.ops), {}

    def resolve(event: int, what: str) -> int:
        if event in number:
            return number[event]
        if -len(LANES) <= event < 0:
            return event
        raise ValueError(f"{what} waits for op {event}, which was not issued before it")

    for instruction in instructions:
        if isinstance(instruction, Launch):
            op = instruction.op
            index = len(code.ops)
            timing = _TIMING[type(op.work)]
            if (timing == ON_HOST) != (op.lane == HOST):
                raise ValueError(f"op {op.id} ({op.label}): {type(op.work).__name__} cannot run on lane {op.lane}")
            cost = prices.host_seconds(op.work) if isinstance(op.work, HostWork) else prices.issue_seconds(op)
            clock += cost
            code.host_busy += cost
            waits = [resolve(event, f"op {op.id} ({op.label})") for event in op.waits]
            # An op on the own lane is over anyway, one on the host before it can launch anything later.
            foreign = tuple(w for w in waits if (LANES[-1 - w] if w < 0 else code.ops[w].lane) not in (op.lane, HOST))
            if foreign:
                code.waits[index] = foreign
            code.ops.append(op)
            code.timing.append(timing)
            code.offset.append(clock)
            code.cost.append(cost)
            code.segment_of.append(len(code.segments))
            number[op.id] = index
            if op.lane != HOST:
                lanes.setdefault(op.lane, []).append(index)
                code.last[op.lane] = index
            if timing == KERNELS:
                code.memory.append(MemoryStep(op, len(code.segments), clock, op.id))
        elif isinstance(instruction, HostWait):
            target = IDLE if instruction.op is None else resolve(instruction.op, "the host")
            if isinstance(target, str) or target < 0 or code.ops[target].lane != HOST:
                close(target)
        else:
            after = instruction.after if isinstance(instruction, Free) else None
            resolved = None if after is None else resolve(after, f"the free of {instruction.key}")
            last_op = code.ops[-1].id if code.ops else None
            code.memory.append(MemoryStep(instruction, len(code.segments), clock, last_op, resolved))
    close(None)
    return code
