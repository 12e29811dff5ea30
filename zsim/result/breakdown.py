"""Where a step's seconds go, as the compute lane sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from zsim.cluster.spec import Device
from zsim.cost.price import kernel_seconds
from zsim.cost.profile import Profile
from zsim.engine.timeline import OpRecord
from zsim.model.kernels import Attention, Gemm, Kernel
from zsim.program.ops import COMPUTE, HOST, OFF_GPU, Collective, Compute, Copy, CpuWork
from zsim.result.critical_path import RankView, Segment
from zsim.result.spec import Temporal, Time

HOST_CAUSE = "host"


REMAPPING = "memory mapped anew"  # by the allocator; on no lane


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
        return "compute", f"kernels of {op.lane}/{op.phase}"
    return HOST_CAUSE, HOST_CAUSE


def measure_time(view: RankView, device: Device, profile: Profile) -> Time:
    """Splits the steady step of one rank. Every idle stretch is traced back to what held it up."""
    time = _split(view, device, profile)
    if view.repeated is None:
        return time
    times, during = view.repeated
    each = _split(during, device, profile)
    with_all = {name: _plus(value, getattr(each, name), times) for name, value in asdict(time).items()}
    return Time(**with_all | {"first_step_s": time.first_step_s + times * _each_in_first_step(view)})


def _each_in_first_step(view: RankView) -> float:
    """Seconds between the starts of the micro-step that is repeated and of the one after it."""
    assert view.timeline.left_out is not None
    first, starts, micro = min(view.spans), dict[int, float](), view.timeline.left_out.micro
    for record in view.timeline.ops:
        op = record.op
        if record.step == first and record.rank == view.rank and op.lane == COMPUTE and op.phase == "forward":
            starts.setdefault(op.micro, record.start_s)
    return starts[micro + 1] - starts[micro]


def _plus(whole: Any, each: Any, times: int) -> Any:
    if not isinstance(whole, Mapping):
        return whole + times * each
    sums = {name: whole.get(name, 0.0) + times * each.get(name, 0.0) for name in whole | each}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _split(view: RankView, device: Device, profile: Profile) -> Time:
    span = view.steady
    step_s = span.end_s - span.start_s
    by_phase: dict[str, float] = defaultdict(float)
    by_kernels: dict[int, float] = defaultdict(float)  # equal blocks share their kernels
    kernels: dict[int, tuple[Kernel, ...]] = {}
    compute: list[tuple[float, float]] = []
    for record in view.on(COMPUTE):
        op = record.op
        if isinstance(op.work, Compute):
            start, end = max(record.start_s, span.start_s), min(record.end_s, span.end_s)
            compute.append((start, end))
            by_phase[op.phase] += end - start
            by_kernels[id(op.work.kernels)] += end - start
            kernels[id(op.work.kernels)] = op.work.kernels
    by_family: dict[str, float] = defaultdict(float)
    for key, seconds in by_kernels.items():
        for name, share in shares_by_family(kernels[key], device, profile).items():
            by_family[name] += seconds * share
    waiting: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for segment in waiting_segments(view):
        group, name = cause(segment)
        waiting[group][name] += segment.seconds
    exposed, host = dict(waiting.pop("communication", {})), sum(waiting.pop(HOST_CAUSE, {}).values())
    idle = {name: seconds for names in waiting.values() for name, seconds in names.items()}
    communication = _communication(view)
    covered = _intersection(communication, compute)
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
        comm_s=_length(communication),
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
            yield from clip(view.chain(waiting, start), start, end)
            continue
        # The lane is done, the step is not: whatever ends last is what it waits for.
        yield from clip(view.tail(start), start, end)


def family(kernel: Kernel) -> str:
    """What a report calls a kernel: matrix multiplication, attention, or the kind of memory-bound kernel."""
    if isinstance(kernel, Gemm):
        return "matrix multiplication"
    return "attention" if isinstance(kernel, Attention) else kernel.label


def shares_by_family(kernels: tuple[Kernel, ...], device: Device, profile: Profile) -> dict[str, float]:
    """An op is kernels back to back: its time is shared out by what each takes alone."""
    alone = [kernel_seconds(kernel, device, profile) for kernel in kernels]
    shares: dict[str, float] = defaultdict(float)
    for kernel, seconds in zip(kernels, alone, strict=True):
        shares[family(kernel)] += seconds / sum(alone)
    return shares


def clip(segments: Iterable[Segment], start: float, end: float) -> Iterable[Segment]:
    for segment in segments:
        left, right = max(segment.start_s, start), min(segment.end_s, end)
        if left < right:
            yield Segment(segment.record, left, right)


def temporal(view: RankView) -> Temporal:
    """What runs on the GPU during the kernels of the steady step, whatever the stream."""
    found = _on_gpu((r, r.start_s, r.end_s) for r in view.records if r.step == view.steady.step)
    if view.repeated is not None:
        times, during = view.repeated
        start, end = during.steady[2:]
        records = (r for r in view.records if r.end_s > start and r.start_s < end)
        each = _on_gpu((r, max(r.start_s, start), min(r.end_s, end)) for r in records)
        found = [whole + times * seconds for whole, seconds in zip(found, each, strict=True)]
    kernel_s, compute_s, busy_s, comm_s, overlap_s = found
    return Temporal(
        kernel_s=kernel_s,
        compute_s=compute_s,
        non_compute_s=busy_s - compute_s,
        idle_s=kernel_s - busy_s,
        comm_comp_overlap=overlap_s / comm_s if comm_s else 0.0,
    )


def _on_gpu(records: Iterable[tuple[OpRecord, float, float]]) -> list[float]:
    """Seconds from the first to the last of them, with compute kernels, with anything, with collectives, with both."""
    kernels: list[tuple[float, float]] = []
    collectives: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    for record, start_s, end_s in records:
        if record.op.lane not in (HOST, *OFF_GPU):
            work = record.op.work
            kind = collectives if isinstance(work, Collective) else copies if isinstance(work, Copy) else kernels
            kind.append((start_s, end_s))
    compute, communication = _merged(kernels), _merged(collectives)
    busy = _merged(kernels + collectives + copies)
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    return [span, _length(compute), _length(busy), _length(communication), _intersection(communication, compute)]


def _communication(view: RankView) -> list[tuple[float, float]]:
    """When at least one collective runs in the steady step, as disjoint intervals."""
    span = view.steady
    return _merged(
        (max(r.start_s, span.start_s), min(r.end_s, span.end_s))
        for r in view.records
        if isinstance(r.op.work, Collective) and r.end_s > span.start_s and r.start_s < span.end_s
    )


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


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
