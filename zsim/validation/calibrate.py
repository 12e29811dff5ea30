"""Fits the profiles' constants to published step times: few of them, within bounds a hardware engineer would sign.

A step is the time of its kernels alone, which the constants give directly, plus everything else (collectives that show,
host, interference), which only a simulation gives. So: simulate all `fit` rows, fit the constants by least squares with
everything else held as simulated, and repeat until both agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from zsim.cluster.classes import rank_classes
from zsim.cost.price import Price, kernel_seconds, straggling
from zsim.cost.profile import Profile
from zsim.engine.simulator import run
from zsim.errors import InputError
from zsim.model.kernels import Kernel
from zsim.program.lower import lower
from zsim.program.ops import COMPUTE, Compute, Launch, Program
from zsim.scenario import Setup
from zsim.validation.evidence import Row, setup_of
from zsim.validation.published import extrapolate, micro_steps

ROUNDS = 4
ROBUST_SCALE = 0.03  # errors beyond 3 % pull less and less: single odd rows must not set a constant


@dataclass(frozen=True)
class Knob:
    """A constant to fit: where it stands in the profile ("gemm.efficiency"), and what is physical."""

    path: str
    low: float
    high: float


KNOBS = (
    Knob("gemm.efficiency", 0.35, 0.95),
    Knob("attention.flash.forward", 0.15, 0.80),
    Knob("attention.flash.backward", 0.15, 0.80),
    Knob("memory_efficiency.default", 0.50, 0.95),
)


@dataclass(frozen=True)
class Case:
    """A fit row with its kernels counted. `runs`: the programs whose steps give the row's step (`micro_steps`)."""

    row: Row
    setup: Setup
    runs: Sequence[tuple[Setup, Program]]
    kernels: Mapping[Kernel, float]
    measured_s: float

    def compute_alone(self, profile: Profile) -> float:
        device = self.setup.cluster.devices[0]
        slowest = straggling(self.setup.cluster.world_size, profile.spread)
        return slowest * sum(count * kernel_seconds(kernel, device, profile) for kernel, count in self.kernels.items())

    def simulate(self, profile: Profile) -> float:
        """Seconds of the steady step."""
        times = []
        for setup, program in self.runs:
            timeline = run(program, rank_classes(setup.cluster), Price(setup.cluster, profile))
            steady = timeline.steps[timeline.steady_step]
            times.append(steady.end_s - steady.start_s)
        return extrapolate(self.setup, times)


def case_of(row: Row) -> Case | None:
    """None where the row cannot be simulated or has no step time."""
    try:
        setup, measured = setup_of(row), row.step_s
        runs = [(part, lower(part.model, part.tree, part.plan, part.workload)) for part in micro_steps(setup)]
    except InputError:
        return None
    if measured is None:
        return None
    counts = [_kernels(program) for _, program in runs]
    kernels = {kernel: extrapolate(setup, [count[kernel] for count in counts]) for kernel in counts[-1]}
    return Case(row, setup, runs, kernels, measured)


def _kernels(program: Program) -> Counter[Kernel]:
    """Kernels of a steady step on the compute lane."""
    kernels: Counter[Kernel] = Counter()
    ops = [instruction.op for instruction in program.steps[-1] if isinstance(instruction, Launch)]
    for op in ops:
        if op.lane == COMPUTE and isinstance(op.work, Compute):
            kernels.update(op.work.kernels)
    return kernels


@dataclass(frozen=True)
class Fit:
    values: Mapping[str, float]
    profile: Profile
    errors: Sequence[float]  # percent, of the fit rows


def fit(rows: Sequence[Case], start: Profile, knobs: Sequence[Knob] = KNOBS) -> Fit:
    """The constants that bring the predicted steps of `rows` (all of one device) nearest to the measured ones."""
    import numpy as np
    from scipy.optimize import least_squares

    profile, measured = start, np.array([case.measured_s for case in rows])
    point = np.array([min(max(read(start, knob.path), knob.low), knob.high) for knob in knobs])
    for _ in range(ROUNDS):
        rest = np.array([case.simulate(profile) - case.compute_alone(profile) for case in rows])

        def residuals(values: Any, rest: Any = rest) -> Any:
            trial = write(start, {knob.path: float(value) for knob, value in zip(knobs, values, strict=True)})
            return np.log((rest + [case.compute_alone(trial) for case in rows]) / measured)

        bounds = [knob.low for knob in knobs], [knob.high for knob in knobs]
        found = least_squares(residuals, point, bounds=bounds, loss="soft_l1", f_scale=ROBUST_SCALE, x_scale=point)
        point = np.array([float(f"{value:.4g}") for value in found.x])  # what the file will say
        profile = write(start, {knob.path: float(value) for knob, value in zip(knobs, point, strict=True)})
    errors = [100 * (case.simulate(profile) / case.measured_s - 1) for case in rows]
    return Fit({knob.path: float(value) for knob, value in zip(knobs, point, strict=True)}, profile, errors)


def read(profile: Profile, path: str) -> float:
    """The constant at a dotted path of attributes and keys."""
    value: Any = profile
    for part in path.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return float(value)


def write(profile: Profile, values: Mapping[str, float]) -> Profile:
    """`profile` with the constants at these paths replaced."""
    for path, value in values.items():
        profile = _write(profile, path.split("."), value)
    return profile


def _write(value: Any, path: Sequence[str], new: float) -> Any:
    if not path:
        return new
    if isinstance(value, Mapping):
        return {**value, path[0]: _write(value[path[0]], path[1:], new)}
    assert is_dataclass(value)
    return replace(value, **{path[0]: _write(getattr(value, path[0]), path[1:], new)})  # type: ignore[type-var]
