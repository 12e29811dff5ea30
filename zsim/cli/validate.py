"""zsim validate: predictions against what was measured or recorded, one sub-command per kind of evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, new_app

app = new_app()


@app.callback()
def validate() -> None:
    """Hold predictions against evidence."""


@app.command()
def published(
    files: Annotated[list[Path], typer.Argument(help="CSV files with the columns of validation/published.")],
    split: Annotated[str | None, typer.Option(help="Only rows of this split: fit or test.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Predict published training runs: error of each row, per source and GPU, and which rows were refused and why."""
    from zsim.validation.evidence import read_rows, split_of
    from zsim.validation.published import predict, text, to_dict

    rows = [row for file in files for row in read_rows(file)]
    if split is not None:
        rows = [row for row in rows if row.get("split") == split or (not row.get("split") and split_of(row) == split)]
    predictions = [predict(row) for row in rows]
    if json:
        from json import dumps

        print(dumps(to_dict(predictions)))
    else:
        print(text(predictions))
