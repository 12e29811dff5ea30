"""Where the nodes and links of a topology lie on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.cluster.spec import Cluster, global_link, global_name

# From bottom to top, as people draw servers: what GPUs share among themselves below them, the way out above.
_ROWS = {
    "nvswitch": -1.2,
    "gpu": 0.0,
    "pcie_switch": 1.2,
    "nic": 2.2,
    "cpu": 3.4,
    "nvme": 4.4,
    "dram": 5.2,
    "fabric": 6.2,
}


def drawing(cluster: Cluster, uses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first node with its way out: nodes with coordinates, edges with capacity and use (`tables.link_rows`)."""
    template = cluster.template(0)
    ends = {local: tuple(local.split(">")) for local in template.links}
    kinds = {name: "fabric" for pair in ends.values() for name in pair} | dict(template.kinds)
    places = _places(kinds, list(ends.values()))
    used = {row["link"]: row for row in uses}
    edges = []
    for local, (src, dst) in ends.items():
        link, use = template.links[local], used.get(global_link(0, local), {})
        edges.append(
            {
                "id": global_link(0, local),
                "src": global_name(0, src),
                "dst": global_name(0, dst),
                "kind": link.kind,
                "capacity": link.bandwidth,
                "bytes": use.get("bytes", 0.0),
                "utilization": use.get("utilization", 0.0),
                "peak": use.get("peak", 0.0),
            }
        )
    nodes = [
        {"id": global_name(0, name), "name": name, "kind": kinds[name], "x": x, "y": y}
        for name, (x, y) in places.items()
    ]
    note = f"{cluster.name}. A link's colour and width show its mean use over the step, blue idle to red full."
    if cluster.nodes > 1:
        note += f" Drawn is the first of {cluster.nodes} nodes; equal nodes carry the same."
    return {"nodes": nodes, "edges": edges, "note": note}


def _places(kinds: dict[str, str], ends: list[tuple[str, ...]]) -> dict[str, tuple[float, float]]:
    """GPUs in a row; everything else over the middle of what it is joined to, spread where several would coincide."""
    neighbours: dict[str, set[str]] = {name: set() for name in kinds}
    for src, dst in ends:
        neighbours[src].add(dst)
        neighbours[dst].add(src)
    x: dict[str, float] = {name: float(i) for i, name in enumerate(n for n in kinds if kinds[n] == "gpu")}
    while len(x) < len(kinds):
        known = {name: [x[other] for other in near if other in x] for name, near in neighbours.items() if name not in x}
        placed = {name: sum(xs) / len(xs) for name, xs in known.items() if xs}
        if not placed:  # joined to nothing
            placed = dict.fromkeys(known, 0.0)
        x |= placed
    rows: dict[float, list[str]] = {}
    for name, kind in kinds.items():
        rows.setdefault(_ROWS.get(kind, 3.4), []).append(name)
    width = max(len(rows.get(0.0, ())), 2) - 1
    places: dict[str, tuple[float, float]] = {}
    for y, names in rows.items():
        names.sort(key=lambda name: x[name])
        if len({round(x[name], 3) for name in names}) < len(names):
            step = width / len(names)
            x |= {name: step * (index + 0.5) for index, name in enumerate(names)}
        places |= {name: (x[name], y) for name in names}
    return places
