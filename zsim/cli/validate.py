"""zsim validate: hold predictions against measurements and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, new_app

app = new_app()

Paths = Annotated[list[Path], typer.Argument(help="Files, or directories of them.", show_default=False)]


@app.callback()
def validate() -> None:
    """Hold predictions against measurements and recordings. Exit code 1 where they differ."""


@app.command()
def sequences(paths: Paths, json: Json = False) -> int:
    """Recorded collectives: op, dtype, elements, group and order of initialization and every step."""
    from zsim.validation.sequences import validate as compare

    outcomes = compare(paths)
    lines = []
    for outcome in outcomes:
        if outcome.matches:
            lines.append(f"match    {outcome.name}  {outcome.calls} collectives")
        elif outcome.refused:
            lines.append(f"refused  {outcome.name}  {outcome.refused}")
        else:
            lines.append(f"differs  {outcome.name}  {outcome.difference}")
    return _report([outcome.to_dict() for outcome in outcomes], [o.matches for o in outcomes], lines, json)


@app.command()
def memory(paths: Paths, json: Json = False) -> int:
    """Tracked memory of FSDP2: bytes by category at the start, after forward and backward, and at their peaks."""
    from zsim.validation.memory import validate as compare

    outcomes = compare(paths)
    lines = []
    for outcome in outcomes:
        verdict = "match  " if outcome.matches else "refused" if outcome.refused else "differs"
        lines.append(f"{verdict}  {outcome.name}  {outcome.refused or outcome.summary}")
        lines += [f"         {line}" for line in outcome.differing]
    return _report([outcome.to_dict() for outcome in outcomes], [o.matches for o in outcomes], lines, json)


@app.command("host-time")
def host_time(file: Annotated[Path, typer.Argument(help="What validation.oracles.host_time wrote.")]) -> None:
    """CPU seconds of the thread that issues a training step, by phase, against what a default profile counts."""
    from zsim.validation.host_time import section

    print(*section(file), sep="\n")


def _report(found: Sequence[dict[str, object]], matches: Sequence[bool], lines: Sequence[str], json: bool) -> int:
    """Print a line per file and `N matched of M`; the exit code."""
    if json:
        from json import dumps

        print(dumps({"matched": sum(matches), "of": len(matches), "files": found}))
    else:
        print(*lines, f"{sum(matches)} matched of {len(matches)}", sep="\n")
    return 0 if all(matches) else 1


@app.command()
def collectives(
    file: Annotated[Path, typer.Argument(help="A CSV of measured points, or a log of nccl-tests.", show_default=False)],
    topology: Annotated[Path | None, typer.Option(help="The machine of a log.", show_default=False)] = None,
    op: Annotated[
        str | None, typer.Option(help="The collective of a log that does not name it.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Measured collectives: error of time per set and overall, and the algorithm NCCL chose where known."""
    from zsim.validation.collectives_report import format_size, report

    found = report(file, topology, op)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps(asdict(found)).replace("NaN", "null"))
        return
    print(f"{'set':<30}{'points':>7}{'median':>9}{'>=16 MiB':>10}{'worst':>9} at")
    for title, lines in (("", found.sets), ("of doubtful quality, not counted:", found.other)):
        if lines and title:
            print(title)
        for line in lines:
            large = "" if line.median_large != line.median_large else f"{line.median_large:.1%}"
            errors = f"{line.median:>9.1%}{large:>10}{line.worst:>+9.0%}"
            print(f"{line.name:<30}{line.points:>7}{errors} {format_size(line.worst_at):<9} {line.what}")
    for name, why in found.skipped.items():
        print(f"skipped {name}: {why}")
    print(f"median absolute error of time: {found.median:.1%} over {found.points} points of all sizes,")
    print(f"  {found.median_large:.1%} over {found.points_large} of at least 16 MiB")
    same, known = found.algorithms
    if known:
        print(f"algorithm as NCCL's in {same} of {known} points where it is known")


@app.command()
def bandwidth(
    file: Annotated[
        Path, typer.Argument(help="p2pBandwidthLatencyTest, nvbandwidth, bandwidthTest.", show_default=False)
    ],
    topology: Annotated[Path, typer.Option(help="The machine it ran on.", show_default=False)],
) -> None:
    """Measured copy rates between GPUs and with host memory, against the link figures of a topology."""
    from zsim.cluster.load import load_topology
    from zsim.validation.bandwidth import compare

    lines = compare(file, load_topology(topology))
    print(f"{'measured':>10}{'predicted':>11}{'error':>8}  pairs")
    for line in lines:
        print(f"{line.measured:>10.1f}{line.predicted:>11.1f}{line.median_error:>+8.0%}  {line.pairs:>5}  {line.title}")
    if not lines:
        print("nothing in it that a topology says anything about")


@app.command()
def published(
    files: Annotated[list[Path], typer.Argument(help="CSV files with the columns of validation/published.")],
    split: Annotated[str | None, typer.Option(help="Only rows of this split: fit or test.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Published training runs: error per row, source and GPU, peak memory, and which rows were refused and why."""
    from zsim.validation.published import predict, text, to_dict
    from zsim.validation.rows import read_rows

    rows = [row for file in files for row in read_rows(file)]
    predictions = [predict(row) for row in rows if split is None or row.split == split]
    if json:
        from json import dumps

        print(dumps(to_dict(predictions)))
    else:
        print(text(predictions))


@app.command()
def report(
    evidence: Annotated[Path, typer.Argument(help="The validation/ folder of a checkout.")] = Path("validation"),
) -> None:
    """Write REPORT.md into the evidence folder: all of the above over the evidence that the project keeps."""
    from zsim.validation.report import markdown

    text = "\n".join(markdown(evidence)) + "\n"
    (evidence / "REPORT.md").write_text(text, encoding="utf-8")
    print(f"wrote {evidence / 'REPORT.md'}")


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(help="A directory that capture wrote.", show_default=False)],
    profile: Annotated[
        Path | None, typer.Option(help="A profile of zsim calibrate; without, the base.", show_default=False)
    ] = None,
    runs: Annotated[str | None, typer.Option(help="Only these runs, by commas.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for a plot of real and simulated lanes per run.", show_default=False)
    ] = None,
) -> int:
    """Captured steps against predictions: time by phase, peak memory; number and size of collectives."""
    from zsim.validation.capture_read import runs as read_runs
    from zsim.validation.trace_compare import compare, draw

    same = True
    for run in read_runs(folder, tuple(runs.split(",")) if runs else ()):
        found = compare(run, profile)
        same = same and found.same_collectives is not False
        print(found.text())
        if out:
            out.mkdir(parents=True, exist_ok=True)
            draw(found, out / f"{run.name}.png")
    return 0 if same else 1
