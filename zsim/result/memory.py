"""Replays the memory ledger of a timeline: peak, who holds it, at which op; what lies outside the allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.cluster.spec import Cluster, Device
from zsim.engine.timeline import OpRecord
from zsim.program.ops import COMPUTE, Program
from zsim.result.critical_path import RankView
from zsim.result.spec import GpuMemory, HostMemory

MIB = 1 << 20

# Outside PyTorch's allocator, per process. Context with lazily loaded kernels: 437 MiB (80 GB card, minimal process,
# nvidia-smi) to 0.55 GiB (stas00/ml-engineering 744d01e18b79, first barrier test); 500 MiB taken.
CUDA_CONTEXT_BYTES = 500 * MIB
# NCCL per communicator: 544-688 MB on 4x A100 (NVIDIA/nccl issue 964), 0.7 GiB for the first of a job with its kernels,
# 0.5 GiB for each further one that shares nothing. NVLS buffers on sm_90, 8 GPUs: 256 MiB (nccl src/transport/nvls.cc).
NCCL_FIRST_BYTES = 717 * MIB
NCCL_FURTHER_BYTES = 512 * MIB
NVLS_BYTES = 256 * MIB
NVLS_ARCHITECTURES = ("hopper", "blackwell", "sm_90", "sm_100")
# Reserved over peak allocated when no allocator model ran: 16726/15006 and 19354/17402 MiB (pytorch issue 40989).
RESERVED_RATIO = 1.11


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes held on one device right after one event or inside one op, by category."""

    time_s: float
    step: int
    op: int | None
    by_category: dict[str, int]
    temporary: bool = False

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of the ledger in issue order. `inside`: bytes above `nbytes` alive only while the op runs."""

    time_s: float
    step: int
    op: int | None
    category: str
    nbytes: int
    inside: int = 0


def changes(view: RankView, device: str = "gpu") -> Iterator[_Change]:
    """Allocations, frees and the unsaved tensors of compute ops, in the order in which the host issued them.

    The host allocates as it issues, so order, not time, decides the peak: an event whose `op` is k comes right
    after the launch of op k.
    """
    events = [e for e in view.timeline.memory if e.rank == view.rank and e.device == device]
    if device != "gpu":
        yield from (_Change(e.time_s, e.step, e.op, e.category, e.nbytes) for e in events)
        return
    launches = [r for r in view.records if r.op.temp_peak or r.op.temp_live or r.op.lane == COMPUTE]
    launches.sort(key=lambda r: (r.step, r.op.id))
    live: dict[str, int] = defaultdict(int)
    at = 0
    for event in events:
        key = (event.step, -1 if event.op is None else event.op)
        while at < len(launches) and (launches[at].step, launches[at].op.id) <= key:
            yield from _temporaries(launches[at], live)
            at += 1
        yield _Change(event.time_s, event.step, event.op, event.category, event.nbytes)
    for record in launches[at:]:
        yield from _temporaries(record, live)


def _temporaries(record: OpRecord, live: dict[str, int]) -> Iterator[_Change]:
    """An op's unsaved tensors replace those of the compute op before it."""
    op, time_s = record.op, record.issued_s
    for category in [c for c, nbytes in live.items() if nbytes and c != op.temp_category]:
        yield _Change(time_s, record.step, op.id, category, -live.pop(category))
    before = live[op.temp_category]
    inside = max(op.temp_peak - op.temp_live, 0)
    if op.temp_live != before or inside:
        yield _Change(time_s, record.step, op.id, op.temp_category, op.temp_live - before, inside)
    live[op.temp_category] = op.temp_live


