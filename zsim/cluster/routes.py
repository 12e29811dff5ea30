"""How bytes get from one GPU to another, to a NIC and to host memory: the path types NCCL distinguishes.

A route is the links it loads and how often per byte, its bandwidth when idle, and its type.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from zsim.cluster.spec import Node
from zsim.errors import InputError

# Closest first (NCCL graph/topo.h): same NVLink or NVSwitch, one PCIe switch, several, through a CPU, across sockets.
TYPES = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")


class Route(NamedTuple):
    """`usage`: local link -> times a byte crosses it. `staged`: through host memory."""

    type: str
    usage: dict[str, float]
    bandwidth: float
    latency_s: float
    staged: bool = False


def ancestors(node: Node, name: str) -> list[str]:
    """`name`, then what it plugs into, up to its CPU."""
    chain = [name]
    while chain[-1] in node.parent:
        chain.append(node.parent[chain[-1]])
    return chain


def pcie_path(node: Node, a: str, b: str) -> tuple[str, list[str]]:
    """(path type, links) over PCIe and sockets from a to b."""
    up, down = ancestors(node, a), ancestors(node, b)
    meet = next((name for name in up if name in down), None)
    if meet is None:
        names = [*up, *reversed(down)]
        kind = "SYS"
    else:
        names = [*up[: up.index(meet) + 1], *reversed(down[: down.index(meet)])]
        switches = sum(node.kinds[name] == "pcie_switch" for name in names)
        kind = "PHB" if node.kinds[meet] == "cpu" else "PIX" if switches == 1 else "PXB"
    return kind, [f"{src}>{dst}" for src, dst in itertools.pairwise(names)]


def _route(node: Node, kind: str, links: list[str], staged: bool = False) -> Route:
    usage: dict[str, float] = {}
    for link in links:
        if link not in node.links:
            raise InputError(
                f"no link {link.replace('>', ' to ')}: these CPUs do not see each other", field="cpu.socket_link"
            )
        usage[link] = usage.get(link, 0.0) + 1.0
    bandwidth = min(node.links[link].bandwidth / times for link, times in usage.items())
    return Route(kind, usage, bandwidth, sum(node.links[link].latency_s for link in links), staged)


def gpu_to_gpu(node: Node, a: int, b: int) -> Route:
    """The way NCCL takes: NVLink, else PCIe peer-to-peer where allowed, else through host memory."""
    key = ("gpu", a, b)
    if key not in node._cache:
        node._cache[key] = _gpu_to_gpu(node, a, b)
    return node._cache[key]


def _gpu_to_gpu(node: Node, from_gpu: int, to_gpu: int) -> Route:
    a, b = f"gpu{from_gpu}", f"gpu{to_gpu}"
    if f"{a}>{b}" in node.links:
        return _route(node, "NVL", [f"{a}>{b}"])
    switch = node.switch_of.get(from_gpu)
    if switch is not None and switch == node.switch_of.get(to_gpu):
        return _route(node, "NVL", [f"{a}>{switch}", f"{switch}>{b}"])
    kind, links = pcie_path(node, a, b)
    if node.p2p != "none" and TYPES.index(kind) <= TYPES.index(node.p2p):
        return _route(node, kind, links)
    return _route(node, kind, [*_to_host(node, a), *_from_host(node, b, cpu_of(node, a))], staged=True)


def through_host(node: Node) -> bool:
    """Whether NCCL's neighbours on a node talk through host memory, having no NVLink and no peer-to-peer."""
    if node.switch_of or any(link.kind == "nvlink" for link in node.links.values()):
        return False
    pairs = itertools.pairwise(range(len(node.devices)))
    return len(node.devices) > 1 and all(gpu_to_gpu(node, a, b).staged for a, b in pairs)


def cpu_of(node: Node, name: str) -> str:
    return ancestors(node, name)[-1]


def _to_host(node: Node, device: str) -> list[str]:
    """Store into the memory of the device's own socket."""
    chain = ancestors(node, device)
    links = [f"{src}>{dst}" for src, dst in itertools.pairwise(chain)]
    staging = [f"{device}>host"] if f"{device}>host" in node.links else []
    return [*links, *staging, f"{chain[-1]}>dram{chain[-1].removeprefix('cpu')}"]


def _from_host(node: Node, device: str, memory_of: str) -> list[str]:
    """Read from the memory of socket `memory_of`. DRAM is half duplex: reads load the same link as writes."""
    chain = [*reversed(ancestors(node, device))]
    across = [f"{memory_of}>{chain[0]}"] if memory_of != chain[0] else []
    links = [f"{src}>{dst}" for src, dst in itertools.pairwise(chain)]
    staging = [f"{device}>host"] if f"{device}>host" in node.links else []
    return [f"{memory_of}>dram{memory_of.removeprefix('cpu')}", *across, *links, *staging]


def gpu_host_copy(node: Node, gpu: int, direction: str) -> dict[str, float]:
    """Links that a copy engine loads per byte between a GPU and pinned memory on its socket (h2d | d2h)."""
    chain = ancestors(node, f"gpu{gpu}")
    pairs = list(itertools.pairwise(chain))
    links = [f"{src}>{dst}" for src, dst in pairs] if direction == "d2h" else [f"{dst}>{src}" for src, dst in pairs]
    return {**dict.fromkeys(links, 1.0), f"{chain[-1]}>dram{chain[-1].removeprefix('cpu')}": 1.0}


def gpu_to_nic(node: Node, gpu: int, nic: str, outward: bool) -> Route:
    """Between a GPU and a NIC: GPUDirect up to PXB, from there over a peer nearer to the NIC (PXN), else staged."""
    key = ("nic", gpu, nic, outward)
    if key not in node._cache:
        node._cache[key] = _gpu_to_nic(node, gpu, nic, outward)
    return node._cache[key]


def _gpu_to_nic(node: Node, gpu: int, nic: str, outward: bool) -> Route:
    name = f"gpu{gpu}"
    src, dst = (name, nic) if outward else (nic, name)
    kind, links = pcie_path(node, src, dst)
    direct = TYPES.index(kind) <= TYPES.index("PXB") or node.devices[gpu].c2c_bandwidth > 0
    if direct and node.gdr:
        return _route(node, kind, links)
    if node.gdr and not direct:
        for peer in range(len(node.devices)):
            hop = gpu_to_gpu(node, *((gpu, peer) if outward else (peer, gpu))) if peer != gpu else None
            near, near_links = pcie_path(node, *((f"gpu{peer}", nic) if outward else (nic, f"gpu{peer}")))
            if hop and hop.type == "NVL" and TYPES.index(near) <= TYPES.index("PXB"):
                return _route(node, near, [*hop.usage, *near_links])
    if outward:
        return _route(node, kind, [*_to_host(node, name), *_from_host(node, nic, cpu_of(node, name))], staged=True)
    return _route(node, kind, [*_to_host(node, nic), *_from_host(node, name, cpu_of(node, nic))], staged=True)
