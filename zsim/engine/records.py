"""Turns the columns of a finished simulation into a Timeline."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from zsim.engine.cycle import cycle
from zsim.engine.lanes import Rank
from zsim.engine.ledger import memory_events
from zsim.engine.network import fair_rates
from zsim.engine.stepcode import FIXED, FLOW, ON_HOST
from zsim.engine.timeline import FlowRecord, LeftOut, OpRecord, StepSpan, Timeline
from zsim.program.ops import LANES

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation

_record = partial(tuple.__new__, OpRecord)  # OpRecord._make, without a Python function around it


def timeline(sim: Simulation, left_out: tuple[int, int] | None = None) -> Timeline:
    """`left_out` as in `simulator.run`."""
    each = cycle(sim, left_out[0]) if left_out else None
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
                steps.append(StepSpan(step, rank.number, begin, end))
    notes = []
    if sim.steady is None:
        notes.append(f"no two steps in a row agree within {done - 1} steps; the last one is reported")
    return Timeline(
        ops=ops,
        memory=memory,
        flows=_flows(sim, done),
        steps=steps,
        link_capacity=sim.price.link_capacity,
        rank_classes=sim.classes,
        steady_step=(sim.reported - 1) * len(sim.ranks),
        events=sim.events,
        notes=notes,
        left_out=LeftOut(*left_out, each) if left_out and each is not None else None,
    )


def _flows(sim: Simulation, done: int) -> list[FlowRecord]:
    first = sim.ranks[0]
    stop = first.bases[done - 1] + len(first.codes[done - 1].ops)
    records = _flows_of_init(sim) if sim.init_alone else []
    members: dict[int, tuple[int, ...]] = {}  # by id of the bundle: the ranks that met
    for meeting, flow in sim.flows:
        if meeting.op < stop:
            ranks = members.get(id(meeting.bundle))
            if ranks is None:
                ranks = members[id(meeting.bundle)] = tuple(sorted(rank.number for rank in meeting.ranks))
            step, op = first.locate(meeting.op)
            records.append(FlowRecord(step, ranks, op.id, flow.transfer, flow.times, flow.rates))
    return records


def _flows_of_init(sim: Simulation) -> list[FlowRecord]:
    rank = sim.ranks[0]
    numbers = sim.alone(rank.codes[0], rank)
    records = []
    for place, (op, timing) in enumerate(zip(rank.codes[0].ops, rank.codes[0].timing, strict=True)):
        if timing == FLOW:
            kind = sim.route(rank, int(numbers[place]))[1]
            transfer, rate = sim.network.transfers[kind], sim.network.rate_alone(kind)
            times = [rank.start[place] + transfer.latency_s, rank.end[place]]
            records.append(FlowRecord(0, (rank.number,), op.id, transfer, times, [rate]))
    return records


class _Writer:
    """Writes the OpRecords of one rank."""

    def __init__(self, sim: Simulation, rank: Rank) -> None:
        self.sim, self.rank = sim, rank
        self.free: dict[str, float] = {}  # lane -> end of its last op
        self.issued = 0.0  # host clock after the last launch
        self.alone: dict[int, tuple[float, str]] = {}  # work -> seconds alone, algorithm

    def step(self, step: int) -> list[OpRecord]:
        rank, free = self.rank, self.free
        code, base = rank.codes[step], rank.bases[step]
        here = slice(base, base + len(code.ops))
        numbers = self.sim.alone(code, rank)
        columns = (rank.issued[here], rank.start[here], rank.end[here], numbers, rank.waits[here])
        number, before = rank.number, self.issued
        records: list[OpRecord] = []
        append = records.append
        for op, timing, issued, start, end, alone, waits in zip(code.ops, code.timing, *columns, strict=True):
            if timing == ON_HOST:
                begin = max(before, issued - alone)
                append(_record((step, number, op, begin, begin, issued, "host", 0.0, "")))
                before = issued
                continue
            before = issued
            # What decided the start: the lane before the host, either before an op that ended no later.
            blocker: int | str = "host"
            time = issued
            lane = op.lane
            ready = free.get(lane)
            if ready is not None and ready >= time:
                blocker, time = "lane", ready
            if waits:
                for target in waits:
                    if rank.end[target] > time:
                        time = rank.end[target]
                        earlier = target < base
                        blocker = -1 - LANES.index(rank.lane_of[target]) if earlier else code.ops[target - base].id
            free[lane] = end
            algorithm = ""
            if timing == FLOW:
                alone, algorithm = self._transfer_alone(int(alone))
            stretch = end - start - alone
            if stretch < 0.0 or timing == FIXED:
                stretch = 0.0
            append(_record((step, number, op, issued, start, end, blocker, stretch, algorithm)))
        self.issued = before
        return records

    def _transfer_alone(self, number: int) -> tuple[float, str]:
        """Seconds that work `number` takes when nobody else, not even a peer group, uses the links; its algorithm."""
        known = self.alone.get(number)
        if known is None:
            sim, work = self.sim, self.sim.works[number]
            groups = sim.route(self.rank, number)[0].groups
            own = next(group for group in groups if self.rank.number in group)
            transfer = sim.price.transfer(work, (own,))
            (rate,) = fair_rates([transfer], sim.network.capacity)
            known = (transfer.latency_s + transfer.payload_bytes / rate, transfer.algorithm)
            self.alone[number] = known
        return known
