"""Sweeps that are killed, shared, split and joined come to the same table as one that is left alone."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import zsim
from zsim.errors import InputError
from zsim.sweep.evaluate import COLUMNS
from zsim.sweep.executors import Crew, local
from zsim.sweep.export import export
from zsim.sweep.grid import from_options
from zsim.sweep.runner import run, sweep_id
from zsim.sweep.store import Store

VARY = ["zero.stage=1,2,3", "micro_batch=1,2,3", "seq_len=128,256,1000000", "zero.zero_hpz_partition_size=1,3"]
CASES = 3 * 3 * 3 * 2


class Inline(Executor):
    """Computes in the caller, at once."""

    def submit(self, function, /, *arguments, **named):  # type: ignore[no-untyped-def]
        future: Future = Future()
        future.set_result(function(*arguments, **named))
        return future


@contextmanager
def inline() -> Iterator[Crew]:
    yield Crew(Inline(), 1)


Table = list[tuple[object, ...]]


def table(store: Path, sweep: bytes) -> Table:
    with Store(store, sweep) as opened:
        return list(opened.rows(("position", "inputs", *COLUMNS)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table]:
    from .conftest import SCENARIO

    folder = tmp_path_factory.mktemp("expected")
    scenario = folder / "small.yaml"
    scenario.write_text(SCENARIO)
    sweep = from_options([scenario], VARY)
    with Store(folder / "all.db", sweep_id(sweep)) as store:
        tally = run(sweep, store, inline)
        assert (tally.computed, tally.reused) == (CASES, 0)
    found = table(folder / "all.db", sweep_id(sweep))
    assert len(found) == CASES
    return scenario, found


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Python finds a copy of zsim that nobody edits while processes come and go.

    The code that computes a scenario is part of its key: after a change to it, they begin anew, and rightly so.
    """
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(zsim.__file__).parent, folder / "zsim", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def whole_table(store: Path) -> Table:
    """Of a store that knows one sweep."""
    with Store(store) as opened:
        ((sweep, _),) = opened.sweeps()
    return table(store, sweep)


def command(scenario: Path, store: Path, *more: str) -> list[str]:
    vary = [text for axis in VARY for text in ("--vary", axis)]
    return [sys.executable, "-m", "zsim", "sweep", str(scenario), *vary, "--store", str(store), "--workers", "1", *more]


def rows(store: Path) -> int:
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
            return db.execute("SELECT count(*) FROM scenarios").fetchone()[0]
    except sqlite3.OperationalError:  # not there yet
        return 0


