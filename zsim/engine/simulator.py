"""Runs a Program: host, lanes and network of every simulated rank on one SimPy clock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import simpy

from zsim.engine.groups import Bundle, bundles_of
from zsim.engine.host import issue_steps, targets
from zsim.engine.lanes import INFINITY, Lane, Rank, advance, rerate
from zsim.engine.network import Flow, Network
from zsim.engine.prices import Prices
from zsim.engine.records import timeline
from zsim.engine.steady import repeated, repeats
from zsim.engine.stepcode import FIXED, FLOW, IDLE, KERNELS, ON_HOST, StepCode, prepare
from zsim.engine.timeline import Timeline
from zsim.program.ops import Collective, Compute, Copy, CpuWork, HostWork, Instruction, Program, Work

MAX_STEPS = 8


def run(
    program: Program,
    rank_classes: Sequence[tuple[int, ...]],
    price: Prices,
    *,
    fold: bool = True,
    left_out: tuple[int, int] | None = None,
) -> Timeline:
    """Simulate `program` until a step repeats the one before it, `MAX_STEPS` at most.

    `rank_classes`: classes of ranks on equivalent hardware, every rank in one of them. With `fold` the first
    rank of each class stands for all of it and the network carries the traffic of the whole class; without,
    every rank is simulated. `left_out`: a micro-step, and how many more follow it that the Program has not; it is None
    in the Timeline where that micro-step is not the same as the one before it. Raises ValueError where the Program is
    inconsistent (a bug of a strategy).
    """
    if not fold:
        rank_classes = [(rank,) for rank in range(program.world_size)]
    with uncollected():
        simulation = Simulation(program, rank_classes, price)
        simulation.run()
        found = timeline(simulation, left_out)
        simulation.dissolve()
    return found


@contextmanager
def uncollected() -> Iterator[None]:
    """Tens of thousands of records come to life within, and none dies: searching them for garbage doubles the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Meeting:
    """A collective or copy on its way: which simulated ranks have arrived, and how it loads the network."""

    __slots__ = ("bundle", "kind", "op", "ranks")

    def __init__(self, bundle: Bundle, op: int, kind: int) -> None:
        self.bundle, self.op, self.kind = bundle, op, kind
        self.ranks: list[Rank] = []


