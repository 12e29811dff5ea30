"""Which ranks sit on equivalent hardware, so that one of them can stand for all."""

from __future__ import annotations

from typing import Any

from zsim.cluster.routes import ancestors
from zsim.cluster.spec import Cluster, Node


def rank_classes(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Ranks grouped by device and by all that hangs between it and the rest: PCIe, NVLinks, NICs, socket memory."""
    if "classes" not in cluster._cache:
        per_template = [_signatures(template) for template in cluster.templates]
        classes: dict[Any, list[int]] = {}
        for rank, (node, index) in enumerate(cluster.places):
            template = cluster.node_templates[node]
            classes.setdefault((template, per_template[template][index]), []).append(rank)
        cluster._cache["classes"] = tuple(tuple(ranks) for ranks in classes.values())
    return cluster._cache["classes"]


def _signatures(node: Node) -> list[Any]:
    """One hashable per GPU; equal for GPUs that see the same machine."""
    children: dict[str, list[str]] = {}
    for child, parent in node.parent.items():
        children.setdefault(parent, []).append(child)

    def shape(name: str) -> Any:
        """The tree below `name`, with devices as their kind and link rates."""
        below = sorted(map(repr, (shape(child) for child in children.get(name, ()))))
        up = node.links.get(f"{name}>{node.parent.get(name, '')}")
        device = node.devices[int(name[3:])].name if node.kinds[name] == "gpu" else node.kinds[name]
        return device, up.bandwidth if up else 0.0, tuple(below)

    signatures = []
    for index, device in enumerate(node.devices):
        name = f"gpu{index}"
        nvlinks = sorted(link.bandwidth for link in node.links.values() if link.src == name and link.kind == "nvlink")
        chain = tuple(shape(above) for above in ancestors(node, name))
        signatures.append((device.name, tuple(nvlinks), chain))
    return signatures
