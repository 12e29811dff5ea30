"""Algorithms laid on the topology: which links carry how many bytes for each byte of a collective's payload.

A group is cut into parts, its GPUs in one node; a part's load depends on the node's template alone, so 64 equal nodes
are worked out once. Rings come from the ring search, NICs from affinity, the ways to them from the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple, TypeVar

from zsim.cluster.build import STAGE_BANDWIDTH
from zsim.cluster.nics import chains, nic_affinity, nics_of
from zsim.cluster.rings import rings
from zsim.cluster.routes import gpu_to_gpu, gpu_to_nic
from zsim.cluster.spec import Cluster, Node, global_link

Groups = tuple[tuple[int, ...], ...]
Usage = dict[str, float]
T = TypeVar("T")

# Bytes that each edge of a ring carries per byte of payload (nccl-tests' bus bandwidth factors, doc/PERFORMANCE.md).
# The payload is the full buffer: gathered output, scattered input, reduced tensor. A broadcast is a ring without the
# edge back to its root, whichever that is: each edge carries (n-1)/n on average.
EDGE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}

# Payload of an NVLS all_reduce against one GPU's NVLink rate: 5 to 8 H200 259-270 of 371, 8 B200 483 of 722 GB/s. It
# hardly depends on the number of GPUs although the wire carries 1 + 1/n bytes: the kernels are the limit.
NVLS_EFFICIENCY = {"Hopper": 0.74, "Blackwell": 0.67, "Blackwell Ultra": 0.67}
# Two phases and the network between them: 2 nodes of H100 reach 471 of the 508 GB/s that NVLS alone gives 16 ranks.
NVLS_TREE_EFFICIENCY = 0.93
TREE_EFFICIENCY = 0.92  # NCCL graph/tuning.cc
# In a ring of two every byte that arrives is also the one to send back: it passes the GPU's own memory before the wire
# takes the next, as over a stage of 1.2 TB/s in series. A6000 bridge 47.5 of 48 GB/s, A100 bridge 195 of 240, H100
# bridge 200 of 247, two H100 behind NVSwitch 274 of 371 (all_reduce plateaus).
PAIR_STAGE = 1.2e12
# One GPU and its proxy alone on a NIC: B200 on 400 Gb/s 36.7, H100 41 of 48 GB/s.
LONE_NIC_EFFICIENCY = 0.8


class Part(NamedTuple):
    """A group's GPUs in one node; `nodes` and `ranks` are the whole group's."""

    gpus: tuple[int, ...]
    nodes: int
    ranks: int


class Layout(NamedTuple):
    """`usage`: link -> bytes per byte of payload, all groups together. `max_rate`: payload bytes/s of one group at best
    for other reasons than a full link: the busiest node of a tree, how well a kernel drives its wires."""

    usage: Usage
    max_rate: float
    rate: float  # payload bytes/s when nothing else runs


def lay_out(cluster: Cluster, groups: Groups, algorithm: str, kind: str) -> Layout:
    """All `groups` running `kind` by `algorithm` (ring | tree | nvls | nvls_tree | pat | pairwise) at once."""
    key = ("layout", groups, algorithm, kind)
    if key not in cluster._cache:
        cluster._cache[key] = _lay_out(cluster, groups, algorithm, kind)
    return cluster._cache[key]


def _lay_out(cluster: Cluster, groups: Groups, algorithm: str, kind: str) -> Layout:
    usage: Usage = {}
    max_rate = float("inf")
    for node, parts in representatives(cluster, parts_of(cluster, groups)):
        template = cluster.template(node)
        for part in parts:
            local, limit = _part(template, part, algorithm, kind)
            max_rate = min(max_rate, limit)
            for link, times in local.items():
                name = global_link(node, link)
                usage[name] = usage.get(name, 0.0) + times
    links = cluster.links
    wires = min((links[link].bandwidth / times for link, times in usage.items()), default=float("inf"))
    return Layout(usage, max_rate, min(wires, max_rate))


def parts_of(cluster: Cluster, groups: Groups) -> dict[int, list[Part]]:
    """node -> the parts of all groups that it holds."""
    key = ("parts", groups)
    if key not in cluster._cache:
        parts: dict[int, list[Part]] = {}
        for group in groups:
            by_node: dict[int, list[int]] = {}
            for rank in group:
                node, index = cluster.places[rank]
                by_node.setdefault(node, []).append(index)
            for node, indices in by_node.items():
                parts.setdefault(node, []).append(Part(tuple(sorted(indices)), len(by_node), len(group)))
        cluster._cache[key] = parts
    return cluster._cache[key]


def representatives(cluster: Cluster, parts: dict[int, list[T]]) -> Iterable[tuple[int, list[T]]]:
    """The nodes whose links are named: one per template where all its nodes do the same, else every one."""
    if not cluster.collapse:
        return parts.items()
    by_template: dict[int, list[int]] = {}
    for node, template in enumerate(cluster.node_templates):
        by_template.setdefault(template, []).append(node)
    chosen: list[tuple[int, list[T]]] = []
    for nodes in by_template.values():
        loads = {tuple(sorted(parts.get(node, ()))) for node in nodes}  # type: ignore[type-var]
        named = nodes[:1] if len(loads) == 1 else nodes
        chosen.extend((node, parts[node]) for node in named if node in parts)
    return chosen


def _part(node: Node, part: Part, algorithm: str, kind: str) -> tuple[Usage, float]:
    key = (part, algorithm, kind)
    if key not in node._cache:
        node._cache[key] = _ALGORITHMS[algorithm](node, part, kind)
    return node._cache[key]


def _ring(node: Node, part: Part, kind: str) -> tuple[Usage, float]:
    factor = EDGE_FACTOR[kind](part.ranks)
    if part.nodes > 1:
        usage = _scaled(_chains(node, part.gpus), factor)
    else:
        usage = _scaled(rings(node, part.gpus).usage, factor) if len(part.gpus) > 1 else {}
    wires = _wires(node, usage)
    if kind in ("broadcast", "reduce"):
        return usage, min(wires * factor, wires * _net_efficiency(node, part))  # an edge in use carries everything
    if part.ranks == 2 and part.nodes == 1 and rings(node, part.gpus).type == "NVL":
        return usage, 1 / (1 / wires + factor / PAIR_STAGE)
    return usage, wires * _net_efficiency(node, part)


def _net_efficiency(node: Node, part: Part) -> float:
    """How much of idle NICs the proxies of a ring or tree can use; infinity where the wire is the limit."""
    if part.nodes > 1:
        nics = nics_of(node, part.gpus)
        if any(gpu_to_nic(node, part.gpus[0], nic, outward=True).staged for nic in nics):
            # A proxy thread copies each byte through host memory before the NIC takes it, on the stage of build.py.
            nic = min(link.bandwidth for link in node.links.values() if link.kind == "nic" and link.src in nics)
            return 1 / (1 + nic / STAGE_BANDWIDTH)
    return LONE_NIC_EFFICIENCY if part.nodes == part.ranks else float("inf")


def _tree(node: Node, part: Part, kind: str) -> tuple[Usage, float]:
    """Double binary tree: a chain inside the node, up for the sum and down for the result."""
    usage: Usage = {}
    g = len(part.gpus)
    if g > 1:
        ring = rings(node, part.gpus).usage
        _add(usage, ring, (g - 1) / g)
        _add(usage, _reversed(node, ring), (g - 1) / g)
    inside = _wires(node, usage) * TREE_EFFICIENCY
    network, limit = _tree_network(node, part)
    _add(usage, network, 1.0)
    return usage, min(inside, limit * min(1.0, _net_efficiency(node, part)))


def _tree_network(node: Node, part: Part) -> tuple[Usage, float]:
    """Between nodes the sum goes up and the result down each edge; half of the data on each of two trees.

    The average node sends 2 (N-1)/N of the payload; the busiest, inner in one tree and leaf in the other, has four edge
    ends and sends twice the payload (three nodes: 1.5 times, two nodes: once).
    """
    if part.nodes == 1:
        return {}, float("inf")
    average = 2 * (part.nodes - 1) / part.nodes
    busiest = {2: 1.0, 3: 1.5}.get(part.nodes, 2.0)
    usage = _scaled(_to_network(node, part.gpus), average)
    return usage, _wires(node, usage) * average / busiest


def _nvls(node: Node, part: Part, kind: str) -> tuple[Usage, float]:
    """The switch adds and multicasts: every GPU sends its data once and its share of the result, and receives both."""
    g = len(part.gpus)
    usage = {}
    for gpu in part.gpus:
        switch = node.switch_of[gpu]
        usage[f"gpu{gpu}>{switch}"] = usage[f"{switch}>gpu{gpu}"] = 1 + 1 / g
    links = min(node.links[link].bandwidth for link in usage)
    return usage, links * NVLS_EFFICIENCY[node.devices[part.gpus[0]].architecture]


def _nvls_tree(node: Node, part: Part, kind: str) -> tuple[Usage, float]:
    usage, inside = _nvls(node, part, kind)
    usage = dict(usage)
    network, limit = _tree_network(node, part)
    _add(usage, network, 1.0)
    return usage, min(inside * NVLS_TREE_EFFICIENCY, limit)


def _pairwise(node: Node, part: Part, kind: str) -> tuple[Usage, float]:
    """all_to_all, for NCCL a group of sends and receives: each rank sends 1/n of its buffer to each other one.

    Between nodes a GPU has its NIC alone, so N nodes reach N / (N-1) of its rate as bus bandwidth
    (github.com/NVIDIA/nccl-tests/issues/130).
    """
    usage: Usage = {}
    n = part.ranks
    for a in part.gpus:
        for b in part.gpus:
            if a != b:
                _add(usage, gpu_to_gpu(node, a, b).usage, 1 / n)
        if part.nodes > 1:
            _add(usage, _to_network(node, (a,)), (n - len(part.gpus)) / n)
    return usage, float("inf")


_ALGORITHMS: dict[str, Callable[[Node, Part, str], tuple[Usage, float]]] = {
    "ring": _ring, "tree": _tree, "nvls": _nvls, "nvls_tree": _nvls_tree, "pat": _ring, "pairwise": _pairwise,
}  # fmt: skip


def _chains(node: Node, gpus: tuple[int, ...]) -> Usage:
    """Rings through several nodes: in by each NIC, through all GPUs, out by the same NIC again (its rail).

    Averaged over all chains that are as good, so that equal GPUs carry equal loads.
    """
    if ("chains", gpus) in node._cache:
        return node._cache["chains", gpus]
    usage: Usage = {}
    nics = nics_of(node, gpus)
    for nic in nics:
        orders = chains(node, gpus, nic)
        share = 1 / (len(nics) * len(orders))
        for order in orders:
            for a, b in pairwise(order):
                _add(usage, gpu_to_gpu(node, a, b).usage, share)
            _add(usage, gpu_to_nic(node, order[0], nic, outward=False).usage, share)
            _add(usage, gpu_to_nic(node, order[-1], nic, outward=True).usage, share)
            _add(usage, _wire(node, nic), share)
    node._cache["chains", gpus] = usage
    return usage


def _to_network(node: Node, gpus: tuple[int, ...]) -> Usage:
    """One byte out and one in per node, spread over the NICs of `gpus`, and there over the GPUs that use them."""
    usage: Usage = {}
    affinity = nic_affinity(node)
    nics = nics_of(node, gpus)
    for nic in nics:
        users = [gpu for gpu in gpus if nic in affinity[gpu]]
        for gpu in users:
            for outward in (False, True):
                _add(usage, gpu_to_nic(node, gpu, nic, outward).usage, 1 / (len(nics) * len(users)))
        _add(usage, _wire(node, nic), 1 / len(nics))
    return usage


def _wire(node: Node, nic: str) -> Usage:
    """The NIC's own cable, both ways."""
    return dict.fromkeys(
        (name for name, link in node.links.items() if link.kind == "nic" and nic in (link.src, link.dst)), 1.0
    )


def _wires(node: Node, usage: Usage) -> float:
    return min((node.links[link].bandwidth / times for link, times in usage.items()), default=float("inf"))


def _add(usage: Usage, more: Usage, times: float) -> None:
    for link, value in more.items():
        usage[link] = usage.get(link, 0.0) + value * times


def _scaled(usage: Usage, factor: float) -> Usage:
    return {link: value * factor for link, value in usage.items()}


def _reversed(node: Node, usage: Usage) -> Usage:
    """The same bytes the other way. Half-duplex links have no other way."""
    turned: Usage = {}
    for link, value in usage.items():
        src, dst = link.split(">")
        back = f"{dst}>{src}"
        turned[back if back in node.links else link] = value
    return turned
