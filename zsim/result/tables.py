"""The records behind a Result as rows: every op, every change of memory, every link. DataFrames are made of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zsim.program.ops import Collective, Compute, Copy
from zsim.result.critical_path import RankView

if TYPE_CHECKING:
    from zsim.engine.timeline import OpRecord
    from zsim.result.spec import Result

Row = dict[str, Any]


def op_rows(result: Result) -> Iterator[Row]:
    """One row per op of each simulated rank and step; seconds on the simulation's clock, bytes and FLOPs of the op."""
    for record in result.timeline.ops:
        op = record.op
        yield {
            "rank": record.rank,
            "step": record.step,
            "lane": op.lane,
            "phase": op.phase,
            "module": op.module,
            "layer": op.layer,
            "micro_batch": result.timeline.micro_step(op),
            "label": op.label,
            "kind": kind(record),
            "issued_s": record.issued_s,
            "start_s": record.start_s,
            "duration_s": record.end_s - record.start_s,
            "waited_for": str(record.blocker),
            "contention_s": record.stretch_s,
            "flops": sum(kernel.flops for kernel in op.work.kernels) if isinstance(op.work, Compute) else 0.0,
            "bytes": moved_bytes(record),
            "algorithm": record.algorithm,
        }


def kind(record: OpRecord) -> str:
    """What an op is, in a word: all_gather, h2d, compute, cpu, host ..."""
    work = record.op.work
    if isinstance(work, Collective):
        return work.kind
    return work.direction if isinstance(work, Copy) else record.op.lane


def moved_bytes(record: OpRecord) -> float:
    """Payload of a transfer; bytes read and written in device memory by kernels."""
    work = record.op.work
    if isinstance(work, Collective):
        return work.payload_bytes
    if isinstance(work, Compute):
        return sum(kernel.bytes for kernel in work.kernels)
    return getattr(work, "nbytes", 0.0)


def memory_rows(result: Result) -> Iterator[Row]:
    """One row per allocation and free, in the host's order, with what its device then holds."""
    held: dict[tuple[int, str], int] = {}
    for event in result.timeline.memory:
        key = event.rank, event.device
        held[key] = held.get(key, 0) + event.nbytes
        yield {
            "rank": event.rank,
            "step": event.step,
            "time_s": event.time_s,
            "device": event.device,
            "category": event.category,
            "tensor": event.key,
            "bytes": event.nbytes,
            "allocated_bytes": held[key],
        }


def link_rows(result: Result) -> list[Row]:
    """One row per link that carried anything in the steady step, the fullest first.

    `utilization` is the mean over the step, `peak` the largest share of the capacity in use at any time. Where equal
    nodes are simulated once, the links are those of the first.
    """
    view = RankView(result.program, result.timeline, result.timeline.rank_classes[0][0])
    parts = [(1, view), view.repeated] if view.repeated else [(1, view)]
    spans = [(times, part.steady) for times, part in parts]
    step_s = sum(times * (span.end_s - span.start_s) for times, span in spans)
    carried: dict[str, float] = {}
    busy: dict[str, float] = {}
    fullest: dict[str, float] = {}
    for use in result.timeline.links:
        during = ((times, min(use.end_s, span.end_s) - max(use.start_s, span.start_s)) for times, span in spans)
        seconds = sum(times * each for times, each in during if each > 0)
        if seconds > 0:
            carried[use.link] = carried.get(use.link, 0.0) + use.rate * seconds
            busy[use.link] = busy.get(use.link, 0.0) + seconds
            fullest[use.link] = max(fullest.get(use.link, 0.0), use.rate)
    rows = []
    for link, nbytes in carried.items():
        capacity = result.timeline.link_capacity[link]
        known = result.setup.cluster.links.get(link)
        rows.append(
            {
                "link": link,
                "kind": known.kind if known else "",
                "capacity_bytes_per_s": capacity,
                "bytes": nbytes,
                "busy_s": busy[link],
                "utilization": nbytes / capacity / step_s,
                "peak": fullest[link] / capacity,
            }
        )
    return sorted(rows, key=lambda row: (-row["utilization"], row["link"]))
