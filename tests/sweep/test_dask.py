"""A real Dask cluster on this machine, one of whose workers is killed in the middle of a sweep."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.sweep import executors
from zsim.sweep.evaluate import COLUMNS
from zsim.sweep.grid import from_options
from zsim.sweep.runner import Tally, run, sweep_id
from zsim.sweep.store import Store

from .test_runs import inline

pytest.importorskip("distributed")
VARY = ["zero.stage=1,2,3", "micro_batch=1..8"]


def test_a_killed_worker_costs_nothing(scenario: Path, tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    sweep = from_options([scenario], VARY)
    with Store(tmp_path / "expected.db", sweep_id(sweep)) as store:
        run(sweep, store, inline)
        expected = list(store.rows(("position", *COLUMNS)))
    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
        with Client(cluster) as client:
            pids = list(client.run(os.getpid).values())
        killed: list[int] = []

        def kill_one(tally: Tally) -> None:
            if tally.computed >= 4 and not killed:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)

        with Store(tmp_path / "dask.db", sweep_id(sweep)) as store:
            tally = run(sweep, store, lambda: executors.dask(cluster.scheduler_address), report=kill_one)
            found = list(store.rows(("position", *COLUMNS)))
    assert killed
    assert (tally.computed, tally.failed) == (24, 0)
    assert found == expected


def test_nobody_there() -> None:
    with pytest.raises(InputError, match="no Dask scheduler"), executors.dask("nonsense"):
        pass


def test_no_profiler_holds_frames() -> None:
    """Also not on a worker that joins later; a frame held keeps tensors of the symbolic tape alive."""
    from distributed import Client, LocalCluster

    def callbacks(dask_worker: Any) -> set[str]:
        return set(dask_worker.periodic_callbacks)

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,
        executors.dask(cluster.scheduler_address),
        Client(cluster) as client,
    ):
        cluster.scale(2)
        client.wait_for_workers(2)
        found = client.run(callbacks)
    assert len(found) == 2
    assert all("heartbeat" in names and "profile" not in names for names in found.values())
