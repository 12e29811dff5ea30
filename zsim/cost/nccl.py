"""What NCCL would choose and what a choice costs beside the bytes: its cost model's constants and formulas.

After NCCL 2.23 to 2.28, github.com/NVIDIA/nccl/blob/v2.28.9-1/src/graph/tuning.cc; every table below stands there.
Seconds and bytes/s.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

US = 1e-6
PROTOCOLS = ("ll", "ll128", "simple")
# Payload per byte on the wire: LL sends a 4-byte flag with each 4 bytes, LL128 8 of each 128.
WIRE_BYTES = {"ll": 2.0, "ll128": 128 / 120, "simple": 1.0}

# Starting an algorithm, by protocol (ll, ll128, simple).
BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0), "nvls_tree": (0, 0, 0), "pat": (8, 8, 8)}
# One hop, by (algorithm, medium) and protocol. Media: nvlink, pci (also through host memory), net.
HOP = {
    ("tree", "nvlink"): (0.6, 1.25, 4.0), ("ring", "nvlink"): (0.6, 1.9, 3.4),
    ("tree", "pci"): (1.0, 1.9, 4.0), ("ring", "pci"): (1.0, 2.5, 5.7),
    ("tree", "net"): (5.0, 8.5, 14.0), ("ring", "net"): (2.7, 4.0, 14.0),
}  # fmt: skip
NVLS_LATENCY, NVLS_TREE_NET, PAT_NET, PAT_PER_RANK = 25.0, 14.0, 14.0 / 3.5, 2.8
# NVLS has one channel per GPU, none faster than the search's highest speed, and works at 5/6 of it (up to 2.27).
NVLS_SPEED, NVLS_CHOICE = {"hopper": 60e9, "blackwell": 90e9}, 5 / 6

# Most that the LL protocol moves (GB/s) for 1, 2 and more nodes; by GPU generation in one node, across nodes by CPU.
LL_MAX = {
    "old": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
# Correction of tree bandwidth by floor(log2(bytes / 64)).
TREE_CORRECTION = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "simple": (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip


class Shape(NamedTuple):
    """What NCCL's model looks at in a communicator."""

    ranks: int
    nodes: int
    generation: str  # old | ampere | hopper | blackwell
    nvlink: bool  # all hops inside a node are NVLink
    nvswitch: bool
    gdr: bool = True  # NICs reach GPU memory without going through the host
    amd_cpu: bool = False
    link_rate: float = 0.0  # of one GPU's way to the NVSwitch, bytes/s
    nic_rate: float = 0.0  # of all NICs of one node that the communicator uses

    @property
    def local(self) -> int:
        return ceil(self.ranks / self.nodes)


def edge(kind: str, ranks: int) -> float:
    """Bytes over one ring edge per byte of payload, as NCCL counts them."""
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def steps(kind: str, ranks: int) -> int:
    """Hops that the last byte of a ring takes."""
    if kind == "send_recv":
        return 1
    return 2 * (ranks - 1) if kind == "all_reduce" else ranks - 1


def crossings(algorithm: str, kind: str, shape: Shape) -> float:
    """Times that the critical path crosses the network."""
    if shape.nodes == 1:
        return 0.0
    if algorithm in ("tree", "nvls_tree"):
        return 2 * log2(shape.nodes)
    if algorithm == "pat":
        return log2(shape.nodes)
    if algorithm == "pairwise" or kind == "send_recv":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (shape.nodes - 1)


def candidates(kind: str, shape: Shape) -> list[tuple[str, str]]:
    """(algorithm, protocol) pairs that NCCL may use for `kind`."""
    # LL128 needs NVLink inside the node and GPUDirect between nodes.
    protocols = PROTOCOLS if shape.nvlink and (shape.gdr or shape.nodes == 1) else ("ll", "simple")
    if kind in ("all_to_all", "send_recv"):
        return [("pairwise" if kind == "all_to_all" else "ring", "simple")]
    found = [("ring", protocol) for protocol in protocols]
    if kind == "all_reduce":
        found += [("tree", protocol) for protocol in protocols]
        if shape.nvswitch and shape.generation in ("hopper", "blackwell") and shape.local > 1:
            found.append(("nvls" if shape.nodes == 1 else "nvls_tree", "simple"))
    if kind in ("all_gather", "reduce_scatter") and shape.nodes == shape.ranks > 1:
        found.append(("pat", "simple"))
    return found


