"""A sweep as one HTML file: scaling, a heat map, values side by side, speed against memory, and the table of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path
from typing import Any

from zsim.result.render.html import page
from zsim.result.render.style import CAUSE_COLORS, PHASE_COLORS

MOST_ROWS = 5000  # what a browser sorts without lagging, and well under 5 MB
_OUTCOME = (
    "status", "error", "fits", "gpus", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "compute_s",
    "exposed_comm_s", "host_s", "idle_s", "bottleneck", "peak_allocated_bytes", "needed_bytes", "headroom_bytes",
)  # fmt: skip


def write(rows: Iterable[Mapping[str, Any]], fields: Sequence[str], title: str, path: Path) -> None:
    """Writes the page. `rows`: inputs under their dotted names and the outcome's columns; `fields`: what was varied.

    Of more than `MOST_ROWS` scenarios the fastest are in it, those that fit first; no more are ever held.
    """
    count: Counter[str] = Counter()

    def counted() -> Iterator[Mapping[str, Any]]:
        for row in rows:
            count[_kind(row)] += 1
            yield row

    left = counted()
    shown = list(islice(left, MOST_ROWS))
    if (another := next(left, None)) is not None:
        shown = nsmallest(MOST_ROWS, chain(shown, [another], left), key=_order)
    data = {
        "name": title,
        "fields": list(fields),
        "total": count.total(),
        "count": dict(count.most_common()),
        "rows": [_row(row, fields) for row in shown],
        "phases": PHASE_COLORS,
        "causes": CAUSE_COLORS,
    }
    path.write_text(page("sweep", title, "scaling", data), encoding="utf-8")


def _row(row: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    outcome = {name: row.get(name) for name in _OUTCOME}
    return outcome | {"inputs": {field: row.get(field) for field in fields}}


def _kind(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return {None: "undecided", True: "fit", False: "do not fit"}[None if row["fits"] is None else bool(row["fits"])]


def _order(row: Mapping[str, Any]) -> tuple[bool, float]:
    return not row["fits"], -(row["tokens_per_s"] or 0.0)
