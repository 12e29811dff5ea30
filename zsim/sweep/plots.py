"""Pictures of a sweep, from its store: scaling, a heat map, or time against cost, by what was varied."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
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

    Reads the store several times rather than hold its rows. Raises InputError where nothing fits, as there is nothing
    to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gpus: set[int] = set()
    rest = [name for name in varied if name not in ("cluster.nodes", "cluster.topology", "cluster")]
    values: dict[str, dict[str, Any]] = {name: {} for name in rest}  # no more of each than it takes to know it is many
    for row in _fitting(store):
        gpus.add(row["gpus"])
        for name, found in values.items():
            if len(found) <= MANY:
                found[str(row.get(name))] = row.get(name)
    if not gpus:
        raise InputError("nothing to draw: this sweep has no scenario that fits and whose step was simulated", path)
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if len(gpus) > 1:
        _scaling(axes, store, rest)
    elif len(rest) == 2 and all(1 < len(found) <= MANY for found in values.values()):
        _heat(axes, store, {name: _sorted(list(found.values())) for name, found in values.items()})
    else:
        _front(axes, store, rest)
    figure.savefig(path)


def _fitting(store: Store, order: str = "position") -> Iterator[dict[str, Any]]:
    return (row for row in records(store, order) if row["fits"] and row["step_s"] is not None)


def _scaling(axes: Axes, store: Store, names: Sequence[str]) -> None:
    """Of each setup, tokens/s over GPUs, next to a straight line through its smallest machine."""
    lines: dict[str, dict[int, float]] = {}
    for row in _fitting(store, "tokens_per_s DESC, position"):  # the best first
        label = _label(row, names)
        if label in lines or len(lines) < MANY:
            lines.setdefault(label, {}).setdefault(row["gpus"], row["tokens_per_s"])
    best = list(lines.items())
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


def _heat(axes: Axes, store: Store, values: Mapping[str, list[Any]]) -> None:
    """tokens/s per GPU over two fields; where nothing fits, the field is empty."""
    (first, across), (second, down) = values.items()
    grid = [[float("nan")] * len(across) for _ in down]
    for row in _fitting(store):
        grid[down.index(row.get(second))][across.index(row.get(first))] = row["tokens_per_s_per_gpu"]
    image = axes.imshow(grid, aspect="auto", cmap="viridis")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:,.0f}" if value == value else "does not fit", ha="center", va="center", color="w")
    axes.set(xlabel=first, ylabel=second, title="tokens/s per GPU")
    axes.set_facecolor("0.4")
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(down)), [str(value) for value in down])
    axes.figure.colorbar(image)


def _front(axes: Axes, store: Store, names: Sequence[str]) -> None:
    """Tokens/s per GPU against the memory it takes; the line joins what nothing else beats in both."""
    needed, speed = array("d"), array("d")
    front: list[tuple[float, float, dict[str, Any]]] = []
    for row in _fitting(store, "needed_bytes, tokens_per_s_per_gpu DESC, position"):
        needed.append(row["needed_bytes"] / 2**30)
        speed.append(row["tokens_per_s_per_gpu"])
        if not front or speed[-1] > front[-1][1]:
            front.append((needed[-1], speed[-1], row))
    axes.scatter(needed, speed, s=18, color="0.6")
    axes.plot([x for x, _, _ in front], [y for _, y, _ in front], "o-", color="tab:blue", markersize=5)
    for x, y, row in front[-MANY:]:
        axes.annotate(_label(row, names), (x, y), textcoords="offset points", xytext=(5, -9), fontsize="x-small")
    axes.set(xlabel="memory per GPU with cache, GiB", ylabel="tokens/s per GPU", title="Speed against memory")


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _label(row: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name.split('.')[-1]} {row.get(name)}" for name in names)
