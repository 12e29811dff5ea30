"""PNG and SVG pictures with matplotlib, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zsim.engine.timeline import OpRecord
from zsim.program.ops import GPU_CATEGORIES, HOST, LANES
from zsim.result.critical_path import RankView
from zsim.result.render.style import CATEGORY_COLORS, PHASE_COLORS
from zsim.result.spec import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30


def write(result: Result, folder: Path, formats: tuple[str, ...] = ("png",)) -> list[Path]:
    """memory_timeline.{png,svg}; returns the paths."""
    figure = memory_and_lanes(result)
    paths = []
    for extension in formats:
        path = folder / f"memory_timeline.{extension}"
        figure.savefig(path, dpi=150)
        paths.append(path)
    return paths


def memory_and_lanes(result: Result) -> Figure:
    """Memory by category over one steady step with the capacity line; below it the lanes on the same clock."""
    from matplotlib.figure import Figure

    view = RankView(result.program, result.timeline, result.gpu.peak_rank)
    figure = Figure(figsize=(11, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _memory(top, result, view)
    _lanes(bottom, view)
    figure.suptitle(result.name)
    return figure


def _memory(axes: Axes, result: Result, view: RankView) -> None:
    times, held = curve(view)
    names = [name for name in GPU_CATEGORIES if name in held and held[name].any()]
    base = np.full(len(times), result.gpu.framework_bytes / GIB)
    axes.fill_between(times, 0, base, step="post", color=CATEGORY_COLORS["framework"], label="framework", lw=0)
    for name in names:
        above = base + held[name] / GIB
        axes.fill_between(
            times, base, above, step="post", color=CATEGORY_COLORS[name], label=name.replace("_", " "), lw=0
        )
        base = above
    axes.axhline(result.gpu.capacity_bytes / GIB, color="red", lw=1.5, label="capacity")
    axes.set_ylabel("GiB per GPU")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def curve(view: RankView) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Bytes by category over the steady step, on the host's clock in seconds from its start."""
    span = view.steady
    events = view.ledgers["gpu"]
    held = dict.fromkeys((event.category for event in events), 0)
    times: list[float] = []
    rows: list[dict[str, int]] = []
    for event in events:
        held[event.category] += event.nbytes
        if event.step == span.step:
            times.append(event.time_s - span.start_s)
            rows.append(dict(held))
    return np.array(times), {name: np.array([row[name] for row in rows], dtype=float) for name in held}


def _lanes(axes: Axes, view: RankView) -> None:
    lanes = [lane for lane in (HOST, *LANES) if lane in view.lanes]
    for row, lane in enumerate(lanes):
        records = view.on(lane)
        spans = [(r.start_s - view.steady.start_s, r.end_s - r.start_s) for r in records]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[_color(r) for r in records])
    axes.set_yticks(range(len(lanes)), [lane.replace("_", " ") for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the start of the step")
    axes.legend(handles=_phase_handles(), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _color(record: OpRecord) -> str:
    return PHASE_COLORS.get(record.op.phase, "#8C8C8C")


def _phase_handles() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=color, label=phase) for phase, color in PHASE_COLORS.items() if phase != "init"]
