"""Builds a node template: devices, PCIe tree, NVLinks, NICs and host memory as directed links with figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.cluster import catalog
from zsim.cluster.spec import Device, Host, Link, Node
from zsim.errors import InputError

# A kernel that moves data through host memory waits for each chunk's round trip: a byte takes as long as on the wire
# plus on a 45 GB/s stage, so a GPU in a ring gets 15.7 of 24 GB/s each way on PCIe 4 and 23 of 48 on PCIe 5.
# Measured: 8x RTX 4090 without P2P 15.0 (all_reduce), 8x RTX PRO 6000 without P2P 22.2 (hardware/collectives.csv).
STAGE_BANDWIDTH = 45e9
DRAM_EFFICIENCY = 0.8  # of nominal, sustained (hardware/host.csv)
NET_REACH = (
    0.96  # of a NIC's line rate: 12 of 12.5, 24 of 25, 48 of 50 GB/s (NCCL topo.h; NVIDIA staff in hardware/README)
)
C2C_REACH = 0.83  # GH200 host-to-device copy, 375 of 450 GB/s (hardware/host.csv)

Tree = str | Sequence["Tree"]  # "gpu0" | "nic0" | a PCIe switch holding more of them


@dataclass(frozen=True)
class NodePlan:
    """What a topology file or a reader says of one machine, in plain words.

    `tree`: one entry per socket (NUMA node), each a sequence of what hangs there; nested sequences are PCIe switches.
    `nvlinks`: (gpu, gpu, links) for direct wires; `nvswitches`: sets of GPUs whose links all go to one switch.
    `slots`: PCIe (generation, lanes) of one device or switch ("gpu3", "plx0") where they differ from the rest.
    `p2p`: auto (as the devices and NCCL's PXB limit allow) | none | all.
    """

    devices: tuple[Device, ...]
    tree: Sequence[Tree]
    host: Host
    nvswitches: tuple[tuple[int, ...], ...] = ()
    nvlinks: tuple[tuple[int, int, int], ...] = ()
    nic_bandwidth: Mapping[str, float] = field(default_factory=dict)  # nic -> line rate each way, bytes/s
    rails: Mapping[str, str] = field(default_factory=dict)  # nic -> fabric node
    socket_link: str | None = "upi_sapphire_rapids"  # None: CPUs that do not see each other (trays of an NVL72)
    pcie_gen: int | None = None
    pcie_lanes: int | None = None
    slots: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    p2p: str = "auto"
    gdr: bool = True
    uplink_share: float = 1.0  # of the NICs' rate that the fabric carries


class _Wiring:
    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.links: dict[str, Link] = {}
        self.parent: dict[str, str] = {}
        self.switch_of: dict[int, str] = {}

    def both(self, a: str, b: str, kind: str, bandwidth: float, raw: float, latency_s: float) -> None:
        for src, dst in ((a, b), (b, a)):
            key = f"{src}>{dst}"
            self.links[key] = Link(key, src, dst, kind, bandwidth, latency_s, raw)

    def shared(self, a: str, b: str, kind: str, bandwidth: float, raw: float, latency_s: float) -> None:
        """Half duplex: both directions are one link, named towards b."""
        key = f"{a}>{b}"
        self.links[key] = Link(key, a, b, kind, bandwidth, latency_s, raw)


def build(plan: NodePlan) -> Node:
    """Lay out one node. GPUs of the tree are numbered as in `plan.devices`."""
    wiring = _Wiring()
    switches = iter(range(10**6))
    for socket, children in enumerate(plan.tree):
        cpu = f"cpu{socket}"
        wiring.kinds[cpu] = "cpu"
        wiring.kinds[f"dram{socket}"] = "dram"
        nominal = plan.host.dram_bandwidth / len(plan.tree)
        wiring.shared(cpu, f"dram{socket}", "dram", nominal * DRAM_EFFICIENCY, nominal, 1e-7)
        _hang(wiring, plan, cpu, children, switches)
    for a in range(len(plan.tree) if plan.socket_link else 0):
        for b in range(a):
            reach, raw, latency = catalog.link_kind(plan.socket_link or "")
            wiring.both(f"cpu{b}", f"cpu{a}", "socket", reach, raw, latency)
    _nvlinks(wiring, plan)
    if plan.host.nvme_read and plan.host.nvme_write:
        wiring.kinds["nvme0"] = "nvme"
        for src, dst, rate in (("nvme0", "dram0", plan.host.nvme_read), ("dram0", "nvme0", plan.host.nvme_write)):
            wiring.links[f"{src}>{dst}"] = Link(f"{src}>{dst}", src, dst, "nvme", rate, 1e-4, rate)
    nics = tuple(name for name, kind in wiring.kinds.items() if kind == "nic")
    for nic in nics:
        rate = plan.nic_bandwidth[nic]
        reach = rate * NET_REACH * plan.uplink_share
        wiring.both(nic, plan.rails.get(nic, "fabric"), "nic", reach, rate, 1e-6)
    return Node(
        devices=plan.devices,
        kinds=wiring.kinds,
        links=wiring.links,
        parent=wiring.parent,
        switch_of=wiring.switch_of,
        nics=nics,
        host=plan.host,
        p2p=_p2p(plan),
        gdr=plan.gdr,
    )


def _hang(wiring: _Wiring, plan: NodePlan, above: str, children: Iterable[Tree], switches: Iterable[int]) -> None:
    for child in children:
        if isinstance(child, str):
            wiring.kinds[child] = child.rstrip("0123456789")
            wiring.parent[child] = above
            _plug(wiring, plan, child, above)
            continue
        switch = f"plx{next(iter(switches))}"
        wiring.kinds[switch] = "pcie_switch"
        wiring.parent[switch] = above
        gens = [device.pcie_gen for device in plan.devices if device.pcie_gen]
        gen, lanes = plan.slots.get(switch, (plan.pcie_gen or max(gens, default=4), plan.pcie_lanes or 16))
        _pcie(wiring, switch, above, gen, lanes)
        _hang(wiring, plan, switch, child, switches)


def _plug(wiring: _Wiring, plan: NodePlan, child: str, above: str) -> None:
    if not child.startswith("gpu"):
        # A NIC's slot is taken as wide as its line rate needs; the NIC link itself is the limit.
        rate = plan.nic_bandwidth[child]
        wiring.both(child, above, "pcie", rate, rate, 1e-6)
        return
    device = plan.devices[int(child.removeprefix("gpu"))]
    if device.unified:
        wiring.both(child, above, "unified", device.memory_bandwidth, device.memory_bandwidth, 0.0)
        return
    if device.c2c_bandwidth:
        raw = device.c2c_bandwidth
        wiring.both(child, above, "c2c", raw * C2C_REACH, raw, 5e-7)
        reach = raw * C2C_REACH
    else:
        gen = min(filter(None, (plan.pcie_gen, device.pcie_gen)), default=4)
        lanes = min(filter(None, (plan.pcie_lanes, device.pcie_lanes)), default=16)
        reach = _pcie(wiring, child, above, *plan.slots.get(child, (gen, lanes)))
    wiring.kinds["host"] = "staging"
    each_way = 1 / (1 / reach + 1 / STAGE_BANDWIDTH)
    wiring.shared(child, "host", "staging", 2 * each_way, 2 * each_way, 2e-6)


def _pcie(wiring: _Wiring, child: str, above: str, gen: int, lanes: int) -> float:
    reach, raw, latency = catalog.link_kind(f"pcie{gen}")
    wiring.both(child, above, "pcie", reach * lanes, raw * lanes, latency)
    return reach * lanes


def _nvlinks(wiring: _Wiring, plan: NodePlan) -> None:
    for number, island in enumerate(plan.nvswitches):
        switch = "nvswitch" if len(plan.nvswitches) == 1 else f"nvswitch{number}"
        wiring.kinds[switch] = "nvswitch"
        for index in island:
            device = plan.devices[index]
            reach, raw, latency = _nvlink(device)
            wiring.both(f"gpu{index}", switch, "nvlink", reach * device.nvlinks, raw * device.nvlinks, latency)
            wiring.switch_of[index] = switch
    for a, b, count in plan.nvlinks:
        reach, raw, latency = min(_nvlink(plan.devices[a]), _nvlink(plan.devices[b]))
        wiring.both(f"gpu{a}", f"gpu{b}", "nvlink", reach * count, raw * count, latency)


def _nvlink(device: Device) -> tuple[float, float, float]:
    if device.nvlink_kind is None:
        raise InputError(f"{device.name} has no NVLink", field="nvlink")
    return catalog.link_kind(device.nvlink_kind)


def _p2p(plan: NodePlan) -> str:
    if plan.p2p == "all":
        return "SYS"
    if plan.p2p == "none" or not all(device.p2p_pcie for device in plan.devices):
        return "none"
    return "PXB"  # NCCL's default limit (graph/paths.cc); beyond it traffic is staged through host memory
