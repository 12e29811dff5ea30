"""Reads a topology file (YAML) into a Cluster.

    name: HGX H100
    nodes: 1                      # any number; one field
    gpu: H100-SXM                 # catalog name, or a list with one per GPU
    gpus: 8                       # per node
    nvlink: switch                # switch | {switches: [[0, 1], [2, 3]]} | none | [[gpu, gpu, links], ...]
    pcie: {gen: 5, tree: [[[gpu0, nic0], [gpu1, nic1]], [[gpu2, nic2], [gpu3, nic3]]]}   # sockets > switches > devices
          # slots: {gpu3: [4, 8]}: generation and lanes of one device; switches are plx0, plx1, ... in order
    p2p: auto                     # auto | none | all
    cpu: {vendor: intel, sockets: 2, cores: 112, dram_gib: 2048, dram_gbps: 614.4, socket_link: upi_sapphire_rapids}
          # avx512: false for CPUs without it (AMD before Zen 4, ARM): DeepSpeedCPUAdam on weights in bf16
    nics: {gbps: 400, gdr: true}  # gigabits per second, each; or {nic0: 400, nic1: 100}
    nvme: {tb: 30, read_gbps: 40, write_gbps: 20}
    fabric: {kind: rail, transport: rdma}   # uplink_share: 0.5 for a fat tree with half the uplinks

    backend: nccl                 # or gloo, for ranks on CPUs
    nccl: {algo: ring, proto: simple}   # as NCCL_ALGO and NCCL_PROTO; without, NCCL's tuner chooses

Without `pcie.tree` the GPUs (and NICs) are spread evenly over the sockets, `pcie.switches` of them at each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zsim.cluster import catalog
from zsim.cluster.build import NodePlan, Tree, build
from zsim.cluster.spec import Cluster, Fabric, Host
from zsim.errors import InputError

FIELDS = (
    "name",
    "nodes",
    "gpu",
    "gpus",
    "nvlink",
    "pcie",
    "p2p",
    "cpu",
    "nics",
    "nvme",
    "fabric",
    "backend",
    "nccl",
    "notes",
)
FABRICS = ("none", "rail", "fat_tree", "ethernet")
MOST_NODES = 100_000
MOST_GPUS = 256  # per node, of which every pair is routed
# One way through the fabric and both NICs, by transport: RDMA writes 2 us; EFA's SRD and TCP are slower.
TRANSPORT_LATENCY = {"rdma": 0.0, "efa": 65e-6, "tcpx": 55e-6, "tcp": 50e-6}


def load_topology(path: str | Path, nodes: int | None = None) -> Cluster:
    """Read the topology at `path`; `nodes` overrides its number of nodes. Raises InputError.

    A file that does not end in .yaml or .yml is taken for what a vendor's tool prints.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml") and path.is_file():
        from zsim.cluster.files import read_machine

        return read_machine(path, nodes=nodes)[0]
    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.load(text, Loader=yaml.CSafeLoader)
    except FileNotFoundError:
        raise InputError("no such topology", file=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the topology: {error}", file=path) from None
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if getattr(error, "problem_mark", None) else None  # type: ignore[attr-defined]
        raise InputError(f"not YAML: {getattr(error, 'problem', error)}", file=path, line=line) from None
    try:
        return cluster_from(data, nodes)
    except InputError as error:
        error.file = error.file or path
        if error.line is None and error.field:
            error.line = _line_of(text, error.field)
        raise


def cluster_from(data: Any, nodes: int | None = None) -> Cluster:
    """A Cluster from the parsed content of a topology file."""
    _mapping(data, "topology", FIELDS)
    own = data.get("nodes", 1)
    count = nodes if nodes is not None else own
    for value in (own, count):
        _positive_int(value, "nodes", MOST_NODES)
    node = build(_node_plan(data))
    fabric_data = _mapping(data.get("fabric") or {}, "fabric", ("kind", "transport", "uplink_share"))
    kind = _one_of(fabric_data.get("kind", "rail" if node.nics else "none"), "fabric.kind", FABRICS)
    transport = _one_of(fabric_data.get("transport", "rdma"), "fabric.transport", tuple(TRANSPORT_LATENCY))
    if count > 1 and not node.nics:
        raise InputError("several nodes need NICs to talk", field="nics", accepted="nics: {gbps: 400}")
    fabric = Fabric(kind, transport, TRANSPORT_LATENCY[transport])
    backend = _one_of(data.get("backend", "nccl"), "backend", ("nccl", "gloo"))
    nccl = _mapping(data.get("nccl") or {}, "nccl", ("algo", "proto"))
    return Cluster(
        name=_name(str(data.get("name", "cluster")), own, count),
        templates=(node,),
        node_templates=(0,) * count,
        fabric=fabric,
        assumptions=tuple(data.get("notes", ())),
        backend=backend,
        nccl_algo=_one_of(nccl.get("algo"), "nccl.algo", (None, "ring", "tree", "nvls", "nvls_tree", "pat")),
        nccl_proto=_one_of(nccl.get("proto"), "nccl.proto", (None, "ll", "ll128", "simple")),
    )


def _name(name: str, own: int, nodes: int) -> str:
    """The name of a file that has `own` nodes, of which `nodes` are wanted: true of these. That of one node stays."""
    if nodes == own or own == 1:
        return name
    wanted = f"{nodes} node{'s' if nodes > 1 else ''}"
    said = re.sub(rf"\b{own}[ -]nodes?\b", wanted, name)
    return said if said != name else f"{name}: {wanted}"


def _node_plan(data: Mapping[str, Any]) -> NodePlan:
    if "gpu" not in data:
        raise InputError("missing", field="gpu", accepted="a GPU of the catalog: " + ", ".join(catalog.known_devices()))
    count = data.get("gpus", len(data["gpu"]) if isinstance(data["gpu"], list) else 1)
    _positive_int(count, "gpus", MOST_GPUS)
    names = data["gpu"] if isinstance(data["gpu"], list) else [data["gpu"]] * count
    if len(names) != count:
        raise InputError(f"{len(names)} GPU names for {count} GPUs", field="gpu")
    devices = tuple(catalog.device(str(name)) for name in names)
    known = ("vendor", "model", "sockets", "cores", "dram_gib", "dram_gbps", "socket_link", "avx512")
    cpu = _mapping(data.get("cpu") or {}, "cpu", known)
    avx512 = cpu.get("avx512", cpu.get("vendor") not in ("arm", "apple"))
    if not isinstance(avx512, bool):
        raise InputError(f"{avx512!r} is not true or false", field="cpu.avx512", accepted="true or false")
    sockets = cpu.get("sockets", 1)
    _positive_int(sockets, "cpu.sockets")
    nvme = _mapping(data.get("nvme") or {}, "nvme", ("tb", "read_gbps", "write_gbps"))
    host = Host(
        sockets=sockets,
        cores=cpu.get("cores", 32 * sockets),
        dram_bytes=round(cpu.get("dram_gib", 256 * sockets) * 2**30),
        dram_bandwidth=cpu.get("dram_gbps", 200.0 * sockets) * 1e9,
        nvme_bytes=round(nvme.get("tb", 0) * 1e12),
        nvme_read=nvme.get("read_gbps", 0) * 1e9,
        nvme_write=nvme.get("write_gbps", 0) * 1e9,
        vendor=cpu.get("vendor", ""),
        avx512=avx512,
    )
    nics = _mapping(data.get("nics") or {}, "nics", ("gbps", "gdr", "count", "model"))
    pcie = _mapping(data.get("pcie") or {}, "pcie", ("gen", "lanes", "tree", "switches", "slots"))
    tree = pcie.get("tree") or _even_tree(count, nics.get("count", 0), sockets, pcie.get("switches", 0))
    found = list(_leaves(tree))
    expected = [f"gpu{index}" for index in range(count)]
    if sorted(leaf for leaf in found if leaf.startswith("gpu")) != sorted(expected):
        raise InputError(f"the tree must hold gpu0 .. gpu{count - 1}, each once", field="pcie.tree")
    nic_names = [leaf for leaf in found if leaf.startswith("nic")]
    if nic_names and "gbps" not in nics:
        raise InputError("missing the NICs' rate", field="nics.gbps", accepted="gigabits per second, e.g. 400")
    fabric_kind = (data.get("fabric") or {}).get("kind", "rail")
    socket_link = _one_of(
        cpu.get("socket_link", "upi_sapphire_rapids"), "cpu.socket_link", ("none", *catalog.SOCKET_LINKS)
    )
    wires, islands = _nvlinks(data.get("nvlink", "none"), count)
    rates = nics.get("gbps", 0)
    rates = rates if isinstance(rates, Mapping) else dict.fromkeys(nic_names, rates)
    return NodePlan(
        devices=devices,
        tree=tree,
        host=host,
        nvswitches=islands,
        nvlinks=wires,
        nic_bandwidth={nic: _positive(rates.get(nic), f"nics.gbps.{nic}") * 1e9 / 8 for nic in nic_names},
        rails={nic: f"fabric/rail{nic[3:]}" if fabric_kind == "rail" else "fabric" for nic in nic_names},
        socket_link=None if socket_link == "none" else socket_link,
        pcie_gen=_one_of(pcie.get("gen"), "pcie.gen", (None, 1, 2, 3, 4, 5, 6)),
        pcie_lanes=pcie.get("lanes"),
        slots={name: (gen, lanes) for name, (gen, lanes) in (pcie.get("slots") or {}).items()},
        p2p=_one_of(data.get("p2p", "auto"), "p2p", ("auto", "none", "all")),
        uplink_share=_positive((data.get("fabric") or {}).get("uplink_share", 1.0), "fabric.uplink_share"),
        gdr=nics.get("gdr", (data.get("fabric") or {}).get("transport") != "tcp"),  # sockets read host memory
    )


def _nvlinks(nvlink: Any, count: int) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, ...], ...]]:
    """(direct wires, GPUs of each NVSwitch)."""
    accepted = "switch | {switches: [[gpu, gpu, ...], ...]} | none | [[gpu, gpu, links], ...]"
    if nvlink in ("none", None):
        return (), ()
    if nvlink == "switch":
        return (), (tuple(range(count)),)
    if isinstance(nvlink, Mapping):
        islands = _mapping(nvlink, "nvlink", ("switches",)).get("switches") or []
        members = [gpu for island in islands for gpu in island]
        if len(members) != len(set(members)) or not all(isinstance(gpu, int) and 0 <= gpu < count for gpu in members):
            raise InputError(f"got {nvlink!r} with {count} GPUs", field="nvlink", accepted=accepted)
        return (), tuple(map(tuple, islands))
    if not isinstance(nvlink, list):
        raise InputError(f"got {nvlink!r}", field="nvlink", accepted=accepted)
    wires = []
    for wire in nvlink:
        if not (isinstance(wire, list) and len(wire) == 3 and all(isinstance(x, int) for x in wire)):
            raise InputError(f"got {wire!r}", field="nvlink", accepted="[gpu, gpu, links]")
        a, b, links = wire
        if not (0 <= a < count and 0 <= b < count and a != b and links > 0):
            raise InputError(f"got {wire!r} with {count} GPUs", field="nvlink", accepted="[gpu, gpu, links]")
        wires.append((a, b, links))
    return tuple(wires), ()


