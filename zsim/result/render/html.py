"""report.html: one file that opens offline, with its charting library (plotly.js, MIT) inside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.engine.timeline import OpRecord
from zsim.program.ops import COMPUTE, HOST, LANES
from zsim.result.breakdown import cause, waiting_segments
from zsim.result.compare import titles
from zsim.result.critical_path import RankView
from zsim.result.curve import Point, Watched, points
from zsim.result.holders import holders
from zsim.result.memory import served
from zsim.result.render import terminal
from zsim.result.render.drawing import drawing
from zsim.result.render.style import CATEGORY_COLORS, CATEGORY_LABELS, CAUSE_COLORS, PHASE_COLORS, cause_label
from zsim.result.spec import Result
from zsim.result.tables import kind, link_rows, moved_bytes

if TYPE_CHECKING:
    from zsim.result.compare import Impossible
    from zsim.result.sensitivity import Change

GIB = 2**30
MOST_POINTS, MOST_BARS = 3000, 8000  # what a browser draws without lagging
WAITS = "compute waits for"
ASSETS = files("zsim.result.render") / "assets"


def write(
    result: Result,
    path: Path,
    others: Sequence[Result] = (),
    changes: Sequence[Change] = (),
    impossible: Sequence[Impossible] = (),
) -> None:
    """Writes the report of `result`; `others` are compared with it, `changes` shown as what would help, and what is
    `impossible` named."""
    path.write_text(document(result, others, changes, impossible), encoding="utf-8")


def document(
    result: Result,
    others: Sequence[Result] = (),
    changes: Sequence[Change] = (),
    impossible: Sequence[Impossible] = (),
) -> str:
    """The HTML text."""
    data = _data(result, others, changes) | {"impossible": [f"{each.name}: {each.why}" for each in impossible]}
    return page("report", result.name, "memory", data)


def page(kind: str, title: str, charts: str, data: object) -> str:
    """The page whose sections are `kind`.html, with its script, the charting library and `data` inside.

    `charts`: the id of the first section that draws one, to which a keyboard can skip.
    """
    parts = {
        "title": escape(title),
        "charts": charts,
        "body": _asset(f"{kind}.html"),
        "css": _asset("report.css"),
        "common": _asset("common.js"),
        "js": _asset(f"{kind}.js"),
        "plotly": _asset("plotly-basic-4.1.1.min.js"),
        # "</script>" inside a string would end the element.
        "data": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _data(result: Result, others: Sequence[Result], changes: Sequence[Change]) -> dict[str, Any]:
    rank = result.timeline.rank_classes[0][0]
    view = RankView(result.program, result.timeline, rank)
    fullest = RankView(result.program, result.timeline, result.gpu.peak_rank)
    links = link_rows(result)
    return {
        "name": result.name,
        "verdict": terminal.verdict(result),
        "state": terminal.state(result),
        "headline": terminal.headline(result.headline),
        "strain": " ".join((*terminal.strain(result), *terminal.beside(result))),
        "accuracy": list(terminal.accuracy(result)),
        "result": result.to_dict(),
        "labels": CATEGORY_LABELS,
        "colors": CATEGORY_COLORS,
        "phases": PHASE_COLORS,
        "causes": CAUSE_COLORS,
        "memory": _memory(result, fullest),
        "lanes": _lanes(view),
        "topology": drawing(result.setup.cluster, links),
        "links": links,
        "ops": _ops(view),
        "holders": [asdict(holder) for holder in holders(result)],
        "changes": [asdict(change) for change in changes],
        "compare": _side_by_side([result, *others]) if others else [],
    }


def _side_by_side(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [{"name": name, "result": each.to_dict()} for name, each in zip(titles(results), results, strict=True)]


def _memory(result: Result, view: RankView) -> dict[str, Any]:
    """Bytes by category over the steady step, in GiB, and the kernel that runs."""
    curve = list(_thinned(list(points(view, CATEGORY_COLORS, served(result, Watched)))))
    texts = Texts()
    columns = {name: [point.held[name] for point in curve] for name in CATEGORY_COLORS}
    columns["framework"] = [result.gpu.framework_bytes] * len(curve)
    return {
        "t": [round(point.time_s, 7) for point in curve],
        "categories": {name: [round(n / GIB, 4) for n in column] for name, column in columns.items() if any(column)},
        "total": [round(sum(row) / GIB, 4) for row in zip(*columns.values(), strict=True)],
        "at": [texts.index(_title(point.kernel)) for point in curve],
        "texts": list(texts.known),
    }


def _thinned(curve: list[Point]) -> Iterator[Point]:
    """At most `MOST_POINTS`: of each run of neighbours the fullest, so that no peak is lost."""
    length = -(-len(curve) // MOST_POINTS)
    for at in range(0, len(curve), length or 1):
        yield max(curve[at : at + length], key=lambda point: sum(point.held.values()))


def _title(kernel: OpRecord | None) -> str:
    if kernel is None:
        return "between steps"
    op = kernel.op
    return f"{op.phase}, {op.module + ': ' if op.module else ''}{op.label}"


class Texts:
    """Strings that repeat, written once."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


