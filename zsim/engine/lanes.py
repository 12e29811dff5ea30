"""The lanes of one simulated rank and the ops on them.

Lanes are driven by calls, not by one generator each: a run of kernels whose inputs are known is advanced in one
loop, ahead of the clock. What is written ahead stays open: when the set of transfers in flight on the rank changes,
`rerate` takes back what has not started, stretches or shrinks the kernel under way, and the lane runs on.
Whatever ended at or before the clock's now is final, and only that is what others may wait for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from zsim.engine.stepcode import FLOW, KERNELS, Segment, StepCode
from zsim.program.ops import LANES, Op

INFINITY = float("inf")
LOOK_AHEAD = 8  # ops: few enough that taking them back is cheap, enough that most kernels need no event of their own


class Lane:
    """One in-order queue. `position` is the first op of `queue` not run (or not written ahead) yet."""

    __slots__ = ("asleep_until", "in_flight", "name", "position", "queue", "rank", "watched")

    def __init__(self, rank: Rank, name: str) -> None:
        self.rank, self.name = rank, name
        self.queue: list[int] = []
        self.position = 0
        self.in_flight = False  # a transfer is under way; it ends when the network says so
        self.asleep_until = -INFINITY  # infinite: until an op that it waits for tells it
        self.watched: dict[int, float] = {}  # ops whose ends others wait for, and when these were last planned


class Rank:
    """All ops of one rank, in columns over all its steps, and its lanes."""

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number  # place among the simulated ranks, rank in the world
        self.lanes: dict[str, Lane] = {name: Lane(self, name) for name in LANES}
        self.issued: list[float] = []
        self.start: list[float] = []
        self.end: list[float] = []
        self.alone: list[float] = []  # seconds alone
        self.timing: list[int] = []
        self.waits: list[tuple[int, ...] | None] = []
        self.lane_of: list[str] = []
        self.codes: list[StepCode] = []  # per step
        self.bases: list[int] = []  # per step: number of its first op
        self.clocks: list[list[float]] = []  # per step: host clock at the start of each segment
        self.last: list[dict[str, int]] = []  # per step: lane -> last op of the earlier steps
        self.waiters: dict[int, list[Lane | Callable[[], object]]] = {}
        self.in_flight: list[int] = []  # works of the transfers in flight, as numbered by the simulator
        self.slowdown = 1.0
        self.kernel_lanes: list[Lane] = []  # those that kernels have run on

    def begin_step(self, code: StepCode, alone: list[float]) -> None:
        """Append the columns of a step; its ops can run when their segment is issued."""
        for name in sorted(code.kernel_lanes):
            if self.lanes[name] not in self.kernel_lanes:
                self.kernel_lanes.append(self.lanes[name])
        base = len(self.start)
        count = len(code.ops)
        earlier: dict[str, int] = {}
        if self.codes:
            earlier = self.last[-1] | {lane: self.bases[-1] + op for lane, op in self.codes[-1].last.items()}
        self.last.append(earlier)
        self.codes.append(code)
        self.bases.append(base)
        self.clocks.append([])
        self.start.extend([INFINITY] * count)
        self.end.extend([INFINITY] * count)
        self.alone.extend(alone)
        self.timing.extend(code.timing)
        self.lane_of.extend(code.lane_of)
        waits: list[tuple[int, ...] | None] = [None] * count
        for op, targets in code.waits.items():
            known = [self.resolve(target) for target in targets]
            waits[op] = tuple(target for target in known if target is not None) or None
        self.waits.extend(waits)

    def resolve(self, target: int, step: int = -1) -> int | None:
        """A wait of `step` (the latest) as a number over all steps; None: no earlier step used that lane."""
        return self.bases[step] + target if target >= 0 else self.last[step].get(LANES[-1 - target])

    def locate(self, number: int) -> tuple[int, Op]:
        """Step and op of a number over all steps."""
        step = bisect_right(self.bases, number) - 1
        return step, self.codes[step].ops[number - self.bases[step]]

    def issue(self, segment: Segment, clock: float) -> None:
        code, base = self.codes[-1], self.bases[-1]
        self.clocks[-1].append(clock)
        self.issued.extend([clock + offset for offset in code.offset[segment.first : segment.stop]])
        for lane, ops in segment.lanes.items():
            self.lanes[lane].queue.extend([base + op for op in ops])


def advance(lane: Lane, now: float) -> tuple[int, float] | int | None:
    """Run the lane's ops ahead until one has to wait, `LOOK_AHEAD` at most.

    Returns the next op and when it may start, or the op that it has to wait for, or None when the queue is empty.
    """
    rank, queue, first = lane.rank, lane.queue, lane.position
    issued, start, end, alone, timing, waits = rank.issued, rank.start, rank.end, rank.alone, rank.timing, rank.waits
    slowdown = rank.slowdown
    free = end[queue[first - 1]] if first else -INFINITY
    for position in range(first, len(queue)):
        op = queue[position]
        time = issued[op]
        if free > time:
            time = free
        targets = waits[op]
        if targets is not None:
            for target in targets:
                done = end[target]
                if done > now:
                    lane.position = position
                    return target
                if done > time:
                    time = done
        kind = timing[op]
        if kind == FLOW or (kind == KERNELS and position - first >= LOOK_AHEAD):
            lane.position = position
            return op, time
        start[op] = time
        free = end[op] = time + (alone[op] * slowdown if kind == KERNELS else alone[op])
    lane.position = len(queue)
    return None


def rerate(lane: Lane, now: float, factor: float) -> bool:
    """Kernels take `factor` times as long from `now` on: take back what has not started, adjust what has.

    Returns whether the lane has to be advanced again.
    """
    rank, queue, position = lane.rank, lane.queue, lane.position
    if lane.in_flight or position == 0 or rank.end[queue[position - 1]] <= now:
        return False
    start, end = rank.start, rank.end
    while position and start[queue[position - 1]] >= now:
        position -= 1
        start[queue[position]] = end[queue[position]] = INFINITY
    if position:
        op = queue[position - 1]
        if end[op] > now and rank.timing[op] == KERNELS:
            end[op] = now + (end[op] - now) * factor
    lane.position = position
    lane.asleep_until = -INFINITY
    return True
