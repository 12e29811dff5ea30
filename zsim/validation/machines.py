"""The machines of published rows: what their columns say, and what such machines are usually built like."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from zsim.cluster.load import cluster_from
from zsim.cluster.spec import Cluster
from zsim.errors import InputError
from zsim.validation.rows import Row, gpu_name

# Gigabits per second and node of 8 GPUs, where the source does not say: what such machines are usually sold with.
USUAL_NETWORK = {"A100": 1600, "A800": 1600, "H100": 3200, "H200": 3200, "B200": 3200, "MI300X": 3200}
# CPU, cores, NUMA nodes and GB/s of DRAM of two sockets, where the source does not say: those of topologies/
# (dgx_a100_8, hgx_h100_8, hgx_h200_8, hgx_b200_8, mi300x_8); of other GPUs' machines there is no usual one.
USUAL_HOST = {
    "A100": ("EPYC 7742", 128, 8, 409.6),
    "A800": ("EPYC 7742", 128, 8, 409.6),
    "H100": ("Xeon Platinum 8480C", 112, 2, 614.4),
    "H200": ("Xeon Platinum 8592+", 128, 2, 716.8),
    "B200": ("Xeon Platinum 8570", 112, 2, 716.8),
    "MI300X": ("EPYC 9534", 128, 2, 921.6),
}
_ANY_HOST = ("", 96, 2, 500.0)
# Devices that are sold in nodes of GPUs all linked to each other, besides those with SXM in their names.
_ALL_LINKED = (
    "H20",
    "H20-141GB",
    "GB200",
    "GB300",
    "GH200-96GB",
    "GH200-144GB",
    "MI250X",
    "MI300X",
    "MI325X",
    "MI355X",
)


def cluster_of(row: Row, assumed: list[str]) -> Cluster:
    """The row's GPUs in nodes of the usual build; what of it is `assumed` is added there. Raises InputError."""
    gpus, device = row.count("n_gpus"), gpu_name(row)
    per_node = min(row.count("gpus_per_node", 8), gpus)
    if gpus % per_node:
        raise InputError(f"{gpus} GPUs are not whole nodes of {per_node}", row.file, row.line, "gpus_per_node")
    linked = ("SXM" in device or device in _ALL_LINKED) and not row.get("intra_node_link").startswith("PCIe")
    document: dict[str, Any] = {
        "name": f"{gpus}x {device}",
        "gpu": device,
        "gpus": per_node,
        "nvlink": "switch" if linked else "none",
        **_host(row, device, per_node),
    }
    if gpus > per_node:
        gbps = _network(row, device, assumed)
        nics = min(per_node, max(1, round(gbps / 100)))
        document["nics"] = {"gbps": gbps / nics, "count": nics}
        document["fabric"] = {"kind": "rail", "transport": "rdma"}
    return _cluster_from(json.dumps(document, sort_keys=True), gpus // per_node)


def _host(row: Row, device: str, per_node: int) -> dict[str, Any]:
    """Two sockets, with a PCIe switch for each GPU of four and more. Those on a module with Grace have one of 72 cores
    each, or for two of them (GB200), and no switch between."""
    grace = re.match(r"G([BH])\d00", device)
    sockets = max(1, per_node // (2 if grace[1] == "B" else 1)) if grace else 2
    known = next((host for family, host in USUAL_HOST.items() if device.startswith(family)), _ANY_HOST)
    model, cores, numa_nodes, dram = ("Grace", 72 * sockets, sockets, 500.0 * sockets) if grace else known
    stated = row.get("host_cpu")
    return {
        "pcie": {"switches": per_node} if per_node >= 4 and not grace else {},
        "cpu": {
            "vendor": "arm" if grace else "amd" if "A100" in device else "intel",
            "model": stated or model,
            "numa_nodes": numa_nodes if stated in ("", model) else sockets,
            "sockets": sockets,
            "cores": row.count("host_cores", cores),
            "dram_gbps": row.measured("host_dram_gbps") or dram,
            **({"socket_link": "grace"} if grace else {}),
        },
    }


@cache
def _cluster_from(document: str, nodes: int) -> Cluster:
    return cluster_from(json.loads(document), nodes)


def _network(row: Row, device: str, assumed: list[str]) -> float:
    """Gbit/s of one node. "InfiniBand NDR 400 Gbps" names a port, and not how many of them a node has."""
    text = row.get("inter_node_network")
    found, each = re.search(r"([\d.]+)\s*([GT])b(?:ps|/s)", text), re.search(r"per (GPU|node)", text)
    gpus = row.count("gpus_per_node", 8)
    if found and (each or not re.search(r"\b[EHNX]DR\b", text)):
        return float(found[1]) * (1000 if found[2] == "T" else 1) * (gpus if each and each[1] == "GPU" else 1)
    for family, gbps in USUAL_NETWORK.items():  # where the source says nothing, or the kind of port and not how many
        if device.startswith(family):
            assumed.append(f"network of {gbps * gpus / 8:g} Gbit/s per node")
            return gbps * gpus / 8
    raise InputError("not stated by the source", row.file, row.line, "inter_node_network")
