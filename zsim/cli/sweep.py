"""zsim sweep: many scenarios into one table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.cli.options import Json, Set, new_app
from zsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zsim.sweep.runner import Tally

app = new_app()


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file, or a scenario to vary.", show_default=False)],
    vary: Annotated[
        list[str], typer.Option("--vary", metavar="FIELD=A,B,...", help="One axis: values, 1..64, or 1..64*2.")
    ] = [],  # noqa: B006 (typer wants the list itself)
    set_: Set = [],  # noqa: B006
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The store; FILE of the sweep with .db unless given.")
    ] = None,
    out: Annotated[list[Path], typer.Option(metavar="FILE", help="Also write .html, .png, .csv or .parquet.")] = [],  # noqa: B006
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core unless given.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="tcp://... of a scheduler, or local.")] = None,
    shard: Annotated[str, typer.Option(metavar="K/N", help="Only the K-th of N parts, as in a job array.")] = "1/1",
    fit_only: Annotated[bool, typer.Option("--fit-only", help="Memory alone, from the allocations; no clock.")] = False,
    json: Json = False,
) -> int:
    """Simulate every scenario of a grid into one table. What the store already has is not computed again.

    Exit code 3 if none fits, 2 if all are refused.
    """
    from zsim.sweep import executors
    from zsim.sweep.export import export, records
    from zsim.sweep.grid import from_options, is_sweep, read_sweep
    from zsim.sweep.runner import run, sweep_id
    from zsim.sweep.store import Store

    if is_sweep(file):
        if vary:
            raise InputError("goes with a scenario; a sweep file states its own axes", field="--vary")
        wanted = read_sweep(file, set_)
    else:
        wanted = from_options([file], vary, set_)
    part = _shard(shard)
    _check(out)
    path = store or Path(file.stem + ".db")
    with Store(path, sweep_id(wanted, fit_only)) as opened:
        with _bar(len(range(part[0] - 1, wanted.size, part[1]))) as report:
            hire = (lambda: executors.dask(dask, workers)) if dask else (lambda: executors.local(workers))
            tally = run(wanted, opened, hire, shard=part, memory_only=fit_only, report=report)
        for target in out:
            if target.suffix == ".html":
                from zsim.result.render.sweep_html import write

                write(records(opened), wanted.varied, f"Sweep of {file.stem}", target)
            elif target.suffix == ".png":
                from zsim.sweep.plots import draw

                draw(opened, wanted.varied, target)
            else:
                export(opened, target)
        if json:
            from dataclasses import asdict
            from json import dumps

            errors = [{"status": s, "error": e, "scenarios": n} for s, e, n in opened.errors()]
            print(dumps(asdict(tally) | {"store": str(path), "table": opened.count(), "errors": errors}))
        else:
            from rich.console import Console

            from zsim.sweep.report import render

            render(opened, wanted, tally, Console(highlight=False))
        count = opened.count()
        if count["refused"] and not count["ok"]:
            return 2
        return 0 if fit_only or count["fit"] else 3


def _check(targets: list[Path]) -> None:
    """Hours of work are not to end in a typo. Raises InputError."""
    for target in targets:
        if target.suffix not in (".csv", ".parquet", ".png", ".html"):
            raise InputError("is not known by its ending", target, accepted=".csv, .parquet, .png or .html")
        if not target.absolute().parent.is_dir():
            raise InputError("no such folder", target.parent)


def _shard(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not slash or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
        raise InputError(f"{text!r} is no part of a sweep", field="--shard", accepted="such as 3/16")
    return int(first), int(second)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Tally], None]]:
    """A bar with rate and time left on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        import time

        task, begun = progress.add_task("", total=total, rate=""), time.monotonic()

        def report(tally: Tally) -> None:
            rate = tally.computed / max(time.monotonic() - begun, 1e-9)
            progress.update(
                task, completed=tally.passed, rate=f"{rate:.1f}/s, {tally.failed + tally.refused} without outcome"
            )

        yield report
