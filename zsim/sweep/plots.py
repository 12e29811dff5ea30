"""Pictures of a sweep, from its store: scaling, a heat map, or time against cost, by what was varied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError
from zsim.sweep.export import records
from zsim.sweep.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 12  # values of a field that a plot can label


def draw(store: Store, varied: Sequence[str], path: Path) -> None:
    """Tokens/s over the number of GPUs where that varies, else over two fields, else step time against memory.

    Raises InputError where nothing fits, as there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in records(store) if row["fits"] and row["step_s"] is not None]
    if not rows:
        raise InputError("nothing to draw: no scenario of this sweep fits", path)
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rest = [name for name in varied if name not in ("cluster.nodes", "cluster.topology", "cluster")]
    if len({row["gpus"] for row in rows}) > 1:
        _scaling(axes, rows, rest)
    elif len(rest) == 2 and all(1 < len({str(row.get(name)) for row in rows}) <= MANY for name in rest):
        _heat(axes, rows, rest)
    else:
        _front(axes, rows, rest)
    figure.savefig(path)


def _scaling(axes: Axes, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Of each setup, tokens/s over GPUs, next to a straight line through its smallest machine."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        line = lines.setdefault(_label(row, names), {})
        line[row["gpus"]] = max(row["tokens_per_s"], line.get(row["gpus"], 0.0))
    best = sorted(lines.items(), key=lambda item: -max(item[1].values()))[:MANY]
    for label, line in best:
        gpus = sorted(line)
        axes.plot(gpus, [line[count] for count in gpus], "o-", label=label or "tokens/s", markersize=4)
    first = min(best[0][1])
    most = max(count for _, line in best for count in line)
    rate = best[0][1][first] / first
    axes.plot([first, most], [rate * first, rate * most], ":", color="gray", label="ideal")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s", title="Scaling")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize="small")


def _heat(axes: Axes, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """tokens/s per GPU over two fields; where nothing fits, the field is empty."""
    across, down = (_values(rows, name) for name in names)
    grid = [[float("nan")] * len(across) for _ in down]
    for row in rows:
        x, y = across.index(row.get(names[0])), down.index(row.get(names[1]))
        grid[y][x] = row["tokens_per_s_per_gpu"]
    image = axes.imshow(grid, aspect="auto", cmap="viridis")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:,.0f}" if value == value else "does not fit", ha="center", va="center", color="w")
    axes.set(xlabel=names[0], ylabel=names[1], title="tokens/s per GPU")
    axes.set_facecolor("0.4")
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(down)), [str(value) for value in down])
    axes.figure.colorbar(image)


def _front(axes: Axes, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Tokens/s per GPU against the memory it takes; the line joins what nothing else beats in both."""
    points = [(row["needed_bytes"] / 2**30, row["tokens_per_s_per_gpu"], row) for row in rows]
    points.sort(key=lambda point: (point[0], -point[1]))
    axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=18, color="0.6")
    front: list[tuple[float, float, dict[str, Any]]] = []
    for point in points:
        if not front or point[1] > front[-1][1]:
            front.append(point)
    axes.plot([x for x, _, _ in front], [y for _, y, _ in front], "o-", color="tab:blue", markersize=5)
    for x, y, row in front[-MANY:]:
        axes.annotate(_label(row, names), (x, y), textcoords="offset points", xytext=(5, -9), fontsize="x-small")
    axes.set(xlabel="memory needed per GPU, GiB", ylabel="tokens/s per GPU", title="Speed against memory")


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    found = list(dict.fromkeys(row.get(name) for row in rows))
    return sorted(found) if all(isinstance(value, int | float) for value in found) else found


def _label(row: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name.split('.')[-1]} {row.get(name)}" for name in names)
