"""Which NICs a set of GPUs uses, and the chain through a node's GPUs that starts and ends at one."""

from __future__ import annotations

from zsim.cluster.rings import rings
from zsim.cluster.routes import TYPES, pcie_path
from zsim.cluster.spec import Node


def distance(node: Node, gpu: int, nic: str) -> int:
    """Rank of the PCIe path type between them: 2 one switch, 3 several, 4 a CPU, 5 sockets."""
    key = ("distance", gpu, nic)
    if key not in node._cache:
        node._cache[key] = TYPES.index(pcie_path(node, f"gpu{gpu}", nic)[0])
    return node._cache[key]


def nic_affinity(node: Node) -> tuple[tuple[str, ...], ...]:
    """Per GPU the NICs it uses: the nearest, dealt so that each serves as few GPUs as possible.

    A NIC left over goes to a GPU that has it as near as its own."""
    if "affinity" not in node._cache:
        gpus = range(len(node.devices))
        chosen: list[list[str]] = [[] for _ in gpus]
        served = dict.fromkeys(node.nics, 0)
        for gpu in gpus:
            nearest = min(node.nics, key=lambda nic: (distance(node, gpu, nic), served[nic], node.nics.index(nic)))
            chosen[gpu].append(nearest)
            served[nearest] += 1
        for nic in (nic for nic, count in served.items() if count == 0):
            as_near = [gpu for gpu in gpus if distance(node, gpu, nic) <= distance(node, gpu, chosen[gpu][0])]
            if as_near:  # else a NIC for storage or management, far from every GPU
                chosen[min(as_near, key=lambda gpu: (len(chosen[gpu]), gpu))].append(nic)
        node._cache["affinity"] = tuple(map(tuple, chosen))
    return node._cache["affinity"]


def nics_of(node: Node, gpus: tuple[int, ...]) -> tuple[str, ...]:
    """The NICs of a group whose GPUs here are `gpus`."""
    affinity = nic_affinity(node)
    return tuple(dict.fromkeys(nic for gpu in gpus for nic in affinity[gpu]))


def chains(node: Node, gpus: tuple[int, ...], nic: str) -> list[tuple[int, ...]]:
    """The rings through `gpus`, either way round, cut open where both ends are nearest to `nic`; every such cut."""
    if len(gpus) == 1:
        return [gpus]
    found: list[tuple[int, ...]] = []
    for order in dict.fromkeys(rings(node, gpus).orders):
        for turned in (order, order[::-1]):
            cuts = [turned[at:] + turned[:at] for at in range(len(turned))]
            far = [distance(node, cut[0], nic) + distance(node, cut[-1], nic) for cut in cuts]
            found += [cut for cut, value in zip(cuts, far, strict=True) if value == min(far)]
    return found
