"""Where a step's seconds go, as the compute lane sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from zsim.cluster.spec import Device
from zsim.cost.price import kernel_seconds
from zsim.cost.profile import Profile
from zsim.engine.timeline import OpRecord
from zsim.model.kernels import Attention, Gemm, Kernel
from zsim.program.ops import COMPUTE, Collective, Compute, Copy, CpuWork
from zsim.result.critical_path import RankView, Segment
from zsim.result.spec import Time

HOST_CAUSE = "host"


def cause(segment: Segment) -> tuple[str, str]:
    """(group, name) of what a waiting compute lane waits for: ("communication", "all_gather/forward")."""
    if segment.record is None:
        return HOST_CAUSE, HOST_CAUSE
    op = segment.record.op
    if isinstance(op.work, Collective):
        return "communication", f"{op.work.kind}/{op.phase}"
    if isinstance(op.work, Copy):
        return "copies", f"{op.work.direction}/{op.phase}"
    if isinstance(op.work, CpuWork):
        return "cpu optimizer", f"cpu_optimizer/{op.phase}"
    if isinstance(op.work, Compute):
        return "compute", f"compute/{op.phase}"
    return HOST_CAUSE, HOST_CAUSE


def measure_time(view: RankView, device: Device, profile: Profile) -> Time:
    """Splits the steady step of one rank. Every idle stretch is traced back to what held it up."""
    span = view.steady
    step_s = span.end_s - span.start_s
    by_phase: dict[str, float] = defaultdict(float)
    by_family: dict[str, float] = defaultdict(float)
    compute = [record for record in view.on(COMPUTE) if isinstance(record.op.work, Compute)]
    for record in compute:
        seconds = min(record.end_s, span.end_s) - max(record.start_s, span.start_s)
        by_phase[record.op.phase] += seconds
        _split(record, seconds, device, profile, by_family)
    waiting: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for segment in waiting_segments(view):
        group, name = cause(segment)
        waiting[group][name] += segment.seconds
    exposed, host = dict(waiting.pop("communication", {})), sum(waiting.pop(HOST_CAUSE, {}).values())
    idle = {name: seconds for names in waiting.values() for name, seconds in names.items()}
    communication = _communication(view)
    covered = _intersection(communication, [(r.start_s, r.end_s) for r in compute])
    first = view.spans[min(view.spans)]
    return Time(
        step_s=step_s,
        compute_s=sum(by_phase.values()),
        exposed_comm_s=sum(exposed.values()),
        host_s=host,
        idle_s=sum(idle.values()),
        compute_by_phase=dict(by_phase),
        compute_by_family=_largest_first(by_family),
        exposed_by=_largest_first(exposed),
        idle_by=_largest_first(idle),
        comm_s=sum(end - start for start, end in communication),
        overlapped_comm_s=covered,
        first_step_s=first.end_s - first.start_s,
    )


def waiting_segments(view: RankView) -> Iterable[Segment]:
    """When the compute lane runs no kernel, each piece with what it was spent waiting for."""
    span = view.steady
    for record in view.on(COMPUTE):
        if not isinstance(record.op.work, Compute):  # a collective or a copy issued on the default stream
            yield Segment(record, max(record.start_s, span.start_s), min(record.end_s, span.end_s))
    for start, end, waiting in view.gaps():
        if waiting is not None:
            yield from _clip(view.chain(waiting, start), start, end)
            continue
        # The tail: the lane is done, the step is not. Whatever ends last is what it waits for.
        yield from _clip(view.critical_path(), start, end)


def family(kernel: Kernel) -> str:
    """What a report calls a kernel: matrix multiplication, attention, or the kind of memory-bound kernel."""
    if isinstance(kernel, Gemm):
        return "matrix multiplication"
    return "attention" if isinstance(kernel, Attention) else kernel.label


def _split(record: OpRecord, seconds: float, device: Device, profile: Profile, into: dict[str, float]) -> None:
    """An op is one or more kernels back to back: its time is shared out by what each takes alone."""
    work = record.op.work
    kernels = work.kernels if isinstance(work, Compute) else ()
    if len(kernels) == 1:
        into[family(kernels[0])] += seconds
        return
    alone = [kernel_seconds(kernel, device, profile) for kernel in kernels]
    total = sum(alone)
    for kernel, weight in zip(kernels, alone, strict=True):
        into[family(kernel)] += seconds * weight / total


def _clip(segments: Iterable[Segment], start: float, end: float) -> Iterable[Segment]:
    for segment in segments:
        left, right = max(segment.start_s, start), min(segment.end_s, end)
        if left < right:
            yield Segment(segment.record, left, right)


def _communication(view: RankView) -> list[tuple[float, float]]:
    """When at least one collective runs in the steady step, as disjoint intervals."""
    span = view.steady
    spans = sorted(
        (max(r.start_s, span.start_s), min(r.end_s, span.end_s))
        for r in view.records
        if isinstance(r.op.work, Collective) and r.end_s > span.start_s and r.start_s < span.end_s
    )
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Length that two sorted lists of disjoint intervals share."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
