"""How a Result shows itself in a notebook: the verdict and two small tables. HTML that takes the notebook's colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zsim.result.render import terminal
from zsim.result.render.style import CATEGORY_COLORS, CATEGORY_LABELS, CAUSE_COLORS, PHASE_COLORS
from zsim.result.spec import Result

GIB = 2**30
BAR_PX = 160
Row = tuple[str, str, float, str]  # name, figure, share of the whole, colour


def summary(result: Result) -> str:
    """The HTML text of `Result._repr_html_`."""
    hue = {"fits": "#1a7f37", "tight": "#9a6700", "over": "#cf222e"}[terminal.state(result)]
    accuracy = result.accuracy
    error = "unknown" if accuracy.step_time_error is None else f"{accuracy.step_time_error:.0%} on average"
    return (
        f"<p style='border-left:5px solid {hue};padding-left:.7em'><strong>{escape(terminal.verdict(result))}</strong>"
        f"<br>{escape(terminal.headline(result.headline))}</p>"
        f"<p>Bottleneck: {escape(result.bottleneck.name)}, {result.bottleneck.share:.0%} of the critical path. "
        f"Expected error of the step time: {error}.</p>"
        f"<div style='display:flex;gap:3em;flex-wrap:wrap;align-items:flex-start'>"
        f"{_table('Memory per GPU at the peak', _memory(result))}{_table('Step', _step(result))}</div>"
    )


def _memory(result: Result) -> list[Row]:
    gpu = result.gpu

    def row(name: str, nbytes: float, color: str) -> Row:
        return name, f"{nbytes / GIB:.2f} GiB", nbytes / gpu.capacity_bytes, color

    held = sorted(gpu.by_category.items(), key=lambda item: -item[1])
    rows = [row(CATEGORY_LABELS.get(name, name), n, CATEGORY_COLORS.get(name, "#8C8C8C")) for name, n in held if n]
    rows.append(row("cached by the allocator", gpu.peak_reserved_bytes - gpu.peak_allocated_bytes, "#C9C9C9"))
    rows.append(row("shown by nvidia-smi (decides)", gpu.nvidia_smi_bytes, "currentColor"))
    return [*rows, row("capacity", gpu.capacity_bytes, "currentColor")]


def _step(result: Result) -> list[Row]:
    time = result.time
    phases = [(f"compute, {name}", seconds, PHASE_COLORS[name]) for name, seconds in time.compute_by_phase.items()]
    waits = [
        ("exposed communication", time.exposed_comm_s, CAUSE_COLORS["communication"]),
        ("waiting for the host", time.host_s, CAUSE_COLORS["host"]),
        ("other idle", time.idle_s, CAUSE_COLORS["other"]),
        ("step", time.step_s, "currentColor"),
    ]
    return [(name, terminal.duration(s), s / time.step_s if time.step_s else 0.0, c) for name, s, c in phases + waits]


def _table(title: str, rows: Sequence[Row]) -> str:
    cell, bar = "padding:1px 8px 1px 0", "display:inline-block;height:.7em"
    body = "".join(
        f"<tr><td style='{cell};text-align:left'>{escape(name)}</td><td style='{cell};text-align:right'>{figure}</td>"
        f"<td style='{cell};text-align:right'>{share:.1%}</td><td style='{cell};text-align:left'>"
        f"<span style='{bar};width:{min(share, 1.5) * BAR_PX:.0f}px;background:{color}'></span>"
        "</td></tr>"
        for name, figure, share, color in rows
    )
    head = f"<caption style='text-align:left;font-weight:bold'>{escape(title)}</caption>"
    return f"<table style='border-collapse:collapse'>{head}<tbody>{body}</tbody></table>"