def peak(stream: Iterator[_Change] | Sequence[_Change], first_step: int | None = None) -> Moment:
    """The fullest moment of a ledger; with `first_step`, of the steps from that one on."""
    held: dict[str, int] = defaultdict(int)
    total, best, at = 0, -1, Moment(0.0, 0, None, {})
    for change in stream:
        held[change.category] += change.nbytes
        total += change.nbytes
        if total + change.inside > best and (first_step is None or change.step >= first_step):
            best = total + change.inside
            by_category = {category: nbytes for category, nbytes in held.items() if nbytes}
            if change.inside:
                by_category[change.category] = by_category.get(change.category, 0) + change.inside
            at = Moment(change.time_s, change.step, change.op, by_category, bool(change.inside))
    return at


def framework_bytes(device: Device, program: Program) -> int:
    """Device memory that PyTorch's allocator does not see: CUDA context, NCCL's communicators."""
    if device.unified or device.vendor.lower() == "apple":
        return 0
    communicators = [groups for groups in program.groups.values() if any(len(group) > 1 for group in groups)]
    nccl = 0
    if communicators:
        nccl = NCCL_FIRST_BYTES + NCCL_FURTHER_BYTES * (len(communicators) - 1)
        if device.architecture.lower() in NVLS_ARCHITECTURES:
            nccl += NVLS_BYTES
    return CUDA_CONTEXT_BYTES + nccl


def measure_gpu(views: Sequence[RankView], cluster: Cluster, program: Program) -> GpuMemory:
    """Memory of the rank with the least headroom."""
    return min((_gpu(view, cluster, program) for view in views), key=lambda gpu: gpu.headroom_bytes)


def _gpu(view: RankView, cluster: Cluster, program: Program) -> GpuMemory:
    stream = list(changes(view))
    top, device = peak(stream), cluster.devices[view.rank]
    outside = framework_bytes(device, program)
    return GpuMemory(
        capacity_bytes=device.usable_bytes,
        peak_allocated_bytes=top.total,
        peak_reserved_bytes=round(top.total * RESERVED_RATIO),
        framework_bytes=outside,
        by_category=top.by_category | {"framework": outside},
        peak_at=describe(view, top),
        peak_rank=view.rank,
        steady_peak_allocated_bytes=peak(stream, view.steady.step).total,
        reserved_source=f"{RESERVED_RATIO} x peak allocated (no allocator model)",
    )


def describe(view: RankView, moment: Moment) -> str:
    """Where a moment lies: "step 2, backward of model.layers.63.mlp, micro-batch 1"."""
    if moment.op is None:
        return f"step {moment.step}, before the first op" if moment.step else "initialization"
    # A tensor is allocated for the op issued next, unless it is the op's own temporary.
    ids = sorted(op for step, op in view.by_op if step == moment.step and op >= moment.op)
    ids = [op for op in ids if view.by_op[moment.step, op].op.lane == COMPUTE]
    if not ids:
        return f"step {moment.step}, after its last kernel"
    op = view.by_op[moment.step, ids[0 if moment.temporary or ids[0] > moment.op or len(ids) == 1 else 1]].op
    where = f"step {moment.step}, {op.phase}" + (f" of {op.module}" if op.module else "") + f", {op.label}"
    return where + (f", micro-batch {op.micro + 1}" if op.micro else "")


def measure_host(views: Sequence[RankView], cluster: Cluster) -> HostMemory:
    """The fullest node: each of its ranks holds what its class's representative holds."""
    node_ranks = min(cluster.gpus_per_node, cluster.world_size)
    tops = [(_peak_of(view, "host"), _peak_of(view, "nvme")) for view in views]
    dram, nvme = max(tops, key=lambda top: top[0].total)
    return HostMemory(
        capacity_bytes=cluster.host.dram_bytes,
        peak_bytes=dram.total * node_ranks,
        per_rank_bytes=dram.total,
        by_category={category: nbytes * node_ranks for category, nbytes in dram.by_category.items()},
        nvme_capacity_bytes=cluster.host.nvme_bytes,
        nvme_peak_bytes=nvme.total * node_ranks,
    )


def _peak_of(view: RankView, device: str) -> Moment:
    return peak(changes(view, device))
