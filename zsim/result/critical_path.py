"""Why did this op not start earlier? Follows `OpRecord.blocker` backwards through lanes, waits and the host."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

from zsim.engine.repetition import Stretch, stretches
from zsim.engine.steady import SAME
from zsim.engine.timeline import MemoryEvent, OpRecord, StepSpan, Timeline
from zsim.program.ops import COMPUTE, DEVICES, HOST, LANES, HostWait, Instruction, Launch, Program


class Segment(NamedTuple):
    """From `start_s` to `end_s` the chain ran through `record`; None: through the host issuing ops."""

    record: OpRecord | None
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class HostBlock(NamedTuple):
    """The host was blocked from `start_s` to `end_s` until `record` was done."""

    start_s: float
    end_s: float
    record: OpRecord


class RankView:
    """One simulated rank's records around the steady step, indexed by op, by lane, and by time."""

    def __init__(self, program: Program, timeline: Timeline, rank: int) -> None:
        self.program, self.timeline, self.rank = program, timeline, rank
        self.spans = {span.step: span for span in timeline.steps if span.rank == rank}
        self.steady: StepSpan = self.spans[timeline.steps[timeline.steady_step].step]
        step = self.steady.step
        # What precedes the steady step by more than one cannot hold it up.
        self.records = [r for r in timeline.ops if r.rank == rank and r.step >= step - 1]
        self.by_op = {(record.step, record.op.id): record for record in self.records}
        self.lanes: dict[str, list[OpRecord]] = defaultdict(list)
        for record in self.records:
            self.lanes[record.op.lane].append(record)
        self._on: dict[str, list[OpRecord]] = {}
        self._orders: dict[str, list[tuple[int, int]]] = {}
        self._waits = self._find_host_waits()
        self._wait_ends = [wait.end_s for wait in self._waits]

    @cached_property
    def ledgers(self) -> dict[str, list[MemoryEvent]]:
        """Memory events by device, in the order in which the host allocates and frees."""
        ledgers: dict[str, list[MemoryEvent]] = {device: [] for device in DEVICES}
        for event in self.timeline.memory:
            if event.rank == self.rank:
                ledgers[event.device].append(event)
        return ledgers

    @cached_property
    def stretches(self) -> list[list[Stretch]] | None:
        """The ledger of the GPU up to the steady step, step by step, with the micro-steps that are left out; None where
        these are no repetition for memory."""
        left, steps = self.timeline.left_out, [list[MemoryEvent]() for _ in range(self.steady.step + 1)]
        for event in self.ledgers["gpu"]:
            if event.step <= self.steady.step:
                steps[event.step].append(event)
        return stretches(self.program, steps, left.micro if left else 0, left.micro_steps if left else 0)

    @cached_property
    def repeated(self) -> tuple[int, RankView] | None:
        """How many micro-steps are left out, and this rank while one runs that is the same. Both ends lie within a
        kernel."""
        left, step = self.timeline.left_out, self.steady.step
        if left is None:
            return None
        kernels = (r for r in self.lanes[COMPUTE] if r.step == step and r.op.micro == left.micro)
        kernel = next(r for r in kernels if r.end_s > r.start_s)
        middle = (kernel.start_s + kernel.end_s) / 2
        during = copy(self)
        during.steady = StepSpan(step, self.rank, middle - left.seconds, middle)
        during._on = {}
        return left.micro_steps, during

    def on(self, lane: str) -> list[OpRecord]:
        """Records on `lane` that overlap the steady step, in order."""
        known = self._on.get(lane)
        if known is None:
            start, end = self.steady.start_s, self.steady.end_s
            known = [r for r in self.lanes.get(lane, ()) if r.end_s > start and r.start_s < end]
            self._on[lane] = known
        return known

    def gaps(self) -> Iterator[tuple[float, float, OpRecord | None]]:
        """Idle stretches of the compute lane in the steady step, each with the op that ended it (None: the end)."""
        now = self.steady.start_s
        for record in self.on(COMPUTE):
            if record.start_s > now:
                yield now, record.start_s, record
            now = max(now, record.end_s)
        if now < self.steady.end_s:
            yield now, self.steady.end_s, None

    def host_waits(self) -> list[HostBlock]:
        """Where the host was blocked in the steady step."""
        return [w for w in self._waits if w.end_s > self.steady.start_s and w.start_s < self.steady.end_s]

    def last_of_step(self) -> OpRecord | None:
        """The device op of the steady step that ends last."""
        ends = (self._last_before_step(self.steady.step + 1, lane) for lane in LANES)
        records = (record for record in ends if record is not None and record.step == self.steady.step)
        return max(records, key=lambda r: r.end_s, default=None)

    def critical_path(self) -> list[Segment]:
        """From the end of the steady step back to its start, in time order."""
        return list(self.tail(self.steady.start_s))[::-1]

    def tail(self, floor: float) -> Iterator[Segment]:
        """What the end of the step waited for, backwards from it to `floor`."""
        last, end = self.last_of_step(), self.steady.end_s
        if last is None or last.end_s < end:  # the host's own work ends the step
            begin = floor if last is None else max(last.end_s, floor)
            if begin < end:
                yield Segment(None, begin, end)
        if last is not None:
            start, stop = max(last.start_s, floor), min(last.end_s, end)
            if start < stop:
                yield Segment(last, start, stop)
            yield from self.chain(last, floor)

    def chain(self, record: OpRecord, floor: float) -> Iterator[Segment]:
        """What delayed `record`, backwards from its start to `floor`, without holes."""
        cursor = record.start_s
        while cursor > floor:
            before = self._blocker(record)
            if before is None:
                wait = self._wait_before(min(record.issued_s, cursor))
                busy_from = floor if wait is None else max(wait.end_s, floor)
                if busy_from < cursor:
                    yield Segment(None, busy_from, cursor)
                    cursor = busy_from
                if wait is None or cursor <= floor:
                    return
                before = wait.record
            start = max(min(before.start_s, cursor), floor)
            if start < cursor:
                yield Segment(before, start, cursor)
            cursor, record = min(cursor, before.start_s), before

    def _blocker(self, record: OpRecord) -> OpRecord | None:
        """The record that decided when `record` started; None: the host."""
        if record.blocker == "lane":
            return self._before(record.step, record.op.id, record.op.lane)
        if isinstance(record.blocker, int):
            if record.blocker >= 0:
                return self.by_op.get((record.step, record.blocker))
            return self._last_before_step(record.step, LANES[-1 - record.blocker])
        return None

    def _last_before_step(self, step: int, lane: str) -> OpRecord | None:
        """The last op that the steps before `step` issued on `lane`."""
        return self._before(step, -1, lane)

    def _before(self, step: int, op: int, lane: str) -> OpRecord | None:
        """The last record on `lane`, whose ops run in the order of their issue, that was issued before op `op`."""
        order = self._orders.get(lane)
        if order is None:
            order = self._orders[lane] = [(record.step, record.op.id) for record in self.lanes.get(lane, ())]
        at = bisect_left(order, (step, op))
        return self.lanes[lane][at - 1] if at else None

    def _wait_before(self, time_s: float) -> HostBlock | None:
        at = bisect_right(self._wait_ends, time_s)
        return self._waits[at - 1] if at else None

    def _find_host_waits(self) -> list[HostBlock]:
        """Where the host blocked on the device. The timeline keeps only their sum; the program says where they are."""
        waits: list[HostBlock] = []
        scanned: dict[int, list[tuple[int | None, int | None, dict[str, int]]]] = {}  # equal steps are the same object
        for step in sorted(step for step in self.spans if step >= self.steady.step - 1):
            instructions = self.program.steps[min(step, len(self.program.steps)) - 1]
            if id(instructions) not in scanned:
                scanned[id(instructions)] = list(_host_waits(instructions))
            now = self.spans[step].start_s
            for awaited, last, issued in scanned[id(instructions)]:
                if last is not None:
                    now = max(now, self.by_op[step, last].issued_s)
                record = self._awaited(step, awaited, issued)
                if record is not None and record.end_s > now:
                    waits.append(HostBlock(now, record.end_s, record))
                    now = record.end_s
        return waits

    def _awaited(self, step: int, op: int | None, issued: dict[str, int]) -> OpRecord | None:
        """The op that a host wait waits for; None, for an idle device: the last to end of what is issued."""
        if op is None:
            records = (self.by_op[step, last] for lane, last in issued.items() if lane != HOST)
            return max(records, key=lambda record: record.end_s, default=None)
        return self.by_op.get((step, op)) if op >= 0 else self._last_before_step(step, LANES[-1 - op])


def slowest_of(views: Iterable[RankView]) -> RankView:
    """The one whose steady step takes longest. GPUs of two kinds that wait for each other differ by rounding alone: of
    such, the first."""
    known = list(views)
    spans = [view.steady.end_s - view.steady.start_s for view in known]
    return next(view for view, span in zip(known, spans, strict=True) if span >= (1 - SAME) * max(spans))


def _host_waits(instructions: Sequence[Instruction]) -> Iterator[tuple[int | None, int | None, dict[str, int]]]:
    """Each HostWait's target and the last op issued before it; where it waits for the whole device, on each lane."""
    issued: dict[str, int] = {}
    last: int | None = None
    for instruction in instructions:
        if isinstance(instruction, Launch):
            issued[instruction.op.lane] = last = instruction.op.id
        elif isinstance(instruction, HostWait):
            yield instruction.op, last, dict(issued) if instruction.op is None else {}
