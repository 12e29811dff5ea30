"""Turns the columns of a finished simulation into a Timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.engine.lanes import Rank
from zsim.engine.ledger import memory_events
from zsim.engine.network import fair_rates
from zsim.engine.stepcode import FIXED, FLOW, ON_HOST
from zsim.engine.timeline import FlowRecord, OpRecord, StepSpan, Timeline
from zsim.program.ops import LANES

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation


def timeline(sim: Simulation) -> Timeline:
    done = min(len(ends) for ends in sim.step_ends)
    ops, memory, steps = [], [], []
    ledgers = [memory_events(rank) for rank in sim.ranks]
    writers = [_Writer(sim, rank) for rank in sim.ranks]
    for step in range(done):
        for rank, writer, ledger in zip(sim.ranks, writers, ledgers, strict=True):
            ops.extend(writer.step(step))
            memory.extend(next(ledger))
            if step > 0:
                begin, end = sim.step_ends[rank.index][step - 1 : step + 1]
                host = sim.host_steps[rank.index][step]
                busy = sum(segment.seconds for segment in rank.codes[step].segments)
                steps.append(StepSpan(step, rank.number, begin, end, busy, host.waited))
    notes = []
    if sim.steady is None:
        notes.append(f"no two steps in a row agree within {done - 1} steps; the last one is reported")
    steady = (sim.steady if sim.steady is not None else done - 1) - 1
    return Timeline(
        ops=ops,
        memory=memory,
        flows=_flows(sim, done),
        steps=steps,
        link_capacity=sim.price.link_capacity,
        rank_classes=sim.classes,
        steady_step=steady * len(sim.ranks),
        events=sim.events,
        notes=notes,
    )


def _flows(sim: Simulation, done: int) -> list[FlowRecord]:
    first = sim.ranks[0]
    stop = first.bases[done - 1] + len(first.codes[done - 1].ops)
    records = []
    for meeting, flow in sim.flows:
        if meeting.op < stop:
            step, op = first.locate(meeting.op)
            ranks = tuple(sorted(rank.number for rank in meeting.ranks))
            records.append(FlowRecord(step, ranks, op.id, flow.transfer, flow.times, flow.rates))
    return records


class _Writer:
    """Writes the OpRecords of one rank."""

    def __init__(self, sim: Simulation, rank: Rank) -> None:
        self.sim, self.rank = sim, rank
        self.free: dict[str, float] = {}  # lane -> end of its last op
        self.alone: dict[int, tuple[float, str]] = {}  # work -> seconds alone, algorithm

    def step(self, step: int) -> list[OpRecord]:
        rank = self.rank
        code, base = rank.codes[step], rank.bases[step]
        records = []
        for segment, clock in zip(code.segments, rank.clocks[step], strict=True):
            for index in range(segment.first, segment.stop):
                op, timing, number = code.ops[index], code.timing[index], base + index
                before, clock = clock, rank.issued[number]
                if timing == ON_HOST:
                    records.append(OpRecord(step, rank.number, op, before, before, clock, "host"))
                    continue
                start, end, alone, algorithm = rank.start[number], rank.end[number], rank.alone[number], ""
                if timing == FLOW:
                    alone, algorithm = self._transfer_alone(int(alone))
                stretch = max(0.0, end - start - alone) if timing != FIXED else 0.0
                blocker = self._blocker(op.lane, number, step)
                self.free[op.lane] = end
                records.append(OpRecord(step, rank.number, op, clock, start, end, blocker, stretch, algorithm))
        return records

    def _blocker(self, lane: str, number: int, step: int) -> int | str:
        """What decided the start of op `number`; the lane before the host, either before an op that ended no later."""
        rank = self.rank
        blocker: int | str = "host"
        time, free = rank.issued[number], self.free.get(lane)
        if free is not None and free >= time:
            blocker, time = "lane", free
        for target in rank.waits[number] or ():
            if rank.end[target] > time:
                time = rank.end[target]
                earlier = target < rank.bases[step]
                blocker = -1 - LANES.index(rank.lane_of[target]) if earlier else rank.locate(target)[1].id
        return blocker

    def _transfer_alone(self, number: int) -> tuple[float, str]:
        """Seconds that work `number` takes when nobody else, not even a peer group, uses the links; its algorithm."""
        known = self.alone.get(number)
        if known is None:
            sim, work = self.sim, self.sim.works[number]
            groups = sim.bundle(self.rank, work).groups
            own = next(group for group in groups if self.rank.number in group)
            transfer = sim.price.transfer(work, (own,))
            (rate,) = fair_rates([transfer], sim.network.capacity)
            known = (transfer.latency_s + transfer.payload_bytes / rate, transfer.algorithm)
            self.alone[number] = known
        return known
