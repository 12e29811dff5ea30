"""A Comparison in a terminal: blocks of up to four setups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zsim.result.compare import Comparison, Line
from zsim.result.compare import label as label_of
from zsim.result.render.page import Page, wrap
from zsim.result.render.style import CATEGORY_LABELS

GIB = 2**30
PER_BLOCK = 4
CELL, NAME = 11, 24  # columns of a value, and at least of what it is a value of


def render(comparison: Comparison, page: Page) -> None:
    """Prints the setups, what differs between them, what came out, and why."""
    for each in comparison.impossible:
        page.say(f"{each.name}: {each.why}")
    if comparison.impossible:
        page.line()
    for block in _blocks(len(comparison.names), min(PER_BLOCK, max(1, (page.width - NAME) // CELL))):
        label = page.width - CELL * len(block)
        for index in block:
            page.line(f"({comparison.letters[index]}) {comparison.names[index]}", "bold")
        page.line()
        for title, lines in (
            ("Inputs that differ", comparison.inputs),
            ("Outcome", comparison.outcome),
            ("Step by cause", _visible(comparison.time, 1e-4)),
            ("Memory at the peak", _visible(comparison.memory, 0.005 * GIB)),
            ("Communication per step", comparison.programs),
        ):
            if lines:
                letters = "".join(f"{comparison.letters[index]:>{CELL}}" for index in block)
                page.line(f"{title:<{label}}{letters}", "bold")
                for row in _rows(lines, block, comparison.letters, page.width):
                    page.line(row)
                page.line()
    if comparison.reasons:
        page.line("Why", "bold")
    for reason in comparison.reasons:
        page.say(reason, indent=2)


def _blocks(setups: int, most: int) -> Iterator[range]:
    """Blocks of nearly the same number of setups: of five not one that stands alone."""
    blocks = -(-setups // most)
    for block in range(blocks):
        yield range(setups * block // blocks, setups * (block + 1) // blocks)


def _visible(lines: Sequence[Line], smallest: float) -> list[Line]:
    return [line for line in lines if max(map(abs, line.values)) >= smallest]


def _rows(lines: Iterable[Line], block: Sequence[int], letters: Sequence[str], width: int) -> Iterator[str]:
    label = width - CELL * len(block)
    for line in lines:
        cells = [show(line.values[index], line.unit) for index in block]
        name = label_of(CATEGORY_LABELS.get(line.name, line.name), ", ") if line.unit not in ("", "1/s") else line.name
        if all(len(cell) < CELL for cell in cells):
            if len(name) > label - 3:  # lines of its own
                yield from (f"  {line}" for line in wrap(name, width - 2))
                name = ""
            yield f"  {name:<{label - 2}}" + "".join(f"{cell:>{CELL}}" for cell in cells)
        elif len(set(cells)) == 1:
            yield from wrap(f"  {name}: {cells[0]}", width)
        else:
            yield f"  {name}"
            for index, cell in zip(block, cells, strict=True):
                yield f"    {letters[index]}: {cell}"


def show(value: Any, unit: str) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if not value and unit:
        return "0"
    if unit == "bytes" and abs(value) < 0.005 * GIB:
        return f"{value / 2**20:.2f} MiB" if value >= 0.005 * 2**20 else f"{value} B"
    if unit == "bytes":
        return f"{value / GIB:.{1 if abs(value) >= 100 * GIB else 2}f} GiB"
    if unit == "s":
        return f"{value:.4f} s"
    if unit == "share":
        return f"{value:.1%}"
    if unit in ("1/s", "count"):
        return f"{value:,.0f}"
    return str(value)
