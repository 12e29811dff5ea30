"""timeline.json: a Chrome trace in Kineto's shape; Perfetto and HolisticTraceAnalysis read it like a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.engine.timeline import OpRecord
from zsim.model.kernels import DTYPE_BYTES
from zsim.program.ops import ALL_GATHER, COMPUTE, CPU, D2H, H2D, HOST, NVME, REDUCE_SCATTER, Collective, Compute, Copy
from zsim.result.spec import Result

# CUDA numbers streams in order of creation: 7 is PyTorch's default stream in Kineto traces.
STREAMS = {COMPUTE: 7, ALL_GATHER: 16, REDUCE_SCATTER: 20, H2D: 24, D2H: 28}
_HOST_TID, _CPU_TID, _NVME_TID = 1000, 2000, 2001
# NCCL's name for a dtype in its kernels (2.19 and later have one kernel per function, Kineto adds the type).
_NCCL_KERNELS = {
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_Reduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
_NCCL_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "uint8": "u8", "int64": "i64"}
_COLLECTIVE_NAMES = {
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_reduce": "allreduce",
}


def write(result: Result, path: Path, rank: int | None = None) -> None:
    """One process per simulated rank; `rank` keeps that one alone, as Kineto's one file per rank does."""
    path.write_text(json.dumps(trace(result, rank)))


def trace(result: Result, rank: int | None = None) -> dict[str, Any]:
    """The trace as Kineto's JSON object; times in microseconds."""
    ranks = [ranks[0] for ranks in result.timeline.rank_classes]
    chosen = [rank] if rank is not None else ranks
    events = [event for each in chosen for event in _rank_events(result, each)]
    devices = result.setup.cluster.devices
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": devices[each].name, "totalGlobalMem": devices[each].usable_bytes} for each in chosen
        ],
        "distributedInfo": {"backend": "nccl", "rank": chosen[0], "world_size": result.headline.world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": "timeline.json",
        "traceEvents": events,
    }


def _rank_events(result: Result, rank: int) -> Iterator[dict[str, Any]]:
    yield from _names(rank)
    for span in result.timeline.steps:
        if span.rank == rank:
            yield _slice("user_annotation", f"ProfilerStep#{span.step}", rank, _HOST_TID, span.start_s, span.end_s, {})
    for correlation, record in enumerate((r for r in result.timeline.ops if r.rank == rank), start=1):
        yield from _op_events(record, rank, correlation, result)


def _names(rank: int) -> Iterator[dict[str, Any]]:
    def meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": rank, "tid": tid, "ts": 0, "args": args}

    yield meta("process_name", 0, {"name": "python"})
    yield meta("process_labels", 0, {"labels": f"rank {rank}"})
    yield meta("process_sort_index", 0, {"sort_index": rank})
    yield meta("thread_name", _HOST_TID, {"name": "thread 1000 (host)"})
    for lane, stream in STREAMS.items():
        yield meta("thread_name", stream, {"name": f"stream {stream} ({lane})"})
    yield meta("thread_name", _CPU_TID, {"name": "thread 2000 (cpu optimizer)"})
    yield meta("thread_name", _NVME_TID, {"name": "thread 2001 (nvme)"})


def _op_events(record: OpRecord, rank: int, correlation: int, result: Result) -> Iterator[dict[str, Any]]:
    op = record.op
    title = f"{op.module}: {op.label}" if op.module else op.label
    about = {"phase": op.phase, "layer": op.layer, "micro_batch": op.micro, "step": record.step}
    if op.lane == HOST:
        yield _slice("cpu_op", title, rank, _HOST_TID, record.start_s, record.end_s, about)
        return
    if op.lane in (CPU, NVME):
        tid = _CPU_TID if op.lane == CPU else _NVME_TID
        yield _slice("cpu_op", title, rank, tid, record.start_s, record.end_s, about)
        return
    stream = STREAMS[op.lane]
    launched = {"External id": correlation, "correlation": correlation}
    yield _slice(
        "cuda_runtime", _runtime_name(op.work), rank, _HOST_TID, record.issued_s - 1e-6, record.issued_s, launched
    )
    device: dict[str, Any] = (
        {"device": 0, "stream": stream, "context": 1} | launched | about | {"module": op.module, "label": op.label}
    )
    name, category = title, "kernel"
    if isinstance(op.work, Collective):
        name = _nccl_name(op.work)
        group = result.program.groups.get(op.work.group, ())
        device |= {
            "Collective name": _COLLECTIVE_NAMES.get(op.work.kind, op.work.kind),
            "In msg nelems": op.work.in_numel,
            "Out msg nelems": op.work.out_numel,
            "Group size": len(group[0]) if group else result.headline.world_size,
            "dtype": op.work.dtype,
            "In msg size": op.work.in_numel * DTYPE_BYTES[op.work.dtype],
            "Process Group Name": op.work.group,
            "algorithm": record.algorithm,
        }
    elif isinstance(op.work, Copy):
        category = "gpu_memcpy"
        name = "Memcpy HtoD (Pinned -> Device)" if op.lane == H2D else "Memcpy DtoH (Device -> Pinned)"
        device |= {"bytes": op.work.nbytes}
    elif isinstance(op.work, Compute):
        device |= {"FLOP": sum(kernel.flops for kernel in op.work.kernels)}
    yield _slice(category, name, rank, stream, record.start_s, record.end_s, device)
    yield _flow("s", correlation, rank, _HOST_TID, record.issued_s - 1e-6)
    yield _flow("f", correlation, rank, stream, record.start_s)


def _runtime_name(work: object) -> str:
    return "cudaMemcpyAsync" if isinstance(work, Copy) else "cudaLaunchKernel"


def _nccl_name(work: Collective) -> str:
    return _NCCL_KERNELS[work.kind].format(dtype=_NCCL_DTYPES.get(work.dtype, work.dtype))


def _slice(
    category: str, name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6, "args": args,
    }  # fmt: skip


def _flow(phase: str, correlation: int, pid: int, tid: int, time_s: float) -> dict[str, Any]:
    event = {"ph": phase, "id": correlation, "pid": pid, "tid": tid, "ts": time_s * 1e6, "cat": "ac2g", "name": "ac2g"}
    return event | ({"bp": "e"} if phase == "f" else {})
