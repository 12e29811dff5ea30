"""Collectives as NCCL runs them, laid on the topology: bytes over each link, latency, algorithm and protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from zsim.cluster.rings import rings
from zsim.cluster.routes import TYPES, gpu_to_gpu, gpu_to_nic, pcie_path
from zsim.cluster.spec import Cluster, Node, global_link
from zsim.cost.transfer import Transfer
from zsim.errors import NotModeled
from zsim.program.ops import Collective

Groups = tuple[tuple[int, ...], ...]

# Bytes that each ring edge carries per byte of payload (nccl-tests' bus bandwidth factors, doc/PERFORMANCE.md).
EDGE_FACTOR = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "barrier": lambda n: 2 * (n - 1) / n,  # ProcessGroupNCCL::barrier all-reduces one element
}
STEPS = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
    "broadcast": lambda n: n - 1,
    "reduce": lambda n: n - 1,
    "barrier": lambda n: 2 * (n - 1),
}
BASE_LATENCY = 8.4e-6  # Ring Simple (NCCL graph/tuning.cc 2.23-2.28)


@dataclass(frozen=True)
class Layout:
    """A ring of each of `groups`, all at once: link -> bytes per byte that a ring edge carries."""

    usage: dict[str, float]
    ranks: int  # of one group (the largest)
    nodes: int  # that one group spans
    hop_s: float  # latency of one step between GPUs of a node
    net_s: float  # latency of one step between nodes


def lay(cluster: Cluster, work: Collective, groups: Groups) -> Transfer:
    """The transfer of all `groups` running `work` at the same time.

    Usage is the sum over the groups. Raises NotModeled for a kind it does not know.
    """
    if work.kind not in EDGE_FACTOR:
        raise NotModeled(f"collective {work.kind!r}", accepted=", ".join(EDGE_FACTOR))
    layout = ring_layout(cluster, groups)
    if layout.ranks == 1:
        return Transfer(0.0, {}, 0.0, algorithm="none")
    factor = EDGE_FACTOR[work.kind](layout.ranks)
    usage = {link: times * factor for link, times in layout.usage.items()}
    steps = STEPS[work.kind](layout.ranks)
    crossings = steps * (layout.nodes if layout.nodes > 1 else 0) // layout.ranks
    latency = BASE_LATENCY + (steps - crossings) * layout.hop_s + crossings * layout.net_s
    return Transfer(work.payload_bytes, usage, latency, algorithm="ring/simple")


def ring_layout(cluster: Cluster, groups: Groups) -> Layout:
    key = ("ring", groups)
    if key not in cluster._cache:
        cluster._cache[key] = _ring_layout(cluster, groups)
    return cluster._cache[key]


def _ring_layout(cluster: Cluster, groups: Groups) -> Layout:
    parts: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # node -> (its GPUs in a group, nodes the group spans)
    for group in groups:
        by_node: dict[int, list[int]] = {}
        for rank in group:
            node, index = cluster.places[rank]
            by_node.setdefault(node, []).append(index)
        for node, indices in by_node.items():
            parts.setdefault(node, []).append((tuple(sorted(indices)), len(by_node)))
    usage: dict[str, float] = {}
    hop = net = 0.0
    for node, node_parts in representatives(cluster, parts):
        template = cluster.template(node)
        for indices, spans in node_parts:
            local, latency = _through(template, indices, spans)
            if spans > 1:
                net = max(net, latency + cluster.fabric.latency_s)
            if len(indices) > 1:
                hop = max(hop, rings(template, indices).hop_latency_s)
            for link, times in local.items():
                name = global_link(node, link)
                usage[name] = usage.get(name, 0.0) + times
    spans = max(spans for node_parts in parts.values() for _, spans in node_parts)
    return Layout(usage, max(map(len, groups)), spans, hop, net)


def representatives(cluster: Cluster, parts: dict[int, list]) -> Iterable[tuple[int, list]]:
    """The nodes whose links are named: one per template where all its nodes do the same, else every one."""
    if not cluster.collapse:
        return parts.items()
    by_template: dict[int, list[int]] = {}
    for node in range(cluster.nodes):
        by_template.setdefault(cluster.node_templates[node], []).append(node)
    chosen: list[tuple[int, list]] = []
    for nodes in by_template.values():
        loads = {tuple(sorted(parts.get(node, ()))) for node in nodes}
        named = nodes[:1] if len(loads) == 1 else nodes
        chosen.extend((node, parts[node]) for node in named if node in parts)
    return chosen


def _through(node: Node, indices: tuple[int, ...], spans: int) -> tuple[dict[str, float], float]:
    """What a ring loads in one node: a closed ring if the group lives here, else chains from NIC to NIC."""
    if spans > 1:
        key = ("chains", indices)
        if key not in node._cache:
            node._cache[key] = _chains(node, indices)
        return node._cache[key]
    if len(indices) == 1:
        return {}, 0.0
    found = rings(node, indices)
    return found.usage, found.hop_latency_s


def _chains(node: Node, indices: tuple[int, ...]) -> tuple[dict[str, float], float]:
    """One channel per NIC of the group: in by the NIC, through all GPUs, out by the same NIC (same rail)."""
    usage: dict[str, float] = {}
    nics = nics_of(node, indices)
    order = rings(node, indices).orders[0] if len(indices) > 1 else indices
    latency = 0.0

    def add(links: dict[str, float]) -> None:
        for link, times in links.items():
            usage[link] = usage.get(link, 0.0) + times / len(nics)

    for nic in nics:
        chain = _turn(node, order, nic)
        entry, leave = gpu_to_nic(node, chain[0], nic, outward=False), gpu_to_nic(node, chain[-1], nic, outward=True)
        wire = dict.fromkeys(
            (name for name, link in node.links.items() if link.kind == "nic" and nic in (link.src, link.dst)), 1.0
        )
        for links in (entry.usage, leave.usage, wire):
            add(links)
        for a, b in itertools.pairwise(chain):
            add(gpu_to_gpu(node, a, b).usage)
        latency = max(latency, entry.latency_s + leave.latency_s)
    return usage, latency


def _turn(node: Node, order: tuple[int, ...], nic: str) -> tuple[int, ...]:
    """The ring cut open where both ends are nearest to the NIC."""

    def distance(gpu: int) -> int:
        return TYPES.index(pcie_path(node, f"gpu{gpu}", nic)[0])

    cuts = [order[cut:] + order[:cut] for cut in range(len(order))]
    return min(cuts, key=lambda chain: (distance(chain[0]) + distance(chain[-1]), distance(chain[0])))


def nics_of(node: Node, indices: tuple[int, ...]) -> tuple[str, ...]:
    """The NICs that a group with these GPUs uses: each GPU's nearest, shared out evenly among equally near GPUs."""
    affinity = nic_affinity(node)
    return tuple(dict.fromkeys(nic for index in indices for nic in affinity[index]))


def nic_affinity(node: Node) -> tuple[tuple[str, ...], ...]:
    """Per GPU the NICs it uses: nearest first; NICs are dealt so that each serves as few GPUs as possible."""
    if "affinity" not in node._cache:
        gpus = range(len(node.devices))
        distance = {(g, nic): TYPES.index(pcie_path(node, f"gpu{g}", nic)[0]) for g in gpus for nic in node.nics}
        chosen: list[list[str]] = [[] for _ in gpus]
        served = dict.fromkeys(node.nics, 0)
        for g in gpus:
            nearest = min(node.nics, key=lambda nic: (distance[g, nic], served[nic], node.nics.index(nic)))
            chosen[g].append(nearest)
            served[nearest] += 1
        for nic, count in served.items():
            if count == 0:
                near = min(gpus, key=lambda g: (distance[g, nic], len(chosen[g]), g))
                chosen[near].append(nic)
        node._cache["affinity"] = tuple(map(tuple, chosen))
    return node._cache["affinity"]
