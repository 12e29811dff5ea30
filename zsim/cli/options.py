"""What commands share: how their typer app is made, and options that mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Set = Annotated[
    list[str],
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the scenario, as in --set zero.stage=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def new_app() -> typer.Typer:
    """A typer app for one command. Plain help and tracebacks: rich costs 50 ms that only rendering should pay."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
