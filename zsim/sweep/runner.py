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

from zsim.sweep.evaluate import COLUMNS, Outcome, Task, evaluate
from zsim.sweep.executors import Crew
from zsim.sweep.grid import Case, Sweep
from zsim.sweep.identity import Identity, engine_digest
from zsim.sweep.store import Entry, Store

CHUNK = 256  # cases looked up in the store at once
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
        self.flying: dict[Future[Outcome], Job] = {}
        self.others: list[Job] = []  # claimed by another process
        self.suspects: list[Job] = []  # in flight when the executor broke
        self.beaten = time.monotonic()

    def go(self, jobs: Iterator[Job]) -> Tally:
        wanted = self._wanted(jobs)
        job = next(wanted, None)
        if job is None:
            return self.tally
        while job is not None or self.suspects:  # until an executor has lived through
            with self.hire() as crew:
                try:
                    self._try_suspects(crew)
                    while job is not None:
                        self._make_room(crew.window)
                        self._start(crew, job)
                        job = next(wanted, None)
                    self._make_room(1)
                    self._wait_for_others(crew)
                except BrokenExecutor:
                    self.suspects += self.flying.values()
                    self.flying.clear()
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
            self._submit(crew, job)
        elif claim == "others":
            self.others.append(job)
            if len(self.others) > CHUNK:
                self._forget_done()
        else:
            self._pass_over()

    def _submit(self, crew: Crew, job: Job) -> None:
        try:
            self.flying[crew.executor.submit(evaluate, task_of(job[1], self.memory_only))] = job
        except BrokenExecutor:
            self.suspects.append(job)
            raise

    def _make_room(self, window: int) -> None:
        """Write what is finished, until less than `window` scenarios are in flight."""
        while len(self.flying) >= window:
            done, _ = wait(self.flying, timeout=BEAT_S, return_when=FIRST_COMPLETED)
            broken: BrokenExecutor | None = None
            finished = []
            for future in done:
                try:
                    outcome = future.result()
                except BrokenExecutor as error:
                    broken = error
                    continue
                except (Exception, CancelledError) as error:  # of the executor; `evaluate` keeps a scenario's own
                    outcome = lost(f"{type(error).__name__}: {error}")
                finished.append((self.flying.pop(future), outcome))
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
                self._submit(crew, job)
                self._make_room(1)
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
                self._make_room(crew.window)
                self._start(crew, job)
            self._make_room(1)
            if self.others:
                time.sleep(POLL_S)


def lost(error: str) -> Outcome:
    """The outcome of a scenario whose computation never came back."""
    return dict.fromkeys(COLUMNS) | {"status": "failed", "error": error, "wall_s": None}
