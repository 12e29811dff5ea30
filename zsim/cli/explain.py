"""zsim explain: why a step takes what it takes, and what would help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, Set, new_app

app = new_app()


@app.command()
def explain(
    scenario: Annotated[Path, typer.Argument(help="A scenario file.", show_default=False)],
    set_: Set = [],  # noqa: B006 (typer wants the list itself)
    json: Json = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write explain.json and report.html here.")] = None,
) -> int:
    """The critical path of a step, where every second goes, and what faster parts or other settings would gain.

    Each change is simulated again, alone.
    """
    from zsim.api import simulate
    from zsim.cli.processes import each
    from zsim.result import sensitivity
    from zsim.result.render import explanation

    result = simulate(scenario, set_)
    variants = [*sensitivity.settings(result), *sensitivity.hardware(result)]
    tried = each(partial(sensitivity.change, result), variants, "simulating changes")
    changes = [change for change in tried if change is not None]
    if out is not None:
        from zsim.result.render import write_explanation

        write_explanation(result, changes, out)
    if json:
        from json import dumps

        print(dumps(explanation.to_dict(result, changes)))
    else:
        from zsim.result.render.page import Page

        explanation.render(result, changes, Page())
    return 0 if result.fits else 3
