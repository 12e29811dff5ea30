"""Walks a sweep: what the store has is passed over, the rest is claimed, computed by an executor, and written."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from zsim.sweep.evaluate import COLUMNS, Outcome, Task, each, evaluate
from zsim.sweep.executors import Crew
from zsim.sweep.grid import Case, Sweep
from zsim.sweep.identity import Identity, engine_digest
from zsim.sweep.store import Entry, Store

CHUNK = 256  # cases looked up in the store at once
MOST_AT_ONCE = 64  # scenarios in one call: what a killed sweep loses at most per worker
POLL_S = 0.2
BEAT_S = 5.0

Job = tuple[Entry, Case]


@dataclass(slots=True)
class Tally:
    """How far a run is: combinations of the grid passed, and what became of them."""

    passed: int = 0
    reused: int = 0
    computed: int = 0
    refused: int = 0
    failed: int = 0


def sweep_id(sweep: Sweep, memory_only: bool = False) -> bytes:
    """The same for the same statement under the same simulator, whichever shard or process works on it."""
    stated = [
        [base.data for base in sweep.bases],
        sweep.axes,
        [holds.text for holds in sweep.where],
        [holds.text for holds in sweep.skip],
        memory_only,
    ]
    return sha256(f"{engine_digest()}{json.dumps(stated, sort_keys=True)}".encode()).digest()[:16]


def run(
    sweep: Sweep,
    store: Store,
    hire: Callable[[], AbstractContextManager[Crew]],
    *,
    shard: tuple[int, int] = (1, 1),
    memory_only: bool = False,
    report: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Compute what is missing of the sweep's part `shard`; returns when all of it is in the store.

    `hire` starts an executor; it is called again if the executor breaks. Raises InputError for bad conditions.
    """
    store.release_dead()
    return _Run(store, hire, report, memory_only).go(jobs(sweep.part(*shard), memory_only))


def jobs(cases: Iterable[Case], memory_only: bool = False) -> Iterator[Job]:
    """Every case with its entry in the store."""
    identity = Identity()
    for case in cases:
        inputs, sources = identity.inputs(case.data), identity.sources(case.data, case.document.file)
        yield Entry(identity.key(inputs, sources, memory_only), case.position, inputs, sources), case


def task_of(case: Case, memory_only: bool) -> Task:
    """What a worker needs. Fields that axes set are said to come from --set, with which one case runs alone."""
    document = case.document
    places = {path: (f"--set {text}", None) for (path, _), text in zip(case.settings, case.overrides, strict=True)}
    return Task(str(document.file), str(Path(document.file).parent), case.data, document.places | places, memory_only)