class Simulation:
    """The state of one run. Every SimPy event calls `_fire`, which ends with `_settle`."""

    def __init__(self, program: Program, classes: Sequence[tuple[int, ...]], price: Prices) -> None:
        self.program, self.classes, self.price = program, [tuple(members) for members in classes], price
        self.env = simpy.Environment()
        # SimPy adds a delay to its own now and may be one rounding off; this is the exact time of the event at hand.
        self.now = 0.0
        self.events = 0
        self.ranks = [Rank(index, members[0]) for index, members in enumerate(self.classes)]
        self.network = Network(price.link_capacity)
        self.works: list[Collective | Copy] = []
        self.flows: list[tuple[Meeting, Flow]] = []  # finished
        self.host_ends: list[list[float]] = [[] for _ in self.ranks]  # of each step, after its last instruction
        self.step_ends: list[list[float]] = [[] for _ in self.ranks]
        self.steady: int | None = None  # the first step that the next one repeats
        self.finished = self.env.event()
        self.init_alone = False  # see `set_up_alone`
        self._bundles = {name: bundles_of(groups, self.classes) for name, groups in program.groups.items()}
        self._own = [Bundle((i,), tuple((rank,) for rank in ranks)) for i, ranks in enumerate(self.classes)]
        self._codes: dict[int, StepCode] = {}
        self._alone: dict[tuple[int, int], list[float]] = {}
        self._work_numbers: dict[Collective | Copy, int] = {}
        self._kinds: dict[tuple[int, int], int] = {}  # (work, first member of the bundle) -> kind of transfer
        self._routes: dict[tuple[int, int], tuple[Bundle, int]] = {}  # (work, rank) -> its bundle, kind of transfer
        self._slowdowns: dict[tuple[int, ...], float] = {(): 1.0}
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._ready: deque[Lane] = deque()
        self._loaded: dict[int, Rank] = {}  # ranks whose transfers in flight changed

    def run(self) -> None:
        for rank in self.ranks:
            self.at(0.0, self._resume, rank, issue_steps(self, rank, MAX_STEPS))
        try:
            self.env.run(until=self.finished)
        except RuntimeError:
            if self.env.peek() == INFINITY and not self.finished.triggered:
                raise RuntimeError(f"deadlock at {self.now} s: {self._stuck()}") from None
            raise

    @property
    def reported(self) -> int:
        """The steady step, or the last one if there is none."""
        return self.steady if self.steady is not None else min(map(len, self.step_ends)) - 1

    def dissolve(self) -> None:
        """Forget everything, at the end: ranks, lanes and events hold each other in memory."""
        for rank in self.ranks:
            vars(rank).clear()
        vars(self).clear()

    # Programs and prices, once per distinct step program.

    def instructions(self, step: int) -> Sequence[Instruction]:
        steps = self.program.steps
        return self.program.init if step == 0 else steps[min(step, len(steps)) - 1]

    def code(self, step: int) -> StepCode:
        instructions = self.instructions(step)
        code = self._codes.get(id(instructions))
        if code is None:
            code = self._codes[id(instructions)] = prepare(instructions, self.price)
        return code

    def alone(self, code: StepCode, rank: Rank) -> list[float]:
        """Seconds alone of timed ops; for transfers their number in `works` (they take what the network gives)."""
        known = self._alone.get((id(code), rank.index))
        if known is None:
            alone: dict[int, float] = {}  # by id of the work: equal blocks share them
            for op in code.ops:
                if id(op.work) not in alone:
                    alone[id(op.work)] = self._work_alone(op.work, rank)
            known = self._alone[id(code), rank.index] = [alone[id(op.work)] for op in code.ops]
        return known

    def _work_alone(self, work: Work, rank: Rank) -> float:
        if isinstance(work, Compute):
            return self.price.compute_seconds(rank.number, work)
        if isinstance(work, CpuWork):
            return self.price.cpu_seconds(rank.number, work)
        if isinstance(work, HostWork):
            return self.price.host_seconds(work)
        if work not in self._work_numbers:
            self._work_numbers[work] = len(self.works)
            self.works.append(work)
        return self._work_numbers[work]

    def route(self, rank: Rank, number: int) -> tuple[Bundle, int]:
        """Whom `rank` meets for work `number`, and the network's number for what they then do together."""
        known = self._routes.get((number, rank.index))
        if known is None:
            work = self.works[number]
            bundle = self._own[rank.index] if isinstance(work, Copy) else self._bundles[work.group].get(rank.index)
            if bundle is None:
                assert isinstance(work, Collective)
                raise ValueError(f"rank {rank.number} calls {work.kind} in {work.group}, of which it is no member")
            key = (number, bundle.members[0])
            if key not in self._kinds:
                self._kinds[key] = self.network.add_kind(self.price.transfer(work, bundle.groups))
            known = self._routes[number, rank.index] = bundle, self._kinds[key]
        return known

    def set_up_alone(self, rank: Rank) -> None:
        """Give the transfers of the init the time that they take alone, if they just follow each other on one lane.

        Thousands of broadcasts, one per parameter, then need no events. In their records they remain transfers.
        """
        code = rank.codes[0]
        in_a_row = len(code.last) == 1 and all(timing in (FLOW, ON_HOST) for timing in code.timing)
        if len(self.ranks) > 1 or not in_a_row:
            return
        self.init_alone = True
        known: dict[float, float] = {}
        for op, timing in enumerate(code.timing):
            if timing == FLOW:
                number = rank.alone[op]
                if number not in known:
                    kind = self.route(rank, int(number))[1]
                    transfer = self.network.transfers[kind]
                    known[number] = transfer.latency_s + transfer.payload_bytes / self.network.rate_alone(kind)
                rank.timing[op], rank.alone[op] = FIXED, known[number]

    # Clock.

    def at(self, time: float, action: Callable[..., object], *arguments: object) -> None:
        delay = time - self.env.now
        event: Any = self.env.timeout(delay if delay > 0.0 else 0.0, (time, action, arguments))
        event.callbacks.append(self._fire)

    def _fire(self, event: Any) -> None:
        time, action, arguments = event.value
        self.events += 1
        if time > self.now:
            self.now = time
        action(*arguments)
        self._settle()

    def _settle(self) -> None:
        """Let everything that can happen now happen: transfers begin, rates change, lanes run ahead."""
        ready, loaded, network, now = self._ready, self._loaded, self.network, self.now
        kernels: list[Lane] = []
        while True:
            while ready:
                lane = ready.popleft()
                if lane.in_flight or lane.asleep_until > now:
                    continue
                # Kernels last: what begins now decides how fast they run.
                if lane.position < len(lane.queue) and lane.rank.timing[lane.queue[lane.position]] == KERNELS:
                    kernels.append(lane)
                else:
                    self._advance(lane)
            while loaded:
                self._rerate(loaded.popitem()[1])
            if network.changed:
                for flow in network.share(now):
                    self.at(flow.end, self._flow_ends, flow, flow.end)
            if not kernels and not ready:
                return
            for lane in kernels:
                if not lane.in_flight and lane.asleep_until <= now:  # else it was ready twice
                    self._advance(lane)
            kernels.clear()

    # Host.

    def _resume(self, rank: Rank, host: Iterator[list[int]]) -> None:
        """Let the host go on until it blocks, and again when the first of the ops it waits for is done."""
        blocked = True

        def one_done() -> None:
            nonlocal blocked
            if blocked:
                blocked = False
                self._resume(rank, host)

        for op in next(host, ()):
            self.watch(rank, op, one_done)

    def wake(self, rank: Rank, lanes: Iterable[str]) -> None:
        self._ready.extend(rank.lanes[name] for name in lanes)

    def watch(self, rank: Rank, op: int, waiter: Lane | Callable[[], object]) -> None:
        """Tell `waiter` when `op` is done."""
        waiters = rank.waiters.get(op)
        if waiters is None:
            rank.waiters[op] = [waiter]
            if rank.timing[op] != FLOW:
                lane = rank.lanes[rank.lane_of[op]]
                lane.watched[op] = INFINITY
                self._plan_ends(lane)
        elif waiter not in waiters:
            waiters.append(waiter)

    # Lanes.

    def _plan_ends(self, lane: Lane) -> None:
        for op, planned in lane.watched.items():
            end = lane.rank.end[op]
            if end != planned:
                lane.watched[op] = end
                if end < INFINITY:
                    self.at(end, self._watched_op_ends, lane, op, end)

    def _watched_op_ends(self, lane: Lane, op: int, time: float) -> None:
        if lane.watched.get(op) == time:  # else it was moved meanwhile
            del lane.watched[op]
            self._tell(lane.rank, op)

    def _tell(self, rank: Rank, op: int) -> None:
        for waiter in rank.waiters.pop(op, ()):
            if isinstance(waiter, Lane):
                waiter.asleep_until = -INFINITY
                self._ready.append(waiter)
            else:
                waiter()

    def _advance(self, lane: Lane) -> None:
        stop = advance(lane, self.now)
        if lane.watched:
            self._plan_ends(lane)
        if isinstance(stop, int):
            lane.asleep_until = INFINITY
            self.watch(lane.rank, stop, lane)
        elif stop is not None:
            op, start = stop
            if start <= self.now and lane.rank.timing[op] == FLOW:
                self._begin(lane, op, start)
            else:
                lane.asleep_until = start
                self.at(start, self._wake_up, lane, start)

    def _wake_up(self, lane: Lane, time: float) -> None:
        if lane.asleep_until == time:  # else it was told to go on meanwhile
            lane.asleep_until = -INFINITY
            self._ready.append(lane)

    def _rerate(self, rank: Rank) -> None:
        mix = tuple(sorted(rank.in_flight)) if len(rank.in_flight) > 1 else tuple(rank.in_flight)
        slowdown = self._slowdowns.get(mix)
        if slowdown is None:
            slowdown = self.price.compute_slowdown([self.works[number] for number in mix])
            self._slowdowns[mix] = slowdown
        if slowdown != rank.slowdown:
            factor = slowdown / rank.slowdown
            rank.slowdown = slowdown
            self._ready.extend(lane for lane in rank.kernel_lanes if rerate(lane, self.now, factor))

    # Transfers.

    def _begin(self, lane: Lane, op: int, start: float) -> None:
        rank = lane.rank
        rank.start[op] = start
        lane.in_flight = True
        number = int(rank.alone[op])
        rank.in_flight.append(number)
        self._loaded[rank.index] = rank
        bundle, kind = self.route(rank, number)
        key = (op, bundle.members[0])
        meeting = self._meetings.pop(key, None) or Meeting(bundle, op, kind)
        meeting.ranks.append(rank)
        if len(meeting.ranks) < len(bundle.members):
            self._meetings[key] = meeting
            return
        flow = Flow(kind, self.network.transfers[kind], meeting)
        join = self.now + flow.transfer.latency_s
        if self.network.plan_alone(flow, join):
            self.at(flow.end, self._flow_ends, flow, flow.end)
        else:
            for early in self.network.unplan(kind, self.now):
                self._join_later(early, early.times.pop())
            self._join_later(flow, join)

    def _join_later(self, flow: Flow, time: float) -> None:
        self.network.joining.append(flow)
        self.at(time, self._join, flow)

    def _join(self, flow: Flow) -> None:
        self.network.joining.remove(flow)
        self.network.add(flow)

    def _flow_ends(self, flow: Flow, time: float) -> None:
        if flow.end != time:  # it was moved meanwhile
            return
        self.network.remove(flow, self.now)
        meeting = flow.owner
        assert isinstance(meeting, Meeting)
        self.flows.append((meeting, flow))
        op = meeting.op
        for rank in meeting.ranks:
            rank.end[op] = self.now
            lane = rank.lanes[rank.lane_of[op]]
            lane.in_flight = False
            lane.position += 1
            rank.in_flight.remove(int(rank.alone[op]))
            self._loaded[rank.index] = rank
            self._ready.append(lane)
            self._tell(rank, op)

    # Steps.

    def step_issued(self, rank: Rank, step: int, host_end: float) -> None:
        self.host_ends[rank.index].append(host_end)
        pending = targets(rank, IDLE)
        left = len(pending) + 1

        def one_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.step_ends[rank.index].append(max([host_end, *(rank.end[op] for op in pending)]))
                self._step_done(step)

        for op in pending:
            if rank.end[op] > self.now:
                self.watch(rank, op, one_done)
            else:
                one_done()
        one_done()

    def _step_done(self, step: int) -> None:
        if self.finished.triggered or any(len(ends) <= step for ends in self.step_ends):
            return
        if step >= 1 and repeats(self, step):
            self.steady = step
        elif step >= 2 and repeated(self, step):
            self.steady = step - 1
        if self.steady is not None or step == MAX_STEPS:
            self.finished.succeed()

    def _stuck(self) -> str:
        heads = []
        for rank in self.ranks:
            for lane in rank.lanes.values():
                if lane.position < len(lane.queue):
                    step, op = rank.locate(lane.queue[lane.position])
                    heads.append(f"rank {rank.number} lane {lane.name} at step {step} op {op.id} ({op.label})")
        return "; ".join(heads) or "nothing is queued"
