"""Who computes: local processes, or a Dask cluster. Both behind the interface of `concurrent.futures`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

from zsim.errors import InputError

DASK_CALL_S = 0.25  # its scheduler takes some 5 ms for a call, in the process that writes the store
COLLECT_AFTER = 1_000_000  # objects made and not released


@dataclass(frozen=True, slots=True)
class Crew:
    """An executor, and how much it should have at once, so that no worker waits for the next.

    `window`: calls in flight. `call_s`: seconds of work that go into one call, where a call by itself costs
    milliseconds; 0: a scenario each.
    """

    executor: Executor
    window: int
    call_s: float = 0.0


@contextmanager
def local(workers: int | None = None) -> Iterator[Crew]:
    """Processes on this machine, one per core unless told otherwise."""
    count = workers or usable_cores()
    # Not forked: a fork would share the store's connection and whatever threads draw the progress bar.
    with _processes(count, "spawn") as executor:
        yield Crew(executor, 2 * count + 1)


@contextmanager
def forked(workers: int) -> Iterator[Crew]:
    """As `local`, but with all that is imported here, for callers without open files or threads. Only Linux can."""
    if sys.platform == "linux":
        _prepare()
    with _processes(workers, "fork" if sys.platform == "linux" else "spawn") as executor:
        with uninterrupted():
            executor.submit(int).result()  # forks now, before the caller starts a thread
        yield Crew(executor, 2 * workers + 1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end, where there is but one thread.

    What Python runs around a fork would print its exception and go on.
    """
    masks = sys.platform != "win32"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if masks else []
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _processes(count: int, method: str) -> Iterator[ProcessPoolExecutor]:
    executor = ProcessPoolExecutor(count, multiprocessing.get_context(method), initializer=_warm_up)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def dask(address: str, workers: int | None = None) -> Iterator[Crew]:
    """A Dask cluster: "local" starts one here, anything else is the address of a scheduler, as tcp://host:8786.

    Raises InputError where Dask is not installed or nobody answers.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise InputError("needs Dask", field="--dask", accepted="pip install 'zsim[cluster]'") from None
    if address == "local":
        count = workers or usable_cores()
        cluster = LocalCluster(n_workers=count, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)
        with cluster, Client(cluster) as client:
            yield _crew_of(client)
        return
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler at {address}: {error}", field="--dask") from None
    with client:
        yield _crew_of(client)


def _crew_of(client: object) -> Crew:
    # Workers that join later get it too.
    client.register_plugin(_preparation(), name="zsim")  # type: ignore[attr-defined]
    cores = sum(client.ncores().values())  # type: ignore[attr-defined]
    return Crew(client.get_executor(pure=False), 3 * max(cores, 1), DASK_CALL_S)  # type: ignore[attr-defined]


def _preparation() -> object:
    """Readies a Dask worker, and stops its statistical profiler for as long as it lives.

    The profiler holds the frames it samples, and their local variables with them, so that a tensor of
    `zsim.model.tape` may outlive its last use. `zsim.model.undisturbed` then runs the model again: right, but slow.
    """
    from distributed import WorkerPlugin

    class Preparation(WorkerPlugin):
        def setup(self, worker: Any) -> None:
            _prepare()
            for name in ("profile", "profile-cycle"):  # distributed/worker.py, Worker.__init__
                callback = worker.periodic_callbacks.pop(name, None)
                if callback is not None:
                    callback.stop()

    return Preparation()


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _warm_up() -> None:
    """Import what a scenario needs before the first one is timed, and do not outlive who asks for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    _prepare()


def _prepare() -> None:
    import_module("zsim.api")
    # A scenario makes some 1e5 objects that live as long as it does; searching them for garbage costs a fifth of it.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def _die_with(sentinel: int) -> None:
    """A worker waiting for its next task never notices that its parent was killed: it holds both ends of the pipe."""
    wait([sentinel])
    os._exit(1)
