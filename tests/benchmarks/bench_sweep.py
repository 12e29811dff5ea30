"""Ratios of sweeps: overhead over bare simulations, scaling over processes, Dask over processes, a store of 1e5 rows.

    python tests/benchmarks/bench_sweep.py [overhead] [scaling] [dask] [store] [plan] [million]

Meant for an otherwise idle machine; times are best of `REPEATS`. `million` takes some ten minutes and 1 GB of disk.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

from zsim.sweep import executors
from zsim.sweep.evaluate import COLUMNS, evaluate
from zsim.sweep.executors import Crew
from zsim.sweep.export import export, records
from zsim.sweep.grid import Sweep, from_options
from zsim.sweep.runner import jobs, run, sweep_id, task_of
from zsim.sweep.store import Store

ROOT = Path(__file__).parents[2]
REPEATS = 3
STEP = ROOT / "scenarios" / "qwen32b_8xh100.yaml"
SMALL = """
model: {{params: 3e7}}
cluster: {root}/topologies/hgx_h100_8.yaml
framework: fsdp2
micro_batch: 1
seq_len: 256
"""


class Inline(Executor):
    def submit(self, function, /, *arguments, **named):  # type: ignore[no-untyped-def]
        future: Future = Future()
        future.set_result(function(*arguments, **named))
        return future


@contextmanager
def inline() -> Iterator[Crew]:
    yield Crew(Inline(), 1)


def best(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(REPEATS):
        begun = clock()
        action()
        times.append(clock() - begun)
    return min(times)


def swept(sweep: Sweep, hire: Callable, folder: str) -> float:  # type: ignore[type-arg]
    """Seconds from a warm executor to the last row."""
    with hire() as crew:
        warm = [crew.executor.submit(time.sleep, 0.3) for _ in range(8)]
        [future.result() for future in warm]

        @contextmanager
        def hired() -> Iterator[Crew]:
            yield crew

        with Store(Path(folder) / f"{time.monotonic_ns()}.db", sweep_id(sweep)) as store:
            begun = time.perf_counter()
            run(sweep, store, hired)
            return time.perf_counter() - begun


def overhead(folder: str) -> None:
    """CPU time of a sweep in one process, over that of its simulations alone."""
    import zsim.sweep.probe  # noqa: F401 (not to be timed)
    from zsim.api import simulate

    sizes = range(1000, 1012)
    sweep = from_options([STEP], [f"seq_len={','.join(map(str, sizes))}"])
    bare = best(lambda: [simulate(STEP, [f"seq_len={size}"]) for size in sizes], time.process_time)

    def all_of_it() -> None:
        with Store(Path(folder) / f"{time.monotonic_ns()}.db", sweep_id(sweep)) as store:
            run(sweep, store, inline)

    whole = best(all_of_it, time.process_time)
    print(f"overhead over bare simulate: {whole / bare - 1:+.1%} ({len(sizes) / whole:.1f} scenarios/s of CPU time)")


def scaling(folder: str) -> None:
    sweep = from_options([STEP], ["seq_len=1001..1024"])
    one = min(swept(sweep, lambda: executors.local(1), folder) for _ in range(REPEATS))
    two = min(swept(sweep, lambda: executors.local(2), folder) for _ in range(REPEATS))
    print(f"two processes: {one / two / 2:.2f} of ideal scaling")


def dask(folder: str) -> None:
    small = Path(folder) / "small.yaml"
    small.write_text(SMALL.format(root=ROOT))
    sweep = from_options([small], ["seq_len=1..2000"])
    ratios = []
    for _ in range(REPEATS):  # they take turns, as the machine may be busier now than then
        processes = swept(sweep, lambda: executors.local(2), folder)
        cluster = swept(sweep, lambda: executors.dask("local", 2), folder)
        ratios.append(cluster / processes)
        print(f"  2,000 scenarios on 2 workers: processes {processes:.1f} s, Dask {cluster:.1f} s")
    print(f"Dask over local processes: {statistics.median(ratios) - 1:+.1%}")


def store(folder: str) -> None:
    sweep = from_options([STEP], ["micro_batch=1..100", "seq_len=1..1000"])
    path = Path(folder) / "large.db"
    outcome = evaluate(task_of(next(iter(sweep)), False))
    assert set(outcome) == {*COLUMNS, "wall_s"}
    with Store(path, sweep_id(sweep)) as opened:
        opened.write((entry, outcome) for entry, _ in jobs(sweep))
        begun = time.process_time()
        tally = run(sweep, opened, inline)
        assert tally.reused == 100_000, tally
        print(f"resume scan of 100,000 rows: {time.process_time() - begun:.2f} s of CPU")
        begun = time.process_time()
        export(opened, Path(folder) / "large.csv")
        print(f"export to CSV: {time.process_time() - begun:.2f} s of CPU")
    print(f"resident at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def million(folder: str) -> None:
    """A sweep of 1e6 scenarios whose outcomes cost nothing, to see what grows with their number."""
    from zsim.result.render import sweep_html
    from zsim.sweep import plots, runner

    outcome = evaluate(task_of(next(iter(from_options([STEP], []))), False))
    runner.evaluate = lambda task: outcome
    sweep = from_options([STEP], ["micro_batch=1..1000", "seq_len=1..1000"])
    with Store(Path(folder) / "million.db", sweep_id(sweep)) as opened:
        steps: dict[str, Callable[[], object]] = {
            "run": lambda: run(sweep, opened, inline),
            "resume": lambda: run(sweep, opened, inline),
            "export to CSV": lambda: export(opened, Path(folder) / "million.csv"),
            "page": lambda: sweep_html.write(records(opened), sweep.varied, "1e6", Path(folder) / "million.html"),
            "plot": lambda: plots.draw(opened, sweep.varied, Path(folder) / "million.png"),
        }
        for name, step in steps.items():
            begun = time.process_time()
            step()
            print(
                f"1e6 scenarios, {name}: {time.process_time() - begun:.0f} s of CPU, "
                f"resident at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
            )
        assert opened.count()["rows"] == 1_000_000


def plan(folder: str) -> None:
    import subprocess

    command = [sys.executable, "-m", "zsim", "plan", str(STEP), "--global-batch", "64", "--workers", "2", "--json"]
    begun = time.perf_counter()
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=folder).stdout)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"plan over {answer['candidates']} candidates: {time.perf_counter() - begun:.1f} s, "
        f"{spent.ru_utime + spent.ru_stime:.1f} s of CPU in all processes"
    )


if __name__ == "__main__":
    parts = {part.__name__: part for part in (plan, overhead, scaling, dask, store, million)}
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[1:] or [name for name in parts if name != "million"]:
            parts[name](scratch)
