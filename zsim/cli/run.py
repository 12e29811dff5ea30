"""zsim run: simulate one scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, Set, new_app

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
) -> int:
    """Simulate a scenario: does it fit, how fast is it, what holds it back?"""
    from zsim.api import simulate

    result = simulate(scenario, set_)
    if out is not None:
        from zsim.result.render import write_all

        write_all(result, out)
    if json:
        from json import dumps

        print(dumps(result.to_dict()))
        return 0 if result.fits else 3

    from zsim.result.render import terminal

    if quiet:
        print(terminal.verdict(result))
    else:
        from rich.console import Console

        console = Console()
        terminal.render(result, console)
        if not result.fits:
            from zsim.result.remedies import remedies

            terminal.render_remedies(remedies(result), console)
    return 0 if result.fits else 3
