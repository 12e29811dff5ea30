"""Holds the host time of a Program against CPU seconds of real training steps (`validation.oracles.host_time`).

Host time is a sum of counts times constants. `counts` says how many of what a step has; `fit` finds the constants of
the measured machine from the runs marked so, and `compare` holds a profile against any of them. The kernels of these
runs are those of that CPU, so that no driver was called, and their collectives returned at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from zsim.cost.profile import HostCost, load_profile
from zsim.errors import InputError
from zsim.model.trace import trace
from zsim.program.lower import lower
from zsim.program.ops import FORWARDS, Collective, Compute, Copy, HostWork, Instruction, Launch
from zsim.validation.recording import PHASES, plan_of, setup

Counts = Counter[str]


@dataclass(frozen=True)
class Measured:
    """CPU seconds of one run by phase (forward, backward, step), and what zsim counts in each."""

    name: str
    use: str  # fit | test
    framework: str
    seconds: Mapping[str, float]
    counts: Mapping[str, Counts]

    @property
    def older(self) -> bool:
        """With another release of DeepSpeed."""
        return "_deepspeed_" in self.name

    @property
    def step_counted(self) -> bool:
        """Not where it is another release's, of which only hooks have constants of their own, nor where it holds the
        engine's steps between micro-steps, which nothing counts."""
        return not self.older and "accumulating" not in self.name


@dataclass(frozen=True)
class Line:
    name: str
    use: str
    phase: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """In percent."""
        return 100 * (self.predicted_s / self.measured_s - 1)


def read(path: Path) -> list[Measured]:
    """Raises InputError where the file is not what `validation.oracles.host_time` writes."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            header = json.loads(text)
            seconds = {phase: float(header["seconds"][phase]) for phase in ("forward", "backward", "step")}
            found.append(
                Measured(header["name"], header["config"]["use"], _framework(header), seconds, _counted(header))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"is no measured run: {error!r}", path, number) from None
    return found


def _framework(header: Mapping[str, Any]) -> str:
    if header["engine"] == "ds":
        return "zero3" if header["config"]["ds"]["zero_optimization"]["stage"] == 3 else "zero12"
    return "none" if header["world"] == 1 else str(header["engine"])


def _counted(header: Mapping[str, Any]) -> dict[str, Counts]:
    """Of the last step that zsim tells apart."""
    model, _, workload = setup(header)
    workload = replace(workload, device="cpu")
    program = lower(model, trace(model, workload), plan_of(header), workload)
    return counts(program.steps[-1])


def counts(step: Iterable[Instruction]) -> dict[str, Counts]:
    """By phase, under the names of `HostCost`'s fields and of the entries of its `calls` and `hooks`."""
    found: dict[str, Counts] = {phase: Counter() for phase in ("forward", "backward", "step")}
    for instruction in step:
        if not isinstance(instruction, Launch):
            continue
        op = instruction.op
        work, into = op.work, found[PHASES[op.phase]]
        if isinstance(work, Compute):
            launches = sum(kernel.launches for kernel in work.kernels)
            into["launch" if op.phase in FORWARDS else "backward_launch"] += launches
            into.update(work.calls._asdict())
        elif isinstance(work, HostWork):
            into[work.label] += work.count
        elif isinstance(work, Collective):
            into["collective"] += 1
        elif isinstance(work, Copy):
            into["copy"] += 1
    return found


def constants(cost: HostCost) -> dict[str, float]:
    """Seconds by kind on the measured machine: no driver, and collectives that are a call and no more."""
    own = {"launch": cost.launch, "backward_launch": cost.backward_launch, **cost.calls, **cost.hooks}
    return KNOWN | own


# A call of torch.distributed with the fake process group; offload is not among the runs.
KNOWN = {"collective": 20e-6, "copy": 0.0}


def seconds(counted: Counts, known: Mapping[str, float]) -> float:
    return sum(n * known[kind] for kind, n in counted.items())


def compare(runs: Sequence[Measured], known: Mapping[str, float]) -> list[Line]:
    return [
        Line(run.name, run.use, phase, measured, seconds(run.counts[phase], known))
        for run in runs
        for phase, measured in run.seconds.items()
    ]