def _lanes(view: RankView) -> dict[str, Any]:
    """Bars of the lanes chart: row, start, length, colour, what (a text), and what it waited for (a text).

    Seconds from the start of the step. Kernels of one layer become one bar where there are more than a browser likes.
    """
    names = [lane for lane in LANES if view.on(lane)]
    rows = [HOST, COMPUTE, WAITS, *(name for name in names if name != COMPUTE)]
    origin, texts, colors = view.steady.start_s, Texts(), Texts()
    bars: list[tuple[int, float, float, int, int, int]] = []

    def bar(row: str, start: float, end: float, color: str, what: str, why: str = "") -> None:
        place = rows.index(row), round(start - origin, 8), round(end - start, 8)
        bars.append((*place, colors.index(color), texts.index(what), texts.index(why)))

    crowded = sum(len(view.on(lane)) for lane in names) > MOST_BARS
    for lane in names:
        for group in _layers(view.on(lane)) if crowded else ([record] for record in view.on(lane)):
            bar(
                lane,
                group[0].start_s,
                group[-1].end_s,
                group[0].op.phase,
                _what(group),
                _blocker(view, group[0].blocker),
            )
    for segment in waiting_segments(view):
        group_name, name = cause(segment)
        color = group_name if group_name in CAUSE_COLORS else "other"
        bar(WAITS, segment.start_s, segment.end_s, color, f"waits for {cause_label(name)}")
    for wait in view.host_waits():
        bar(HOST, wait.start_s, wait.end_s, "host", f"blocked until {wait.record.op.label} is done")
    return {"names": rows, "items": bars, "texts": list(texts.known), "colors": list(colors.known)}


def _layers(records: Sequence[OpRecord]) -> Iterator[list[OpRecord]]:
    """Neighbours of the same layer and phase."""
    for _, group in groupby(records, key=lambda r: (r.op.layer, r.op.phase, r.step, kind(r))):
        yield list(group)


def _what(group: Sequence[OpRecord]) -> str:
    op = group[0].op
    if len(group) > 1:
        return f"{len(group)} ops of layer {op.layer}<br>{op.phase}, {kind(group[0])}"
    moved = moved_bytes(group[0])
    size = f", {moved / 1e6:.2f} MB" if moved else ""
    return f"{op.label}" + (f" of {op.module}" if op.module else "") + f"<br>{op.phase}, {kind(group[0])}{size}"


def _blocker(view: RankView, blocker: int | str) -> str:
    if blocker == "host":
        return "the host had issued it"
    if blocker == "lane":
        return "the op before it was done"
    record = view.by_op.get((view.steady.step, blocker)) if isinstance(blocker, int) else None
    return f"{record.op.label} was done" if record else "an op of the step before was done"


def _ops(view: RankView) -> list[dict[str, Any]]:
    """The ops of the steady step, those of equal blocks summed up, the longest first."""
    sums: dict[tuple[str, ...], dict[str, float]] = {}
    for record in view.records:
        if record.step != view.steady.step:
            continue
        op = record.op
        key = re.sub(r"\b\d+\b", "*", op.module), op.label, op.phase, op.lane, kind(record)
        total = sums.setdefault(key, {"count": 0, "seconds": 0.0, "flops": 0.0, "bytes": 0.0})
        total["count"] += 1
        total["seconds"] += record.end_s - record.start_s
        total["flops"] += sum(kernel.flops for kernel in getattr(op.work, "kernels", ()))
        total["bytes"] += moved_bytes(record)
    names = ("module", "label", "phase", "lane", "kind")
    rows = [dict(zip(names, key, strict=True)) | total for key, total in sums.items()]
    return sorted(rows, key=lambda row: -float(row["seconds"]))
