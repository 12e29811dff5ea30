"""Reads NCCL's topology XML: what NCCL_TOPO_DUMP_FILE writes, or clouds ship for NCCL_TOPO_FILE."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from typing import Any

from zsim.cluster import catalog, cpus
from zsim.cluster.matrix import NO_HINTS, Hints, Reading, host
from zsim.cluster.nvidia_smi import generation
from zsim.errors import InputError

DUMP = "the file that NCCL_TOPO_DUMP_FILE=topo.xml writes"
# PCI classes (pcisig): bridges are switches here; GPUs are display controllers or processing accelerators.
_SWITCH, _GPU, _NIC = ("0x0604",), ("0x0300", "0x0302", "0x0380", "0x1200"), ("0x0200", "0x0207", "0x0280")
_SPEED = re.compile(r"\d+(\.\d+)?")  # of "16.0 GT/s PCIe"
_FASTEST_NIC = 3200  # Gb/s
_NVSWITCH = "0x0680"  # class of an NVLink target that is a switch
# RCCL's name of the architecture -> a GPU of the catalog, and SM versions of NVIDIA's.
_GCN = {
    "gfx942": "MI300X", "gfx941": "MI300X", "gfx940": "MI300X", "940": "MI300X", "gfx950": "MI355X", "gfx90a": "MI250X",
    "910": "MI250X",
}  # fmt: skip
_OLDER = {"906": "MI50", "gfx906": "MI50", "908": "MI100", "gfx908": "MI100"}  # which the catalog has not
_SM = {
    "70": "V100-SXM2-32GB",
    "75": "T4",
    "80": "A100-SXM-80GB",
    "86": "RTX A6000",
    "89": "L40S",
    "90": "H100-SXM",
    "100": "B200-SXM",
    "103": "B300-SXM",
    "120": "RTX 5090",
}
_BY_GENERATION = {3: "V100-SXM2-32GB", 4: "A100-SXM-80GB", 5: "H100-SXM", 6: "B300-SXM"}  # of clouds' own machines
_V100_WITHOUT_SWITCH = 8  # an NVSwitch joins the sixteen of a DGX-2 alone
_SOCKET_LINK = {
    "Sapphire Rapids": "upi_sapphire_rapids", "Emerald Rapids": "upi_emerald_rapids", "Zen 3": "xgmi_milan",
    "Zen 4": "xgmi_genoa", "Zen 4c": "xgmi_genoa", "Zen 5": "xgmi_turin",
}  # fmt: skip


@dataclass
class _Machine:
    gpus: list[ElementTree.Element] = field(default_factory=list)
    busids: list[str] = field(default_factory=list)
    nics: list[tuple[str, float]] = field(default_factory=list)  # (name, Gb/s; 0 where not said)
    slots: dict[str, list[int]] = field(default_factory=dict)
    switches: int = 0
    notes: list[str] = field(default_factory=list)


def read(text: str, hints: Hints = NO_HINTS) -> Reading:
    """A topology document. Raises InputError for XML that is broken, holds a graph, or has no GPUs."""
    try:
        root = ElementTree.fromstring(text.lstrip("\ufeff").lstrip())
    except ElementTree.ParseError as error:
        raise InputError(f"not XML: {error}", line=error.position[0], accepted=DUMP) from None
    if root.tag == "graphs":
        raise InputError(
            "these are the rings and trees NCCL found (NCCL_GRAPH_DUMP_FILE), not the machine", accepted=DUMP
        )
    if root.tag != "system":
        raise InputError(f"<{root.tag}> is not an NCCL topology", accepted=DUMP)
    machine = _Machine()
    nodes = sorted(root.iter("cpu"), key=lambda cpu: _whole(cpu, "numaid", "0"))
    tree = [[child for element in cpu for child in _walk(element, machine)] for cpu in nodes]
    tree = [socket for socket in tree if socket]
    if not machine.gpus:
        raise InputError("no GPU in it: no element of a GPU's PCI class", accepted=DUMP)
    return _document(machine, tree, nodes, hints)


def _walk(element: ElementTree.Element, machine: _Machine) -> list[Any]:
    """Children of a socket or switch: devices by name, switches as lists."""
    if element.tag == "nic":
        return [
            name for net in element.iter("net") for name in _nic(net.get("speed", "0"), net.get("name", ""), machine)
        ]
    if element.tag != "pci":
        return []
    kind = element.get("class", "")[:6]
    if kind in _GPU or element.find("gpu") is not None:
        name = f"gpu{len(machine.gpus)}"
        machine.gpus.append(element)
        machine.busids.append(element.get("busid", "").lower())
        _slot(element, name, machine)
        return [name]
    if kind in _NIC:
        nets = list(element.iter("net"))
        if nets:
            return [name for net in nets for name in _nic(net.get("speed", "0"), net.get("name", ""), machine)]
        return _nic("0", "", machine)
    if kind in _SWITCH or len(element):
        inside = [child for below in element for child in _walk(below, machine)]
        if not inside:
            return []
        if len(inside) == 1:
            return inside  # a bridge above one device is part of its slot
        return [inside]
    return []


def _nic(speed: str, name: str, machine: _Machine) -> list[str]:
    """A NIC and its rate in Gb/s (the file has Mb/s). Those slower than 10 Gb/s are for management."""
    gbps = float(speed) / 1000 if re.fullmatch(r"\d+", speed) else 0.0
    if gbps > _FASTEST_NIC:
        raise InputError(f"NIC {name} of {gbps:g} Gb/s: there is none", field="speed", accepted="Mb/s, such as 400000")
    if 0 < gbps < 10:
        machine.notes.append(f"NIC {name} of {gbps:g} Gb/s left out")
        return []
    machine.nics.append((name, gbps))
    return [f"nic{len(machine.nics) - 1}"]


def _slot(element: ElementTree.Element, name: str, machine: _Machine) -> None:
    speed = _SPEED.match(element.get("link_speed", ""))
    width = element.get("link_width", "0")
    if speed and width.isdecimal() and int(width) > 0:
        machine.slots[name] = [generation(float(speed.group())), int(width)]


def _whole(element: ElementTree.Element, attribute: str, default: str) -> int:
    value = element.get(attribute, default)
    if not re.fullmatch(r"-?\d{1,9}", value):
        raise InputError(f"<{element.tag}> has {value[:80]!r}", field=attribute, accepted="a whole number")
    return int(value)


def _document(machine: _Machine, tree: list[Any], nodes: list[ElementTree.Element], hints: Hints) -> Reading:
    notes, cpu = machine.notes, nodes[0]
    names = [hints.gpu] * len(machine.gpus) if hints.gpu else [_gpu_name(gpu, notes) for gpu in machine.gpus]
    names = [catalog.device(str(name)).name for name in names]
    document: dict[str, Any] = {"name": "from NCCL topology", "gpu": names[0] if len(set(names)) == 1 else names}
    document["gpus"] = len(names)
    wiring = _nvlinks(machine, notes)
    only_pcie = not wiring and "SXM" in names[0] and all(gpu.find("gpu") is None for gpu in machine.gpus)
    if only_pcie and names[0].startswith("V100") and len(names) <= _V100_WITHOUT_SWITCH:
        notes.append("the file has only PCIe: NVLinks of V100s, which wire pairs, are left out (`nvidia-smi topo -m`)")
    elif only_pcie:
        notes.append("an NVSwitch joins the GPUs: the file has only PCIe, NCCL asks the driver for NVLinks")
        wiring = "switch"
    if wiring:
        document["nvlink"] = wiring
    document["pcie"] = {"tree": tree}
    if hints.pcie_gen is not None:
        document["pcie"]["gen"] = hints.pcie_gen
    elif machine.slots:
        document["pcie"]["slots"] = machine.slots
    if hints.p2p:
        document["p2p"] = hints.p2p
    if machine.nics:
        default = 100 if hints.nic_gbps is None else hints.nic_gbps
        if hints.nic_gbps is None and not all(gbps for _, gbps in machine.nics):
            notes.append("NICs of 100 Gb/s where no speed is given, NCCL's own default (--nic-gbps)")
        rates = {f"nic{index}": gbps or default for index, (_, gbps) in enumerate(machine.nics)}
        document["nics"] = {"gbps": default if len(set(rates.values())) == 1 and default in rates.values() else rates}
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(cpu.get("vendor", ""), "")
    core = cpus.core_of(vendor, _whole(cpu, "familyid", "0"), _whole(cpu, "modelid", "0"))
    link = _SOCKET_LINK.get(core, "upi_skylake" if vendor == "intel" else "xgmi_rome")
    document["cpu"] = {
        "sockets": len(tree),
        "vendor": vendor,
        "socket_link": link,
        **host(document, hints, notes, _whole(nodes[-1], "numaid", "0") + 1, core),
    }
    document["notes"] = notes
    return Reading(document, "NCCL topology XML", notes)


def _gpu_name(element: ElementTree.Element, notes: list[str]) -> str:
    """From the PCI device id, else from the architecture."""
    known = catalog.by_pci_id(element.get("device", ""))
    if known:
        return known
    gpu = element.find("gpu")
    gcn, sm = ("", "") if gpu is None else (gpu.get("gcn", ""), gpu.get("sm", ""))
    speed = _SPEED.match(element.get("link_speed", ""))
    by_slot = _BY_GENERATION.get(generation(float(speed.group())) if speed else 4, "A100-SXM-80GB")
    guess = _GCN.get(gcn, "MI250X") if gcn else _SM.get(sm, by_slot)
    note = f"GPUs are {guess}: the file does not name them (--gpu)"
    if gcn in _OLDER:
        note = f"GPUs are taken for {guess}: the file has {_OLDER[gcn]}s, which are not in the catalog (--gpu)"
    if note not in notes:
        notes.append(note)
    return guess


def _nvlinks(machine: _Machine, notes: list[str]) -> Any:
    """`switch`, or wires between GPUs of this file. Links to GPUs that are not in it are left out and said."""
    wires: dict[tuple[int, int], int] = {}
    switched = set()
    for index, element in enumerate(machine.gpus):
        for link in [*element.iter("nvlink"), *element.iter("xgmi")]:
            target, count = link.get("target", "").lower(), _whole(link, "count", "1")
            if link.get("tclass", "").startswith(_NVSWITCH):
                switched.add(index)
            elif target in machine.busids and machine.busids.index(target) != index:
                other = machine.busids.index(target)
                pair = (min(index, other), max(index, other))
                wires[pair] = max(count, wires.get(pair, 0))
            else:
                what = "itself" if target in machine.busids else f"{target}, which is not in the file"
                notes.append(f"{count} links of gpu{index} to {what} left out")
    if switched:
        if len(switched) != len(machine.gpus):
            notes.append(f"only gpus {sorted(switched)} are behind the NVSwitch")
            return {"switches": [sorted(switched)]}
        return "switch"
    return [[a, b, count] for (a, b), count in sorted(wires.items())]
