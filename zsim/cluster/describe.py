"""A topology in words: the tree of one node, its links, its rings, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cluster.nics import nic_affinity
from zsim.cluster.rings import Rings, rings
from zsim.cluster.routes import gpu_to_gpu
from zsim.cluster.spec import Cluster, Link, Node
from zsim.errors import InputError


@dataclass(frozen=True)
class Description:
    """What `zsim topo` prints; rates in bytes/s. `rings` is None for a single GPU."""

    tree: list[str]
    links: list[dict[str, object]]
    paths: dict[str, int]
    rings: Rings | None
    limit: str | None  # the link that bounds the rings
    problems: list[str]


def describe(cluster: Cluster, template: int = 0) -> Description:
    """One node of the cluster (all nodes of a template are equal)."""
    node = cluster.templates[template]
    gpus = tuple(range(len(node.devices)))
    found = rings(node, gpus) if len(gpus) > 1 and cluster.backend == "nccl" else None
    limit = min(found.usage, key=lambda link: node.links[link].bandwidth / found.usage[link]) if found else None
    return Description(tree(node), link_table(node), path_counts(node), found, limit, problems(cluster, node))


def tree(node: Node) -> list[str]:
    """The PCIe tree, a line per device or switch, as `tree` draws directories."""
    children: dict[str, list[str]] = {}
    for child, parent in node.parent.items():
        children.setdefault(parent, []).append(child)
    lines: list[str] = []

    def show(name: str, lead: str, branch: str, below: str) -> None:
        lines.append(f"{lead}{branch}{name}  {_about(node, name)}".rstrip())
        held = children.get(name, [])
        for number, child in enumerate(held):
            last = number == len(held) - 1
            show(child, lead + below, "└─ " if last else "├─ ", "   " if last else "│  ")

    for name, kind in node.kinds.items():
        if kind == "cpu":
            show(name, "", "", "")
    if not node.parent:
        lines += [f"{name}  {_about(node, name)}" for name, kind in node.kinds.items() if kind == "gpu"]
    for switch in dict.fromkeys(node.switch_of.values()):
        members = [f"gpu{gpu}" for gpu, held in node.switch_of.items() if held == switch]
        lines.append(f"{switch}  joins {_span(members)}")
    return lines


def _about(node: Node, name: str) -> str:
    kind = node.kinds[name]
    up = node.links.get(f"{name}>{node.parent.get(name, '')}")
    if kind == "cpu":
        number = name.removeprefix("cpu")
        dram = node.links[f"{name}>dram{number}"]
        return f"memory {_gbps(dram.raw)}"
    if kind == "gpu":
        index = int(name.removeprefix("gpu"))
        parts = [node.devices[index].name]
        if up:
            parts.append(f"{up.kind} {_gbps(up.bandwidth)}")
        wires = [link for link in node.links.values() if link.src == name and link.kind == "nvlink"]
        if wires:
            parts.append("nvlink " + ", ".join(f"{_gbps(link.bandwidth)} to {link.dst}" for link in wires))
        if node.nics:
            parts.append("uses " + ", ".join(nic_affinity(node)[index]))
        return "  ".join(parts)
    if kind == "nic":
        wire = next(link for link in node.links.values() if link.src == name and link.kind == "nic")
        return f"{wire.raw * 8 / 1e9:g} Gb/s to {wire.dst}"
    return f"{up.kind} {_gbps(up.bandwidth)}" if up else ""


def link_table(node: Node) -> list[dict[str, object]]:
    """One row per kind and rate: how many directed links, bytes/s usable and raw."""
    rows: dict[tuple[str, float, float], list[Link]] = {}
    for link in node.links.values():
        rows.setdefault((link.kind, link.bandwidth, link.raw), []).append(link)
    return [
        {"kind": kind, "links": len(links), "bandwidth": bandwidth, "raw": raw, "example": links[0].id}
        for (kind, bandwidth, raw), links in rows.items()
    ]


def path_counts(node: Node) -> dict[str, int]:
    """Ordered pairs of GPUs by path type; "+host" where the way goes through host memory."""
    counts: dict[str, int] = {}
    gpus = range(len(node.devices))
    for a in gpus:
        for b in gpus:
            if a != b:
                route = gpu_to_gpu(node, a, b)
                if not route.bandwidth > 0:
                    continue
                name = route.type + ("+host" if route.staged else "")
                counts[name] = counts.get(name, 0) + 1
    return counts


def problems(cluster: Cluster, node: Node) -> list[str]:
    """What a careful reader would question; empty for a sound machine."""
    found = []
    reached = sum(path_counts(node).values())
    if reached != len(node.devices) * (len(node.devices) - 1):
        found.append("some GPUs do not reach each other")
    for key, link in node.links.items():
        back = node.links.get(f"{link.dst}>{link.src}")
        if link.kind not in ("dram", "staging", "nvme") and (back is None or back.bandwidth != link.bandwidth):
            found.append(f"{key} has no equal way back")
    if cluster.nodes > 1 and not node.gdr:
        found.append("NICs do not reach GPU memory (no GPUDirect RDMA): every byte between nodes passes host memory")
    slow = {gpu: link.bandwidth for gpu, link in _uplinks(node).items()}
    if len(set(slow.values())) > 1:
        worst = min(slow, key=slow.__getitem__)
        found.append(f"{worst} has a narrower slot than others: {_gbps(slow[worst])} of {_gbps(max(slow.values()))}")
    return found


def _uplinks(node: Node) -> dict[str, Link]:
    names = (f"gpu{index}" for index in range(len(node.devices)))
    ups = ((name, node.links.get(f"{name}>{node.parent.get(name, '')}")) for name in names)
    return {name: link for name, link in ups if link is not None}


def _gbps(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"


def _span(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]}"


def draw(cluster: Cluster, path: str) -> None:
    """The graph of one node as a picture (PNG by suffix): CPUs on top, devices below, NVLink in green."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    node = cluster.templates[0]
    heights = {"dram": 4, "cpu": 3, "pcie_switch": 2, "gpu": 1, "nic": 1, "nvswitch": 0, "nvme": 3.5}
    places: dict[str, tuple[float, float]] = {}
    for kind, height in heights.items():
        names = [name for name, held in node.kinds.items() if held == kind]
        for position, name in enumerate(names):
            depth = 0.25 * (len(_chain(node, name)) - 2) if kind == "pcie_switch" else 0.0
            places[name] = ((position + 0.5) / len(names), height - depth)
    colours = {"nvlink": "tab:green", "pcie": "tab:blue", "c2c": "tab:purple", "socket": "tab:red", "dram": "tab:gray"}
    figure, axes = pyplot.subplots(figsize=(max(8, len(node.devices) * 1.2), 6))
    for link in node.links.values():
        if link.src in places and link.dst in places and link.kind in colours:
            (x0, y0), (x1, y1) = places[link.src], places[link.dst]
            axes.plot([x0, x1], [y0, y1], color=colours[link.kind], linewidth=1, alpha=0.6, zorder=1)
    for name, (x, y) in places.items():
        axes.text(x, y, name, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round", "fc": "white"}, zorder=2)
    for kind, colour in colours.items():
        axes.plot([], [], color=colour, label=kind)
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(f"{cluster.name}: one of {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}")
    axes.axis("off")
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be drawn: {error}", file=path, accepted="a .png, .svg or .pdf to write") from None
    finally:
        pyplot.close(figure)


def _chain(node: Node, name: str) -> list[str]:
    chain = [name]
    while chain[-1] in node.parent:
        chain.append(node.parent[chain[-1]])
    return chain
