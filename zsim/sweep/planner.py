"""Finds the fastest and the cheapest setup that fits, simulating few of the many.

Four rounds, each on what the one before left:
1. Memory of every strategy at its least demanding (micro-batch 1, full checkpointing). What lacks memory there lacks
   it everywhere.
2. Memory by micro-batch: for each way of checkpointing the largest that may fit, by bisection.
3. The clock, from the largest micro-batch downwards while smaller ones are faster; the setups with the least lower
   bound first (`probe.least_seconds`), and none whose bound is as long as the best found so far.
4. Bucket sizes and prefetching, where a setup came close to the best.

Rounds 1 and 2 rest on memory rising with the micro-batch, round 3 on a step with more micro-steps taking at least
their kernels longer. Stopping at the first slower micro-batch and tuning only what is close are judgements; both are
counted in the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from zsim.plan.document import Document
from zsim.sweep.evaluate import Outcome, Task, evaluate
from zsim.sweep.probe import Least, Probe, least_seconds, probe_memory
from zsim.sweep.space import CHECKPOINTING, Candidate, Machine, Strategy, candidates

INDISTINGUISHABLE = 0.01  # a setup whose lower bound is within this of the best is not worth a clock
CLOSE = 0.05  # setups this close to the best have their buckets tuned

# Why candidates were not simulated.
NO_MEMORY_AT_ALL = "lack memory even with micro-batch 1 and full checkpointing"
BATCH_TOO_LARGE = "lack memory at their micro-batch and checkpointing"
BOUND = "cannot be better: one micro-step and the kernels of the others take as long as the two best steps"
KERNELS = "other bucket sizes of setups whose kernels alone take as long as the best step"
SLOWER_SIDE = "micro-batches smaller than one that was already slower"
NOT_CLOSE = f"other bucket sizes of setups more than {CLOSE:.0%} behind the best"
REFUSED = "refused or not modeled"


@dataclass(frozen=True, slots=True)
class Choice:
    """A simulated candidate. `dollars`: per step, None without prices; `gpu_hours` per step is always there."""

    candidate: Candidate
    outcome: Outcome

    @property
    def step_s(self) -> float:
        return float(self.outcome["step_s"])

    @property
    def gpu_hours(self) -> float:
        return self.step_s * self.candidate.machine.ranks / 3600

    @property
    def cost(self) -> float:
        """Dollars per step, or GPU-hours where no machine has a price."""
        return self.gpu_hours * (self.candidate.machine.price or 1.0)


@dataclass(slots=True)
class Plan:
    """The answer. `searched` counts every candidate once: simulated, or why not."""

    candidates: int = 0
    searched: Counter[str] = field(default_factory=Counter)
    choices: list[Choice] = field(default_factory=list)  # simulated and fitting
    too_big: int = 0  # simulated, and the allocator ran out
    nearest: tuple[int, Candidate] | None = None  # bytes missing, of what lacks least
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def fastest(self) -> Choice | None:
        return min(self.choices, key=lambda choice: (choice.step_s, choice.cost), default=None)

    @property
    def cheapest(self) -> Choice | None:
        return min(self.choices, key=lambda choice: (choice.cost, choice.step_s), default=None)

    def runner_up(self, winner: Choice, by: Callable[[Choice], Any]) -> Choice | None:
        """The best that differs from the winner in more than bucket sizes."""
        own = replace(winner.candidate, tuning=0)
        return min((c for c in self.choices if replace(c.candidate, tuning=0) != own), key=by, default=None)

    @property
    def pareto(self) -> list[Choice]:
        """Those that no other one beats in both time and cost, the fastest first."""
        front: list[Choice] = []
        for choice in sorted(self.choices, key=lambda choice: (choice.step_s, choice.cost)):
            if not front or choice.cost < front[-1].cost:
                front.append(choice)
        return front


def plan(base: Document, machines: Sequence[Machine], global_batch: int, executor: Executor, workers: int) -> Plan:
    """Search all `machines`. `base` states the model, the sequence length and what else the planner leaves alone."""
    search = _Search(base, executor, workers)
    everything = [(machine, list(candidates(machine, global_batch))) for machine in machines]
    search.answer.candidates = sum(len(found) for _, found in everything)
    groups = [
        _Group(machine, strategy, list(members))
        for machine, found in everything
        for strategy, members in groupby(found, key=lambda candidate: candidate.strategy)
    ]
    lines = search.batches(search.possible(groups))
    search.descend(lines)
    search.tune()
    return search.answer


@dataclass(slots=True)
class _Group:
    """All candidates of one strategy on one machine."""

    machine: Machine
    strategy: Strategy
    members: list[Candidate]

    def untuned(self, checkpointing: str) -> list[Candidate]:
        """One per micro-batch, rising."""
        return [c for c in self.members if c.checkpointing == checkpointing and c.tuning == 0]


@dataclass(slots=True)
class _Line:
    """What may fit of one strategy with one way of checkpointing: micro-batches yet to simulate, the next one last."""

    left: list[Candidate]
    bound: float = 0.0  # seconds, of the next one once it is known
    before: float = float("inf")  # step of the last one simulated
    tuning: int = 0

    @property
    def next(self) -> Candidate:
        return replace(self.left[-1], tuning=self.tuning)


class _Search:
    def __init__(self, base: Document, executor: Executor, workers: int) -> None:
        self.base, self.executor, self.workers = base, executor, workers
        self.answer = Plan()
        self.kernels: dict[Candidate, float] = {}  # seconds, by candidate with tuning 0

    # Round 1 and 2: memory.

    def possible(self, groups: Iterable[_Group]) -> Iterator[_Group]:
        groups = list(groups)
        least = [group.untuned("full")[0] for group in groups]
        for group, candidate, probe in zip(groups, least, self._map(probe_memory, least), strict=True):
            if probe.need is None:
                self.answer.searched[REFUSED] += len(group.members)
                self.answer.refusals[probe.refusal] += len(group.members)
            elif probe.excluded:
                self.answer.searched[NO_MEMORY_AT_ALL] += len(group.members)
                self._miss(probe, candidate)
            else:
                yield group

    def batches(self, groups: Iterable[_Group]) -> list[_Line]:
        kinds = CHECKPOINTING[::-1]  # what needs least first
        asked = [[group.untuned(checkpointing) for checkpointing in kinds] for group in groups]
        tasks = [[[candidate.task(self.base) for candidate in row] for row in rows] for rows in asked]
        lines = []
        for rows, found in zip(asked, self._map_tasks(largest, tasks), strict=True):
            for row, (count, probe) in zip(rows, found, strict=True):
                left_out = (len(row) - count) * len(row[0].strategy.tunings)
                if probe is not None and probe.need is None:
                    self.answer.searched[REFUSED] += left_out
                    self.answer.refusals[probe.refusal] += left_out
                elif left_out:
                    self.answer.searched[BATCH_TOO_LARGE] += left_out
                    if probe is not None:
                        self._miss(probe, row[count])
                if count:
                    lines.append(_Line(row[:count], tuning=row[0].strategy.usual))
        return lines

    def _miss(self, probe: Probe, candidate: Candidate) -> None:
        assert probe.need is not None
        missing = probe.need.missing
        if missing > 0 and (self.answer.nearest is None or missing < self.answer.nearest[0]):
            self.answer.nearest = missing, candidate

    # Round 3 and 4: the clock.

    def descend(self, lines: list[_Line]) -> None:
        unbounded, waiting = list(lines), list[_Line]()
        flying: dict[Future[Any], tuple[_Line, Candidate]] = {}
        while unbounded or waiting or flying:
            while len(flying) <= self.workers and (unbounded or waiting):
                if unbounded:  # first, as bounds decide what is worth a clock
                    line = unbounded.pop()
                    flying[self._submit(least_seconds, line.next)] = line, line.next
                    continue
                line = min(waiting, key=lambda line: line.bound)
                waiting.remove(line)
                if self._hopeless(line.next, line.bound, places=2):  # who is second matters too
                    self._give_up(line, BOUND)
                else:
                    flying[self._submit(evaluate, line.next)] = line, line.next
            if not flying:
                continue
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                line, candidate = flying.pop(future)
                found = future.result()
                if isinstance(found, Least):
                    line.bound = found.step
                    self.kernels[replace(candidate, tuning=0)] = found.kernels
                    waiting.append(line)
                elif self._again(line, candidate, found):
                    waiting.append(line)
                elif line.left:
                    unbounded.append(line)

    def _again(self, line: _Line, candidate: Candidate, outcome: Outcome) -> bool:
        """Take an outcome in; whether the same micro-batch is to be simulated again with less demanding buckets."""
        fits = self._record(candidate, outcome)
        usual, tunings = candidate.strategy.usual, len(candidate.strategy.tunings)
        if not fits and line.tuning != 0 and outcome["status"] == "ok":
            line.tuning = 0
            return True
        line.left.pop()
        if not fits:
            # What was simulated of these is counted already.
            self.answer.searched[BATCH_TOO_LARGE] += tunings - (1 if line.tuning == usual else 2)
            line.tuning = usual
        elif outcome["step_s"] > line.before:
            self._give_up(line, SLOWER_SIDE)
        else:
            line.before = outcome["step_s"]
        return False

    def _give_up(self, line: _Line, reason: str) -> None:
        self.answer.searched[reason] += sum(len(candidate.strategy.tunings) for candidate in line.left)
        line.left.clear()

    def tune(self) -> None:
        """The other bucket sizes of the setups that are close to the best in time or in cost."""
        near: list[Candidate] = []
        for choice in list(self.answer.choices):
            candidate = choice.candidate
            # Where the usual buckets did not fit, they were tried before number 0.
            tried = {candidate.tuning, candidate.strategy.usual if candidate.tuning == 0 else candidate.tuning}
            others = [replace(candidate, tuning=t) for t in range(len(candidate.strategy.tunings)) if t not in tried]
            if not self._close(choice):
                self.answer.searched[NOT_CLOSE] += len(others)
            elif self._hopeless(candidate, self.kernels[replace(candidate, tuning=0)]):
                self.answer.searched[KERNELS] += len(others)
            else:
                near += others
        for candidate, outcome in zip(near, self._map(evaluate, near), strict=True):
            self._record(candidate, outcome)

    def _close(self, choice: Choice) -> bool:
        fastest, cheapest = self.answer.fastest, self.answer.cheapest
        assert fastest is not None
        assert cheapest is not None
        return choice.step_s <= fastest.step_s * (1 + CLOSE) or choice.cost <= cheapest.cost * (1 + CLOSE)

    def _hopeless(self, candidate: Candidate, bound: float, places: int = 1) -> bool:
        """Whether `places` choices that differ in more than buckets are as good in time and cost as it could be."""
        best = Choice(candidate, {"step_s": bound * (1 + INDISTINGUISHABLE)})
        better = (one for one in self.answer.choices if one.step_s <= best.step_s and one.cost <= best.cost)
        return len({replace(one.candidate, tuning=0) for one in better}) >= places

    def _record(self, candidate: Candidate, outcome: Outcome) -> bool:
        answer = self.answer
        if outcome["status"] != "ok":
            answer.searched[REFUSED] += 1
            answer.refusals[str(outcome["error"]).strip().splitlines()[-1]] += 1
            return False
        if outcome["decided_by"] == "memory":
            answer.searched[BATCH_TOO_LARGE] += 1
            return False
        answer.searched["simulated"] += 1
        if outcome["fits"]:
            answer.choices.append(Choice(candidate, outcome))
            return True
        answer.too_big += 1
        missing = -int(outcome["headroom_bytes"])
        if missing > 0 and (answer.nearest is None or missing < answer.nearest[0]):
            answer.nearest = missing, candidate
        return False

    # Workers.

    def _submit(self, question: Callable[[Task], Any], candidate: Candidate) -> Future[Any]:
        return self.executor.submit(question, candidate.task(self.base))

    def _map(self, question: Callable[[Task], Any], asked: Sequence[Candidate]) -> list[Any]:
        return self._map_tasks(question, [candidate.task(self.base) for candidate in asked])

    def _map_tasks(self, question: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return [future.result() for future in [self.executor.submit(question, task) for task in tasks]]


def largest(rows: Sequence[Sequence[Task]]) -> list[tuple[int, Probe | None]]:
    """Of each row, tasks in rising need, how many may fit, and the probe of the first that does not, if there was one.

    Each row needs more than the one before, so no more of its tasks may fit.
    """
    found = []
    most = max(map(len, rows))
    for tasks in rows:
        low, high, refused = 0, min(most, len(tasks)), None
        while low < high:
            middle = (low + high + 1) // 2 - 1
            probe = probe_memory(tasks[middle])
            if probe.excluded:
                high, refused = middle, probe
            else:
                low = middle + 1
        found.append((low, refused))
        if refused is None or refused.need is not None:
            most = low
    return found
