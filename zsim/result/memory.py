"""Replays the memory ledger of a timeline: peak, who holds it, at which op; what lies outside the allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple, TypeVar

from zsim.cluster.routes import through_host
from zsim.cluster.spec import Cluster, Device
from zsim.cost.driver import remap_seconds
from zsim.engine.allocator import CachingAllocator, Replay, Reserved, Retry
from zsim.engine.ledger import TEMPORARY
from zsim.engine.repetition import Stretch, run_through
from zsim.engine.timeline import MemoryEvent
from zsim.plan.spec import Allocator
from zsim.program.ops import COMPUTE, DELAYED_FREES, RANK_0, Launch, Op, Program
from zsim.program.startup import CHECKPOINT
from zsim.result.critical_path import RankView
from zsim.result.spec import GpuMemory, HostMemory, Result

A = TypeVar("A", bound=CachingAllocator)

MIB = 1 << 20

# Outside PyTorch's allocator, per process. Context with lazily loaded kernels: 437 MiB (80 GB card, minimal process,
# nvidia-smi) to 0.55 GiB (stas00/ml-engineering 744d01e18b79, first barrier test); 500 MiB taken.
CUDA_CONTEXT_BYTES = 500 * MIB
# NCCL per communicator: 544-688 MB on 4x A100 (NVIDIA/nccl issue 964), 0.7 GiB for the first of a job with its kernels,
# 0.5 GiB for each further one that shares nothing. With both of DeepSpeed's 1.78 and 1.94 GiB lie outside PyTorch on 7
# and 4 A100 (OpenBMB/MiniCPM-V issue 299, huggingface/peft issue 1703), and 1.20 on 8 while it loads, with the first
# alone (hiyouga/LlamaFactory issue 9510). NVLS buffers on sm_90, 8 GPUs: 256 MiB (nccl src/transport/nvls.cc).
NCCL_FIRST_BYTES = 717 * MIB
NCCL_FURTHER_BYTES = 512 * MIB
# Where GPUs talk through host memory, NCCL's buffers lie there (src/transport/shm.cc), and all that is outside the
# allocator is about the context: 0.36 GiB of a process under FSDP on 8 RTX 3080 (huggingface/trl issue 3436: 9.54 GiB
# in use, 6.61 allocated, 2.57 cached), 484 MiB with a communicator on RTX 3090 (NVIDIA/nccl pull request 2366).
NVLS_BYTES = 256 * MIB
NVLS_LINKS = ("nvlink4", "nvlink5")

# Resident host memory of a process before it holds a tensor. Python, torch, transformers and DeepSpeed: 389 MiB here
# (torch 2.13 for CPUs). CUDA's runtime with the kernels of torch and its libraries: 1.3 to 2.5 GB reported, 2.0 in the
# middle (pytorch issues 12873, 15209, 31767, 83340, 87539; torch 1.0 to 1.12). From 1.13 on kernels are loaded when
# first called, which on the GPU leaves 287 of 667 MB (pytorch pull request 86509): the same share taken here.
LIBRARIES_BYTES = 389 * MIB
CUDA_HOST_BYTES = round(2.0e9 * 287 / 667)
PROCESSES = "processes"

SETTLING = 6  # steps after the steady one, at most, until the allocator gives memory back as often as in any later one


class Moment(NamedTuple):
    """Bytes held on one device right after `event`, by category."""

    event: MemoryEvent | None
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def peak(events: Sequence[MemoryEvent]) -> Moment:
    """The moment of a ledger at which most is allocated, as `torch.cuda.max_memory_allocated` counts."""
    return at(events, peak_index(events)) if events else Moment(None, {})


def peak_index(events: Sequence[MemoryEvent]) -> int:
    """The event after which most is allocated."""
    totals = list(accumulate([0 if event.category == DELAYED_FREES else event.nbytes for event in events]))
    return totals.index(max(totals, default=0)) if totals else 0


def at(events: Sequence[MemoryEvent], index: int) -> Moment:
    """What is allocated after event `index`."""
    held: dict[str, int] = defaultdict(int)
    for event in events[: index + 1]:
        held[event.category] += event.nbytes
    held.pop(DELAYED_FREES, None)
    return Moment(events[index], {category: nbytes for category, nbytes in held.items() if nbytes})


def framework_bytes(device: Device, program: Program, cluster: Cluster) -> int:
    """Device memory that PyTorch's allocator does not see: CUDA context, NCCL's communicators."""
    if device.unified or device.vendor.lower() == "apple":
        return 0
    communicators = [groups for groups in program.groups.values() if any(len(group) > 1 for group in groups)]
    nccl = 0
    if communicators and not all(through_host(node) for node in cluster.templates):
        nccl = NCCL_FIRST_BYTES + NCCL_FURTHER_BYTES * (len(communicators) - 1)
        if device.nvlink_kind in NVLS_LINKS:
            nccl += NVLS_BYTES
    return CUDA_CONTEXT_BYTES + nccl


def process_bytes(device: Device) -> int:
    """Host memory of a process that drives `device`, beside what it allocates."""
    return LIBRARIES_BYTES + (CUDA_HOST_BYTES if device.vendor.lower() in ("nvidia", "amd") else 0)


def measure_gpu(views: Sequence[RankView], cluster: Cluster, program: Program, settings: Allocator) -> GpuMemory:
    """Memory of the rank with the least headroom."""
    return min((_gpu(view, cluster, program, settings) for view in views), key=lambda gpu: gpu.headroom_bytes)


def _gpu(view: RankView, cluster: Cluster, program: Program, settings: Allocator) -> GpuMemory:
    """The allocator runs against what the device has left beside CUDA and NCCL.

    A limit of the allocator's own leaves what it may not have to managed memory.
    """
    # A step after the steady one repeats it.
    events = events_until(view, "gpu", view.steady.step)
    device = cluster.devices[view.rank]
    outside = framework_bytes(device, program, cluster)
    allocator = CachingAllocator.on(device.usable_bytes, device.usable_bytes - outside, settings)
    allowed = allocator.allowed
    replay = Replay(allocator)
    steps = whole_steps(view)
    top, run = peak(events), run_through(replay, chain.from_iterable(steps))
    failed, reserved = run.out_of_memory, wanted_bytes(run, events)
    settled = settled_retries(replay, run, steps[-1], view.steady.step)
    paged = peak(view.ledgers["managed"]).total
    room = device.usable_bytes - outside - reserved
    beside = max(0, room)
    headroom = room - min(paged, beside)
    return GpuMemory(
        capacity_bytes=device.usable_bytes,
        peak_allocated_bytes=top.total,
        peak_reserved_bytes=reserved,
        framework_bytes=outside,
        by_category=top.by_category | {"framework": outside},
        peak_at=describe(view, top.event),
        peak_rank=view.rank,
        headroom_bytes=headroom if allowed is None else min(headroom, allowed - reserved),
        out_of_memory_at=describe(view, failed, run.repetition) if failed else None,
        allocator_retries=len(run.retries),
        allocator_retries_per_step=len(settled),
        remapping_s=_remapping_seconds(device, settled),
        first_remapping_s=_remapping_seconds(device, [retry for retry in run.retries if retry.step == 1]),
        paged_bytes=paged,
        evicted_bytes=max(0, paged - beside),
        allowed_bytes=allowed,
    )


def events_until(view: RankView, device: str, step: int) -> list[MemoryEvent]:
    """Of the ledger of a device, up to the end of `step`."""
    events = view.ledgers[device]
    return events[: bisect_right(events, step, key=attrgetter("step"))]


def whole_steps(view: RankView) -> list[list[Stretch]]:
    """The ledger of a GPU up to the steady step, of a timeline whose micro-steps left out repeat memory, too."""
    assert view.stretches is not None
    return view.stretches


def settled_retries(replay: Replay, run: Reserved, again: Sequence[Stretch], steady: int) -> tuple[Retry, ...]:
    """When the allocator gives cached memory back in a step once its blocks suit the steps: `replay` came to `run`, and
    goes on with steps like `steady`, the last, as `again` has it, until one gives back as often as the one before."""
    last, before = (tuple(retry for retry in run.retries if retry.step == step) for step in (steady, steady - 1))
    settled = steady > 2 and len(last) == len(before)  # the first step has states to make
    for _ in range(SETTLING if last and not settled and not run.out_of_memory else 0):
        before, known = last, len(run.retries)
        run = run_through(replay, again)
        if run.out_of_memory:
            break
        last = run.retries[known:]
        if len(last) in (0, len(before)):
            break
    return last


def _remapping_seconds(device: Device, retries: Sequence[Retry]) -> float | None:
    """What the driver takes for the pages of expandable segments in `retries`. None: of others it is not known."""
    if device.vendor != "NVIDIA" or not any(retry.pages for retry in retries):
        return None
    return remap_seconds(sum(retry.pages for retry in retries))


def served(result: Result, allocator: type[A]) -> A:
    """A fresh allocator as the fullest GPU has; without limit where the run does not fit and is shown as if it did."""
    gpu, settings = result.gpu, result.setup.plan.allocator
    if not gpu.fits:
        return allocator(None, settings)
    return allocator.on(gpu.capacity_bytes, gpu.capacity_bytes - gpu.framework_bytes, settings)


def wanted_bytes(run: Reserved, events: Sequence[MemoryEvent]) -> int:
    """What the allocator reserved at its peak or, where it ran out of memory, would have had to reserve at least."""
    if run.out_of_memory is None:
        return run.peak_bytes
    return max(run.peak_bytes + run.out_of_memory.nbytes, peak(events).total)


def describe(view: RankView, event: MemoryEvent | None, repetition: int = 0) -> str:
    """Where an event lies: "step 2, backward of model.layers.63.mlp, down_proj, micro-batch 2".

    `repetition`: in which of the micro-steps that its own one stands for, from 0.
    """
    if event is None or event.step == 0:
        return "initialization"
    op = _op_at(view, event)
    if op is None:
        return f"step {event.step}, after its last kernel"
    where = f"step {event.step}, {op.phase}" + (f" of {op.module}" if op.module else "") + f", {op.label}"
    return where + (f", micro-batch {view.timeline.micro_step(op) + repetition + 1}" if op.micro else "")


def _op_at(view: RankView, event: MemoryEvent) -> Op | None:
    """The op that an event belongs to: a temporary to its own op, a tensor to the kernels issued next."""
    steps = view.program.steps
    own = event.key == TEMPORARY
    for instruction in steps[min(event.step, len(steps)) - 1]:
        if isinstance(instruction, Launch) and instruction.op.lane == COMPUTE:
            op = instruction.op
            if op.id == event.op if own else op.id > (-1 if event.op is None else event.op):
                return op
    return None


def measure_host(views: Sequence[RankView], cluster: Cluster, gpu: GpuMemory) -> HostMemory:
    """The fullest node: each of its ranks holds what its class's representative holds.

    The processes themselves count, and where CPU and GPU share their memory what the GPU needs.
    """
    node_ranks = min(cluster.gpus_per_node, cluster.world_size)
    tops = [
        (view, peak(_of_node(view, "host", node_ranks)), peak(_of_node(view, "nvme", node_ranks))) for view in views
    ]
    view, dram, nvme = max(tops, key=lambda top: top[1].total)
    held = dict(dram.by_category)
    if gpu.evicted_bytes:  # once the checkpoint has been read
        events = _of_node(view, "host", node_ranks)
        later = peak([event for event in events if event.category not in (CHECKPOINT, RANK_0)]).by_category
        later["optimizer_states"] = later.get("optimizer_states", 0) + gpu.evicted_bytes * node_ranks
        held = max(held, later, key=lambda categories: sum(categories.values()))
    if any(device.unified for device in cluster.devices):
        # what the GPU holds comes after the checkpoint has been read
        held = {category: nbytes for category, nbytes in held.items() if category not in (CHECKPOINT, RANK_0)}
        if held:
            held["gpu"] = gpu.nvidia_smi_bytes * node_ranks
    held[PROCESSES] = process_bytes(cluster.devices[0]) * node_ranks
    return HostMemory(
        capacity_bytes=cluster.host.dram_bytes,
        peak_bytes=sum(held.values()),
        per_rank_bytes=sum(nbytes for category, nbytes in held.items() if category != RANK_0) // node_ranks,
        by_category=held,
        nvme_capacity_bytes=cluster.host.nvme_bytes,
        nvme_peak_bytes=nvme.total,
        peak_at=describe(view, dram.event),
    )


def _of_node(view: RankView, device: str, ranks: int) -> list[MemoryEvent]:
    """The ledger of a node on which `ranks` ranks do what this one does."""
    return [
        event if event.category == RANK_0 else event._replace(nbytes=event.nbytes * ranks)
        for event in view.ledgers[device]
    ]
