"""The engine's rules again, as plainly as they can be said: every rank, every op, one event after the other.

No folding, no look-ahead, no lists of waiters: at each moment start what may start, look up all speeds, go to the
next moment at which anything ends. Far too slow for real programs; the engine has to agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.engine.network import fair_rates
from zsim.program.ops import (
    HOST,
    LANES,
    Collective,
    Compute,
    Copy,
    CpuWork,
    HostWait,
    HostWork,
    Launch,
    Op,
    Program,
)

EPSILON = 1e-13


@dataclass
class Running:
    op: Op
    step: int
    issued: float
    start: float | None = None
    end: float | None = None
    left: float = 0.0  # seconds alone, or bytes
    latency: float = 0.0


@dataclass
class NaiveRank:
    rank: int
    script: list
    at: int = 0
    clock: float = 0.0
    lanes: dict[str, list[Running]] = field(default_factory=lambda: {lane: [] for lane in LANES})
    ops: dict[tuple[int, int], Running] = field(default_factory=dict)
    started: dict[int, dict[str, Running]] = field(default_factory=dict)  # last op per lane before a step

    def event(self, step: int, event: int) -> Running | None:
        if event >= 0:
            return self.ops[step, event]
        lane = LANES[-1 - event]
        earlier = [running for running in self.lanes[lane] if running.step < step]
        return earlier[-1] if earlier else None


def simulate(program: Program, price, count: int) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(rank, step, op) -> start, end, for init and the first `count` steps."""
    script = [(0, instruction) for instruction in program.init]
    for step in range(1, count + 1):
        script += [(step, instruction) for instruction in program.steps[min(step, len(program.steps)) - 1]]
    ranks = [NaiveRank(rank, script) for rank in range(program.world_size)]
    capacity, now = price.link_capacity, 0.0
    flows: dict[tuple, list] = {}  # (step, op, group) -> [bytes left, transfer, latency left]
    while True:
        while any(_host(rank, price, now) for rank in ranks) or any(_start(rank, price, now) for rank in ranks):
            pass
        active = {rank.rank: [r for lane in rank.lanes.values() for r in lane if r.start is not None and r.end is None]
                  for rank in ranks}  # fmt: skip
        for rank in ranks:
            for running in active[rank.rank]:
                work = running.op.work
                if isinstance(work, Collective | Copy):
                    group = _group(program, rank.rank, work)
                    key = (running.step, running.op.id, group)
                    present = sum(any((o.step, o.op.id) == key[:2] for o in active[member]) for member in group)
                    if key not in flows and present == len(group):
                        transfer = price.transfer(work, (group,))
                        flows[key] = [transfer.payload_bytes, transfer, transfer.latency_s]
        loading = [key for key, flow in flows.items() if flow[2] <= EPSILON]
        rates = dict(zip(loading, fair_rates([flows[key][1] for key in loading], capacity), strict=True))
        # When does the next thing end?
        moments = [flow[2] for flow in flows.values() if flow[2] > EPSILON]
        moments += [flows[key][0] / rates[key] for key in loading]
        speeds = {}
        for rank in ranks:
            in_flight = [r.op.work for r in active[rank.rank] if isinstance(r.op.work, Collective | Copy)]
            speeds[rank.rank] = 1 / price.compute_slowdown(in_flight)
            for running in active[rank.rank]:
                if isinstance(running.op.work, Compute):
                    moments.append(running.left / speeds[rank.rank])
                elif isinstance(running.op.work, CpuWork):
                    moments.append(running.left)
            if rank.clock > now and rank.at < len(rank.script):
                moments.append(rank.clock - now)
            heads = (next((r for r in lane if r.end is None), None) for lane in rank.lanes.values())
            moments += [r.issued - now for r in heads if r and r.start is None and r.issued > now]
        if not moments:
            assert all(r.end is not None for rank in ranks for r in rank.ops.values()), "deadlock"
            return {(rank.rank, *key): (r.start, r.end) for rank in ranks for key, r in rank.ops.items()}
        pause = max(0.0, min(moments))
        now += pause
        for rank in ranks:
            for running in active[rank.rank]:
                if isinstance(running.op.work, Compute | CpuWork):
                    speed = speeds[rank.rank] if isinstance(running.op.work, Compute) else 1.0
                    running.left -= pause * speed
                    if running.left <= EPSILON:
                        running.end = now
        for key in list(flows):
            flow = flows[key]
            if flow[2] > EPSILON:
                flow[2] -= pause
                continue
            flow[0] -= pause * rates[key]
            if flow[0] <= EPSILON * max(1.0, flow[1].payload_bytes):
                del flows[key]
                for member in key[2]:
                    ranks[member].ops[key[:2]].end = now


def _group(program: Program, rank: int, work: Collective | Copy) -> tuple[int, ...]:
    if isinstance(work, Copy):
        return (rank,)
    return next(group for group in program.groups[work.group] if rank in group)


def _host(rank: NaiveRank, price, now: float) -> bool:
    """Execute the next instruction if the host is free; whether it did."""
    if rank.at == len(rank.script) or rank.clock > now + EPSILON:
        return False
    step, instruction = rank.script[rank.at]
    if isinstance(instruction, HostWait):
        if instruction.op is None:
            awaited = [lane[-1] for lane in rank.lanes.values() if lane]
        else:
            one = rank.event(step, instruction.op)
            awaited = [one] if one else []
        if any(running.end is None for running in awaited):
            return False
        rank.clock = max([rank.clock, *(running.end for running in awaited)])
    elif isinstance(instruction, Launch):
        op = instruction.op
        begin = rank.clock
        rank.clock += price.host_seconds(op.work) if isinstance(op.work, HostWork) else price.issue_seconds(op)
        running = rank.ops[step, op.id] = Running(op, step, rank.clock)
        if op.lane == HOST:
            running.start, running.end = begin, rank.clock
        else:
            rank.lanes[op.lane].append(running)
    rank.at += 1
    return True


def _start(rank: NaiveRank, price, now: float) -> bool:
    """Start the head of a lane if it may; whether one did."""
    for lane in rank.lanes.values():
        head = next((running for running in lane if running.end is None), None)
        if head is None or head.start is not None or head.issued > now + EPSILON:
            continue
        awaited = [rank.event(head.step, event) for event in head.op.waits]
        if any(one is not None and one.end is None for one in awaited):
            continue
        head.start = now
        work = head.op.work
        if isinstance(work, Compute):
            head.left = price.compute_seconds(rank.rank, work)
        elif isinstance(work, CpuWork):
            head.left = price.cpu_seconds(rank.rank, work)
        return True
    return False
