"""The catalog: accelerators and link kinds, one YAML block each, every figure with its source.

Blocks are parsed one by one as they are asked for, because parsing all of them takes longer than a simulation.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from zsim.cluster.spec import Device
from zsim.errors import InputError

# Entries of links.yaml that join sockets.
SOCKET_LINKS = (
    "qpi", "upi_skylake", "upi_sapphire_rapids", "upi_emerald_rapids", "xgmi_rome", "xgmi_milan", "xgmi_genoa",
    "xgmi_turin", "grace", "xbus_power9",
)  # fmt: skip
GB = 1e9
GIB = 2**30


@cache
def _blocks(file: str) -> dict[str, str]:
    """Top-level key -> its text."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return {part.split(":", 1)[0]: part for part in parts if not part.startswith("#")}


def _plain(name: str) -> str:
    """ "NVIDIA A100-SXM4-80GB" and "a100 sxm4 80 gb" are one name."""
    name = name.lower()
    for vendor in ("nvidia", "amd", "intel", "geforce", "tesla", "radeon", "graphics", "generation"):
        name = name.replace(vendor, "")
    return re.sub(r"[^a-z0-9]", "", name)


@cache
def _names() -> dict[str, str]:
    """Plain name or alias -> catalog name."""
    names: dict[str, str] = {}
    for name, block in _blocks("devices.yaml").items():
        aliases = re.search(r"^  aliases: \[(.*)\]$", block, flags=re.MULTILINE)
        for alias in [name, *(aliases.group(1).split(",") if aliases else [])]:
            names[_plain(alias)] = name
    return names


@cache
def _sized_names() -> dict[tuple[str, float], str]:
    """(Plain name or alias without its memory, memory in GB) -> catalog name."""
    names: dict[tuple[str, float], str] = {}
    for alias, name in _names().items():
        memory = re.search(r"^  memory_gb: ([\d.]+)$", _blocks("devices.yaml")[name], flags=re.MULTILINE)
        if memory:
            names.setdefault((re.sub(r"\d+gb", "", alias), float(memory[1])), name)
    return names


def known_name(name: str) -> str | None:
    """The catalog's name of an accelerator; None where it has none. Sources put the memory where they like ("A100-40GB
    SXM", "H200-141GB"): it has to be the accelerator's."""
    if name in _blocks("devices.yaml"):
        return name
    found = _names().get(_plain(name))
    if found is None and (memory := re.search(r"(\d+) ?GB", name, flags=re.IGNORECASE)):
        found = _sized_names().get((_plain(name.replace(memory[0], "")), float(memory[1])))
    return found


@cache
def _pci_ids() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, block in _blocks("devices.yaml").items():
        ids = re.search(r"^  pci: \[(.*)\]$", block, flags=re.MULTILINE)
        if ids:
            found |= dict.fromkeys(re.findall(r"0x[0-9a-f]{4}", ids.group(1)), name)
    return found


def by_pci_id(device_id: str) -> str | None:
    """The accelerator with PCI device id "0x2330", if the catalog has it."""
    return _pci_ids().get(device_id.lower())


def known_devices() -> list[str]:
    return list(_blocks("devices.yaml"))


@cache
def device(name: str) -> Device:
    """The accelerator called `name` (any usual spelling). Raises InputError with the nearest names if unknown."""
    found = known_name(name)
    if found is None:
        known = _names()
        close = difflib.get_close_matches(_plain(name), known, n=5, cutoff=0.4)
        nearest = list(dict.fromkeys(known[match] for match in close)) or known_devices()
        counted = re.fullmatch(r"\d+ ?[x×*] ?(.+)|(.+?) ?[x×*] ?\d+", name, flags=re.IGNORECASE)
        alone = counted and (known_name(counted[1] or counted[2]))
        notes = (f"how many there are is said elsewhere; this would be {alone}",) if alone else ()
        raise InputError(f"unknown GPU {name[:80]!r}", field="gpu", accepted=", ".join(nearest), notes=notes)
    entry: dict[str, Any] = yaml.load(_blocks("devices.yaml")[found], Loader=yaml.CSafeLoader)[found]
    kind, count = entry.get("nvlink", (None, 0))
    gen, lanes = entry.get("pcie", (0, 0))
    return Device(
        name=found,
        vendor=entry["vendor"],
        peak_flops={dtype: rate * 1e12 for dtype, rate in entry["tflops"].items()},
        memory_bytes=round(entry["memory_gb"] * GB),
        usable_bytes=round(entry["usable_gib"] * GIB),
        memory_bandwidth=entry["memory_gbps"] * GB,
        architecture=entry["architecture"],
        p2p_pcie=entry["p2p_pcie"],
        unified=entry.get("unified", False),
        source=entry["source"],
        nvlink_kind=kind,
        nvlinks=count,
        pcie_gen=gen,
        pcie_lanes=lanes,
        c2c_bandwidth=entry.get("c2c_gbps", 0) * GB,
        compute_capability=entry.get("compute_capability", ""),
    )


@cache
def link_kind(name: str) -> tuple[float, float, float]:
    """(reachable bytes/s, raw bytes/s, latency in seconds) of a link kind, one way."""
    blocks = _blocks("links.yaml")
    if name not in blocks:
        raise InputError(f"unknown link kind {name!r}", accepted=", ".join(blocks))
    entry = yaml.load(blocks[name], Loader=yaml.CSafeLoader)[name]
    return entry["reach"] * GB, entry["raw"] * GB, entry["latency_us"] * 1e-6
