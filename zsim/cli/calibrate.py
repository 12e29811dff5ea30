"""zsim calibrate: fits the cost profiles to evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import new_app

app = new_app()


@app.callback()
def calibrate() -> None:
    """Fit cost profiles to evidence: `zsim calibrate DIR` (the same as `calibrate capture DIR`), or `published`."""


@app.command()
def capture(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Directories that capture wrote, Kineto traces, output of nccl-tests, DeepSpeed's comms log.",
            show_default=False,
        ),
    ],
    base: Annotated[
        str, typer.Option(help="Software stack, or device, whose constants hold where the data say nothing.")
    ] = "default",
    device: Annotated[
        str | None, typer.Option(help="Device of the traces, where they do not name it.", show_default=False)
    ] = None,
    op: Annotated[
        str | None, typer.Option(help="Collective of a log that does not name it: all_gather...", show_default=False)
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks of a log that does not list them.", show_default=False)
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(help="Training runs of the capture to fit to, by commas; none: only micro-benchmarks."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The profile that scenarios then name.")] = Path("profile.yaml"),
) -> None:
    """Fit a profile to the machine that a capture or traces come from; say what the data determined."""
    import yaml

    from zsim.validation.capture_read import runs as read_runs
    from zsim.validation.fit_profile import calibrate
    from zsim.validation.fit_steps import refine

    found = calibrate(paths, base, device, op, ranks)
    for folder in (path for path in paths if (path / "steps.csv").exists()):
        chosen = None if runs is None else () if runs == "none" else tuple(runs.split(","))
        if chosen != () and (made := read_runs(folder, chosen or ())):
            refine(found, made)
    out.write_text(yaml.safe_dump(found.document(), sort_keys=False, width=120), encoding="utf-8")
    print(found.text())
    print(f"written to {out}; a scenario names it as `profile:`, by its path from the scenario's folder")


@app.command()
def published(
    folder: Annotated[
        Path, typer.Argument(help="Folder of CSV files whose rows are marked fit or test in a column `split`.")
    ] = Path("validation/published"),
    out: Annotated[
        Path | None, typer.Option(help="Where to write, instead of the installed package.", show_default=False)
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Also fit without each term, for the report; takes minutes.")
    ] = False,
) -> None:
    """Fit profiles to the rows of published runs marked fit, and write what the others say of them."""
    import yaml

    from zsim.cost.profile import PROFILES
    from zsim.validation.ablate import ablate
    from zsim.validation.calibrate import calibrate, fitted_on
    from zsim.validation.rows import read_folder

    others = [part for part in (*sorted(folder.glob("*holdout")), folder / "float8") if part.is_dir()]
    result = calibrate(read_folder(folder), [row for part in others for row in read_folder(part)])
    document = result.document()
    target = out or PROFILES / "fitted.yaml"
    text = yaml.safe_dump(document, sort_keys=True, width=120, allow_unicode=True)
    target.write_text("# Written by `zsim calibrate published`.\n" + text, encoding="utf-8")
    for knob, value in result.values.items():
        print(f"{knob.document + ': ' + knob.path:<48}{value:>8.3g}   within {knob.low:g} to {knob.high:g}")
    print(document["provenance"])
    print(f"written to {target}")
    if ablations:
        record = {
            "left_out": {row: round(error, 2) for row, error in result.left_out.items()},
            "ablations": [
                {"without": name, "fit_mape": round(fit, 2), "test_mape": round(test, 2)}
                for name, fit, test in ablate(fitted_on(result.train), fitted_on(result.test))
            ],
        }
        text = yaml.safe_dump(record, sort_keys=False)
        (folder / "calibration.yaml").write_text("# Written by `zsim calibrate published --ablations`.\n" + text)
