"""Fits the profiles' constants to published step times: few of them, within bounds a hardware engineer would sign.

A step is the time of its kernels alone, which the constants give directly, plus everything else (collectives that show,
host, interference), which only a simulation gives. So: simulate all `fit` rows, fit the constants by least squares with
everything else held as simulated, and repeat until both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zsim.cost import profile as profiles
from zsim.cost.price import Price
from zsim.cost.profile import Document, Profile
from zsim.errors import InputError
from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.result.accuracy import HELD_UP, waits_for_host
from zsim.validation.fit_cases import Case, Reader, cases
from zsim.validation.rows import Row

ROUNDS = 3
ROBUST_SCALE = 0.02  # errors beyond 2 % pull less and less: single odd rows must not set a constant
DIGITS = 3  # of a fitted constant; more would be noise
FULL = "GPUs as full as this one, whose allocator gives memory back in every step"
WAITING = f"steps that wait for a host of unknown speed for {HELD_UP:.0%} of their time and more, as this one does"


@dataclass(frozen=True)
class Knob:
    """A constant to fit: the document it stands in, its path there ("gemm.efficiency"), and what is physical.

    It acts on every device whose document builds on that one and does not say it itself.
    """

    document: str
    path: str
    low: float
    high: float


KNOBS = (
    # Collectives take 16 to 32 of 108 or 132 SMs, and memory bandwidth and power beside that.
    Knob("generic", "collective_slowdown", 1.05, 1.8),
    Knob("generic", "memory_efficiency.default", 0.5, 0.95),  # a copy reaches 0.79 to 0.95
    Knob("a100-sxm-80gb", "gemm.efficiency", 0.5, 0.87),  # 0.87: the best of a search over shapes
    Knob("a100-sxm-80gb", "attention.flash1.forward", 0.2, 0.73),
    Knob("a100-sxm-80gb", "attention.flash1.backward", 0.2, 0.65),
    # Not its forward too: with both free the one runs into its bound.
    Knob("a100-sxm-80gb", "attention.triton.backward", 0.2, 0.65),
    Knob("a100-sxm-80gb", "attention.triton.small_head", 0.7, 1.4),
    Knob("h100-sxm", "gemm.efficiency", 0.5, 0.80),
    Knob("h100-sxm", "attention.flash1.forward", 0.1, 0.40),
    Knob("h100-sxm", "attention.flash1.backward", 0.1, 0.35),
    Knob("h100-sxm-96gb", "gemm.efficiency", 0.4, 0.80),
)


def fit(
    rows: Sequence[Case],
    knobs: Sequence[Knob] = KNOBS,
    base: Reader | None = None,
    rounds: int = ROUNDS,
    price: type[Price] = Price,
) -> dict[Knob, float]:
    """The constants that bring the predicted steps of `rows` nearest to the measured ones, rounded.

    `base`: the documents that the constants are written over (None: the package's, without fitted values).
    """
    import numpy as np
    from scipy.optimize import least_squares

    base = base or unfitted
    measured = np.array([case.measured_s for case in rows])
    point = np.array([min(max(_value(knob, base), knob.low), knob.high) for knob in knobs])
    bounds = [knob.low for knob in knobs], [knob.high for knob in knobs]
    for _ in range(rounds):
        now = _built(rows, with_values(base, dict(zip(knobs, point, strict=True))))
        simulated = np.array([case.simulate(now[case.device, case.setup.profile], price) for case in rows])
        rest, stretch = simulated[:, 0] - _alone(rows, now), simulated[:, 1]
        used = _excess(rows, now)

        def residuals(values: Any, rest: Any = rest, stretch: Any = stretch, used: Any = used) -> Any:
            trial = _built(rows, with_values(base, dict(zip(knobs, map(float, values), strict=True))))
            # Kernels stretch in proportion to the excess over 1.
            changed = stretch * (_excess(rows, trial) / used - 1)
            return np.log((rest + changed + _alone(rows, trial)) / measured)

        found = least_squares(
            residuals, point, bounds=bounds, loss="soft_l1", f_scale=ROBUST_SCALE, x_scale=point, diff_step=1e-4
        )
        point = np.array([float(f"{value:.{DIGITS}g}") for value in found.x])
    return {knob: float(value) for knob, value in zip(knobs, point, strict=True)}


def _built(rows: Sequence[Case], read: Reader) -> dict[tuple[str, str], Profile]:
    kinds = {(case.device, case.setup.profile) for case in rows}
    return {(device, stack): profiles.build(device, stack, read) for device, stack in kinds}


def _alone(rows: Sequence[Case], built: Mapping[tuple[str, str], Profile]) -> Any:
    import numpy as np

    return np.array([case.compute_alone(built[case.device, case.setup.profile]) for case in rows])


def _excess(rows: Sequence[Case], built: Mapping[tuple[str, str], Profile]) -> Any:
    import numpy as np

    return np.array([built[case.device, case.setup.profile].collective_slowdown - 1 for case in rows])


def unfitted(name: str) -> Document | None:
    """The package's documents as written by hand."""
    return None if name == "fitted" else profiles.read(name)


def without_device(document: str) -> Reader:
    """Documents in which devices that build on `document` have none of their own."""

    def read(name: str) -> Document | None:
        found = unfitted(name)
        chain, here = [name], found
        while here is not None and (above := here.get("like")):
            chain.append(above)
            here = unfitted(above)
        return None if document in chain else found

    return read


def with_values(base: Reader, values: Mapping[Knob, float]) -> Reader:
    """`base` with a document of fitted values."""
    fitted: dict[str, Any] = {}
    for knob, value in values.items():
        place = fitted.setdefault(knob.document, {})
        *outer, last = knob.path.split(".")
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return lambda name: {"values": fitted} if name == "fitted" else base(name)


FAMILIES = ("a100-sxm-80gb", "h100-sxm")  # documents that fitted devices build on: left out one at a time


@dataclass(frozen=True)
class Calibration:
    """Fitted constants and what they were held against. `left_out`: errors of devices that the fit did not see."""

    values: Mapping[Knob, float]
    fit_errors: Mapping[str, float]  # row id -> percent
    test_errors: Mapping[str, float]
    left_out: Mapping[str, float]
    evidence: Mapping[str, Sequence[Mapping[str, Any]]]
    full_memory: Mapping[str, Any] | None
    held_up: Mapping[str, Any] | None
    float8: Mapping[str, Mapping[str, Any]]
    train: Sequence[Case]
    test: Sequence[Case]

    def document(self) -> dict[str, Any]:
        """What `profiles/fitted.yaml` holds."""
        fit_mape, test_mape = (_mape(errors.values()) for errors in (self.fit_errors, self.test_errors))
        values = (with_values(unfitted, self.values)("fitted") or {})["values"]
        return {
            "provenance": f"zsim calibrate published: {len(self.values)} constants, {len(self.fit_errors)} fit rows of "
            f"validation/published (MAPE {fit_mape:.2f} %), held against {len(self.test_errors)} test rows "
            f"(MAPE {test_mape:.2f} %)",
            "values": values,
            "evidence": dict(self.evidence),
            "full_memory": self.full_memory,
            "held_up": self.held_up,
            "float8": dict(self.float8),
        }


def calibrate(rows: Sequence[Row], holdout: Sequence[Row] = ()) -> Calibration:
    """Fit on the rows marked `fit`, measure on the others, and on each family of devices with its rows left out.

    `holdout`: rows that count as evidence for what error to expect, and for nothing else, as do those marked `fit` on
    devices that have no constant to fit. Those in float8 count by themselves.
    """
    known = cases(rows)
    if not known:
        raise InputError("no row can be simulated and has a step time", rows[0].file if rows else None)
    train = [case for case in known if case.row.split == "fit"]
    test = [case for case in known if case.row.split != "fit"]
    fitted = fitted_on(train)
    values = fit(fitted)
    read = with_values(unfitted, values)
    test_errors = errors(test, read)
    left_out: dict[str, float] = {}
    for family in FAMILIES:
        left_out |= leave_out(family, train, known)
    evidence = {
        "generic": [_evidence("GPUs of which no run was fitted", [c for c in known if c.row.id in left_out], left_out)]
    }
    held = cases(holdout)
    low = [case for case in held if case.setup.workload.float8]
    unseen = [case for case in (*held, *train) if case not in low and case not in fitted]
    found = test_errors | errors(unseen, read)
    for group in sorted({_group(case) for case in (*test, *unseen)}):
        if group.document == "generic":
            continue  # one device's error says nothing of all others without a profile
        same = [case for case in (*test, *unseen) if _group(case) == group]
        program = same[0].row["framework"]
        program += f" ({group.program})" if group.program not in program else ""
        where = {"device": same[0].device, "framework": program}
        evidence.setdefault(group.document, []).append(_evidence(group.source, same, found) | where)
    built = _built((*test, *unseen), read)
    full, held_up = [], []
    for case in (*test, *unseen):
        report = case.report(built[case.device, case.setup.profile])
        if report.gpu.allocator_retries_per_step > 0:
            full.append(case)
        if waits_for_host(report.time):
            held_up.append(case)
    return Calibration(
        values=values,
        fit_errors=errors(train, read),
        test_errors=test_errors,
        left_out=left_out,
        evidence=evidence,
        full_memory=_evidence(FULL, full, found) if full else None,
        held_up=_evidence(WAITING, held_up, found) if held_up else None,
        float8=float8_evidence(low, errors(low, read)),
        train=train,
        test=test,
    )


def float8_evidence(low: Sequence[Case], found: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By kind of GPU what the errors `found` of runs in float8 say."""
    kinds = sorted({profiles.kind(case.device) for case in low})
    return {
        kind: _evidence("published runs in float8", [c for c in low if profiles.kind(c.device) == kind], found)
        for kind in kinds
    }


def leave_out(family: str, train: Sequence[Case], known: Sequence[Case]) -> dict[str, float]:
    """Errors of the rows on a family of devices under the generic profile, fitted on the other devices alone."""
    base = without_device(family)
    others = [case for case in fitted_on(train) if family not in _chain(case)]
    knobs = [knob for knob in KNOBS if knob.document == "generic" or base(knob.document) is not None]
    read = with_values(base, fit(others, knobs, base, rounds=2))
    return errors([case for case in known if family in _chain(case)], read)


def errors(rows: Sequence[Case], read: Reader, price: type[Price] = Price) -> dict[str, float]:
    """Row id -> error of the simulated step in percent."""
    built = _built(rows, read)
    return {
        case.row.id: 100 * (case.step_s(built[case.device, case.setup.profile], price) / case.measured_s - 1)
        for case in rows
    }


def fitted_on(rows: Sequence[Case]) -> list[Case]:
    """Of the cases those on whose devices there is a constant to fit."""
    own = {knob.document for knob in KNOBS if knob.document != "generic"}
    return [case for case in rows if own & set(_chain(case))]


def _chain(case: Case) -> list[str]:
    """The documents that the case's device is described by, without the generic one."""
    name: str | None = profiles.slug(case.device)
    chain = []
    while name is not None and (document := unfitted(name)) is not None:
        chain.append(name)
        name = document.get("like")
    return chain


def _kind(case: Case) -> tuple[str, str]:
    return (_chain(case) or ["generic"])[0], case.setup.profile


_PROGRAMS = {DdpPlan: "DDP", DeepSpeedPlan: "DeepSpeed", Fsdp1Plan: "FSDP1", Fsdp2Plan: "FSDP2"}


class _Group(NamedTuple):
    """Rows whose errors are stated together."""

    document: str
    stack: str
    source: str
    program: str
    adapters: bool


def _group(case: Case) -> _Group:
    return _Group(*_kind(case), case.row.source, _PROGRAMS[type(case.setup.plan)], case.setup.model.tuning is not None)


def _evidence(source: str, rows: Sequence[Case], found: Mapping[str, float]) -> dict[str, Any]:
    values = [found[case.row.id] for case in rows]
    gpus = [case.setup.cluster.world_size for case in rows]
    return {
        "source": source,
        "mape": round(_mape(values), 2),
        "bias": round(sum(values) / len(values), 2),
        "rows": len(values),
        "min_gpus": min(gpus),
        "max_gpus": max(gpus),
        "min_tokens": min(case.setup.workload.micro_batch * case.setup.workload.seq_len for case in rows),
        "max_tokens": max(case.setup.workload.micro_batch * case.setup.workload.seq_len for case in rows),
        "adapters": all(case.setup.model.tuning is not None for case in rows),
    }


def _mape(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / len(sizes)


def _value(knob: Knob, read: Reader) -> float:
    value: Any = profiles.document(knob.document, read)
    for part in knob.path.split("."):
        value = value[part]
    return float(value)
