"""What training runs on: devices, directed links, and the topology graph that joins them.

A cluster is a few node templates repeated. Links are named per node ("n0/gpu0>n0/nvswitch"), and their figures are
looked up in the template when asked for, so that 4,096 GPUs cost no more than 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU (or an APU) from the catalog. Rates are dense, per second; memory in bytes."""

    name: str
    vendor: str
    peak_flops: Mapping[str, float]  # dtype -> FLOP/s of the matrix units with fp32 accumulation
    memory_bytes: int  # what the vendor prints
    usable_bytes: int  # what torch reports as total capacity, the ceiling of the allocator
    memory_bandwidth: float  # bytes/s, nominal
    architecture: str
    p2p_pcie: bool  # peer-to-peer over PCIe with stock drivers
    unified: bool = False  # CPU and GPU share this memory
    source: str = ""
    nvlink_kind: str | None = None  # an entry of catalog/links.yaml, xGMI included
    nvlinks: int = 0  # links that leave one GPU
    pcie_gen: int = 0
    pcie_lanes: int = 0
    c2c_bandwidth: float = 0.0  # bytes/s each way to a CPU on the same module, which then replaces PCIe
    compute_capability: str = ""  # NVIDIA's, "9.0"; AMD's "gfx942"

    @property
    def without_cuda(self) -> bool:
        """Neither PYTORCH_ALLOC_CONF nor managed memory: torch's backends for Apple's GPUs and for CPUs."""
        return self.unified and self.vendor.lower() not in ("nvidia", "amd")

    @property
    def workspace_bytes(self) -> int:
        """Of one of cuBLAS' workspaces: ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize. 0: not NVIDIA's."""
        if self.vendor != "NVIDIA":
            return 0
        return 32 << 20 if self.compute_capability in ("9.0", "10.0", "10.3") else 2 * (4096 << 10) + 8 * (16 << 10)

    @property
    def without_flash(self) -> bool:
        """FlashAttention 2 is made for compute capability 8.0 and later; torch's SDPA checks it too."""
        return self.architecture in ("Volta", "Turing")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire. `bandwidth` is what NCCL-like traffic can reach, bytes/s, `raw` the vendor's."""

    id: str  # "n0/gpu0>n0/nvswitch"
    src: str
    dst: str
    kind: str  # nvlink | pcie | c2c | unified | staging (through host memory) | dram | socket (UPI, xGMI) | nic | nvme
    bandwidth: float
    latency_s: float
    raw: float = 0.0


HOST_GIB = 256  # of each socket, where nobody says
SOCKET_GBPS = 200  # of DRAM, as well


@dataclass(frozen=True)
class Host:
    """One node's CPU side."""

    sockets: int
    cores: int
    dram_bytes: int
    dram_bandwidth: float  # bytes/s, all sockets, nominal
    nvme_bytes: int = 0
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    vendor: str = ""  # intel | amd | arm | apple
    avx512: bool = True
    numa_nodes: int = 1  # of all sockets
    pace: float = 1.0  # times as long as the core that host times were measured on takes to interpret the same


@dataclass(frozen=True)
class Node:
    """One machine. Names are local ("gpu0", "plx0", "cpu0", "nic0"); links are keyed "src>dst".

    `parent` is the PCIe tree: device or switch -> what it plugs into, up to a CPU. `switch_of`: GPU index -> NVSwitch.
    `p2p`: the farthest path over which GPUs may talk directly over PCIe: "none" | "PXB" | "SYS".
    """

    devices: tuple[Device, ...]
    kinds: Mapping[str, str]
    links: Mapping[str, Link]
    parent: Mapping[str, str]
    switch_of: Mapping[int, str]
    nics: tuple[str, ...]
    host: Host
    p2p: str
    gdr: bool = True  # NICs may read and write GPU memory (GPUDirect RDMA)
    _cache: dict = field(default_factory=dict, init=False, compare=False, repr=False)