def wait_for_rows(store: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    while rows(store) < number:
        assert process.poll() is None or rows(store) >= number
        time.sleep(0.01)


def test_the_table_has_all_kinds_of_outcome(expected: tuple[Path, Table]) -> None:
    """Else equal tables would say little."""
    statuses = {(row[2], row[4], row[5]) for row in expected[1]}
    assert statuses == {("ok", 1, "clock"), ("ok", 0, "memory"), ("refused", None, None)}


def test_again_computes_nothing(expected: tuple[Path, Table]) -> None:
    scenario, found = expected
    sweep = from_options([scenario], VARY)
    with Store(scenario.parent / "all.db", sweep_id(sweep)) as store:
        tally = run(sweep, store, inline)
    assert (tally.computed, tally.reused) == (0, CASES)
    assert table(scenario.parent / "all.db", sweep_id(sweep)) == found


def test_a_changed_scenario_or_machine_is_computed_anew(scenario: Path, tmp_path: Path) -> None:
    topology = tmp_path / "machine.yaml"
    text = Path(scenario.read_text().split("cluster: ")[1].splitlines()[0]).read_text()
    topology.write_text(text)
    store_path = tmp_path / "s.db"

    def computed(overrides: list[str]) -> int:
        sweep = from_options([scenario], ["micro_batch=1,2"], [f"cluster={topology}", *overrides])
        with Store(store_path, sweep_id(sweep)) as store:
            return run(sweep, store, inline).computed

    assert computed([]) == 2
    assert computed([]) == 0
    assert computed(["seq_len=64"]) == 2
    topology.write_text(text + "\n# the same machine, but who knows\n")
    assert computed([]) == 2
    profile = tmp_path / "profile.yaml"
    device = yaml.safe_load(text)["gpu"]
    for gap in (1e-6, 2e-6):
        profile.write_text(f"device: {device}\nvalues: {{launch_gap: {gap}}}\n")
        assert computed([f"profile={profile}"]) == 2
        assert computed([f"profile={profile}"]) == 0


def test_killed_at_random_and_resumed(expected: tuple[Path, Table], elsewhere: Path, tmp_path: Path) -> None:
    scenario, found = expected
    store = tmp_path / "killed.db"
    for stop in sorted(random.sample(range(1, CASES - 5), 3)):
        process = subprocess.Popen(command(scenario, store), cwd=elsewhere, stdout=subprocess.DEVNULL)
        wait_for_rows(store, stop, process)
        time.sleep(random.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = rows(store)
        assert done >= stop
    before = dict(_finished(store))
    subprocess.run(command(scenario, store), cwd=elsewhere, check=True, stdout=subprocess.DEVNULL)
    assert whole_table(store) == found
    after = dict(_finished(store))
    assert {key: after[key] for key in before} == before  # nothing was computed twice


def _finished(store: Path) -> list[tuple[bytes, float]]:
    with sqlite3.connect(store) as db:
        return db.execute("SELECT key, finished_at FROM scenarios WHERE status != 'failed'").fetchall()


def test_two_processes_on_one_store(expected: tuple[Path, Table], elsewhere: Path, tmp_path: Path) -> None:
    scenario, found = expected
    store = tmp_path / "shared.db"
    both = [
        subprocess.Popen(
            command(scenario, store, "--json"), cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    import json

    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    tallies = [json.loads(out) for out, _ in outputs]
    assert sum(tally["computed"] for tally in tallies) == CASES  # each scenario once, by one of them
    assert [tally["table"]["rows"] for tally in tallies] == [CASES, CASES]
    assert whole_table(store) == found


def test_claims_of_a_dead_process_are_void(scenario: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    code = f"""
import os
from pathlib import Path
from zsim.sweep.store import Store
print(Store(Path({str(path)!r})).claim(b"k"), flush=True)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "mine"
    with Store(path) as store:
        assert store.claim(b"k") == "others"
        store.release_dead()
        assert store.claim(b"k") == "mine"
        other = Store(path)
        other.release_dead()
        assert other.claim(b"k") == "others"  # this process lives
        other.close()


def test_shards_merge_to_the_same_table(expected: tuple[Path, Table], tmp_path: Path) -> None:
    scenario, found = expected
    sweep = from_options([scenario], VARY)
    parts = []
    for shard in (1, 2, 3):
        parts.append(tmp_path / f"{shard}.db")
        with Store(parts[-1], sweep_id(sweep)) as store:
            run(sweep, store, inline, shard=(shard, 3))
    with Store(tmp_path / "all.db", sweep_id(sweep)) as merged:
        assert sum(merged.merge(part) for part in parts) == CASES
        assert merged.merge(parts[0]) == 0
        assert list(merged.rows(("position", "inputs", *COLUMNS))) == found


def test_a_worker_that_dies_costs_one_scenario(scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, whatever has micro_batch 3."""
    from zsim.sweep import runner

    monkeypatch.setattr(runner, "evaluate", _deadly)
    sweep = from_options([scenario], ["micro_batch=1..5"])
    with Store(tmp_path / "s.db", sweep_id(sweep)) as store:
        tally = run(sweep, store, lambda: local(1))
        assert tally.failed == 1
        assert [(row[0], row[1]) for row in store.rows(("status", "error"))].count(("ok", None)) == 4
        assert [error for _, error, _ in store.errors()] == ["the worker process died, twice"]


def _deadly(task):  # type: ignore[no-untyped-def]
    from zsim.sweep.evaluate import evaluate

    if task.data["micro_batch"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(task)


class Poisoned(Executor):
    """Loses every call that holds a scenario with micro_batch 3, as Dask does after three dead workers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def submit(self, function, /, question, tasks):  # type: ignore[no-untyped-def,override]
        self.sizes.append(len(tasks))
        future: Future = Future()
        if any(task.data["micro_batch"] == 3 for task in tasks):
            future.set_exception(RuntimeError("gone"))
        else:
            future.set_result(function(question, tasks))
        return future


def test_of_many_in_one_call_only_the_deadly_one_is_lost(scenario: Path, tmp_path: Path) -> None:
    executor = Poisoned()

    @contextmanager
    def hire() -> Iterator[Crew]:
        yield Crew(executor, 1, 60.0)

    sweep = from_options([scenario], ["micro_batch=1..5", "seq_len=128,256"])
    with Store(tmp_path / "s.db", sweep_id(sweep)) as store:
        tally = run(sweep, store, hire)
        assert (tally.computed, tally.failed) == (10, 2)
        assert [error for _, error, _ in store.errors()] == ["RuntimeError: gone"]
        failed = [inputs for inputs, status in store.rows(("inputs", "status")) if status == "failed"]
    assert len(failed) == 2
    assert all('"micro_batch":3' in inputs for inputs in failed)
    assert max(executor.sizes) > 2


def test_export(expected: tuple[Path, Table], tmp_path: Path) -> None:
    import pandas as pd

    scenario, found = expected
    with Store(scenario.parent / "all.db", sweep_id(from_options([scenario], VARY))) as store:
        assert export(store, tmp_path / "t.csv") == CASES
        frame = pd.read_csv(tmp_path / "t.csv")
        if pytest.importorskip("pyarrow"):
            assert export(store, tmp_path / "t.parquet") == CASES
            assert pd.read_parquet(tmp_path / "t.parquet")["step_s"].equals(frame["step_s"])
        with pytest.raises(InputError, match=r"\.csv or \.parquet"):
            export(store, tmp_path / "t.xls")
    assert list(frame["step_s"].dropna()) == [row[9] for row in found if row[9] is not None]
    assert set(frame["zero.stage"]) == {1, 2, 3}


@pytest.mark.parametrize("target", ["t.xls", "nowhere/t.csv"])
def test_a_wrong_target_is_said_before_anything_is_computed(target: str, scenario: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    done = subprocess.run(command(scenario, store, "--out", str(tmp_path / target)), capture_output=True, text=True)
    assert done.returncode == 2
    assert not store.exists()


def test_a_store_is_not_merged_into_itself(scenario: Path, tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    words = [sys.executable, "-m", "zsim", "merge", "s.db", "--into", "./s.db"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "s.db: is the store that gets all rows" in done.stderr


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_text("something else entirely, and long enough to be read as a header " * 20)
    with pytest.raises(InputError, match="no store"):
        Store(path)
