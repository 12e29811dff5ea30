"""timeline.json: the steady step as a Chrome trace in Kineto's shape.

Perfetto, chrome://tracing and HolisticTraceAnalysis (HTA) read it like a profile of a real rank: a process for the
CPU with its launching thread, a process for the GPU with a thread per CUDA stream, launches tied to kernels by
correlation ids, NCCL's kernel names, `ProfilerStep#` annotations on the host's clock. As in a profile that skipped its
warm-up, step 1 is left out; HTA drops the last ProfilerStep, so the step after the steady one (which repeats it) is in,
or where none was simulated a stub without kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.engine.allocator import replay
from zsim.engine.timeline import OpRecord, Timeline
from zsim.program.ops import COMPUTE, DELAYED_FREES, H2D, HOST, LANES, OFF_GPU, Collective, Compute, Copy
from zsim.result.critical_path import RankView
from zsim.result.curve import Delayed, Watched
from zsim.result.memory import served
from zsim.result.spec import Result

Event = dict[str, Any]

THREADS = {lane: 1 + index for index, lane in enumerate((HOST, *OFF_GPU))}
DEFAULT_STREAM = 7  # PyTorch's default stream in Kineto; side streams come in steps of four
STREAMS = {COMPUTE: DEFAULT_STREAM} | {
    lane: 16 + 4 * index for index, lane in enumerate(lane for lane in LANES if lane not in (COMPUTE, *OFF_GPU))
}
CPU_PID = 100_000  # + rank; the GPU's process is the rank itself
LAUNCH_S = 5e-6  # longest slice drawn for one launch; the issuing thread also runs Python in between
_NCCL = {
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_Reduce_Sum_{dtype}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_all": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_NCCL_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "uint8": "u8", "int64": "i64"}
_TORCH_DTYPES = {
    "bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "float64": "Double", "uint8": "Byte", "int8": "Char",
    "int64": "Long",
}  # fmt: skip
_TORCH_NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}


def write(result: Result, path: Path) -> list[Path]:
    """`path` holds the slowest rank; where ranks differ, each simulated one also gets its own file beside it."""
    views = [RankView(result.program, result.timeline, ranks[0]) for ranks in result.timeline.rank_classes]
    targets = [(path, result.slowest)]
    if len(views) > 1:
        targets += [(path.with_name(f"{path.stem}_rank{view.rank}{path.suffix}"), view) for view in views]
    for target, view in targets:
        target.write_text(json.dumps(trace(result, view)))
    return [target for target, _ in targets]


def trace(result: Result, view: RankView) -> dict[str, Any]:
    """One rank's trace as Kineto's JSON object; times in microseconds."""
    device, left = result.setup.cluster.devices[view.rank], result.timeline.left_out
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": view.rank, "name": device.name, "totalGlobalMem": device.usable_bytes}],
        "distributedInfo": {"backend": "nccl", "rank": view.rank, "world_size": result.headline.world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": result.name + (f", without {left.micro_steps} of its micro-steps" if left else ""),
        "traceEvents": list(_events(result, view)),
    }


def _events(result: Result, view: RankView) -> Iterator[Event]:
    yield from _names(view)
    records = [record for record in view.records if record.step >= view.steady.step]
    records.sort(key=lambda record: (record.step, record.op.id))  # as the host issues them
    yield from _steps(records, view)
    previous = 0.0
    for correlation, record in enumerate(records, start=1):
        if record.op.lane in THREADS:
            yield _on_cpu(record, view)
        else:
            yield from _launched(record, view.rank, correlation, previous)
            yield _on_gpu(record, view.rank, correlation, result)
        previous = record.end_s if record.op.lane == HOST else record.issued_s
    yield from _memory(view, served(result, Watched))


def _names(view: RankView) -> Iterator[Event]:
    cpu, gpu = CPU_PID + view.rank, view.rank
    for pid, label, order in ((cpu, "CPU", 0), (gpu, f"GPU {gpu}", 1)):
        yield _meta("process_name", pid, 0, {"name": "python"})
        yield _meta("process_labels", pid, 0, {"labels": label})
        yield _meta("process_sort_index", pid, 0, {"sort_index": order})
    for lane in view.lanes:
        if lane in STREAMS:
            yield _meta("thread_name", gpu, STREAMS[lane], {"name": f"stream {STREAMS[lane]} {lane}"})
    for lane in (HOST, *(lane for lane in view.lanes if lane in OFF_GPU)):
        yield _meta("thread_name", cpu, THREADS[lane], {"name": f"thread {THREADS[lane]} {lane}"})


def _steps(records: list[OpRecord], view: RankView) -> Iterator[Event]:
    """`prof.step()` as the host calls it: from the first launch of a step to the first of the next."""
    first: dict[int, float] = {}
    for record in records:
        first.setdefault(record.step, record.issued_s - LAUNCH_S)
    end = max(record.issued_s for record in records) + LAUNCH_S
    if len(first) == 1:  # nothing repeats: HTA would drop the only step
        first[max(first) + 1] = end
        end += LAUNCH_S
    starts = sorted(first.items(), key=lambda item: item[0])
    for (step, start), stop in zip(starts, [*(start for _, start in starts[1:]), end], strict=True):
        yield _slice("user_annotation", f"ProfilerStep#{step}", CPU_PID + view.rank, THREADS[HOST], start, stop, {})


def _on_cpu(record: OpRecord, view: RankView) -> Event:
    tid, about = THREADS[record.op.lane], _about(record, view.timeline)
    return _slice("cpu_op", _title(record), CPU_PID + view.rank, tid, record.start_s, record.end_s, about)


def _launched(record: OpRecord, rank: int, correlation: int, previous: float) -> Iterator[Event]:
    """The launch on the host and the arrow from it to the kernel."""
    name = "cudaMemcpyAsync" if isinstance(record.op.work, Copy) else "cudaLaunchKernel"
    start = max(previous, record.issued_s - LAUNCH_S)
    args = {"External id": correlation, "correlation": correlation}
    pid, tid, stream = CPU_PID + rank, THREADS[HOST], STREAMS[record.op.lane]
    yield _slice("cuda_runtime", name, pid, tid, start, record.issued_s, args)
    arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
    yield arrow | {"ph": "s", "pid": pid, "tid": tid, "ts": start * 1e6}
    yield arrow | {"ph": "f", "bp": "e", "pid": rank, "tid": stream, "ts": record.start_s * 1e6}


def _on_gpu(record: OpRecord, rank: int, correlation: int, result: Result) -> Event:
    op, work = record.op, record.op.work
    stream = STREAMS[op.lane]
    args: Event = {
        "External id": correlation,
        "device": rank,
        "context": 1,
        "stream": stream,
        "correlation": correlation,
    }
    category, name = "kernel", _title(record)
    if isinstance(work, Collective):
        name = _NCCL[work.kind].format(dtype=_NCCL_DTYPES.get(work.dtype, work.dtype))
        groups = result.program.groups[work.group]
        args |= {
            "Collective name": _TORCH_NAMES.get(work.kind, work.kind),
            "In msg nelems": work.in_numel,
            "Out msg nelems": work.out_numel,
            "Group size": next((len(group) for group in groups if rank in group), 1),
            "dtype": _TORCH_DTYPES.get(work.dtype, work.dtype),
            "Process Group Name": work.group,
            "bytes": work.payload_bytes,
            "algorithm": record.algorithm,
        }
    elif isinstance(work, Copy):
        category = "gpu_memcpy"
        kind, host = ("HtoD", "Pinned -> Device") if op.lane == H2D else ("DtoH", "Device -> Pinned")
        name = f"Memcpy {kind} ({host if work.pinned else host.replace('Pinned', 'Pageable')})"
        args["bytes"] = work.nbytes
    elif isinstance(work, Compute):
        args["flops"] = sum(kernel.flops for kernel in work.kernels)
    return _slice(category, name, rank, stream, record.start_s, record.end_s, args | _about(record, result.timeline))


def _memory(view: RankView, allocator: Watched) -> Iterator[Event]:
    """Counters that Perfetto draws: allocated bytes, and their parts. What `allocator`, a fresh one, waits for before
    it would exceed its limit is reusable from then on."""
    held: dict[str, int] = {}
    replay(view.ledgers["gpu"], allocator)
    delayed = Delayed(allocator.waits)
    for event in view.ledgers["gpu"]:
        if event.category == DELAYED_FREES:
            delayed.change(event)
        else:
            held[event.category] = held.get(event.category, 0) + event.nbytes
        if id(event) in delayed.waits:
            delayed.all_over()
        held[DELAYED_FREES] = delayed.nbytes
        if event.step >= view.steady.step:
            parts = {category: nbytes for category, nbytes in held.items() if nbytes}
            where = {"ph": "C", "name": "allocated bytes", "pid": view.rank, "tid": 0}
            yield where | {"ts": event.time_s * 1e6, "args": parts}


def _title(record: OpRecord) -> str:
    op = record.op
    return f"{op.module}.{op.label}" if op.module else op.label


def _about(record: OpRecord, timeline: Timeline) -> Event:
    op = record.op
    about: Event = {"phase": op.phase, "micro-batch": timeline.micro_step(op), "module": op.module, "label": op.label}
    if op.layer is not None:
        about["layer"] = op.layer
    if record.stretch_s > 0:
        about["contention (us)"] = record.stretch_s * 1e6
    return about


def _slice(category: str, name: str, pid: int, tid: int, start_s: float, end_s: float, args: Event) -> Event:
    # Whole nanoseconds at both ends: Perfetto drops a slice that begins a rounding error before its predecessor ends.
    start, end = round(1e9 * start_s), round(1e9 * end_s)
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
    }  # fmt: skip


def _meta(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
