"""From a matrix of connection types, as vendor tools print it, to a topology document (the content of a YAML file).

The matrix says how near two devices are, not what hangs where; the tree is rebuilt from that: what is PIX shares a
switch, PXB a hierarchy of switches, PHB and NODE a CPU, SYS does not. Pairs of GPUs joined by NVLink hide how they meet
over PCIe, so NUMA affinity and the NICs next to them place them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.cluster import catalog, cpus
from zsim.cluster.spec import HOST_GIB, SOCKET_GBPS
from zsim.errors import InputError

# Nearest first. SOC is what drivers before 2018 print for SYS.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass
class Matrix:
    """`cells[a, b]`: PIX | PXB | PHB | NODE | SYS, or a count of direct links in `wires[a, b]`; names gpu0, nic0."""

    gpus: list[str]
    nics: list[str]
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    wires: dict[tuple[str, str], int] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)  # device -> NUMA node or CPU list, whatever tells sockets apart
    nic_names: dict[str, str] = field(default_factory=dict)
    fabric: str = "nvlink"  # what `wires` are: nvlink | xgmi
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise InputError for a matrix that contradicts itself."""
        for (a, b), cell in self.cells.items():
            other = self.cells.get((b, a))
            if other is not None and other != cell:
                raise InputError(f"{a}-{b} is {cell} but {b}-{a} is {other}: the matrix must be symmetric")
        for (a, b), count in self.wires.items():
            if self.wires.get((b, a), count) != count:
                raise InputError(
                    f"{a}-{b} has {count} links but {b}-{a} {self.wires[b, a]}: the matrix must be symmetric"
                )

    def near(self, a: str, b: str) -> int:
        """Index into PCIE; one more than the last where the matrix does not say."""
        cell = self.cells.get((a, b)) or self.cells.get((b, a))
        return PCIE.index(cell) if cell else len(PCIE)


@dataclass(frozen=True)
class Hints:
    """What a matrix does not say, given by the user."""

    gpu: str | None = None
    pcie_gen: int | None = None
    p2p: str | None = None  # auto | none | all
    nic_gbps: float | None = None
    host_gib: float | None = None
    cpu: str | None = None  # its model
    gpus: tuple[str, ...] = ()  # a name per GPU, from `nvidia-smi -q` or `lspci`
    slots: tuple[tuple[int, int], ...] = ()  # PCIe generation and lanes of each


NO_HINTS = Hints()


@dataclass
class Reading:
    """A topology document and how it came about."""

    document: dict[str, Any]
    source: str  # which format it was
    assumptions: list[str]


def to_document(matrix: Matrix, hints: Hints, source: str) -> Reading:
    """The topology that `matrix` describes. Raises InputError for contradictions and unknown GPUs."""
    matrix.check()
    notes = list(matrix.notes)
    names = [catalog.device(name).name for name in hints.gpus]
    if names and len(names) != len(matrix.gpus):
        raise InputError(f"the query lists {len(names)} GPUs, the matrix {len(matrix.gpus)}", field="--query")
    device = catalog.device(hints.gpu or (names[0] if names else guess_gpu(matrix, notes)))
    mixed = not hints.gpu and len(set(names)) > 1
    document: dict[str, Any] = {"name": f"from {source}", "gpu": names if mixed else device.name}
    document["gpus"] = len(matrix.gpus)
    wiring = nvlinks(matrix, device.nvlinks)
    if wiring:
        if device.nvlink_kind is None:
            raise InputError(
                f"{device.name} has no links of its own, but the matrix shows {matrix.fabric}", field="gpu"
            )
        document["nvlink"] = wiring
    gen = (device.pcie_gen or 4) if hints.pcie_gen is None else hints.pcie_gen
    document["pcie"] = {"gen": gen, "tree": tree(matrix)}
    if len(hints.slots) == len(matrix.gpus):
        document["pcie"]["slots"] = dict(zip(matrix.gpus, map(list, hints.slots), strict=True))
    elif hints.pcie_gen is None:
        notes.append(f"PCIe generation {gen} x16, as {device.name} has (--pcie-gen)")
    if hints.p2p:
        document["p2p"] = hints.p2p
    else:
        can = "below a common PCIe switch" if device.p2p_pcie else "nowhere"
        notes.append(f"peer-to-peer over PCIe {can}, as stock drivers and NCCL have it (--p2p)")
    if matrix.nics:
        document["nics"] = {"gbps": 100 if hints.nic_gbps is None else hints.nic_gbps}
        if hints.nic_gbps is None:
            notes.append("NICs of 100 Gb/s, NCCL's own default (--nic-gbps)")
    nodes = {int(node) for node in matrix.numa.values() if node.isdecimal()}
    # GPUs may hang at some of them only: 1, 3, 5 and 7 of a DGX A100's. POWER9 numbers its two 0 and 8
    count = max(nodes, default=0) + 1 if max(nodes, default=0) < 8 else len(nodes)
    document["cpu"] = {"sockets": len(document["pcie"]["tree"]), **host(document, hints, notes, count)}
    document["notes"] = notes
    return Reading(document, source, notes)


