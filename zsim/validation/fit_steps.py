"""Constants that only whole training steps show.

Alone, a kernel that moves bytes finds them in a cache and its result's pages in place; within a step each tensor is
new. So the share of the memory bandwidth comes from steps where a capture has them: what forward, backward and update
take, minus what everything else accounts for. One share for all runs; products, attention and collectives stay as
measured alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from zsim.api import load_scenario, simulate
from zsim.result.spec import Result
from zsim.validation.capture_read import Run
from zsim.validation.fit import mean
from zsim.validation.fit_profile import Calibration
from zsim.validation.trace_compare import phases

DEFAULT, UPDATE = "memory_efficiency.default", "memory_efficiency.optimizer"
_ARITHMETIC = {"matrix multiplication", "gemm", "attention"}
_ROUNDS = 4


def refine(calibration: Calibration, runs: Sequence[Run]) -> None:
    """Fit both shares to `runs`, by repeated simulation: each changes what the other sees only a little."""
    for _ in range(_ROUNDS):
        shares: dict[str, list[float]] = {DEFAULT: [], UPDATE: []}
        for run in runs:
            result = predicted(run, calibration)
            time, parts = result.time, phases(result)
            families = dict(time.compute_by_family)
            update = families.pop("optimizer", 0.0)
            moving = sum(seconds for family, seconds in families.items() if family not in _ARITHMETIC)
            for name, seconds, missing in (
                (DEFAULT, moving, run.forward_s + run.backward_s - parts["forward"] - parts["backward"]),
                (UPDATE, update, run.optimizer_s - parts["optimizer"]),
            ):
                # Where all else already takes longer than the measurement, the share cannot be told from it.
                wanted = seconds + missing
                if seconds > 0 and wanted > 0.1 * seconds:
                    shares[name].append(_value(calibration, name) * seconds / wanted)
        for name, found in shares.items():
            if found:
                calibration.determined[name] = mean(found)
    calibration.notes.append(f"memory efficiency within steps, from {', '.join(run.name for run in runs)}")


def _value(calibration: Calibration, name: str) -> float:
    if name in calibration.determined:
        return calibration.determined[name].value
    values = calibration.profile.memory_efficiency
    return values.get(name.rsplit(".", 1)[1], values["default"])


def predicted(run: Run, calibration: Calibration) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(yaml.safe_dump(calibration.document()), encoding="utf-8")
        return simulate(load_scenario(run.scenario, [f"profile={path}"]))