class _Run:
    def __init__(
        self,
        store: Store,
        hire: Callable[[], AbstractContextManager[Crew]],
        report: Callable[[Tally], None],
        memory_only: bool,
    ) -> None:
        self.store, self.hire, self.report, self.memory_only = store, hire, report, memory_only
        self.tally = Tally()
        self.flying: dict[Future[list[Outcome]], list[Job]] = {}
        self.next: list[Job] = []  # what the next call will take along
        self.pace = Pace()
        self.others: list[Job] = []  # claimed by another process
        self.suspects: list[Job] = []  # in flight when the executor broke
        self.beaten = time.monotonic()

    def go(self, jobs: Iterator[Job]) -> Tally:
        wanted = self._wanted(jobs)
        first = next(wanted, None)
        if first is None:
            return self.tally
        wanted, lived_through = itertools.chain([first], wanted), False
        while not lived_through or self.suspects:
            with self.hire() as crew:
                try:
                    self._try_suspects(crew)
                    for job in wanted:
                        self._start(crew, job)
                    self._finish(crew)
                    self._wait_for_others(crew)
                    lived_through = True
                except BrokenExecutor:
                    self.suspects += [job for jobs in self.flying.values() for job in jobs] + self.next
                    self.flying.clear()
                    self.next.clear()
        return self.tally

    def _wanted(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The jobs that the store has no outcome for."""
        while chunk := list(itertools.islice(jobs, CHUNK)):
            known = self.store.known([entry for entry, _ in chunk])
            for entry, case in chunk:
                if entry.key in known:
                    self._pass_over()
                else:
                    yield entry, case
            self.report(self.tally)

    def _start(self, crew: Crew, job: Job) -> None:
        claim = self.store.claim(job[0].key)
        if claim == "mine":
            self.next.append(job)
            if len(self.next) >= self.pace.scenarios(crew.call_s):
                self._send(crew)
        elif claim == "others":
            self.others.append(job)
            if len(self.others) > CHUNK:
                self._forget_done()
        else:
            self._pass_over()

    def _send(self, crew: Crew) -> None:
        """What has been collected, as one call."""
        if self.next:
            self._make_room(crew, crew.window)
            self._submit(crew, self.next)
            self.next = []

    def _submit(self, crew: Crew, jobs: list[Job]) -> None:
        tasks = [task_of(case, self.memory_only) for _, case in jobs]
        self.flying[crew.executor.submit(each, evaluate, tasks)] = jobs

    def _finish(self, crew: Crew) -> None:
        self._send(crew)
        self._make_room(crew, 1)

    def _make_room(self, crew: Crew, window: int) -> None:
        """Write what is finished, until less than `window` calls are in flight."""
        while len(self.flying) >= window:
            done, _ = wait(self.flying, timeout=BEAT_S, return_when=FIRST_COMPLETED)
            broken: BrokenExecutor | None = None
            finished: list[tuple[Job, Outcome]] = []
            for future in done:
                jobs = self.flying[future]
                try:
                    outcomes = future.result()
                except BrokenExecutor as error:
                    broken = error
                    continue
                except (Exception, CancelledError) as error:  # of the executor; `evaluate` keeps a scenario's own
                    if len(jobs) > 1:  # one of them is to blame; alone, it will be known
                        del self.flying[future]
                        for job in jobs:
                            self._submit(crew, [job])
                        continue
                    outcomes = [lost(f"{type(error).__name__}: {error}")]
                finished += zip(self.flying.pop(future), outcomes, strict=True)
            self._write(finished)
            if broken:
                raise broken

    def _write(self, finished: list[tuple[Job, Outcome]]) -> None:
        if finished:
            self.store.write((entry, outcome) for (entry, _), outcome in finished)
            self.beaten = time.monotonic()
        elif time.monotonic() - self.beaten > BEAT_S:
            self.store.beat()
            self.beaten = time.monotonic()
        for _, outcome in finished:
            self.pace.saw(outcome)
            self.tally.passed += 1
            self.tally.computed += 1
            self.tally.refused += outcome["status"] == "refused"
            self.tally.failed += outcome["status"] == "failed"
        self.report(self.tally)

    def _try_suspects(self, crew: Crew) -> None:
        """One at a time, so that whichever kills its worker is known for it."""
        while self.suspects:
            job = self.suspects.pop()
            try:
                self._submit(crew, [job])
                self._make_room(crew, 1)
            except BrokenExecutor:
                self.flying.clear()
                self.suspects = [other for other in self.suspects if other is not job]
                self._write([(job, lost("the worker process died, twice"))])
                raise

    def _pass_over(self) -> None:
        self.tally.passed += 1
        self.tally.reused += 1

    def _forget_done(self) -> None:
        known = self.store.known([entry for entry, _ in self.others])
        left = [job for job in self.others if job[0].key not in known]
        for _ in range(len(self.others) - len(left)):
            self._pass_over()
        self.others = left
        self.report(self.tally)

    def _wait_for_others(self, crew: Crew) -> None:
        """Until what other processes had claimed is done, by them, or here if they are gone."""
        while self.others:
            self.store.release_dead()
            waiting, self.others = self.others, []
            for job in waiting:
                self._start(crew, job)
            self._finish(crew)
            if self.others:
                time.sleep(POLL_S)


class Pace:
    """How long a scenario takes, by those seen last."""

    def __init__(self) -> None:
        self.wall_s: float | None = None

    def saw(self, outcome: Outcome) -> None:
        if outcome["wall_s"] is not None:
            self.wall_s = outcome["wall_s"] if self.wall_s is None else 0.9 * self.wall_s + 0.1 * outcome["wall_s"]

    def scenarios(self, seconds: float) -> int:
        """How many come to so many seconds: at least one, and one as long as nothing is known."""
        return 1 if self.wall_s is None else max(1, min(MOST_AT_ONCE, int(seconds / max(self.wall_s, 1e-6))))


def lost(error: str) -> Outcome:
    """The outcome of a scenario whose computation never came back."""
    return dict.fromkeys(COLUMNS) | {"status": "failed", "error": error, "wall_s": None}
