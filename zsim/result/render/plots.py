"""PNG and SVG pictures with matplotlib, drawn without a display."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from zsim.engine.timeline import OpRecord
from zsim.program.ops import DELAYED_FREES, HOST, LANES
from zsim.result.compare import titles
from zsim.result.critical_path import RankView
from zsim.result.curve import Watched, points
from zsim.result.memory import served
from zsim.result.render.style import CATEGORY_COLORS, CATEGORY_LABELS, CAUSE_COLORS, PHASE_COLORS
from zsim.result.spec import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30


def write(result: Result, folder: Path) -> list[Path]:
    """memory_timeline and breakdown, each as PNG and SVG; returns the paths."""
    return _save({"memory_timeline": memory_and_lanes(result), "breakdown": comparison([result])}, folder)


def write_comparison(results: Sequence[Result], folder: Path) -> list[Path]:
    """comparison, and scaling where the number of GPUs differs, as PNG and SVG; returns the paths."""
    figures = {"comparison": comparison(results)}
    if len({result.headline.world_size for result in results}) > 1:
        figures["scaling"] = scaling(results)
    return _save(figures, folder)


def _save(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    from matplotlib import rc_context

    paths = []
    # Text stays text, and the same figure gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zsim"}):
        for name, figure in figures.items():
            for extension, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                paths.append(folder / f"{name}.{extension}")
                figure.savefig(paths[-1], dpi=150, metadata=metadata)
    return paths


def comparison(results: Sequence[Result]) -> Figure:
    """Bars: memory per GPU by category against capacity and the textbook's figure; the step by cause."""
    from matplotlib.figure import Figure

    names = ["\n".join(wrap(name, 16)) for name in titles(results)]
    figure = Figure(figsize=(max(6.0, 3.0 + 1.6 * len(results)), 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    base = np.zeros(len(results))
    for category, color in CATEGORY_COLORS.items():
        held = np.array([result.gpu.by_category.get(category, 0) for result in results]) / GIB
        base = _stack(top, names, base, held, color, CATEGORY_LABELS[category])
    cached = np.array([result.gpu.nvidia_smi_bytes for result in results]) / GIB - base
    _stack(top, names, base, cached, "#E8E8E8", "cached by the allocator")
    for index, result in enumerate(results):
        width = (index - 0.45, index + 0.45)
        named = index == 0  # once in the legend
        capacity, book = result.gpu.capacity_bytes / GIB, result.textbook.per_gpu_bytes / GIB
        top.plot(width, [capacity] * 2, color="red", lw=2, label="capacity" if named else None)
        top.plot(width, [book] * 2, color="black", lw=1.2, ls="--", label="textbook: states" if named else None)
    highest = max(max(result.gpu.nvidia_smi_bytes, result.gpu.capacity_bytes) for result in results)
    top.set_ylim(0, 1.06 * highest / GIB)
    top.set_xlim(-0.6, len(results) - 0.4)
    top.set_ylabel("GiB per GPU")
    _legend(top)
    base = np.zeros(len(results))
    for phase, color in PHASE_COLORS.items():
        if phase == "reference" and not any(phase in result.time.compute_by_phase for result in results):
            continue
        seconds = np.array([result.time.compute_by_phase.get(phase, 0.0) for result in results])
        base = _stack(bottom, names, base, seconds, color, f"compute, {phase}")
    for cause, field, color in (
        ("exposed communication", "exposed_comm_s", CAUSE_COLORS["communication"]),
        ("waiting for the host", "host_s", CAUSE_COLORS["host"]),
        ("other idle", "idle_s", CAUSE_COLORS["other"]),
    ):
        base = _stack(bottom, names, base, np.array([getattr(r.time, field) for r in results]), color, cause)
    for index, result in enumerate(results):
        text = f"{base[index]:.3g} s" + ("" if result.trains else "\nas if it fitted")
        bottom.annotate(text, (index, base[index]), ha="center", va="bottom", fontsize="small")
    bottom.set_ylim(0, 1.15 * base.max(initial=0.0) or 1.0)
    bottom.set_ylabel("seconds per step")
    bottom.tick_params(axis="x", labelsize="small")
    _legend(bottom)
    return figure


def scaling(results: Sequence[Result]) -> Figure:
    """Tokens/s over the number of GPUs, beside what the smallest setup would reach if it scaled ideally."""
    from matplotlib.figure import Figure

    ordered = sorted(results, key=lambda result: result.headline.world_size)
    gpus = np.array([result.headline.world_size for result in ordered], dtype=float)
    speed = np.array([result.throughput.tokens_per_s for result in ordered])
    ideal = speed[0] / gpus[0] * gpus
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(gpus, ideal, ls="--", color="#8C8C8C", label="ideal")
    axes.plot(gpus, speed, marker="o", color=PHASE_COLORS["forward"], label="simulated")
    for x, y, share, result in zip(gpus, speed, speed / ideal, ordered, strict=True):
        text = f"{share:.0%}" + ("" if result.trains else ", as if it fitted")
        axes.annotate(text, (x, y), xytext=(6, -12), textcoords="offset points", fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.margins(x=0.09)
    axes.set_xticks(gpus, [f"{count:,.0f}" for count in gpus])
    axes.set_yticks(speed, [f"{value:,.0f}" for value in speed])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s")
    axes.legend(frameon=False)
    return figure


def _stack(axes: Axes, names: list[str], base: np.ndarray, height: np.ndarray, color: str, label: str) -> np.ndarray:
    if height.any():
        axes.bar(names, height, bottom=base, color=color, label=label, width=0.7 if len(names) > 1 else 0.35)
    return base + height


def _legend(axes: Axes) -> None:
    """Beside the plot, in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False
    )


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
    curve = list(points(view, CATEGORY_COLORS, served(result, Watched)))
    times = [point.time_s for point in curve]
    base = np.zeros(len(curve))
    for name, color in CATEGORY_COLORS.items():
        held = np.array([point.held[name] for point in curve], dtype=float)
        if name == "framework":
            held[:] = result.gpu.framework_bytes
        if held.any():
            above = base + held / GIB
            label = CATEGORY_LABELS[name]
            axes.fill_between(times, base, above, step="post", color=color, label=label, lw=0, rasterized=True)
            base = above
    allocated = np.array([sum(point.held.values()) - point.held[DELAYED_FREES] for point in curve], dtype=float)
    top = int(allocated.argmax()) if len(curve) else 0
    ceiling = max(result.gpu.capacity_bytes / GIB, base.max(initial=0))
    axes.axhline(result.gpu.capacity_bytes / GIB, color="red", lw=1.5, label="capacity")
    if len(base):
        title = curve[top].kernel.op.label if curve[top].kernel else ""  # type: ignore[union-attr]
        place = times[top] / (times[-1] or 1.0)
        side = "left" if place < 0.1 else "right" if place > 0.9 else "center"  # so that the text stays inside
        level = (allocated[top] + result.gpu.framework_bytes) / GIB
        axes.annotate(
            f"{allocated[top] / GIB:.1f} GiB allocated: {title}", (times[top], level),
            xytext=(times[top], 1.03 * ceiling), ha=side, fontsize="small", arrowprops={"arrowstyle": "-", "lw": 0.8},
        )  # fmt: skip
    axes.set_ylim(0, 1.12 * ceiling)
    axes.set_ylabel("GiB per GPU")
    _legend(axes)


def _lanes(axes: Axes, view: RankView) -> None:
    """One row per lane, coloured by phase; the host's row shows when it is blocked."""
    origin = view.steady.start_s
    lanes = [HOST, *(lane for lane in LANES if view.on(lane))]
    blocked = [(wait.start_s - origin, wait.end_s - wait.start_s) for wait in view.host_waits()]
    axes.broken_barh(blocked, (-0.4, 0.8), facecolors=CAUSE_COLORS["host"])
    for row, lane in enumerate(lanes[1:], start=1):
        records = view.on(lane)
        spans = [(r.start_s - origin, r.end_s - r.start_s) for r in records]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[_color(r) for r in records], rasterized=True)
    axes.set_yticks(range(len(lanes)), [lane.replace("_", "-") for lane in lanes])
    axes.set_xlim(0, view.steady.end_s - origin)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the start of the step")
    seen = {record.op.phase for lane in lanes[1:] for record in view.on(lane)}
    axes.legend(
        handles=_phase_handles(seen), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False
    )


def _color(record: OpRecord) -> str:
    return PHASE_COLORS.get(record.op.phase, "#8C8C8C")


def _phase_handles(seen: Collection[str]) -> list[Any]:
    """Of all phases of a step; of a reference where there is one."""
    from matplotlib.patches import Patch

    shown = [phase for phase in PHASE_COLORS if phase != "init" and (phase in seen or phase != "reference")]
    handles = [Patch(color=PHASE_COLORS[phase], label=phase) for phase in shown]
    return [*handles, Patch(color=CAUSE_COLORS["host"], label="host blocked")]
