"""Measured collectives against predictions: reads a CSV of points, rebuilds each machine from its words, compares.

Columns: set_id, gpu, n_gpus, nodes, intra, net, collective, size_bytes, time_us; optional quality, held, note, nccl.
`intra` and `net` are short English ("NVSwitch", "PCIe4 x16 direct to dual EPYC 7542, no P2P", "IB NDR 8x400G"); what
they leave open is filled with NCCL's own defaults and listed with the set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from zsim.cluster.load import cluster_from
from zsim.cluster.spec import Cluster
from zsim.cost.bench import seconds_alone
from zsim.cost.collectives import KINDS, transfer
from zsim.errors import InputError
from zsim.validation.tables import read_table

REQUIRED = ("set_id", "gpu", "n_gpus", "nodes", "intra", "net", "collective", "size_bytes", "time_us")
LARGE = 16 * 2**20
NVLINK_DOMAIN = 72  # GPUs of an NVL72 rack
# A process that drives all GPUs of a node launches one kernel after the other; nccl-tests -g 8 has floors of 39 to
# 48 us on A100, V100 and 4090 where one process per GPU has 13 to 25.
LAUNCH_PER_GPU = 5e-6

CUBE_MESH = [
    [0, 1, 1], [0, 2, 1], [0, 3, 2], [0, 4, 2], [1, 2, 2], [1, 3, 1], [1, 5, 2], [2, 3, 1],
    [2, 6, 2], [3, 7, 2], [4, 5, 1], [4, 6, 1], [4, 7, 2], [5, 6, 2], [5, 7, 1], [6, 7, 1],
]  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured line."""

    set_id: str
    gpu: str
    gpus: int
    nodes: int
    intra: str
    net: str
    kind: str
    nbytes: int
    seconds: float
    quality: str = "ok"
    note: str = ""
    line: int = 0


@dataclass(frozen=True)
class Compared:
    point: Point
    predicted_s: float
    algorithm: str

    @property
    def error(self) -> float:
        """Of time, relative to the measurement."""
        return self.predicted_s / self.point.seconds - 1


@dataclass
class Comparison:
    compared: list[Compared] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # set -> why

    def sets(self) -> dict[str, list[Compared]]:
        by_set: dict[str, list[Compared]] = {}
        for one in self.compared:
            by_set.setdefault(one.point.set_id, []).append(one)
        return by_set


def median_error(compared: Iterable[Compared]) -> float:
    """Median absolute relative error of time; NaN of nothing."""
    errors = [abs(one.error) for one in compared]
    return median(errors) if errors else float("nan")


def read_points(path: str | Path) -> list[Point]:
    """The points of a CSV file. Raises InputError with the line for a missing column or a number that is none."""
    points = []
    for line, row in read_table(path, REQUIRED):
        try:
            points.append(_point(row, line))
        except (ValueError, OverflowError) as error:
            raise InputError(f"not a measured point: {error}", file=path, line=line) from None
    return points


def _point(row: dict[str, str], line: int) -> Point:
    point = Point(
        row["set_id"], row["gpu"], int(row["n_gpus"]), int(row["nodes"]), row["intra"] or "", row["net"] or "",
        row["collective"], int(float(row["size_bytes"])), float(row["time_us"]) * 1e-6,
        row.get("quality") or "ok", row.get("note") or "", line,
    )  # fmt: skip
    if point.gpus < 1 or point.nodes < 1 or point.nbytes < 0 or not 0 < point.seconds < 1e9:
        raise ValueError("counts, bytes and time must be positive and finite")
    return point


def compare(points: Sequence[Point]) -> Comparison:
    """Predict every point. What cannot be rebuilt is listed in `skipped` by set."""
    result = Comparison()
    for point in points:
        try:
            seconds, algorithm = predict(point)
        except InputError as error:
            result.skipped[point.set_id] = error.message
            continue
        result.compared.append(Compared(point, seconds, algorithm))
    return result


def predict(point: Point) -> tuple[float, str]:
    """(seconds, algorithm) of one point on its machine."""
    if point.kind not in KINDS:
        raise InputError(f"collective {point.kind!r}", accepted=", ".join(KINDS))
    cluster = _machine(point.gpu, point.gpus, point.nodes, point.intra, point.net)
    group = (tuple(range(cluster.world_size)),)
    one = transfer(cluster, point.kind, point.nbytes, group, override(point))
    launch = LAUNCH_PER_GPU * point.gpus / point.nodes if "single process" in point.note else 0.0
    return max(seconds_alone(cluster, one), launch), one.algorithm


def override(point: Point) -> str | None:
    """The algorithm where the test forced one."""
    words = f"{point.net}; {point.note}"
    if re.search(r"\btree forced\b", words, re.IGNORECASE):
        return "tree"
    if re.fullmatch(r"nvls off", point.note.strip(), re.IGNORECASE):
        return "ring"
    return None


@cache
def _machine(gpu: str, gpus: int, nodes: int, intra: str, net: str) -> Cluster:
    return cluster_from(machine(gpu, gpus, nodes, intra, net))