def stood_for(runs: Sequence[Measured], known: Mapping[str, float], use: str, older: bool) -> list[Line]:
    """Of these runs the phases that the constants stand for."""
    chosen = {run.name: run for run in runs if run.use == use and run.older == older}
    lines = compare(list(chosen.values()), known)
    return [line for line in lines if line.phase != "step" or chosen[line.name].step_counted]


# Frameworks' hooks that their runs cannot tell apart: those before and after a unit share what a pass adds per unit.
LIKE = {
    f"{name} post-{way}": f"{name} pre-{way}" for name in ("fsdp1", "fsdp2") for way in ("forward", "backward")
}  # fmt: skip


def fit(runs: Sequence[Measured]) -> dict[str, float]:
    """Constants from the runs of use "fit": first those of the bare model, then what each framework adds.

    What ZeRO-3 spends per gathered parameter and per gradient cannot be told from its hooks in these runs, as the
    models' proportions are too much alike: a gather is 50 us (measured in itself, around the gathers inside the hook),
    a gradient's hook what it is in ZeRO-1 and 2 with what they do for its bucket.
    """
    runs = [run for run in runs if run.use == "fit"]
    found = dict(KNOWN)
    for framework in ("none", "ddp", "fsdp1", "fsdp2", "zero12", "zero3"):
        if framework == "zero3":
            found["zero3 gather"] = 50e-6
            for kind in [kind for kind in found if kind.startswith("zero12 gradient hook")]:
                found[kind.replace("zero12", "zero3")] = found[kind] + found[kind.replace("gradient hook", "bucket")]
        found |= _least_squares([run for run in runs if run.framework == framework], found)
    return found


def _least_squares(runs: Iterable[Measured], known: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each kind that is not `known`, none negative: the squares of relative errors are least."""
    import numpy as np
    from scipy.optimize import nnls

    rows = [
        (run.seconds[phase], counted)
        for run in runs
        for phase, counted in run.counts.items()
        if phase != "step" or run.step_counted
    ]
    kinds = sorted({LIKE.get(kind, kind) for _, counted in rows for kind, n in counted.items() if n} - set(known))
    shares, rest = np.zeros((len(rows), len(kinds))), np.ones(len(rows))
    for row, (measured, counted) in enumerate(rows):
        for kind, n in counted.items():
            if kind in known:
                rest[row] -= n * known[kind] / measured
            elif n:
                shares[row, kinds.index(LIKE.get(kind, kind))] += n / measured
    found = dict(zip(kinds, nnls(shares, rest)[0].tolist(), strict=True))
    return found | {kind: found[like] for kind, like in LIKE.items() if like in found}


def section(path: Path) -> Iterator[str]:
    """Markdown lines: errors of the default profile by run and phase, and its constants beside those fitted anew."""
    runs = read(path)
    held = constants(load_profile("generic").host)
    lines = compare(runs, held)
    yield (
        "CPU time of the thread that issues a step of real eager training, tiny models on one core, against the counts "
        "of the Program times the constants of `profiles/stacks.yaml`. In percent; runs marked `test` are of other "
        "depths, models and mixtures than those that the constants were fitted to. What a step of another release of "
        "DeepSpeed takes is shown and not counted. "
        "`zsim validate host-time validation/measured/host_time.jsonl`\n"
    )
    yield "| runs | phases | mean error | worst |\n|---|--:|--:|--:|"
    for use, older in (("fit", False), ("test", False), ("fit", True), ("test", True)):
        errors = [line.error for line in stood_for(runs, held, use, older)]
        title = f"{use}, other releases of DeepSpeed" if older else use
        yield f"| {title} | {len(errors)} | {fmean(map(abs, errors)):.1f} | {max(errors, key=abs):+.1f} |"
    yield "\n| run | use | forward | | backward | | step | |\n|---|---|--:|--:|--:|--:|--:|--:|"
    for run in runs:
        own: Callable[[str], Line] = {line.phase: line for line in lines if line.name == run.name}.__getitem__
        cells = [f"{1e3 * own(phase).measured_s:.2f} ms | {own(phase).error:+.1f}" for phase in run.seconds]
        yield f"| {run.name} | {run.use} | {' | '.join(cells)} |"
    yield "\n| constant, us | used | fitted |\n|---|--:|--:|"
    for kind, value in fit(runs).items():
        yield f"| {kind} | {1e6 * held[kind]:.1f} | {1e6 * value:.1f} |"
