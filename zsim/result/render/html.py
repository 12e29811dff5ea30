"""report.html: one file that opens offline, with its charting library (plotly.js, MIT) inside."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from zsim.engine.timeline import OpRecord
from zsim.program.ops import COMPUTE, HOST, LANES
from zsim.result.breakdown import cause, waiting_segments
from zsim.result.critical_path import RankView
from zsim.result.curve import points
from zsim.result.render import terminal
from zsim.result.render.drawing import drawing
from zsim.result.render.style import CATEGORY_COLORS, CATEGORY_LABELS, CAUSE_COLORS, PHASE_COLORS, cause_label
from zsim.result.spec import Result
from zsim.result.tables import kind, link_rows, moved_bytes

GIB = 2**30
ASSETS = files("zsim.result.render") / "assets"


def write(result: Result, path: Path, others: Sequence[Result] = ()) -> None:
    """Writes the report of `result`; `others` are compared with it at the top."""
    path.write_text(document(result, others), encoding="utf-8")


def document(result: Result, others: Sequence[Result] = ()) -> str:
    """The HTML text."""
    parts = {
        "title": escape(result.name),
        "css": _asset("report.css"),
        "js": _asset("report.js"),
        "plotly": _asset("plotly-basic-4.1.1.min.js"),
        # "</script>" inside a string would end the element.
        "data": json.dumps(_data(result, others), separators=(",", ":")).replace("</", "<\\/"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _data(result: Result, others: Sequence[Result]) -> dict[str, Any]:
    rank = result.timeline.rank_classes[0][0]
    view = RankView(result.program, result.timeline, rank)
    fullest = RankView(result.program, result.timeline, result.gpu.peak_rank)
    links = link_rows(result)
    return {
        "name": result.name,
        "verdict": terminal.verdict(result),
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
        "compare": [{"name": each.name, "result": each.to_dict()} for each in (result, *others)] if others else [],
    }


def _memory(result: Result, view: RankView) -> dict[str, Any]:
    """Bytes by category over the steady step, in GiB, and the kernel that runs."""
    curve = list(points(view, CATEGORY_COLORS))
    texts: dict[str, int] = {}
    at = [texts.setdefault(_title(point.kernel), len(texts)) for point in curve]
    columns = {name: [point.held[name] for point in curve] for name in CATEGORY_COLORS}
    columns["framework"] = [result.gpu.framework_bytes] * len(curve)
    return {
        "t": [round(point.time_s, 7) for point in curve],
        "categories": {name: [round(n / GIB, 4) for n in column] for name, column in columns.items() if any(column)},
        "total": [round(sum(row) / GIB, 4) for row in zip(*columns.values(), strict=True)],
        "at": at,
        "texts": list(texts),
    }


def _title(kernel: OpRecord | None) -> str:
    if kernel is None:
        return "between steps"
    op = kernel.op
    return f"{op.phase}, {op.module + ': ' if op.module else ''}{op.label}"


def _lanes(view: RankView) -> dict[str, Any]:
    """Bars of the lanes chart: (row, start, length, colour group, text), seconds from the start of the step."""
    names = [lane for lane in LANES if view.on(lane)]
    titles = [HOST, COMPUTE, "compute waits for", *(name for name in names if name != COMPUTE)]
    origin = view.steady.start_s
    bars: list[tuple[int, float, float, str, str]] = []

    def bar(row: str, start: float, end: float, group: str, text: str) -> None:
        bars.append((titles.index(row), round(start - origin, 8), round(end - start, 8), group, text))

    for lane in names:
        for record in view.on(lane):
            op = record.op
            text = f"{op.label}" + (f" of {op.module}" if op.module else "") + f"<br>{op.phase}, {kind(record)}"
            moved = moved_bytes(record)
            text += f", {moved / 1e6:.2f} MB" if moved else ""
            text += f"<br>{1e6 * (record.end_s - record.start_s):.1f} µs, started when {_blocker(view, record.blocker)}"
            bar(lane, record.start_s, record.end_s, op.phase, text)
    for segment in waiting_segments(view):
        group, name = cause(segment)
        group = group if group in CAUSE_COLORS else "other"
        bar(
            "compute waits for",
            segment.start_s,
            segment.end_s,
            group,
            f"{cause_label(name)}: {1e6 * segment.seconds:.1f} µs",
        )
    for wait in view.host_waits():
        bar(HOST, wait.start_s, wait.end_s, "host", f"blocked until {wait.record.op.label} is done")
    return {"names": titles, "items": bars}


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