@dataclass(frozen=True)
class Fabric:
    """What joins the nodes. `kind`: rail | fat_tree | ethernet | none. `latency_s` is added per crossing."""

    kind: str = "none"
    transport: str = "rdma"  # rdma | efa | tcpx | tcp
    latency_s: float = 0.0


class Links(Mapping[str, Link]):
    """All links of a cluster by id, made on demand from the templates."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[str, Link] = {}

    def __getitem__(self, link_id: str) -> Link:
        link = self._made.get(link_id)
        if link is None:
            src, dst = link_id.split(">")
            inside = dst if src.startswith("fabric") else src
            node = inside[: inside.index("/") + 1]
            template = self._cluster.template(int(node[1:-1])).links[link_id.replace(node, "")]
            link = Link(link_id, src, dst, template.kind, template.bandwidth, template.latency_s, template.raw)
            self._made[link_id] = link
        return link

    def __iter__(self) -> Iterator[str]:
        for node in range(self._cluster.nodes):
            for local in self._cluster.template(node).links:
                yield global_link(node, local)

    def __len__(self) -> int:
        return sum(len(self._cluster.template(node).links) for node in range(self._cluster.nodes))


def global_name(node: int, local: str) -> str:
    """ "gpu0" of node 3 -> "n3/gpu0"; what belongs to no node ("fabric/rail0") keeps its name."""
    return local if local.startswith("fabric") else f"n{node}/{local}"


def global_link(node: int, local: str) -> str:
    src, dst = local.split(">")
    return f"{global_name(node, src)}>{global_name(node, dst)}"


@dataclass(frozen=True)
class Cluster:
    """`node_templates[i]` is the index in `templates` of node i. Ranks count through the nodes in order.

    `backend`: what torch.distributed runs on, nccl | gloo. `nccl_algo`, `nccl_proto`: as the environment variables of
    that name; they bind where the collective can run them.

    `collapse`: transfers that load equal nodes equally name the links of the first node of each kind only. Right as
    long as every transfer in flight is symmetric over those nodes, which folded simulation guarantees.
    """

    name: str
    templates: tuple[Node, ...]
    node_templates: tuple[int, ...]
    fabric: Fabric = Fabric()
    assumptions: tuple[str, ...] = ()
    collapse: bool = True
    backend: str = "nccl"
    nccl_algo: str | None = None
    nccl_proto: str | None = None
    _cache: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    def unfolded(self) -> Cluster:
        """The same cluster with every node's links named, for simulating every rank on its own."""
        return replace(self, collapse=False)

    @property
    def nodes(self) -> int:
        return len(self.node_templates)

    @property
    def cores_per_gpu(self) -> int:
        """CPU cores that each rank of a node can have to itself, at least one."""
        return max(1, min(node.host.cores // len(node.devices) for node in self.templates))

    def template(self, node: int) -> Node:
        return self.templates[self.node_templates[node]]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """rank -> (node, GPU index within the node)."""
        return tuple(
            (node, index)
            for node, template in enumerate(self.node_templates)
            for index in range(len(self.templates[template].devices))
        )

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        return tuple(f"n{node}/gpu{index}" for node, index in self.places)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for template in self.node_templates for device in self.templates[template].devices)

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def host(self) -> Host:
        """The CPU side of the first node."""
        return self.templates[self.node_templates[0]].host

    @property
    def gpus_per_node(self) -> int:
        """Of the largest node."""
        return max(len(template.devices) for template in self.templates)

    @property
    def p2p(self) -> bool:
        return all(template.p2p != "none" for template in self.templates)

    @cached_property
    def links(self) -> Mapping[str, Link]:
        return Links(self)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The whole topology as a networkx DiGraph: nodes carry `kind`, edges `link: Link`."""
        import networkx as nx

        graph = nx.DiGraph()
        for node in range(self.nodes):
            for local, kind in self.template(node).kinds.items():
                graph.add_node(global_name(node, local), kind=kind)
        for link in self.links.values():
            graph.add_edge(link.src, link.dst, link=link)
        return graph
