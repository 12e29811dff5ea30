"""What the CPU does: the issuing Python thread, and the optimizer when it runs there."""

from __future__ import annotations

from zsim.cluster.spec import Host
from zsim.cost.profile import CpuCost, HostCost
from zsim.program.ops import Collective, Compute, Copy, CpuWork, HostWork, Op

ADAM_BYTES = 28  # per parameter: reads weight, gradient and both moments, writes all but the gradient


def issue_seconds(op: Op, cost: HostCost) -> float:
    """Time of the issuing thread from entering the call to having launched `op`."""
    work = op.work
    if isinstance(work, Compute):
        launches = sum(kernel.launches for kernel in work.kernels)
        return launches * (cost.backward_launch if op.phase == "backward" else cost.launch)
    if isinstance(work, Collective):
        return cost.collective
    if isinstance(work, Copy):
        return cost.copy
    if isinstance(work, HostWork):
        return host_seconds(work, cost)
    return 0.0


def host_seconds(work: HostWork, cost: HostCost) -> float:
    return work.count * cost.hooks.get(work.label, cost.default_hook)


def cpu_seconds(work: CpuWork, cost: CpuCost, host: Host, ranks_on_node: int) -> float:
    """All ranks of a node update at once: they share its cores and its DRAM bandwidth.

    Either bounds what is done to a byte, so that scaling and casting cost their share of an Adam step.
    """
    bandwidth = host.dram_bandwidth * cost.dram_efficiency / ranks_on_node
    cores = max(1.0, host.cores / ranks_on_node)
    return work.nbytes / min(bandwidth, cores * cost.params_per_core * ADAM_BYTES)
