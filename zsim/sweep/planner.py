"""Finds the fastest and the cheapest setup that fits, simulating few of the many.

Four rounds, each on what the one before left:
1. Memory of every strategy at its least demanding (micro-batch 1, full checkpointing). What lacks memory there lacks
   it everywhere.
2. Memory by micro-batch: for each way of checkpointing the largest that may fit, by bisection.
3. The clock, from the largest micro-batch downwards while smaller ones are faster; the setups with the least lower
   bound first (`probe.least_seconds`), and none whose bound is as long as the best found so far. A worker rather
   begins with round 4 than with what will probably turn out to be one of the latter.
4. Bucket sizes and prefetching of the best.

Rounds 1 and 2 rest on memory rising with the micro-batch, round 3 on `bound.bound`. Stopping at the first slower
micro-batch and tuning only the best are judgements; both are counted in the answer.

A setup that leaves less than `MARGIN` of the memory free is tight: no simulation knows of everything that a run
allocates. Tight setups are simulated and shown, but offered only if there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from zsim.document import Document
from zsim.sweep.choices import INDISTINGUISHABLE, Choice, Plan, by_cost, by_time, untuned
from zsim.sweep.evaluate import Outcome, Task
from zsim.sweep.expression import field as field_of
from zsim.sweep.glance import glance, whole_seconds
from zsim.sweep.probe import Least, Probe, least_seconds, probe_memory
from zsim.sweep.space import CHECKPOINTING, Candidate, Machine, Strategy, candidates

# Why candidates were not simulated.
NO_MEMORY_AT_ALL = "lack memory even with micro-batch 1 and full checkpointing"
BATCH_TOO_LARGE = "lack memory at their micro-batch and checkpointing"
BOUND = "cannot be better: one micro-step and the least that the others take are as long as the two best steps"
SLOWER_SIDE = "micro-batches smaller than one that was already slower"
NOT_BEST = "other bucket sizes of setups that are not the best"
NO_GAIN = "other bucket sizes of the best, which promise less"
REFUSED = "refused or not modeled"


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
        self.answer = Plan(framework=field_of(base.data, ("framework",)))
        self.simulated: dict[Candidate, dict[int, Choice | str]] = {}  # by candidate and tuning; a text: why not
        self.single: dict[Candidate, float] = {}  # seconds of a step with a single micro-step
        self.looking: dict[Candidate, Future[Least]] = {}  # those asked for by `_look_around`

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
            while len(flying) < self.workers and (unbounded or waiting):  # none ahead: what is known by then decides
                if unbounded:  # first, as bounds decide what is worth a clock
                    line = unbounded.pop()
                    flying[self._submit(least_seconds, line.next)] = line, line.next
                    continue
                line = min(waiting, key=lambda line: line.bound)
                if self._hopeless(line.next, line.bound):
                    self._give_up(line, BOUND)
                elif self._hopeless(line.next, line.bound, [before for before, _ in flying.values()]):
                    break  # probably: worth waiting for those in flight
                else:
                    flying[self._submit(glance, line.next)] = line, line.next
                waiting.remove(line)
            if not flying:
                continue
            if len(flying) < self.workers:
                self._look_around()
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                line, candidate = flying.pop(future)
                found = future.result()
                if isinstance(found, Least):
                    line.bound, self.single[candidate] = found.step, found.single
                    waiting.append(line)
                elif self._again(line, candidate, found):
                    waiting.append(line)
                elif line.left:
                    unbounded.append(line)

    def _again(self, line: _Line, candidate: Candidate, outcome: Outcome) -> bool:
        """Take an outcome in; whether the same micro-batch is to be simulated again with less demanding buckets."""
        found = self._record(candidate, outcome)
        choice = found if isinstance(found, Choice) else None
        if line.tuning != 0 and found == BATCH_TOO_LARGE:
            line.tuning = 0
            return True
        line.left.pop()
        line.tuning = candidate.strategy.usual
        if choice is not None:
            if choice.step_s > line.before:
                self._give_up(line, SLOWER_SIDE)
            line.before = choice.step_s
        return False

    def _give_up(self, line: _Line, reason: str) -> None:
        if line.left:
            self.answer.searched[reason] += sum(len(candidate.strategy.tunings) for candidate in line.left)
            line.left.clear()

    def tune(self) -> None:
        """Bucket sizes of the best, in time and in cost.

        Each size by itself in a step with a single micro-step. Then all those together that make it shorter, if that is
        by more than 1 %: in the whole step, and if it is that much there, too, with memory.
        """
        best = self._best()
        asked = {candidate: _neighbours(candidate) for candidate in best}
        self._look_around()
        for candidate in [one for one in self.looking if one not in self.single]:
            self.single[candidate] = self.looking[candidate].result().single
        promising: dict[Candidate, float] = {}  # and what it has to take less than
        for candidate, others in asked.items():
            own = self.single[candidate]
            gains = {other: own - single for other in others if 0 < (single := self.single[other]) < own}
            together = _together(candidate, list(gains))
            if (
                sum(gains.values()) > INDISTINGUISHABLE * own
                and together.tuning not in self.simulated[untuned(together)]
            ):
                promising[together] = best[candidate] / (1 + INDISTINGUISHABLE)
        whole = dict(zip(promising, self._map(whole_seconds, list(promising)), strict=True))
        new = [candidate for candidate, limit in promising.items() if whole[candidate] < limit]
        for candidate, outcome in zip(new, self._map(glance, new), strict=True):
            self._record(candidate, outcome)
        self._count_untuned({untuned(candidate) for candidate in best})

    def _best(self) -> dict[Candidate, float]:
        """The best so far, in time and in cost, and their steps."""
        return {choice.candidate: choice.step_s for by in (by_time, by_cost) if (choice := self.answer.best(by))}

    def _look_around(self) -> None:
        """Have the best, and what differs from them in one bucket size, simulated with a single micro-step."""
        for own in self._best():
            for candidate in (own, *_neighbours(own)):
                if candidate not in self.single and candidate not in self.looking:
                    self.looking[candidate] = self._submit(least_seconds, candidate)

    def _count_untuned(self, chosen: Container[Candidate]) -> None:
        for candidate, simulated in self.simulated.items():
            found = simulated.values()
            if candidate in chosen:
                reason = NO_GAIN
            elif any(isinstance(one, Choice) for one in found):
                reason = NOT_BEST
            else:
                reason = REFUSED if REFUSED in found else BATCH_TOO_LARGE
            left = len(candidate.strategy.tunings) - len(simulated)
            if left:
                self.answer.searched[reason] += left

    def _hopeless(self, candidate: Candidate, bound: float, supposed: Iterable[_Line] = ()) -> bool:
        """Whether two choices (who is second matters too) are as good in time and cost as it could be.

        `supposed`: lines in flight, taken to be as good as their bounds.
        """
        best = Choice(candidate, {"step_s": bound * (1 + INDISTINGUISHABLE)})
        choices = [one for one in self.answer.choices if not one.tight]
        choices += [Choice(line.next, {"step_s": line.bound}) for line in supposed]
        better = (one for one in choices if one.step_s <= best.step_s and one.cost <= best.cost)
        return len({untuned(one.candidate) for one in better}) >= 2

    def _record(self, candidate: Candidate, outcome: Outcome) -> Choice | str:
        answer = self.answer
        found: Choice | str
        if outcome["status"] != "ok":
            found = REFUSED
            answer.searched[REFUSED] += 1
            answer.refusals[str(outcome["error"]).strip().splitlines()[-1]] += 1
        elif outcome["decided_by"] == "memory":
            found = BATCH_TOO_LARGE
            answer.searched[BATCH_TOO_LARGE] += 1
        else:
            answer.searched["simulated"] += 1
            found = Choice(candidate, outcome) if outcome["fits"] else BATCH_TOO_LARGE
        if isinstance(found, Choice):
            answer.choices.append(found)
        elif found == BATCH_TOO_LARGE:
            missing = -int(outcome["headroom_bytes"])
            if missing > 0 and (answer.nearest is None or missing < answer.nearest[0]):
                answer.nearest = missing, candidate
        self.simulated.setdefault(untuned(candidate), {})[candidate.tuning] = found
        return found

    # Workers.

    def _submit(self, question: Callable[[Task], Any], candidate: Candidate) -> Future[Any]:
        return self.executor.submit(question, candidate.task(self.base))

    def _map(self, question: Callable[[Task], Any], asked: Sequence[Candidate]) -> list[Any]:
        return self._map_tasks(question, [candidate.task(self.base) for candidate in asked])

    def _map_tasks(self, question: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return [future.result() for future in [self.executor.submit(question, task) for task in tasks]]


def _neighbours(candidate: Candidate) -> list[Candidate]:
    """The candidates that differ in one bucket size."""
    tunings = candidate.strategy.tunings
    own = tunings[candidate.tuning]
    return [
        replace(candidate, tuning=number)
        for number, tuning in enumerate(tunings)
        if sum(a != b for a, b in zip(tuning, own, strict=True)) == 1
    ]


def _together(candidate: Candidate, neighbours: Sequence[Candidate]) -> Candidate:
    """The candidate with the sizes in which its neighbours differ from it."""
    tunings = candidate.strategy.tunings
    own = tunings[candidate.tuning]
    changed = [dict(tunings[other.tuning]) for other in neighbours]
    wanted = {path: next((o[path] for o in changed if o[path] != value), value) for path, value in own}
    return replace(candidate, tuning=[dict(tuning) for tuning in tunings].index(wanted))


def largest(rows: Sequence[Sequence[Task]]) -> list[tuple[int, Probe | None]]:
    """Of each row, tasks in rising need, how many may fit, and the probe of the first that does not, if there was one.

    Each row needs more than the one before, so no more of its tasks may fit. The first task of the first row may.
    """
    found = []
    most, low = max(map(len, rows)), 1
    for tasks in rows:
        high, refused = min(most, len(tasks)), None
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
        low = 0
    return found
