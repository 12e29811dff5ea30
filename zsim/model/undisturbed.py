"""Runs what counts on Python's reference counts, and sees whether anybody else held what it let go of.

`zsim.model.tape` frees a tensor when the last variable lets go of it. Tools that hold frames keep variables alive
after their function is over: sampling profilers (Dask's among them), debuggers, `sys.setprofile` and `sys.settrace`
functions (before Python 3.13 the interpreter copies every local into `f_locals` for these). A peak of memory counted
while they watch is too high, and nothing would show it. So:

- `Watch` sees a storage that dies outside of the tape's own code (a sampler lets go of a frame), in a run of the
  garbage collector (of a frame in a cycle), not at all (a frame is still held), or a copy of the locals of the
  outermost frame (somebody reads `f_locals` up the stack).
- `undisturbed` repeats a disturbed run: in a thread without trace functions, at the start of its time slice; at last
  in a process of its own, that nothing else runs in.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

REPEATS = 3  # a run takes a few ms, a time slice 5 ms
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from zsim.model.undisturbed import serve; serve()"


class Counts(Protocol):
    """What a tape counts: bytes alive, and whether a storage has died by the hand of code that is not the tape's."""

    live: int
    disturbed: bool


class Outcome(NamedTuple):
    result: Any
    disturbed: bool


class _Canary:
    """Dies when the variable that holds it lets go, unless the frame's locals have been copied."""


class Watch:
    """Around a run of a tape: `disturbed` says whether its counts can be trusted. Tensors must be gone at its end."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._before = 0
        self._canary: weakref.ref[_Canary] | None = None

    def canary(self) -> _Canary:
        """To be held by a local variable of the frame that runs everything, until just before the watch ends."""
        canary = _Canary()
        self._canary = weakref.ref(canary)
        return canary

    def __enter__(self) -> Watch:
        gc.callbacks.append(self._collecting)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._before = self._counts.live
        elif self._counts.live != self._before:
            self._counts.disturbed = True

    @property
    def disturbed(self) -> bool:
        copied = self._canary is not None and self._canary() is not None
        return copied or self._counts.disturbed or self._counts.live != 0


def undisturbed(attempt: Callable[..., Outcome], *arguments: Any) -> Any:
    """The result of `attempt(*arguments)` from a run that nobody disturbed.

    `attempt` is a function of a module and `arguments` can be pickled. Whatever it raises passes through.
    """
    outcome = attempt(*arguments)
    # A trace function sees (and a debugger stops in) this first run; its counts are not used.
    if not outcome.disturbed and sys.gettrace() is None and sys.getprofile() is None:
        return outcome.result
    for _ in range(REPEATS):
        outcome = _in_a_new_thread(attempt, *arguments)
        if not outcome.disturbed:
            return outcome.result
    return _in_a_new_process(attempt, *arguments)


def _in_a_new_thread(attempt: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Not `threading.Thread`, which takes over the trace functions of `threading.settrace`."""
    done = Lock()
    outcomes: list[Outcome] = []

    def run() -> None:
        try:
            time.sleep(0)  # whoever waits for the interpreter gets it now, rather than in our midst
            outcomes.append(attempt(*arguments))
        finally:
            done.release()

    done.acquire()
    start_new_thread(run, ())
    done.acquire()
    return outcomes[0] if outcomes else Outcome(None, True)


def _in_a_new_process(attempt: Callable[..., Outcome], *arguments: Any) -> Any:
    """-I and -S: no hook of the environment or of site-packages starts anything in it."""
    import pickle
    import subprocess

    child = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _CHILD, *(os.path.abspath(path) for path in sys.path)],
        input=pickle.dumps((attempt, arguments)),
        capture_output=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"the model could not be traced apart: {child.stderr.decode(errors='replace')}")
    outcome: Outcome = pickle.loads(child.stdout)
    if outcome.disturbed:
        raise RuntimeError("something holds frames of the model's trace, even in a process of its own")
    return outcome.result


def serve() -> None:
    """What the process of `_in_a_new_process` does."""
    import pickle

    attempt, arguments = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(attempt(*arguments)))
