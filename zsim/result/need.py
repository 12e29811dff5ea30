"""Memory that a Program needs before any clock runs: allocations are made by the host, in the order of issue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zsim.cluster.spec import Cluster, Device
from zsim.program.ops import DEVICES, RANK_0, Alloc, Compute, Free, Instruction, Launch, Program
from zsim.program.startup import CHECKPOINT
from zsim.result.memory import framework_bytes, process_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """A safe lower bound of what a run needs, bytes.

    The GPU's is the peak of `torch.cuda.memory_allocated` plus what lies outside the allocator: fragmentation, caching
    and frees that wait for another stream can only add to it. The host's and NVMe's are exact, per node.
    """

    peak_allocated: int
    framework: int
    usable: int
    host: int
    host_capacity: int
    nvme: int
    nvme_capacity: int

    @property
    def missing(self) -> int:
        """Bytes that the fullest GPU lacks at least; not above 0 where the bound does not exclude that it fits."""
        return self.peak_allocated + self.framework - self.usable

    @property
    def excluded(self) -> str | None:
        """Why the run cannot fit, whatever its timing; None if it may."""
        if self.missing > 0:
            return "GPU memory"
        if self.host_capacity and self.host > self.host_capacity:
            return "host memory"
        return "NVMe space" if self.nvme > self.nvme_capacity else None


def need(program: Program, cluster: Cluster) -> Need:
    """What every rank of `program` needs at least on the device of `cluster` that offers least."""
    ranks = min(cluster.gpus_per_node, cluster.world_size)
    tops = _tops(program, ranks, cluster)
    offers = [(framework_bytes(device, program, cluster), device) for device in _kinds(cluster)]
    outside, device = min(offers, key=lambda offer: offer[1].usable_bytes - offer[0])
    host = tops["host"]
    if host and device.unified:  # one memory for both
        host += (tops["gpu"] + outside) * ranks
    host += process_bytes(cluster.devices[0]) * ranks
    return Need(
        peak_allocated=tops["gpu"],
        framework=outside,
        usable=device.usable_bytes,
        host=host,
        host_capacity=cluster.host.dram_bytes,
        nvme=tops["nvme"],
        nvme_capacity=cluster.host.nvme_bytes,
    )


def _kinds(cluster: Cluster) -> Iterable[Device]:
    return {id(device): device for device in cluster.devices}.values()


def _tops(program: Program, ranks: int, cluster: Cluster) -> dict[str, int]:
    """The most bytes allocated at once on a GPU, and on a node's host and NVMe by its `ranks`.

    As in `result.memory.measure_host`: what only rank 0 holds counts once, and where CPU and GPU share their memory,
    the checkpoint has been read before the GPU holds anything.
    """
    unified = any(device.unified for device in _kinds(cluster))
    held = dict.fromkeys(DEVICES, 0)
    tops = dict(held)
    sizes: dict[str, tuple[str, int]] = {}
    gpu = top = temporary = 0  # what the GPU holds, its most, and the temporaries that the last op left there
    for part in _parts(program):
        for item in part:
            if isinstance(item, Launch):
                op = item.op
                if isinstance(op.work, Compute):
                    temporary = op.temp_live
                    if gpu + op.temp_peak > top:
                        top = gpu + op.temp_peak
            elif isinstance(item, Alloc):
                key, category, nbytes, device, _, _ = item
                if device == "gpu":
                    gpu += nbytes
                    if gpu + temporary > top:
                        top = gpu + temporary
                else:
                    starting = category in (CHECKPOINT, RANK_0)
                    nbytes = 0 if unified and starting else nbytes * (1 if category == RANK_0 else ranks)
                    held[device] += nbytes
                    tops[device] = max(tops[device], held[device])
                sizes[key] = device, nbytes
            elif isinstance(item, Free):
                device, nbytes = sizes.pop(item.key)
                if device == "gpu":
                    gpu -= nbytes
                else:
                    held[device] -= nbytes
    return tops | {"gpu": top}


def _parts(program: Program) -> Sequence[Sequence[Instruction]]:
    """Initialization and each different step once; a later step that repeats one allocates nothing new."""
    return [program.init, *{id(step): step for step in program.steps}.values()]
