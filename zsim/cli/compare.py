"""zsim compare: several setups side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zsim.cli.options import Json, Set, new_app
from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.result.compare import Impossible
    from zsim.result.spec import Result

app = new_app()


@app.command()
def compare(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files.", show_default=False)],
    set_: Set = [],  # noqa: B006 (typer wants the list itself)
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=A,B,...", help="Instead: each scenario with these values, as in micro_batch=1,2,4."
        ),
    ] = None,
    stages: Annotated[
        str | None, typer.Option(metavar="0,1,2,3", help="Instead: each DeepSpeed scenario under these ZeRO stages.")
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write compare.json, report.html and plots here.")
    ] = None,
) -> int:
    """What differs between setups in the inputs, in the outcome, and why. Exit code 3 if none fits."""
    from zsim.result.compare import compare

    results, impossible = _simulated(_runs(scenarios, list(set_), vary, stages))
    comparison = compare(results, impossible)
    if out is not None:
        from zsim.result.render import write_comparison

        write_comparison(results, out, impossible)
    if json:
        from json import dumps

        print(dumps(comparison.to_dict() | {"results": [result.to_dict() for result in results]}))
    else:
        from zsim.result.render.page import Page
        from zsim.result.render.side_by_side import render

        render(comparison, Page())
    return 0 if any(result.fits for result in results) else 3


class Run(NamedTuple):
    """`name` is empty where the scenario runs as it stands."""

    path: Path
    overrides: list[str]
    name: str = ""


def _simulated(runs: list[Run]) -> tuple[list[Result], list[Impossible]]:
    """What runs, and which values a scenario cannot have. Raises InputError where none runs, and for a scenario that
    runs as it stands.
    """
    from zsim.api import simulate
    from zsim.cli.progress import track
    from zsim.result.compare import Impossible

    results, errors = [], []
    for run in track(runs, "simulating", len(runs)):
        try:
            results.append(simulate(run.path, run.overrides))
        except InputError as error:
            if not run.name:
                raise
            errors.append((run.name, error))
    if not results:
        raise errors[0][1]
    return results, [Impossible.of(name, error) for name, error in errors]


def _runs(scenarios: list[Path], overrides: list[str], vary: str | None, stages: str | None) -> list[Run]:
    """Scenario and overrides of each run; where one file runs several times, its name says how."""
    if vary is not None and stages is not None:
        raise InputError("--vary and --stages exclude each other", accepted="--vary zero.stage=0,1,2,3")
    if stages is not None:
        field, values = "zero.stage", _values(stages)
        if not values or not set(values) <= {"0", "1", "2", "3"}:
            raise InputError(f"{stages!r} is not a list of ZeRO stages", field="--stages", accepted="such as 0,1,2,3")
        for path in scenarios:
            _check_framework(path, overrides)
    elif vary is not None:
        field, _, text = vary.partition("=")
        values = _values(text)
        if not values:
            raise InputError(f"{vary!r} has no values", field="--vary", accepted="such as micro_batch=1,2,4")
    elif len(scenarios) < 2:
        raise InputError(
            "one scenario compares with nothing", accepted="two or more files, --vary, or --stages 0,1,2,3"
        )
    else:
        return [Run(path, overrides) for path in scenarios]
    runs = []
    for path in scenarios:
        prefix = f"{path.stem} " if len(scenarios) > 1 else ""
        for value in values:
            name = prefix + _title(field, value)
            runs.append(Run(path, [*overrides, f"{field}={value}", f'name="{name}"'], name))
    return runs


def _check_framework(path: Path, overrides: list[str]) -> None:
    """Raises InputError for a scenario that has no ZeRO stage."""
    from zsim.scenario import load

    framework = load(path, overrides).fields.framework.name
    if framework != "deepspeed":
        why = f"are ZeRO's stages, and this scenario's framework is {framework}"
        raise InputError(why, path, field="--stages", accepted="a scenario with framework: deepspeed, or --vary")


def _title(field: str, value: str) -> str:
    if field == "zero.stage":
        return "stage 0 (no ZeRO)" if value == "0" else f"ZeRO-{value}"
    return f"{field}={value}"


def _values(text: str) -> list[str]:
    """What commas separate outside brackets: "1,2" and "[2, 4],[1, 8]"."""
    return [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", text) if value.strip()]
