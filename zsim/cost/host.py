"""What the CPU does: the issuing Python thread, and the optimizer when it runs there."""

from __future__ import annotations

from math import ceil

from zsim.cluster.spec import Host
from zsim.cost.profile import CpuCost, HostCost
from zsim.model.kernels import Calls
from zsim.program.ops import FORWARDS, Collective, Compute, Copy, CpuWork, HostWork, Op


def issue_seconds(op: Op, cost: HostCost) -> float:
    """Time of the issuing thread from entering the call to having launched `op`."""
    work = op.work
    if isinstance(work, Compute):
        launches = sum(kernel.launches for kernel in work.kernels)
        own = cost.launch if op.phase in FORWARDS else cost.backward_launch
        around = sum(count * cost.calls[kind] for kind, count in zip(Calls._fields, work.calls, strict=True) if count)
        return launches * (own + cost.driver) + around
    if isinstance(work, Collective):
        return cost.collective
    if isinstance(work, Copy):
        return cost.copy
    if isinstance(work, HostWork):
        return host_seconds(work, cost)
    return 0.0


def host_seconds(work: HostWork, cost: HostCost) -> float:
    return work.count * cost.hooks.get(work.label, cost.default_hook)


def cpu_seconds(work: CpuWork, cost: CpuCost, host: Host, ranks_on_node: int, threads: int | None) -> float:
    """All ranks of a node work at once: they share its DRAM bandwidth, and `threads` of each share its cores.

    `threads` None: OpenMP's default, in every process as many as the node has cores. What a process has pinned lies in
    the memory of one NUMA node, what its threads fill in that of all; the node of most ranks is what they wait for.
    """
    threads = max(1, round((threads or host.cores) * work.cores))
    # What was measured with more threads than cores begins at twice as many; up to there a straight line.
    crowded = min(max(threads * ranks_on_node / host.cores - 1, 0.0), 1.0)
    reached = cost.dram_efficiency + (cost.crowded_efficiency - cost.dram_efficiency) * crowded
    nodes = host.numa_nodes
    in_one = work.pinned * ceil(ranks_on_node / nodes) + (work.nbytes - work.pinned) * ranks_on_node / nodes
    at_work = min(threads, host.cores / ranks_on_node)
    own = cost.thread_bandwidth.get(host.vendor, cost.thread_bandwidth["default"]) * at_work
    moving = max(in_one / (host.dram_bandwidth / nodes * reached), work.nbytes / own)
    if work.moments is None:
        return moving
    converting = cost.conversion["avx512" if host.avx512 else "scalar"][work.moments]
    return max(moving, work.numel * converting / at_work)
