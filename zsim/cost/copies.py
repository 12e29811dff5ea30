"""Copies between a GPU and its host's memory, and to NVMe, laid on the topology."""

from __future__ import annotations

from math import inf

from zsim.cluster.routes import gpu_host_copy
from zsim.cluster.spec import Cluster, global_link
from zsim.cost.layouts import representatives
from zsim.cost.transfer import Transfer
from zsim.errors import NotModeled
from zsim.program.ops import Copy

# A copy engine's large DMA packs a PCIe wire better than the stores of a collective's kernel, which the links'
# figures are for: 25-26 against 24 GB/s on PCIe 4, 52 against 48 on PCIe 5 (hardware/host.csv).
COPY_LOAD = 24 / 26
DIRECTIONS = ("h2d", "d2h", "nvme_read", "nvme_write")
COPY_LATENCY = 10e-6  # launch and completion of one cudaMemcpyAsync
# From a request to its first byte on an idle drive. With q requests of b bytes in flight a drive reads at
# q b / (latency + q b / rate), by 80 to 200 us: GitHub 0xBakeer/deepseek-v41-flash-spark issue 2 (0.49, 1.05, 3.06 GB/s
# at 1, 4, 16 times 64 KiB; 1.06, 2.35, 5.22 of 256 KiB; 6.4 at most), nibor1896/Crow issue 30 (0.78, 3.17, 5.86 at 1,
# 4, 8 times 68 KiB; 9.0 at most). Writes are acknowledged from the drive's own memory: no such limit was measured.
NVME_LATENCY = 120e-6
PAGEABLE_SLOWDOWN = 5.0  # pinned over pageable, 4-6x (DeepSpeed PR 5301)
# A GPU that shares the page tables of its CPU reads such memory itself: 97.4 and 93.0 GiB/s, 1 GiB to a GH200
# (vortex-data/vortex PR 7815)
PAGEABLE_SLOWDOWN_C2C = 1.05


def kind(work: Copy) -> str:
    """As a measured profile names it: "h2d pinned"."""
    return f"{work.direction} {'pinned' if work.pinned else 'pageable'}"


def lay(cluster: Cluster, work: Copy, ranks: tuple[int, ...]) -> Transfer:
    """All `ranks` doing this copy at the same time, each between its GPU and its own socket's memory.

    On unified memory nothing moves. Raises NotModeled for another direction, and for NVMe on a machine that lists none.
    """
    if work.direction not in DIRECTIONS:
        raise NotModeled(f"a copy {work.direction!r}", accepted=" | ".join(DIRECTIONS))
    key = ("copy", work.direction, work.pinned, work.direct, ranks)
    if key not in cluster._cache:
        cluster._cache[key] = _usage(cluster, work, ranks)
    usage = cluster._cache[key]
    if not usage and work.direction in ("h2d", "d2h"):
        return Transfer(0.0, {}, 0.0, algorithm="none")
    algorithm = "dma" if work.pinned else "pageable"
    return Transfer(work.nbytes, usage, COPY_LATENCY, _read_rate(cluster, work, ranks[0]), algorithm)


def _read_rate(cluster: Cluster, work: Copy, rank: int) -> float:
    """bytes/s that one process's requests can reach: those in flight arrive in one latency and their own time."""
    in_flight = min(work.in_flight, work.nbytes)
    if work.direction != "nvme_read" or work.in_flight == inf or not in_flight:
        return inf
    drives = cluster.template(cluster.places[rank][0]).host.nvme_read
    return in_flight / (NVME_LATENCY + in_flight / drives)


def _usage(cluster: Cluster, work: Copy, ranks: tuple[int, ...]) -> dict[str, float]:
    parts: dict[int, list[int]] = {}
    for rank in ranks:
        node, index = cluster.places[rank]
        parts.setdefault(node, []).append(index)
    usage: dict[str, float] = {}
    for node, indices in representatives(cluster, parts):
        template = cluster.template(node)
        if work.direction in ("nvme_read", "nvme_write"):
            rate = template.host.nvme_read if work.direction == "nvme_read" else template.host.nvme_write
            if not rate:
                raise NotModeled("a copy to NVMe on a machine that lists none", field="nvme")
            usage[global_link(node, _NVME[work.direction])] = float(len(indices))
            if not work.direct:
                usage[global_link(node, "cpu0>dram0")] = float(len(indices))
                continue
        for index in indices:
            if template.devices[index].unified:
                continue
            slowdown = PAGEABLE_SLOWDOWN_C2C if template.devices[index].c2c_bandwidth else PAGEABLE_SLOWDOWN
            for link, times in gpu_host_copy(template, index, "d2h" if work.direction == "d2h" else "h2d").items():
                kind = template.links[link].kind
                if work.direct and kind == "dram":
                    continue
                load = times * (COPY_LOAD if kind == "pcie" else 1.0) * (1.0 if work.pinned else slowdown)
                name = global_link(node, link)
                usage[name] = usage.get(name, 0.0) + load
    return usage


_NVME = {"nvme_read": "nvme0>dram0", "nvme_write": "dram0>nvme0"}
