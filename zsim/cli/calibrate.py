"""zsim calibrate: fits the cost profiles to evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import new_app

app = new_app()


@app.callback()
def calibrate() -> None:
    """Fit cost profiles to evidence."""


@app.command()
def published(
    folder: Annotated[
        Path, typer.Argument(help="Folder of CSV files whose rows are marked fit or test in a column `split`.")
    ] = Path("validation/published"),
    out: Annotated[
        Path | None, typer.Option(help="Where to write, instead of the installed package.", show_default=False)
    ] = None,
) -> None:
    """Fit profiles to the rows of published runs marked fit, and write what the others say of them."""
    import yaml

    from zsim.cost.profile import PROFILES
    from zsim.validation.calibrate import calibrate
    from zsim.validation.evidence import read_folder

    result = calibrate(read_folder(folder))
    document = result.document()
    target = out or PROFILES / "fitted.yaml"
    text = yaml.safe_dump(document, sort_keys=True, width=120, allow_unicode=True)
    target.write_text("# Written by `zsim calibrate published`.\n" + text, encoding="utf-8")
    for knob, value in result.values.items():
        print(f"{knob.document + ': ' + knob.path:<48}{value:>8.3g}   within {knob.low:g} to {knob.high:g}")
    print(document["provenance"])
    print(f"written to {target}")
