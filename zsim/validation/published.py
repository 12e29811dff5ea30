"""Predicts published runs and says how far off it is: step time and peak memory, row by row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from zsim.cost.price import peak_flops
from zsim.cost.profile import Profile
from zsim.errors import InputError
from zsim.result.measure import own_profile, timed
from zsim.validation.evidence import setup_of
from zsim.validation.readings import contradiction
from zsim.validation.rows import Row, gpu_name

if TYPE_CHECKING:
    from zsim.scenario import Setup

GIB = 2**30
STATES = ("parameters", "master_weights", "optimizer_states")
ProfileOf = Callable[["Setup"], Profile]


@dataclass(frozen=True)
class Step:
    """A steady step (seconds) and the peaks of memory (bytes)."""

    step_s: float
    compute_s: float
    exposed_s: float
    host_s: float
    idle_s: float
    allocated: float
    reserved: float
    nvidia_smi: float  # reserved, with what lies outside PyTorch's allocator
    states: float  # of weights and optimizer, which stay from step to step
    fits: bool
    full: bool  # the allocator gives memory back in every step, which takes time that is not predicted


@dataclass(frozen=True)
class Prediction:
    """One row: what was measured, what is predicted, or why it was `refused`."""

    row: Row
    gpu: str
    split: str
    refused: str = ""
    measured_s: float | None = None
    step: Step | None = None
    assumed: tuple[str, ...] = ()
    contradiction: str = ""  # of the row's memory readings, which are not compared then

    @property
    def error(self) -> float | None:
        """Relative error of the step time, in percent; positive: predicted slower than measured."""
        if self.step is None or self.measured_s is None:
            return None
        return 100 * (self.step.step_s / self.measured_s - 1)

    @property
    def fullness(self) -> str:
        """By prediction: whether the allocator has to give memory back in every step."""
        return "full" if self.step and self.step.full else "not full"

    def memory_error(self, kind: str) -> float | None:
        """Percent, for "allocated" or "reserved", each against its own column."""
        measured = self.row.measured(f"peak_mem_gib_{kind}")
        if self.step is None or measured is None or self.contradiction:
            return None
        return 100 * (self.memory(kind) / (measured * GIB) - 1)

    def memory(self, kind: str) -> float:
        """Bytes predicted for a column: "reserved" is what nvidia-smi shows where the row's notes say so."""
        assert self.step is not None
        if kind == "reserved" and "nvidia-smi" in self.row.get("notes"):
            return self.step.nvidia_smi
        return self.step.allocated if kind == "allocated" else self.step.reserved


def simulate_step(setup: Setup, profile: Profile) -> Step:
    """The path of `zsim.api.simulate`, under any profile."""
    result = timed(setup, profile)
    time, gpu = result.time, result.gpu
    return Step(
        step_s=time.step_s,
        compute_s=time.compute_s,
        exposed_s=time.exposed_comm_s,
        host_s=time.host_s,
        idle_s=time.idle_s,
        allocated=gpu.peak_allocated_bytes,
        reserved=gpu.peak_reserved_bytes,
        nvidia_smi=gpu.nvidia_smi_bytes,
        states=sum(gpu.by_category.get(category, 0) for category in STATES),
        fits=gpu.fits,
        full=gpu.allocator_retries_per_step > 0,
    )


def predict(row: Row, profile_of: ProfileOf = own_profile) -> Prediction:
    """Simulate what `row` describes. A row that cannot be simulated comes back with the reason."""
    blank = Prediction(row, row.get("gpu"), "")
    try:
        blank = replace(blank, gpu=gpu_name(row), split=row.split, measured_s=row.step_s)
        for kind in ("allocated", "reserved"):
            row.measured(f"peak_mem_gib_{kind}")
        setup = setup_of(row)
        step = simulate_step(setup, profile_of(setup))
        against = contradiction(row, setup, step.states)
        return replace(blank, step=step, assumed=setup.assumptions, contradiction=against)
    except InputError as error:
        return replace(blank, refused=f"{error.field}: {error.message}" if error.field else error.message)


@dataclass(frozen=True)
class Score:
    """Errors of some rows, in percent. `bias` is the mean signed error."""

    rows: int
    mape: float
    median: float
    worst: float
    bias: float
    beyond_10: int

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Score | None:
        known = [error for error in errors if error is not None]
        if not known:
            return None
        sizes = [abs(error) for error in known]
        return cls(
            len(known),
            statistics.fmean(sizes),
            statistics.median(sizes),
            max(known, key=abs),
            statistics.fmean(known),
            sum(size > 10 for size in sizes),
        )


