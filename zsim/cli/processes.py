"""The same function over many items, on all cores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zsim.cli.progress import track

T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Sequence[T], what: str) -> list[R]:
    """`function` of every item, in order, with a progress bar on standard error where that is a terminal.

    The items go by index to forked processes, which have them already: a Result with all its records would take
    longer to send than to use. Only Linux forks safely; elsewhere, as on a single core, the items take turns here.
    """
    from zsim.sweep.executors import uninterrupted, usable_cores

    workers = min(usable_cores(), len(items))
    if workers < 2 or sys.platform != "linux":
        return list(track(map(function, items), what, len(items)))

    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # What is not written yet would be written by every process.
    sys.stdout.flush()
    sys.stderr.flush()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(function, items)) as pool:
        with uninterrupted():
            results = pool.map(_call, range(len(items)))  # forks here, before the progress bar starts a thread
        return list(track(results, what, len(items)))


_work: tuple[Callable[[Any], Any], Sequence[Any]]  # of a forked process


def _begin(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    import signal

    global _work
    _work = function, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says that it was interrupted


def _call(index: int) -> Any:
    function, items = _work
    return function(items[index])