def host(
    document: Mapping[str, Any], hints: Hints, notes: list[str], numa_nodes: int, model: str = ""
) -> dict[str, Any]:
    """Memory of a node, which no file of this kind tells, and its CPU, unless the file has `model`.

    Each NUMA node with a GPU is an entry of the tree; more than two of them are parts of two sockets, but Grace's.
    """
    places = len(document["pcie"]["tree"])
    numa_nodes = max(numa_nodes, places)
    names = document["gpu"] if isinstance(document["gpu"], list) else [document["gpu"]]
    grace = catalog.device(str(names[0])).c2c_bandwidth > 0
    sockets = places if numa_nodes <= 2 or grace else 2
    found: dict[str, Any] = {"dram_gib": hints.host_gib, "numa_nodes": numa_nodes}
    if sockets != places:
        found["dram_gbps"] = SOCKET_GBPS * sockets
        notes.append(f"{numa_nodes} NUMA nodes are of {sockets} sockets with {SOCKET_GBPS} GB/s each (cpu.dram_gbps)")
    if hints.host_gib is None:
        found["dram_gib"] = usual = HOST_GIB * sockets
        notes.append(f"host memory of {usual} GiB per node, {HOST_GIB} for each socket (--host-gib)")
    if hints.cpu or model:
        found["model"] = hints.cpu or model
    if cpus.known(found.get("model", "")) is None:
        notes.append(f"{cpus.UNKNOWN} (--cpu{f': {hints.cpu} is not known' if hints.cpu else ''})")
    return found


def guess_gpu(matrix: Matrix, notes: list[str]) -> str:
    """The commonest GPU with that many links. Said, because it decides every rate."""
    most = max((sum(n for (a, _), n in matrix.wires.items() if a == gpu) for gpu in matrix.gpus), default=0)
    single = max(matrix.wires.values(), default=0)
    everywhere = len(matrix.wires) == len(matrix.gpus) * (len(matrix.gpus) - 1)  # else bridged pairs or islands
    if matrix.fabric == "xgmi":
        guess = "MI300X" if most >= 7 else "MI250X"
    elif single >= 18 or most == 18:
        guess = "H100-SXM" if everywhere else "H200-NVL"
    elif single >= 12 or most == 12:
        guess = "A100-SXM-80GB" if everywhere and len(matrix.gpus) > 2 else "A100-PCIe-80GB"
    elif single == 8:
        guess = "A800-SXM-80GB"
    elif single == 6 or most == 6 or (single <= 2 and most > 2):
        guess = "V100-SXM2-32GB"
    elif single:
        guess = "RTX 3090" if single < 4 else "RTX A6000"
    else:
        guess = "RTX 4090"
    notes.append(f"the GPUs are {guess}: the file does not name them (--gpu)")
    return guess


