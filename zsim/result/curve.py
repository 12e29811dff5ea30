"""Memory over the steady step, drawn against the kernels it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zsim.engine.allocator import CachingAllocator, replay
from zsim.engine.timeline import TEMPORARY, MemoryEvent, OpRecord
from zsim.program.ops import COMPUTE, DELAYED_FREES
from zsim.result.critical_path import RankView
from zsim.result.memory import events_until


@dataclass(frozen=True, slots=True)
class Point:
    """From `time_s` after the start of the step on, `held` bytes by category; `kernel` is what then runs."""

    time_s: float
    held: dict[str, int]
    kernel: OpRecord | None


def points(view: RankView, categories: Iterable[str], allocator: Watched) -> Iterator[Point]:
    """What one GPU holds, in the order in which the host allocates, placed at the kernels issued with it.

    The host runs ahead of the device, so on its own clock the peak inside a kernel would have no width. A kernel's
    temporaries last as long as it runs; a tensor appears with the next kernel of the default stream. `allocator`, a
    fresh one, waits for the streams that still read what has been freed before it would exceed its limit.
    """
    span = view.steady
    kernels = [record for record in view.lanes.get(COMPUTE, ()) if record.step == span.step]
    ids = [record.op.id for record in kernels]
    held = dict.fromkeys(categories, 0)
    begun = False
    replay(events_until(view, "gpu", span.step), allocator)
    delayed = Delayed(allocator.waits)
    for event in view.ledgers["gpu"]:
        if event.step == span.step and not begun:
            begun = True
            yield Point(0.0, dict(held), None)
        if event.category == DELAYED_FREES:
            delayed.change(event)
        else:
            held[event.category] += event.nbytes
        if id(event) in delayed.waits:
            delayed.all_over()
        held[DELAYED_FREES] = delayed.nbytes
        if event.step != span.step:
            continue
        behind = bisect_right(ids, -1 if event.op is None else event.op)
        own = kernels[behind - 1] if event.key == TEMPORARY and behind and ids[behind - 1] == event.op else None
        if own is not None:
            time_s, kernel = (own.start_s if event.nbytes > 0 else own.end_s), own
        elif behind < len(kernels):
            time_s, kernel = kernels[behind].start_s, kernels[behind]
        else:
            time_s, kernel = span.end_s, None
        yield Point(min(max(time_s, span.start_s), span.end_s) - span.start_s, dict(held), kernel)


@dataclass
class Delayed:
    """Bytes that are freed while another stream reads them; `waits` are the events at which the allocator waits."""

    waits: set[int]
    nbytes: int = 0
    _pending: Counter[str] = field(default_factory=Counter)
    _over: Counter[str] = field(default_factory=Counter)  # waited for, so that the stream's own end changes nothing

    def change(self, event: MemoryEvent) -> None:
        if event.nbytes > 0:
            self._pending[event.key] += event.nbytes
            self.nbytes += event.nbytes
            return
        waited = min(self._over[event.key], -event.nbytes)
        self._over[event.key] -= waited
        self._pending[event.key] += event.nbytes + waited
        self.nbytes += event.nbytes + waited

    def all_over(self) -> None:
        self._over += self._pending
        self._pending.clear()
        self.nbytes = 0


@dataclass
class Watched(CachingAllocator):
    """`waits`: the ids of the events at which it waits for the other streams."""

    waits: set[int] = field(default_factory=set)

    def _release_cached(self) -> None:
        self.waits.add(id(self.event))
        super()._release_cached()
