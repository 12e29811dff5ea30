"""zsim merge: the stores of a sweep's shards as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import new_app
from zsim.errors import InputError

app = new_app()


@app.command()
def merge(
    stores: Annotated[list[Path], typer.Argument(help="Stores that shards wrote.", show_default=False)],
    into: Annotated[Path, typer.Option(metavar="FILE", help="The store that gets all rows.", show_default=False)],
    out: Annotated[list[Path], typer.Option(metavar="FILE", help="Also write its sweep as .csv or .parquet.")] = [],  # noqa: B006
) -> None:
    """Join the stores of a sweep's shards. A scenario that several have is taken once."""
    from zsim.sweep.export import export
    from zsim.sweep.store import Store

    for path in stores:
        if not path.exists():
            raise InputError("no such store", path)
        if into.exists() and path.samefile(into):
            raise InputError("is the store that gets all rows", path, accepted="another one for --into")
    with Store(into) as target:
        for path in stores:
            print(f"{path}: {target.merge(path):,} new scenarios")
        sweeps = target.sweeps()
        if out and len(sweeps) != 1:
            raise InputError(f"holds {len(sweeps)} sweeps, and a table has one", into)
        for sweep, count in sweeps:
            print(f"{into}: {count:,} scenarios of sweep {sweep.hex()[:8]}")
            target.sweep = sweep
        for path in out:
            export(target, path)