def scores(predictions: Sequence[Prediction], key: Callable[[Prediction], str]) -> dict[str, Score]:
    """Scores of the step time per value of `key`, in order of the values."""
    found = {
        value: Score.of(p.error for p in predictions if key(p) == value) for value in sorted(set(map(key, predictions)))
    }
    return {value: score for value, score in found.items() if score}


def baseline_seconds(setup: Setup) -> float:
    """One line of arithmetic: (6N + attention + recomputation) FLOPs over the peak."""
    from zsim.result.flops import per_micro_batch

    _, hardware = per_micro_batch(setup.tree)
    peak = peak_flops(setup.cluster.devices[0], setup.workload.dtype)
    return hardware * setup.plan.grad_accum / peak


def text(predictions: Sequence[Prediction]) -> str:
    """The report of `zsim validate published`."""
    lines = [f"{'row':<42}{'GPU':<22}{'GPUs':>5}{'measured':>11}{'predicted':>11}{'error':>8}  memory"]
    lines += [_line(prediction) for prediction in predictions if prediction.step]
    lines.append("")
    lines.append(f"{'step time':<44}{'rows':>5}{'MAPE':>8}{'median':>8}{'worst':>8}{'bias':>8}{'> 10 %':>8}")
    groups = {"all": scores(predictions, lambda p: "all")}
    for name, key in (
        ("source", lambda p: p.row.source),
        ("GPU", lambda p: p.gpu),
        ("split", lambda p: p.split),
        ("memory", lambda p: p.fullness),
    ):
        groups[name] = scores(predictions, key)
    for group, found in groups.items():
        lines += [_score_line(name if group == "all" else f"{group} {name}", score) for name, score in found.items()]
    for kind in ("allocated", "reserved"):
        memory = Score.of(prediction.memory_error(kind) for prediction in predictions)
        if memory:
            lines.append(_score_line(f"peak memory {kind}", memory))
    refused = [prediction for prediction in predictions if prediction.refused]
    lines += ["", f"predicted {len(predictions) - len(refused)} of {len(predictions)} rows"]
    lines += [f"  refused {prediction.row.get('id'):<42} {prediction.refused}" for prediction in refused]
    lines += [f"  memory not compared {p.row.id:<42} {p.contradiction}" for p in predictions if p.contradiction]
    wrong = [prediction.row.id for prediction in predictions if prediction.step and not prediction.step.fits]
    if wrong:
        lines.append(f"called out of memory, though they ran: {', '.join(wrong)}")
    return "\n".join(lines)


def _line(prediction: Prediction) -> str:
    row, error, step = prediction.row, prediction.error, prediction.step
    assert step is not None
    measured = f"{prediction.measured_s:>10.3f}s" if prediction.measured_s else f"{'-':>11}"
    memory = [
        f"{kind} {prediction.memory(kind) / GIB:.1f} GiB {found:+.1f} %"
        for kind in ("allocated", "reserved")
        if (found := prediction.memory_error(kind)) is not None
    ]
    return (
        f"{row.id:<42}{prediction.gpu:<22}{row.get('n_gpus'):>5}{measured}{step.step_s:>10.3f}s"
        f"{f'{error:+.1f} %' if error is not None else '-':>8}  {', '.join(memory)}"
    ).rstrip()


def _score_line(name: str, score: Score) -> str:
    return (
        f"{name:<44}{score.rows:>5}{score.mape:>7.2f}%{score.median:>7.2f}%{score.worst:>+7.1f}%{score.bias:>+7.2f}%"
        f"{score.beyond_10:>8}"
    )


def to_dict(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Plain data for --json."""

    def score(errors: Iterable[float | None]) -> dict[str, Any] | None:
        found = Score.of(errors)
        return asdict(found) if found else None

    def by(key: Callable[[Prediction], str]) -> dict[str, Any]:
        return {name: asdict(found) for name, found in scores(predictions, key).items()}

    return {
        "rows": [
            {
                "id": p.row.get("id"),
                "source": p.row.source,
                "gpu": p.gpu,
                "split": p.split,
                "refused": p.refused or None,
                "measured_s": p.measured_s,
                "predicted": asdict(p.step) if p.step else None,
                "error_pct": p.error,
                "allocated_error_pct": p.memory_error("allocated"),
                "reserved_error_pct": p.memory_error("reserved"),
                "memory_not_compared": p.contradiction or None,
                "assumed": list(p.assumed),
            }
            for p in predictions
        ],
        "all": score(p.error for p in predictions),
        "by_source": by(lambda p: p.row.source),
        "by_gpu": by(lambda p: p.gpu),
        "by_split": by(lambda p: p.split),
        "memory": {kind: score(p.memory_error(kind) for p in predictions) for kind in ("allocated", "reserved")},
        "coverage": {"rows": len(predictions), "refused": sum(bool(p.refused) for p in predictions)},
    }
