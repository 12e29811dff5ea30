"""zsim run: simulate one scenario."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from zsim.cli.options import Json, Set, new_app

if TYPE_CHECKING:
    from zsim.result.sensitivity import Change
    from zsim.result.spec import Result

app = new_app()


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario file.", show_default=False)],
    set_: Set = [],  # noqa: B006 (typer wants the list itself)
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write result.json, timeline.json and plots here.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,
    changes: Annotated[
        int | None,
        typer.Option(min=0, help="Simulate what would help, that many; 3 on a terminal or if it does not fit, else 0."),
    ] = None,
) -> NoReturn:
    """Simulate a scenario: does it fit, how fast is it, what holds it back, and what would help?"""
    from zsim.api import simulate

    result = simulate(scenario, set_)
    if changes is None:  # simulating them takes longer than the run itself: a job or a pipe does not wait for them
        wanted = not result.fits or sys.stdout.isatty()
        changes = 3 if wanted and not (quiet or json) else 0
    found: list[Change] = []
    try:
        if json:
            from json import dumps

            found = _helpful(result, changes)
            print(dumps(result.to_dict() | ({"changes": [asdict(change) for change in found]} if changes else {})))
        else:
            from zsim.result.render import terminal
            from zsim.result.render.page import Page

            page = Page()
            if quiet:
                print(terminal.verdict(result))
            else:
                terminal.render(result, page)
            found = _helpful(result, changes)
            if changes or not quiet:
                terminal.render_changes(result, found if changes else None, page, set_)
    finally:  # also where whoever reads the output has left
        if out is not None:
            from zsim.result.render import write_all

            write_all(result, out, found)
    # An exception keeps this frame and with it the result, which `zsim.__main__` leaves without freeing it.
    sys.exit(0 if result.fits else 3)


def _helpful(result: Result, number: int) -> list[Change]:
    """The changes that help most: to run faster or, where it does not fit, to make it fit. Each is simulated."""
    if not number:
        return []
    if not result.fits:
        from zsim.cli.progress import working
        from zsim.result.remedies import remedies

        with working("simulating what would make it fit"):
            return remedies(result, number)
    from zsim.cli.processes import each
    from zsim.result.sensitivity import change
    from zsim.result.suggestions import best, candidates

    found = each(partial(change, result, if_it_fits=True), candidates(result), "simulating changes")
    return best(found, number)
