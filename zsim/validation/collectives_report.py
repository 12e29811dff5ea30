"""What `zsim validate collectives` says: per set, overall, and how often the algorithm is NCCL's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.cluster.load import load_topology
from zsim.cluster.spec import Cluster
from zsim.cost.bench import seconds_alone
from zsim.cost.collectives import transfer
from zsim.errors import InputError
from zsim.validation import nccl_log
from zsim.validation.collectives import (
    LARGE,
    LAUNCH_PER_GPU,
    Compared,
    Comparison,
    Point,
    compare,
    median_error,
    read_points,
)

# Below this size NCCL's choice is often another one than the plateau's, which is what notes name.
NAMED_FROM = 64 * 2**20


@dataclass(frozen=True)
class SetLine:
    """One set. Errors are of time, relative; NaN where there is no point."""

    name: str
    what: str
    points: int
    median: float
    median_large: float
    worst: float
    worst_at: int  # bytes


@dataclass(frozen=True)
class Report:
    """Medians over the points of quality ok (`_large`: of at least 16 MiB)."""

    sets: list[SetLine]
    points: int
    points_large: int
    median: float
    median_large: float
    algorithms: tuple[int, int]  # (as NCCL's, known)
    skipped: dict[str, str]
    other: list[SetLine]  # sets of another quality


def report(path: str | Path, topology: str | Path | None = None, op: str | None = None) -> Report:
    """Compare a CSV of points, or a log of nccl-tests with the machine it ran on. Raises InputError."""
    path = Path(path)
    if path.suffix == ".csv":
        if topology:
            raise InputError("a CSV of points describes its machines itself", field="--topology")
        found = compare(read_points(path))
    else:
        tables = nccl_log.read(path)
        if topology is None:
            raise InputError(
                "a log does not say which machine it ran on", field="--topology", accepted="a topology file"
            )
        found = compare_log(path.name, tables, load_topology(topology), op)
    if not found.compared:
        raise InputError(
            "nothing in it can be compared",
            path,
            notes=tuple(f"{name}: {why}" for name, why in found.skipped.items()),
        )
    return summarize(found)


def compare_log(file: str, tables: Sequence[nccl_log.Table], cluster: Cluster, op: str | None) -> Comparison:
    """Every table of a log named `file` against the first ranks of `cluster`."""
    result = Comparison()
    for number, table in enumerate(tables, 1):
        name = f"{file}#{number}"
        kind, ranks = op or table.op, table.ranks or cluster.world_size
        if kind is None:
            result.skipped[name] = "the log does not name the collective (--op)"
            continue
        if not 2 <= ranks <= cluster.world_size:
            result.skipped[name] = f"{ranks} ranks on a machine of {cluster.world_size}"
            continue
        group = (tuple(range(ranks)),)
        for row in table.rows:
            one = transfer(cluster, kind, row.nbytes, group)
            point = Point(name, cluster.devices[0].name, ranks, cluster.nodes, "", "", kind, row.nbytes, row.seconds)
            launch = LAUNCH_PER_GPU * (table.gpus_per_process if table.gpus_per_process > 1 else 0)
            result.compared.append(Compared(point, max(seconds_alone(cluster, one), launch), one.algorithm))
    return result


def summarize(result: Comparison) -> Report:
    """Medians by set and over all."""
    good = [one for one in result.compared if one.point.quality == "ok"]
    large = [one for one in good if one.point.nbytes >= LARGE]
    lines = {name: _line(name, compared) for name, compared in result.sets().items()}
    trusted = {one.point.set_id for one in good}
    known = [(one.algorithm, algorithm) for one in good if (algorithm := named_algorithm(one.point))]
    return Report(
        sets=[line for name, line in lines.items() if name in trusted],
        points=len(good),
        points_large=len(large),
        median=median_error(good),
        median_large=median_error(large),
        algorithms=(sum(chosen.startswith(named + "/") for chosen, named in known), len(known)),
        skipped=result.skipped,
        other=[line for name, line in lines.items() if name not in trusted],
    )


def _line(name: str, compared: list[Compared]) -> SetLine:
    point = compared[0].point
    worst = max(compared, key=lambda one: abs(one.error))
    return SetLine(
        name,
        f"{point.kind}, {point.gpus} x {point.gpu}" + (f" on {point.nodes} nodes" if point.nodes > 1 else ""),
        len(compared),
        median_error(compared),
        median_error(one for one in compared if one.point.nbytes >= LARGE),
        worst.error,
        worst.point.nbytes,
    )


def named_algorithm(point: Point) -> str | None:
    """The algorithm that the note says NCCL chose, if it does."""
    if point.nbytes < NAMED_FROM:
        return None
    switches = re.search(r"switches to NVLS at (\d+)G", point.note)
    if switches:
        return "nvls" if point.nbytes >= int(switches.group(1)) * 2**30 else "ring"
    if re.search(r"\boff\b|forced", f"{point.net} {point.note}"):
        return None  # an override, not a choice
    named = re.search(r"(?:^|, )(NVLSTree|NVLS|Ring|Tree)\b", point.note)
    return {"NVLSTree": "nvls_tree"}.get(named.group(1), named.group(1).lower()) if named else None


def to_markdown(found: Report) -> str:
    """The section of validation/REPORT.md: figures overall, then every set, worst first."""
    same, known = found.algorithms
    lines = [
        "## Collectives",
        "",
        f"Median absolute error of time over {found.points} measured points: **{found.median:.1%}**; over the "
        f"{found.points_large} of at least 16 MiB: **{found.median_large:.1%}**.",
        f"The algorithm is the one NCCL chose in {same} of {known} points where it is known.",
        "",
        "| set | what | points | median | at least 16 MiB | worst point |",
        "|---|---|--:|--:|--:|---|",
    ]
    for line in sorted(found.sets, key=lambda line: -line.median):
        large = "" if line.median_large != line.median_large else f"{line.median_large:.1%}"
        worst = f"{line.worst:+.0%} at {format_size(line.worst_at)}"
        lines.append(f"| {line.name} | {line.what} | {line.points} | {line.median:.1%} | {large} | {worst} |")
    if found.other:
        named = ", ".join(f"{line.name} ({line.median:.0%})" for line in found.other)
        lines += ["", f"Not counted, of doubtful quality: {named}."]
    if found.skipped:
        named = ", ".join(f"{name} ({why})" for name, why in found.skipped.items())
        lines += ["", f"Not predictable from its description: {named}."]
    return "\n".join(lines) + "\n"


def format_size(nbytes: int) -> str:
    """ "16 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
