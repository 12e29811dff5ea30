"""Reads a topology file (YAML) into a Cluster.

    name: HGX H100
    nodes: 1                      # any number; one field
    gpu: H100-SXM                 # catalog name, or a list with one per GPU
    gpus: 8                       # per node
    nvlink: switch                # switch | {switches: [[0, 1], [2, 3]]} | none | [[gpu, gpu, links], ...]
    pcie: {gen: 5, tree: [[[gpu0, nic0], [gpu1, nic1]], [[gpu2, nic2], [gpu3, nic3]]]}   # sockets > switches > devices
          # slots: {gpu3: [4, 8]}: generation and lanes of one device; switches are plx0, plx1, ... in order
    p2p: auto                     # auto | none | all
    cpu: {vendor: intel, model: Xeon Platinum 8480C, sockets: 2, cores: 112, dram_gib: 2048, dram_gbps: 614.4,
          socket_link: upi_sapphire_rapids}     # model: how fast Python issues kernels, and whether it has AVX-512
          # avx512: false where that is not so: DeepSpeedCPUAdam on weights in bf16
          # numa_nodes: 8 where sockets are several, as a DGX A100's: a process's pinned buffers lie in one
    nics: {gbps: 400, gdr: true}  # gigabits per second, each; or {nic0: 400, nic1: 100}
    nvme: {tb: 30, read_gbps: 40, write_gbps: 20}
    fabric: {kind: rail, transport: rdma}   # uplink_share: 0.5 for a fat tree with half the uplinks

    backend: nccl                 # or gloo, for ranks on CPUs
    nccl: {algo: ring, proto: simple}   # as NCCL_ALGO and NCCL_PROTO; without, NCCL's tuner chooses

Without `pcie.tree` the GPUs (and NICs) are spread evenly over the sockets, `pcie.switches` of them at each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.cluster import catalog, cpus
from zsim.cluster.build import NodePlan, Tree, build
from zsim.cluster.spec import HOST_GIB, SOCKET_GBPS, Cluster, Fabric, Host, Node
from zsim.cluster.values import mapping, number, one_of, shown, texts, truth, whole
from zsim.document import read_yaml
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
PCIE_GENERATIONS = (1, 2, 3, 4, 5, 6)
FABRICS = ("none", "rail", "fat_tree", "ethernet")
MOST_NODES = 100_000
MOST_GPUS = 256  # per node, of which every pair is routed; and as many NICs and PCIe switches
MOST_LANES = 32
MOST_LINKS = 36  # between two GPUs; NVLink 5 has 18 of a GPU
TREE = "a list of sockets, each a list of gpu0, nic0, ... and of PCIe switches, which are such lists again"
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
    document = read_yaml(path, "topology")
    try:
        return cluster_from(document.data, nodes)
    except InputError as error:
        if error.file is None:
            error.file, error.line = document.place(tuple(error.field.split(".")) if error.field else ())
        raise


def cluster_from(data: Any, nodes: int | None = None) -> Cluster:
    """A Cluster from the parsed content of a topology file."""
    mapping(data, "", FIELDS)
    own = whole(data.get("nodes", 1), "nodes", MOST_NODES)
    count = own if nodes is None else whole(nodes, "nodes", MOST_NODES)
    fabric_data = mapping(data.get("fabric") or {}, "fabric", ("kind", "transport", "uplink_share"))
    node = build(_node_plan(data, fabric_data))
    kind = one_of(fabric_data.get("kind", "rail" if node.nics else "none"), "fabric.kind", FABRICS)
    transport = one_of(fabric_data.get("transport", "rdma"), "fabric.transport", tuple(TRANSPORT_LATENCY))
    if count > 1 and not node.nics:
        raise InputError("several nodes need NICs to talk", field="nics", accepted="nics: {gbps: 400}")
    fabric = Fabric(kind, transport, TRANSPORT_LATENCY[transport])
    backend = one_of(data.get("backend", "nccl"), "backend", ("nccl", "gloo"))
    nccl = mapping(data.get("nccl") or {}, "nccl", ("algo", "proto"))
    return Cluster(
        name=_name(str(data.get("name", "cluster")), own, count),
        templates=(node,),
        node_templates=(0,) * count,
        fabric=fabric,
        assumptions=(*texts(data.get("notes") or [], "notes"), *_unstated(data, node)),
        backend=backend,
        nccl_algo=one_of(nccl.get("algo"), "nccl.algo", (None, "ring", "tree", "nvls", "nvls_tree", "pat")),
        nccl_proto=one_of(nccl.get("proto"), "nccl.proto", (None, "ll", "ll128", "simple")),
    )


def _unstated(data: Mapping[str, Any], node: Node) -> Iterator[str]:
    """What decides whether a run fits, or how fast it is, and stands nowhere."""
    cpu = data.get("cpu") or {}
    if "dram_gib" not in cpu and not any(device.unified for device in node.devices):
        yield f"host memory of {node.host.dram_bytes >> 30} GiB per node, {HOST_GIB} for each socket (cpu.dram_gib)"
    model = str(cpu.get("model", ""))
    said = any(str(note).startswith(cpus.UNKNOWN) for note in data.get("notes") or [])  # by who read a tool's output
    if cpus.known(model) is None and not said:
        yield f"{cpus.UNKNOWN} (cpu.model{f': {shown(model)} is not known' if model else ''})"


def _name(name: str, own: int, nodes: int) -> str:
    """The name of a file that has `own` nodes, of which `nodes` are wanted: true of these. That of one node stays."""
    if nodes == own or own == 1:
        return name
    wanted = f"{nodes} node{'s' if nodes > 1 else ''}"
    said = re.sub(rf"\b{own}[ -]nodes?\b", wanted, name)
    return said if said != name else f"{name}: {wanted}"


def _node_plan(data: Mapping[str, Any], fabric: Mapping[str, Any]) -> NodePlan:
    if "gpu" not in data:
        raise InputError("missing", field="gpu", accepted="a GPU of the catalog: " + ", ".join(catalog.known_devices()))
    listed = data["gpu"] if isinstance(data["gpu"], list) else None
    count = whole(data.get("gpus", len(listed) if listed else 1), "gpus", MOST_GPUS)
    names = [data["gpu"]] * count if listed is None else listed
    if len(names) != count:
        raise InputError(f"{len(names)} GPU names for {count} GPUs", field="gpu")
    host = _host(data)
    nics = mapping(data.get("nics") or {}, "nics", ("gbps", "gdr", "count", "model"))
    pcie = mapping(data.get("pcie") or {}, "pcie", ("gen", "lanes", "tree", "switches", "slots"))
    switches = whole(pcie.get("switches", 0), "pcie.switches", MOST_GPUS, least=0)
    nic_count = whole(nics.get("count", 0), "nics.count", MOST_GPUS, least=0)
    tree = _tree(pcie["tree"]) if pcie.get("tree") else _even_tree(count, nic_count, host.sockets, switches)
    found = list(_leaves(tree))
    expected = [f"gpu{index}" for index in range(count)]
    nic_names = [leaf for leaf in found if leaf.startswith("nic")]
    if sorted(found) != sorted({*expected, *nic_names}):
        raise InputError(f"the tree must hold gpu0 .. gpu{count - 1}, each once, and no NIC twice", field="pcie.tree")
    if nic_names and "gbps" not in nics:
        raise InputError("missing the NICs' rate", field="nics.gbps", accepted="gigabits per second, e.g. 400")
    socket_link = (data.get("cpu") or {}).get("socket_link", "upi_sapphire_rapids")
    one_of(socket_link, "cpu.socket_link", ("none", *catalog.SOCKET_LINKS))
    wires, islands = _nvlinks(data.get("nvlink", "none"), count)
    rates = nics.get("gbps", 0)
    rates = mapping(rates, "nics.gbps", nic_names) if isinstance(rates, Mapping) else dict.fromkeys(nic_names, rates)
    return NodePlan(
        devices=tuple(catalog.device(shown(name) if isinstance(name, (list, dict)) else str(name)) for name in names),
        tree=tree,
        host=host,
        nvswitches=islands,
        nvlinks=wires,
        nic_bandwidth={nic: number(rates.get(nic), f"nics.gbps.{nic}") * 1e9 / 8 for nic in nic_names},
        rails={nic: f"fabric/rail{nic[3:]}" if fabric.get("kind", "rail") == "rail" else "fabric" for nic in nic_names},
        socket_link=None if socket_link == "none" else socket_link,
        pcie_gen=one_of(pcie.get("gen"), "pcie.gen", (None, *PCIE_GENERATIONS)),
        pcie_lanes=None if pcie.get("lanes") is None else whole(pcie["lanes"], "pcie.lanes", MOST_LANES),
        slots=_slots(pcie.get("slots") or {}, [*expected, *_switches(tree)]),
        p2p=one_of(data.get("p2p", "auto"), "p2p", ("auto", "none", "all")),
        uplink_share=number(fabric.get("uplink_share", 1.0), "fabric.uplink_share", most=1),
        gdr=truth(nics.get("gdr", fabric.get("transport") != "tcp"), "nics.gdr"),  # sockets read host memory
    )


def _host(data: Mapping[str, Any]) -> Host:
    known = ("vendor", "model", "sockets", "cores", "dram_gib", "dram_gbps", "socket_link", "avx512", "numa_nodes")
    cpu = mapping(data.get("cpu") or {}, "cpu", known)
    nvme = mapping(data.get("nvme") or {}, "nvme", ("tb", "read_gbps", "write_gbps"))
    sockets = whole(cpu.get("sockets", 1), "cpu.sockets", 64)
    core = cpus.known(str(cpu.get("model", "")))
    avx512 = core.avx512 if core else cpu.get("vendor") not in ("arm", "apple")
    read, write = (number(nvme.get(way, 0), f"nvme.{way}", least=0) for way in ("read_gbps", "write_gbps"))
    cores = whole(cpu.get("cores", 32 * sockets), "cpu.cores", 100_000)
    numa_nodes = whole(cpu.get("numa_nodes", sockets), "cpu.numa_nodes", 1024)
    for field, count in (("sockets", sockets), ("numa_nodes", numa_nodes)):
        if count > cores:
            raise InputError(f"{count} {field} of {cores} cores", field=f"cpu.{field}", accepted=f"1 to {cores}")
    return Host(
        sockets=sockets,
        cores=cores,
        dram_bytes=round(number(cpu.get("dram_gib", HOST_GIB * sockets), "cpu.dram_gib") * 2**30),
        dram_bandwidth=number(cpu.get("dram_gbps", SOCKET_GBPS * sockets), "cpu.dram_gbps") * 1e9,
        nvme_bytes=round(number(nvme.get("tb", 0), "nvme.tb", least=0) * 1e12),
        nvme_read=read * 1e9,
        nvme_write=write * 1e9,
        vendor=cpu.get("vendor", ""),
        avx512=truth(cpu.get("avx512", avx512), "cpu.avx512"),
        numa_nodes=numa_nodes,
        pace=core.pace if core else 1.0,
    )


def _slots(slots: Any, known: list[str]) -> dict[str, tuple[int, int]]:
    accepted = f"[1 to {PCIE_GENERATIONS[-1]}, 1 to {MOST_LANES}]: generation and lanes"
    found = {}
    for name, slot in mapping(slots, "pcie.slots", known).items():
        field = f"pcie.slots.{name}"
        if not isinstance(slot, list) or len(slot) != 2:
            raise InputError(f"got {shown(slot)}", field=field, accepted=accepted)
        found[name] = (whole(slot[0], field, PCIE_GENERATIONS[-1]), whole(slot[1], field, MOST_LANES))
    return found


def _nvlinks(nvlink: Any, count: int) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, ...], ...]]:
    """(direct wires, GPUs of each NVSwitch)."""
    accepted = "switch | {switches: [[gpu, gpu, ...], ...]} | none | [[gpu, gpu, links], ...]"

    def gpus(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(gpu) is int and 0 <= gpu < count for gpu in numbers)

    if nvlink in ("none", None):
        return (), ()
    if nvlink == "switch":
        return (), (tuple(range(count)),)
    if isinstance(nvlink, Mapping):
        islands = mapping(nvlink, "nvlink", ("switches",)).get("switches") or []
        sound = isinstance(islands, list) and all(map(gpus, islands))
        members = [gpu for island in islands for gpu in island] if sound else []
        if not sound or len(members) != len(set(members)):
            raise InputError(f"got {shown(nvlink)} with {count} GPUs", field="nvlink", accepted=accepted)
        return (), tuple(map(tuple, islands))
    if not isinstance(nvlink, list):
        raise InputError(f"got {shown(nvlink)}", field="nvlink", accepted=accepted)
    for wire in nvlink:
        if not (isinstance(wire, list) and len(wire) == 3 and gpus(wire[:2]) and wire[0] != wire[1]):
            raise InputError(f"got {shown(wire)} with {count} GPUs", field="nvlink", accepted="[gpu, gpu, links]")
        whole(wire[2], "nvlink", MOST_LINKS)
    return tuple((a, b, links) for a, b, links in nvlink), ()


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


def _tree(tree: Any) -> list[Tree]:
    """sockets > switches > devices, as `pcie.tree` has it."""
    if not isinstance(tree, list) or not all(isinstance(socket, list) for socket in tree):
        raise InputError(f"got {shown(tree)}", field="pcie.tree", accepted=TREE)
    for leaf in _leaves(tree):
        if not isinstance(leaf, str) or not re.fullmatch(r"(gpu|nic)\d+", leaf):
            raise InputError(f"got {shown(leaf)} in it", field="pcie.tree", accepted=TREE)
    return tree


def _leaves(tree: Tree) -> Iterator[str]:
    if not isinstance(tree, list):
        yield tree  # type: ignore[misc]
        return
    for child in tree:
        yield from _leaves(child)


def _switches(tree: list[Tree]) -> list[str]:
    """The names that `build` gives to the tree's switches."""

    def inside(children: Any) -> int:
        return sum(1 + inside(child) for child in children if not isinstance(child, str))

    return [f"plx{number}" for number in range(sum(map(inside, tree)))]
