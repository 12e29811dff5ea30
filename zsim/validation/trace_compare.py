"""The steps of a capture against what a profile predicts for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.api import load_scenario, simulate
from zsim.program.ops import COMPUTE, Collective
from zsim.result.spec import Result
from zsim.validation.capture_read import Run
from zsim.validation.kineto import read
from zsim.validation.trace import COMMUNICATION, COPY, Trace

# gloo has no reduce-scatter: it reduces the whole buffer and keeps a part.
_AS_TRACED = {"gloo": {"reduce_scatter": "all_reduce", "reduce": "all_reduce"}}


@dataclass(frozen=True)
class Comparison:
    """Seconds measured (fastest round) and predicted; collectives of a step as (kind, bytes) -> number."""

    run: Run
    result: Result
    measured: dict[str, float]
    predicted: dict[str, float]
    traced: Counter[tuple[str, int]] | None
    simulated: Counter[tuple[str, int]]

    def error(self, part: str) -> float:
        return self.predicted[part] / self.measured[part] - 1

    @property
    def same_collectives(self) -> bool | None:
        """None: the capture has no trace of this run."""
        return None if self.traced is None else self.traced == self.simulated

    def text(self) -> str:
        lines = [f"{self.run.name}   rounds differ by up to {self.run.spread:.0%}"]
        if self.run.wall != self.run.rounds:
            lines.append(f"  core seconds; {min(self.run.wall) * 1e3:.2f} ms on the wall clock of the shared cores")
        for part in self.measured:
            measured, predicted = self.measured[part] * 1e3, self.predicted[part] * 1e3
            lines.append(
                f"  {part:<12}{measured:>10.2f} ms measured{predicted:>10.2f} predicted{self.error(part):>+8.0%}"
            )
        if self.run.peak_bytes:
            allocated = self.result.gpu.peak_allocated_bytes
            off = allocated / self.run.peak_bytes - 1
            lines.append(
                f"  peak memory {self.run.peak_bytes / 2**30:.2f} GiB, {allocated / 2**30:.2f} predicted {off:+.1%}"
            )
        total = sum(size * count for (_, size), count in self.simulated.items())
        said = {None: "no trace to compare with", True: "as traced", False: "DIFFER from the trace"}[
            self.same_collectives
        ]
        lines.append(f"  collectives {self.simulated.total()} of {total / 1e6:.2f} MB: {said}")
        if self.traced is not None and not self.same_collectives:
            lines.append(f"    only traced: {_listed(self.traced - self.simulated)}")
            lines.append(f"    only simulated: {_listed(self.simulated - self.traced)}")
        return "\n".join(lines)


def _listed(found: Counter[tuple[str, int]]) -> str:
    return ", ".join(f"{n} x {kind} {size:,} B" for (kind, size), n in sorted(found.items())[:6]) or "nothing"


def compare(run: Run, profile: Path | None) -> Comparison:
    """Simulate `run` under a profile (None: the base) and set it beside what was measured."""
    result = simulate(load_scenario(run.scenario, [f"profile={profile.resolve()}"] if profile else []))
    measured = {"forward": run.forward_s, "backward": run.backward_s, "optimizer": run.optimizer_s, "step": run.best_s}
    backend = result.setup.cluster.backend
    traced = _of_trace(read(run.traces[0])) if run.traces else None
    parts = phases(result) | {"step": result.time.step_s}
    return Comparison(run, result, measured, parts, traced, _of_result(result, backend))


def phases(result: Result) -> dict[str, float]:
    """Seconds of forward, backward and optimizer as a capture measures them: each until its last op is done."""
    view = result.slowest
    ends = dict.fromkeys(("forward", "backward", "optimizer"), view.steady.start_s)
    for record in view.records:
        if record.step == view.steady.step:
            phase = "backward" if record.op.phase == "recompute" else record.op.phase
            ends[phase] = max(ends[phase], record.end_s)
    ends["optimizer"] = view.steady.end_s
    times = [view.steady.start_s, *ends.values()]
    return {phase: max(0.0, end - start) for phase, start, end in zip(ends, times, ends.values(), strict=False)}


def _of_trace(trace: Trace) -> Counter[tuple[str, int]]:
    """Of one step: what all steps of the trace hold, over their number."""
    found = Counter((piece.call.kind, piece.call.nbytes or 0) for piece in trace.collectives if piece.call)
    steps = max(1, len(trace.steps))
    return Counter({key: count // steps for key, count in found.items() if count >= steps})


def _of_result(result: Result, backend: str) -> Counter[tuple[str, int]]:
    renamed = _AS_TRACED.get(backend, {})
    view = result.slowest
    works = [r.op.work for r in view.records if r.step == view.steady.step and isinstance(r.op.work, Collective)]
    return Counter((renamed.get(w.kind, w.kind), int(w.payload_bytes)) for w in works if isinstance(w, Collective))


def draw(comparison: Comparison, path: Path) -> None:
    """Real lanes above simulated ones, one step each, on one scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(12, 4), layout="constrained")
    axes[0].set_title(f"{comparison.run.name}: traced on rank 0 (under the profiler)", loc="left")
    axes[1].set_title("simulated", loc="left")
    if comparison.run.traces:
        trace = read(comparison.run.traces[0])
        step = trace.steps[-1] if trace.steps else None
        pieces = trace.within(step.start_s, step.end_s) if step else list(trace.slices)
        zero = step.start_s if step else min(piece.start_s for piece in pieces)
        for row, group in enumerate(("compute", "communication")):
            inside = [p for p in pieces if (p.kind == COMMUNICATION) == bool(row) and p.kind != COPY]
            _bars(axes[0], row, [(p.start_s - zero, p.seconds) for p in inside], group)
    view = comparison.result.slowest
    records = [record for record in view.records if record.step == view.steady.step]
    for row, group in enumerate(("compute", "communication")):
        ran = [r for r in records if (isinstance(r.op.work, Collective) if row else r.op.lane == COMPUTE)]
        _bars(axes[1], row, [(r.start_s - view.steady.start_s, r.end_s - r.start_s) for r in ran], group)
    axes[1].set_xlabel("ms")
    for axis in axes:
        axis.set_yticks([0, 1], ["compute", "communication"])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis, row: int, spans: Sequence[tuple[float, float]], group: str) -> None:  # type: ignore[no-untyped-def]
    colour = "tab:blue" if group == "compute" else "tab:orange"
    axis.broken_barh([(start * 1e3, seconds * 1e3) for start, seconds in spans], (row - 0.4, 0.8), color=colour)