def bandwidth(
    algorithm: str, protocol: str, kind: str, shape: Shape, ring_rate: float, tree_rate: float | None
) -> float:
    """Payload bytes/s in NCCL's model, in which all but NVLS derive from the bus bandwidth of the rings.

    `ring_rate`: what a ring of this kind gets on the wire, payload bytes/s; `tree_rate` the same of a tree, if known.
    """
    n = shape.ranks
    if algorithm == "ring":
        return {
            "simple": ring_rate,
            "ll128": 0.92 * ring_rate,
            "ll": min(0.5 * ring_rate, _ll_max(shape) / edge(kind, n)),
        }[protocol]
    if algorithm == "pat":
        return 0.75 * ring_rate
    if algorithm in ("nvls", "nvls_tree"):
        heads = shape.local
        channel = min(NVLS_SPEED[shape.generation], shape.link_rate / heads)
        bus = 2 * heads * channel * NVLS_CHOICE * (heads - 1) / heads
        if algorithm == "nvls_tree":
            bus = min(bus, shape.nic_rate * (2 if shape.nodes == 2 else 1))
        return bus / edge(kind, n)
    tree = tree_rate or 0.92 * ring_rate * edge(kind, n) / 2
    ll128 = 7 / 9 if shape.nodes == 1 else 120 / 128
    return {"simple": tree, "ll128": tree * ll128, "ll": min(tree / 3.8, _ll_max(shape) / 2)}[protocol]


def _ll_max(shape: Shape) -> float:
    row = shape.generation
    if shape.nodes > 1 and row in ("old", "ampere"):
        row = "ampere" if shape.amd_cpu else "old"
    return LL_MAX[row][0 if shape.nodes == 1 else 1 if shape.nodes < 4 else 2] * 1e9


def latency(algorithm: str, protocol: str, kind: str, shape: Shape) -> float:
    """Seconds before and between the bytes, in NCCL's model."""
    column = PROTOCOLS.index(protocol)
    medium = "nvlink" if shape.nvlink else "pci"
    n, nodes, local = shape.ranks, shape.nodes, shape.local
    base = BASE.get(algorithm, BASE["ring"])[column]
    if algorithm == "nvls":
        return NVLS_LATENCY * US
    if algorithm == "nvls_tree":
        return (NVLS_LATENCY + 2 * log2(nodes) * NVLS_TREE_NET) * US
    if algorithm == "pat":
        return (base + log2(nodes) * PAT_NET + PAT_PER_RANK * n) * US
    if algorithm == "tree":
        return (base + 2 * ((local - 1) * HOP["tree", medium][column] + log2(nodes) * HOP["tree", "net"][column])) * US
    if algorithm == "pairwise":
        return (base + HOP["ring", "net" if nodes > 1 else medium][column]) * US
    hops, across = steps(kind, n), crossings(algorithm, kind, shape)
    net = HOP["tree" if local == 1 else "ring", "net"][column]
    overhead = 0.0 if nodes == 1 else (2.0 if shape.amd_cpu else 1.0) * (3 if protocol == "simple" else 1)
    inside = max(HOP["ring", medium][column], overhead)
    seconds = (base + (hops - across) * inside + across * net) * US
    if kind == "all_reduce" and protocol == "simple" and nodes > 1:
        seconds *= 1.4 if shape.generation != "old" else 1.9
    return seconds


def predicted(
    algorithm: str,
    protocol: str,
    kind: str,
    shape: Shape,
    ring_rate: float,
    nbytes: float,
    tree_rate: float | None = None,
) -> float:
    """NCCL's own estimate, by which it chooses."""
    speed = bandwidth(algorithm, protocol, kind, shape, ring_rate, tree_rate)
    if algorithm == "tree":
        index = int(log2(max(nbytes, 64) / 64))
        if index < len(TREE_CORRECTION[protocol]):
            speed *= TREE_CORRECTION[protocol][index]
    return latency(algorithm, protocol, kind, shape) + nbytes / speed
