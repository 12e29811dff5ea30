"""zsim program: what a rank's host issues, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, Set, new_app
from zsim.errors import InputError

app = new_app()


@app.command()
def program(
    scenario: Annotated[Path, typer.Argument(help="A scenario file.", show_default=False)],
    set_: Set = [],  # noqa: B006 (typer wants the list itself)
    step: Annotated[
        int | None, typer.Option(help="Which step: 0 is initialization; the default is the one that repeats.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the Program: what one rank's host issues, in order, before any clock runs."""
    from zsim.program.lower import lower
    from zsim.scenario import load

    setup = load(scenario, set_).resolve()
    found = lower(setup.model, setup.tree, setup.plan, setup.workload)
    steps = [found.init, *found.steps]
    number = len(steps) - 1 if step is None else step
    if not 0 <= number < len(steps):
        raise InputError(
            f"step {number}", field="--step", accepted=f"0 to {len(steps) - 1}; later steps repeat the last"
        )

    from zsim.program import listing

    if json:
        from json import dumps

        listed = {name: [list(ranks) for ranks in groups] for name, groups in found.groups.items()}
        chosen = [*listing.rows(found, steps[number])]
        print(dumps({"world_size": found.world_size, "groups": listed, "step": number, "instructions": chosen}))
        return
    table = [listing.COLUMNS, *listing.lines(found, steps[number])]
    widths = [max(len(row[column]) for row in table) for column in range(len(listing.COLUMNS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    alike = [str(other) for other in range(1, len(steps)) if other != number and steps[other] == steps[number]]
    if alike:
        print(f"step {', '.join(alike)} is the same")
