"""Why did this op not start earlier? Follows `OpRecord.blocker` backwards through lanes, waits and the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.engine.timeline import OpRecord, StepSpan, Timeline
from zsim.program.ops import COMPUTE, HOST, LANES, HostWait, Launch, Program


@dataclass(frozen=True, slots=True)
class Segment:
    """From `start_s` to `end_s` the chain ran through `record`; None: through the host issuing ops."""

    record: OpRecord | None
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class HostBlock:
    """The host was blocked from `start_s` to `end_s` until `record` was done."""

    start_s: float
    end_s: float
    record: OpRecord


class RankView:
    """One simulated rank's records, indexed by op, by lane, and by time."""

    def __init__(self, program: Program, timeline: Timeline, rank: int) -> None:
        self.program, self.timeline, self.rank = program, timeline, rank
        self.records = [record for record in timeline.ops if record.rank == rank]
        self.spans = {span.step: span for span in timeline.steps if span.rank == rank}
        self.steady: StepSpan = self.spans[timeline.steps[timeline.steady_step].step]
        self.by_op = {(record.step, record.op.id): record for record in self.records}
        self.lanes: dict[str, list[OpRecord]] = {}
        self._before: dict[tuple[int, int], OpRecord] = {}
        self._last_of_step: dict[tuple[int, str], OpRecord] = {}
        for record in self.records:
            lane = self.lanes.setdefault(record.op.lane, [])
            if lane:
                self._before[record.step, record.op.id] = lane[-1]
            lane.append(record)
            self._last_of_step[record.step, record.op.lane] = record
        self._waits = self._find_host_waits()
        self._wait_ends = [wait.end_s for wait in self._waits]

    def on(self, lane: str, span: StepSpan | None = None) -> list[OpRecord]:
        """Records on `lane` that overlap `span` (the steady step), in order."""
        span = span or self.steady
        return [r for r in self.lanes.get(lane, ()) if r.end_s > span.start_s and r.start_s < span.end_s]

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
        records = (r for r in self.records if r.step == self.steady.step and r.op.lane != HOST)
        return max(records, key=lambda r: r.end_s, default=None)

    def critical_path(self) -> list[Segment]:
        """From the end of the steady step back to its start, in time order."""
        last = self.last_of_step()
        if last is None:
            return [Segment(None, self.steady.start_s, self.steady.end_s)]
        path = list(self.chain(last, self.steady.start_s))
        end = min(last.end_s, self.steady.end_s)
        if end > max(last.start_s, self.steady.start_s):
            path.insert(0, Segment(last, max(last.start_s, self.steady.start_s), end))
        if end < self.steady.end_s:
            path.insert(0, Segment(None, end, self.steady.end_s))
        return path[::-1]

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
            return self._before.get((record.step, record.op.id))
        if isinstance(record.blocker, int):
            if record.blocker >= 0:
                return self.by_op.get((record.step, record.blocker))
            return self._last_before_step(record.step, LANES[-1 - record.blocker])
        return None

    def _last_before_step(self, step: int, lane: str) -> OpRecord | None:
        for earlier in range(step - 1, -1, -1):
            if (earlier, lane) in self._last_of_step:
                return self._last_of_step[earlier, lane]
        return None

    def _wait_before(self, time_s: float) -> HostBlock | None:
        at = bisect_right(self._wait_ends, time_s)
        return self._waits[at - 1] if at else None

    def _find_host_waits(self) -> list[HostBlock]:
        """Where the host blocked on the device. The timeline keeps only their sum; the program says where they are."""
        waits: list[HostBlock] = []
        for step in sorted(self.spans):
            now, latest = self.spans[step].start_s, None
            for instruction in self.program.steps[min(step, len(self.program.steps)) - 1]:
                if isinstance(instruction, Launch):
                    record = self.by_op.get((step, instruction.op.id))
                    if record is None:
                        continue
                    now = max(now, record.issued_s)
                    if instruction.op.lane != HOST and (latest is None or record.end_s > latest.end_s):
                        latest = record
                elif isinstance(instruction, HostWait):
                    awaited = latest if instruction.op is None else self._awaited(step, instruction.op)
                    if awaited is not None and awaited.end_s > now:
                        waits.append(HostBlock(now, awaited.end_s, awaited))
                        now = awaited.end_s
        return waits

    def _awaited(self, step: int, op: int) -> OpRecord | None:
        return self.by_op.get((step, op)) if op >= 0 else self._last_before_step(step, LANES[-1 - op])
