"""Memory over the steady step, drawn against the kernels it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zsim.engine.timeline import TEMPORARY, OpRecord
from zsim.program.ops import COMPUTE
from zsim.result.critical_path import RankView


@dataclass(frozen=True, slots=True)
class Point:
    """From `time_s` after the start of the step on, `held` bytes by category; `kernel` is what then runs."""

    time_s: float
    held: dict[str, int]
    kernel: OpRecord | None


def points(view: RankView, categories: Iterable[str]) -> Iterator[Point]:
    """What one GPU holds, in the order in which the host allocates, placed at the kernels issued with it.

    The host runs ahead of the device, so on its own clock the peak inside a kernel would have no width. A kernel's
    temporaries last as long as it runs; a tensor appears with the next kernel of the default stream.
    """
    span = view.steady
    kernels = [record for record in view.lanes.get(COMPUTE, ()) if record.step == span.step]
    ids = [record.op.id for record in kernels]
    held = dict.fromkeys(categories, 0)
    begun = False
    for event in view.ledgers["gpu"]:
        if event.step == span.step and not begun:
            begun = True
            yield Point(0.0, dict(held), None)
        held[event.category] += event.nbytes
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