def _even_tree(gpus: int, nics: int, sockets: int, switches: int) -> list[Tree]:
    leaves: list[list[str]] = [[] for _ in range(max(switches, sockets))]
    for index in range(gpus):
        leaves[index * len(leaves) // gpus].append(f"gpu{index}")
    for index in range(nics):
        leaves[index * len(leaves) // nics].append(f"nic{index}")
    if not switches:
        return list(leaves)
    per_socket = -(-switches // sockets)
    return [leaves[start : start + per_socket] for start in range(0, switches, per_socket)]


def _leaves(tree: Tree) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    return [leaf for child in tree for leaf in _leaves(child)]


def _mapping(value: Any, where: str, fields: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"expected a mapping, got {value!r}", field=None if where == "topology" else where)
    for key in value:
        if key not in fields:
            import difflib

            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            field = str(key) if where == "topology" else f"{where}.{key}"
            raise InputError(f"unknown field{hint}", field=field, accepted=", ".join(fields))
    return value


def _one_of(value: Any, field: str, accepted: Sequence[Any]) -> Any:
    if value not in accepted:
        raise InputError(
            f"got {value!r}", field=field, accepted=" | ".join(str(one) for one in accepted if one is not None)
        )
    return value


def _positive(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InputError(f"got {value!r}", field=field, accepted="a number above 0")
    return float(value)


def _positive_int(value: Any, field: str, most: int = 10**9) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"got {value!r}", field=field, accepted=f"a whole number from 1 to {most:,}")


def _line_of(text: str, field: str) -> int | None:
    """The line where `field` ("cpu.sockets") stands; of its parent if it is missing."""
    try:
        node: Any = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return None
    line = None
    for part in field.split("."):
        for key, value in getattr(node, "value", ()) if isinstance(node, yaml.MappingNode) else ():
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line
