"""zsim compare: several setups side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, Set, new_app
from zsim.errors import InputError

app = new_app()


@app.command()
def compare(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files.", show_default=False)],
    set_: Set = [],  # noqa: B006 (typer wants the list itself)
    stages: Annotated[
        str | None, typer.Option(metavar="0,1,2,3", help="Instead: one DeepSpeed scenario under these ZeRO stages.")
    ] = None,
    json: Json = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.html and compare.json here.")] = None,
) -> int:
    """What differs between setups in the inputs, in the outcome, and why. Exit code 3 if none fits."""
    from zsim.api import simulate
    from zsim.cli.progress import track
    from zsim.result.compare import compare

    runs = _runs(scenarios, list(set_), stages)
    results = [simulate(path, overrides) for path, overrides in track(runs, "simulating", len(runs))]
    comparison = compare(results)
    if out is not None:
        from zsim.result.render import write_comparison

        write_comparison(results, out)
    if json:
        from json import dumps

        print(dumps(comparison.to_dict() | {"results": [result.to_dict() for result in results]}))
    else:
        from rich.console import Console

        from zsim.result.render.side_by_side import render

        render(comparison, Console(highlight=False))
    return 0 if any(result.fits for result in results) else 3


def _runs(scenarios: list[Path], overrides: list[str], stages: str | None) -> list[tuple[Path, list[str]]]:
    if stages is None:
        if len(scenarios) < 2:
            raise InputError("one scenario compares with nothing", accepted="two or more files, or --stages 0,1,2,3")
        return [(path, overrides) for path in scenarios]
    wanted = stages.split(",")
    if not all(stage.strip() in ("0", "1", "2", "3") for stage in wanted):
        raise InputError(f"{stages} is not a list of ZeRO stages", field="--stages", accepted="such as 0,1,2,3")
    return [
        (path, [*overrides, f"zero.stage={stage.strip()}", f"name={_stage_name(path, stage.strip(), len(scenarios))}"])
        for path in scenarios
        for stage in wanted
    ]


def _stage_name(path: Path, stage: str, scenarios: int) -> str:
    name = "stage 0 (no ZeRO)" if stage == "0" else f"ZeRO-{stage}"
    return name if scenarios == 1 else f"{path.stem} {name}"
