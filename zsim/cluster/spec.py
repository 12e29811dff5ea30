"""What training runs on: devices, directed links, and the topology graph that joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

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
    sm_count: int | None
    architecture: str
    p2p_pcie: bool  # peer-to-peer over PCIe with stock drivers
    unified: bool = False  # CPU and GPU share this memory
    source: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire. `bandwidth` is what NCCL-like traffic can reach, bytes/s, `raw` the vendor's."""

    id: str  # "n0/gpu0>n0/nvswitch"
    src: str
    dst: str
    kind: str  # nvlink | pcie | cpu (root complex to DRAM) | socket (UPI, xGMI) | nic | fabric | c2c | hbm
    bandwidth: float
    latency_s: float
    raw: float = 0.0


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


@dataclass(frozen=True)
class Cluster:
    """A topology: `graph` is a networkx DiGraph whose edges carry `link: Link`, nodes a `kind`.

    Node kinds: gpu, nvswitch, pcie_switch, cpu, dram, nic, fabric, nvme. `gpus[rank]` is the graph node of a rank,
    `devices[rank]` its device.
    """

    name: str
    graph: nx.DiGraph
    gpus: tuple[str, ...]
    devices: tuple[Device, ...]
    host: Host
    gpus_per_node: int
    p2p: bool  # GPUs may talk over PCIe without going through host memory
    assumptions: tuple[str, ...] = ()
    _cache: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return len(self.gpus)

    @cached_property
    def links(self) -> Mapping[str, Link]:
        return {data["link"].id: data["link"] for _, _, data in self.graph.edges(data=True)}
