"""Replays the memory ledger of a timeline: peak, who holds it, at which op; what lies outside the allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.cluster.spec import Cluster, Device
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import COMPUTE, Op, Program
from zsim.result.critical_path import RankView
from zsim.result.spec import GpuMemory, HostMemory

MIB = 1 << 20
TEMPORARY = "temporary"  # the ledger's key for tensors inside an op that nothing saves

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
    """Bytes held on one device right after `event`, by category."""

    event: MemoryEvent | None
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def events_of(view: RankView, device: str) -> list[MemoryEvent]:
    """One rank's ledger of one device, in the order in which the host allocates and frees."""
    return [event for event in view.timeline.memory if event.rank == view.rank and event.device == device]


def peak(events: Sequence[MemoryEvent], first_step: int = 0) -> Moment:
    """The fullest moment of a ledger, in the steps from `first_step` on."""
    held: dict[str, int] = defaultdict(int)
    total, best = 0, -1
    at, by_category = None, {}
    for event in events:
        held[event.category] += event.nbytes
        total += event.nbytes
        if total > best and event.step >= first_step:
            best, at, by_category = total, event, dict(held)
    return Moment(at, {category: nbytes for category, nbytes in by_category.items() if nbytes})


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
    events, device = events_of(view, "gpu"), cluster.devices[view.rank]
    top = peak(events)
    outside = framework_bytes(device, program)
    return GpuMemory(
        capacity_bytes=device.usable_bytes,
        peak_allocated_bytes=top.total,
        peak_reserved_bytes=round(top.total * RESERVED_RATIO),
        framework_bytes=outside,
        by_category=top.by_category | {"framework": outside},
        peak_at=describe(view, top),
        peak_rank=view.rank,
        steady_peak_allocated_bytes=peak(events, view.steady.step).total,
        reserved_source=f"{RESERVED_RATIO} x peak allocated (no allocator model)",
    )


def describe(view: RankView, moment: Moment) -> str:
    """Where a moment lies: "step 2, backward of model.layers.63.mlp, down_proj, micro-batch 2"."""
    event = moment.event
    if event is None or event.step == 0:
        return "initialization"
    op = _op_at(view, event)
    if op is None:
        return f"step {event.step}, after its last kernel"
    where = f"step {event.step}, {op.phase}" + (f" of {op.module}" if op.module else "") + f", {op.label}"
    return where + (f", micro-batch {op.micro + 1}" if op.micro else "")


def _op_at(view: RankView, event: MemoryEvent) -> Op | None:
    """The op that an event belongs to: a temporary to its own op, a tensor to the compute op issued next."""
    if event.key == TEMPORARY and event.op is not None:
        return view.by_op[event.step, event.op].op
    issued = -1 if event.op is None else event.op
    later = (r.op for r in view.lanes.get(COMPUTE, ()) if r.step == event.step and r.op.id > issued)
    return min(later, key=lambda op: op.id, default=None)


def measure_host(views: Sequence[RankView], cluster: Cluster) -> HostMemory:
    """The fullest node: each of its ranks holds what its class's representative holds."""
    node_ranks = min(cluster.gpus_per_node, cluster.world_size)
    tops = [(peak(events_of(view, "host")), peak(events_of(view, "nvme"))) for view in views]
    dram, nvme = max(tops, key=lambda top: top[0].total)
    return HostMemory(
        capacity_bytes=cluster.host.dram_bytes,
        peak_bytes=dram.total * node_ranks,
        per_rank_bytes=dram.total,
        by_category={category: nbytes * node_ranks for category, nbytes in dram.by_category.items()},
        nvme_capacity_bytes=cluster.host.nvme_bytes,
        nvme_peak_bytes=nvme.total * node_ranks,
    )