def machine(gpu: str, gpus: int, nodes: int, intra: str, net: str) -> dict[str, Any]:
    """The topology document of a machine described in words."""
    domain = intra.lower()
    if "nvl72" in domain:
        nodes = ceil(gpus / NVLINK_DOMAIN)
    if gpus % nodes:
        raise InputError(f"{gpus} GPUs on {nodes} nodes", field="nodes")
    local = gpus // nodes
    names = [re.split(r"[/(]", name)[0].strip() for name in gpu.split(" + ")]
    data: dict[str, Any] = {"name": "measured", "gpu": names[0], "gpus": local, "nodes": nodes}
    data["nvlink"] = _nvlink(domain, names[0], local)
    dual = "dual" in domain or (("nvswitch" in domain or "mesh" in domain) and local == 8)
    sockets = 2 if dual and local > 1 else 1
    gen = re.search(r"pcie\s*(?:gen)?\s*(\d)", domain)
    dram = 460.8 if gen and int(gen.group(1)) >= 5 else 204.8  # 12 channels of DDR5-4800 or 8 of DDR4-3200 a socket
    data["cpu"] = {
        "sockets": sockets,
        "socket_link": _socket_link(domain),
        "vendor": _vendor(domain),
        "dram_gbps": dram * sockets,
    }
    data["p2p"] = _p2p(domain)
    switches = 2 if "switch" in domain and "nvswitch" not in domain else 0
    nics = _nics(net, local) if nodes > 1 else {}
    data["pcie"] = {
        "gen": int(gen.group(1)) if gen else None,
        "tree": _tree(local, nics, data["cpu"]["sockets"], switches, domain),
    }
    if nics:
        data["nics"] = {"gbps": nics["gbps"]}
        if re.search(r"gdr off|staging|staged", net, re.IGNORECASE):
            data["nics"]["gdr"] = False
        data["fabric"] = {"kind": "rail", "transport": _transport(net)}
    return data


def _nvlink(domain: str, gpu: str, local: int) -> Any:
    if local == 1:
        return "none"
    if "nvswitch" in domain or "nvl72" in domain:
        return "switch"
    if "mesh" in domain and "xgmi" in domain:
        return [[a, b, max(1, 7 // (local - 1))] for a in range(local) for b in range(a + 1, local)]
    if "cube mesh" in domain or re.fullmatch(r"nvlink2?", domain):
        return CUBE_MESH
    if "pair" in domain:
        return [[a, a + 1, _pair_links(gpu)] for a in range(0, local - 1, 2)]
    return "none"


def _pair_links(gpu: str) -> int:
    from zsim.cluster.catalog import device

    return device(gpu).nvlinks


def _p2p(domain: str) -> str:
    if "no p2p" in domain or "through host" in domain:
        return "none"
    return "all" if "patched" in domain or "tuned" in domain else "auto"


def _socket_link(domain: str) -> str:
    if "turin" in domain:
        return "xgmi_turin"
    if "genoa" in domain:
        return "xgmi_genoa"
    if "epyc" in domain:
        return "xgmi_rome"
    return "upi_sapphire_rapids"


def _vendor(domain: str) -> str:
    return "amd" if re.search("epyc|turin|genoa|milan|rome", domain) else "intel"


def _tree(local: int, nics: dict[str, Any], sockets: int, switches: int, domain: str) -> Any:
    """GPUs and NICs spread over sockets, or below one switch over `switches` others."""
    slots = switches or sockets
    if not switches and nics and local > 1 and "pcie" not in domain:
        slots = max(sockets, min(local, nics["count"]))
    places: list[list[Any]] = [[] for _ in range(slots)]
    for index in range(local):
        places[index * slots // local].append(f"gpu{index}")
    for index in range(nics.get("count", 0)):
        places[index * slots // nics["count"]].append(f"nic{index}")
    if switches:
        return [[places]]
    if slots > sockets:
        per = slots // sockets
        return [places[start : start + per] for start in range(0, slots, per)]
    return places if sockets > 1 or local > 1 else [[places[0]]]  # a lone GPU shares a switch with its NIC


def _nics(net: str, local: int) -> dict[str, Any]:
    """NICs of one node from words; NCCL takes an unstated rate for 100 Gb/s."""
    text = net.lower()
    many = re.search(r"(\d+)\s*x\s*(\d+)\s*g", text)
    if "a3" in text and not many:
        count, gbps = 8, 200  # Google's A3 (Mega) machines
    elif many:
        count, gbps = int(many.group(1)), int(many.group(2))
    else:
        rate = re.search(r"(\d+)\s*gb?e?\b", text)
        several = re.search(r"(\d+)\s*nics?", text)
        count = int(several.group(1)) if several else 1
        gbps = int(rate.group(1)) if rate else 100
    if "per tray" in text:
        count = count * local // 4
    return {"count": count, "gbps": gbps}


def _transport(net: str) -> str:
    text = net.lower()
    if "efa" in text:
        return "efa"
    if "tcpx" in text or "gcp" in text:
        return "tcpx"
    return "tcp" if "tcp" in text or "gbe" in text else "rdma"
