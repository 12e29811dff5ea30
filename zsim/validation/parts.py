"""Runs whose sources time the parts of a step: forward, backward with recomputation, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from zsim.api import simulate
from zsim.result.spec import Result

PHASES = {"forward": ("forward",), "backward": ("backward", "recompute"), "update": ("optimizer",)}


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a run's step."""

    run: str
    source: str
    name: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Percent; positive: predicted slower than measured."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def parts(folder: Path) -> Iterator[Part]:
    """Each part of each run of `parts.yaml`, in order, and the step as a whole."""
    for entry in yaml.safe_load((folder / "parts.yaml").read_text(encoding="utf-8")):
        result = simulate(folder / entry["scenario"])
        predicted, measured = split(result), dict(entry["measured_s"])
        for name, seconds in [*measured.items(), ("step", sum(measured.values()))]:
            whole = result.time.step_s if name == "step" else predicted[name]
            yield Part(result.name, entry["source"], name, float(seconds), whole)


def split(result: Result) -> dict[str, float]:
    """Seconds of each part of the steady step, as timers that synchronize the device see them.

    A part ends when the last of its ops does, on whichever lane; what is left of the step is the update's.
    """
    timeline = result.timeline
    steady = timeline.steps[timeline.steady_step]
    records = [record for record in timeline.ops if record.step == steady.step and record.rank == steady.rank]
    found, before = {}, steady.start_s
    for name, phases in PHASES.items():
        last = max((record.end_s for record in records if record.op.phase in phases), default=before)
        end = steady.end_s if name == "update" else max(before, last)
        found[name], before = end - before, end
    return found
