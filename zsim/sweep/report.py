"""What a sweep came to, on a terminal: counts, the best scenarios, and what has no outcome and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from zsim.document import flat
from zsim.sweep.grid import Sweep
from zsim.sweep.runner import Tally
from zsim.sweep.store import Store

if TYPE_CHECKING:
    from rich.console import Console

BEST = 10
ERRORS = 8
GIB = 2**30


def render(store: Store, sweep: Sweep, tally: Tally, console: Console) -> None:
    count = store.count()
    undecided = count["ok"] - count["fit"] - count["do_not_fit"]
    open_ = f"{undecided:,} are not excluded by their allocations, " if undecided else ""
    console.print(
        f"{count['rows']:,} scenarios: {count['fit']:,} fit, {count['do_not_fit']:,} do not "
        f"({count['decided_by_memory']:,} by their allocations alone), {open_}{count['refused']:,} refused, "
        f"{count['failed']:,} failed; {tally.computed:,} computed now, {tally.reused:,} from {store.path}"
    )
    _best(store, sweep, console)
    for index, (status, error, number) in enumerate(store.errors()):
        if index == ERRORS:
            console.print("  ... (the column `error` has them all)")
            break
        console.print(
            f"{status} {number:,}x: {error.strip().splitlines()[-1 if status == 'failed' else 0]}", markup=False
        )


def _best(store: Store, sweep: Sweep, console: Console) -> None:
    columns = ("inputs", "tokens_per_s", "tokens_per_s_per_gpu", "step_s", "mfu", "headroom_bytes")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in sweep.varied:
        table.add_column(name.removeprefix("zero.").removeprefix("cluster."), justify="right")
    for name in ("tokens/s", "per GPU", "step s", "MFU", "free GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    found = 0
    for inputs, tokens, per_gpu, step, mfu, headroom in store.best(columns, BEST):
        fields = dict(flat(json.loads(inputs)))
        table.add_row(
            *(_short(fields.get(name, "")) for name in sweep.varied),
            f"{tokens:,.0f}",
            f"{per_gpu:,.0f}",
            f"{step:.3f}",
            "" if mfu is None else f"{mfu:.1%}",
            f"{headroom / GIB:.1f}",
        )
        found += 1
    if found:
        console.print(f"the {found} with most tokens/s:" if found > 1 else "the one that fits:")
        console.print(table)


def _short(value: object) -> str:
    """A value for a narrow column; of a path what tells it from others."""
    path = Path(value) if isinstance(value, str) and "/" in value else None
    if path is None:
        return str(value)
    return path.parent.name if path.name == "config.json" else path.stem
