"""What a capture recorded of its training runs."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import inf
from pathlib import Path

from zsim.errors import InputError


@dataclass(frozen=True)
class Run:
    """A run of a capture over its rounds. The parts of a step are those of the fastest round.

    Times in seconds: on CPUs core seconds, which other programs on the machine do not stretch.
    """

    name: str  # ddp_tiny
    scenario: Path
    rounds: tuple[float, ...]  # median step of each round, in order
    wall: tuple[float, ...]  # likewise by the clock on the wall
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int | None
    traces: tuple[Path, ...]

    @property
    def best_s(self) -> float:
        """Disturbances only add: the fastest round is the least disturbed one."""
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """Slowest over fastest round, minus one."""
        return max(self.rounds) / min(self.rounds) - 1


def runs(folder: Path, only: tuple[str, ...] = ()) -> list[Run]:
    """The runs of a capture, in the order they were made; `only` names some. Raises InputError."""
    steps = folder / "steps.csv"
    if not steps.exists():
        raise InputError("is no capture with training runs: it lacks steps.csv", folder, accepted="a capture")
    lines: dict[str, list[dict[str, str]]] = {}
    for row in csv_rows(steps):
        lines.setdefault(f"{row.get('strategy')}_{row.get('model')}", []).append(row)
    if unknown := [name for name in only if name not in lines]:
        raise InputError(f"has no run {unknown[0]!r}", steps, accepted=", ".join(lines))
    return [_run(folder, name, rows) for name, rows in lines.items() if not only or name in only]


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Rows by column. Raises InputError for what is no text."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {error}", path) from None


def _run(folder: Path, name: str, rows: list[dict[str, str]]) -> Run:
    try:
        clock = "_core_s" if rows[0].get("step_core_s") else "_s"
        best = min(rows, key=lambda row: float(row["step" + clock]))
        rounds = tuple(float(row["step" + clock]) for row in rows)
        if not all(0 < seconds < inf for seconds in rounds):
            raise ValueError(f"steps of {min(rounds)} to {max(rounds)} seconds")
        return Run(
            name=name,
            scenario=folder / f"run_{name}.yaml",
            rounds=rounds,
            wall=tuple(float(row["step_s"]) for row in rows),
            forward_s=float(best["forward" + clock]),
            backward_s=float(best["backward" + clock]),
            optimizer_s=float(best["optimizer" + clock]),
            peak_bytes=int(best["peak_bytes"]) if best["peak_bytes"] else None,
            traces=tuple(sorted(folder.glob(f"trace_{name}_rank*.json.gz"))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"run {name} is damaged: {error!r}", folder / "steps.csv") from None