def nvlinks(matrix: Matrix, per_gpu: int) -> Any:
    """`switch`, islands of switches, or direct wires.

    Behind an NVSwitch each pair is shown with all links of a GPU; wires add up to no more than a GPU has.
    """
    if not matrix.wires:
        return None
    index = {gpu: position for position, gpu in enumerate(matrix.gpus)}
    switched, wires = [], []
    for island in groups(matrix.gpus, lambda a, b: (a, b) in matrix.wires or (b, a) in matrix.wires):
        if len(island) < 2:
            continue
        pairs = {
            (a, b): matrix.wires.get((a, b)) or matrix.wires.get((b, a)) or 0
            for a in island
            for b in island
            if index[a] < index[b]
        }
        counts = set(pairs.values())
        if len(island) > 2 and len(counts) == 1 and counts.copy().pop() * (len(island) - 1) > max(per_gpu, 1):
            switched.append([index[gpu] for gpu in island])
        else:
            wires += [[index[a], index[b], count] for (a, b), count in pairs.items() if count]
    if switched and wires:
        raise InputError("some GPUs are behind an NVSwitch and others wired directly: this is not a machine we know")
    if switched == [list(range(len(matrix.gpus)))]:
        return "switch"
    return {"switches": switched} if switched else wires


def groups(names: Iterable[str], joined: Callable[[str, str], bool]) -> list[list[str]]:
    """Connected sets, in order of their first member."""
    found: list[list[str]] = []
    for name in names:
        touching = [group for group in found if any(joined(name, other) for other in group)]
        merged = [member for group in touching for member in group]
        found = [group for group in found if group not in touching]
        found.append([*merged, name])
    order = {name: position for position, name in enumerate(names)}
    return sorted((sorted(group, key=order.__getitem__) for group in found), key=lambda group: order[group[0]])


def tree(matrix: Matrix) -> list[Any]:
    """sockets > switches > devices, by nearness."""
    names = [*matrix.gpus, *matrix.nics]
    near = matrix.near

    def same_socket(a: str, b: str) -> bool:
        if near(a, b) <= PCIE.index("NODE"):
            return True
        # A VM's devices are SYS of each other, whichever node its driver says they are at; NCCL goes by the node.
        return matrix.numa.get(a, a) == matrix.numa.get(b, b)

    sockets = groups(names, same_socket)
    if not matrix.numa and "SYS" not in matrix.cells.values():
        sockets = [names]  # nothing tells sockets apart
    unplaced = [group for group in sockets if len(group) == 1 and not _says_anything(matrix, group[0])]
    if len(sockets) > 1 and unplaced and len(unplaced) < len(sockets):
        home = next(group for group in sockets if group not in unplaced)
        home.extend(group[0] for group in unplaced)
        sockets = [group for group in sockets if group not in unplaced]
    elif len(unplaced) == len(sockets):
        sockets = [names]  # nothing tells sockets apart
    return [_below(matrix, socket) for socket in sockets]


def _says_anything(matrix: Matrix, name: str) -> bool:
    return name in matrix.numa or any(name in pair for pair in matrix.cells)


def _below(matrix: Matrix, names: list[str]) -> list[Any]:
    """What hangs at one socket: devices directly, or switches of those that are PXB or PIX of each other."""
    children: list[Any] = []
    for hierarchy in groups(names, lambda a, b: matrix.near(a, b) <= PCIE.index("PXB")):
        if len(hierarchy) == 1:
            children.append(hierarchy[0])
            continue
        leaves = groups(hierarchy, lambda a, b: matrix.near(a, b) == PCIE.index("PIX"))
        if len(leaves) == 1:
            children.append(leaves[0])
        else:
            children.append([leaf if len(leaf) > 1 else leaf[0] for leaf in leaves])
    return children
