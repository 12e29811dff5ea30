"""A small symmetric cluster with plain prices, and random programs for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import note
from hypothesis import strategies as st

from zsim.cost.transfer import Transfer
from zsim.model.kernels import Memory
from zsim.program.builder import Builder
from zsim.program.ops import (
    ALL_GATHER,
    COMPUTE,
    CPU,
    D2H,
    H2D,
    HOST,
    REDUCE_SCATTER,
    Collective,
    Compute,
    Copy,
    CpuWork,
    HostWork,
    Op,
    Program,
    Work,
)


def kernels(seconds: float) -> Compute:
    """Work that takes `seconds` on a rank of speed 1."""
    return Compute((Memory("copy", seconds * 1e9, 0.0),))


def collective(numel: int, group: str = "world", kind: str = "all_gather") -> Collective:
    return Collective(kind, "int8", numel, numel, group)


@dataclass
class World:
    """`nodes` machines of `per_node` ranks; links: a port per rank, a bus per node, one spine, PCIe and DRAM.

    Rates are about 1e9 bytes/s. `speed[node]` divides compute seconds. Interference: each collective in flight
    slows kernels by `interference`, each copy by half of that.
    """

    nodes: int = 2
    per_node: int = 2
    port: float = 1e9
    bus: float = 1.5e9
    spine: float = 1e9
    pcie: float = 1e9
    dram: float = 1.5e9
    max_rate: float = 0.9e9
    latency: float = 1e-4
    issue: float = 1e-5
    interference: float = 0.25
    speed: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        k = self.per_node
        return {
            "world": (tuple(range(self.size)),),
            "node": tuple(tuple(range(n * k, n * k + k)) for n in range(self.nodes)),
            "cross": tuple(tuple(range(i, self.size, k)) for i in range(k)),
        }

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        return self.groups["node"] if self.speed else self.groups["world"]

    @property
    def link_capacity(self) -> dict[str, float]:
        links = {"spine": self.spine}
        for rank in range(self.size):
            links |= {f"port{rank}": self.port, f"pcie{rank}": self.pcie}
        for node in range(self.nodes):
            links |= {f"bus{node}": self.bus, f"dram{node}": self.dram}
        return links

    def compute_seconds(self, rank: int, work: Compute) -> float:
        speed = self.speed[rank // self.per_node] if self.speed else 1.0
        return sum(kernel.bytes for kernel in work.kernels) / 1e9 / speed

    def issue_seconds(self, op: Op) -> float:
        return self.issue

    def host_seconds(self, work: HostWork) -> float:
        return 2e-5 * work.count

    def cpu_seconds(self, rank: int, work: CpuWork) -> float:
        return work.nbytes / 1e9

    def transfer(self, work: Collective | Copy, groups: tuple[tuple[int, ...], ...]) -> Transfer:
        usage: Counter[str] = Counter()
        for group in groups:
            nodes = {rank // self.per_node for rank in group}
            for rank in group:
                if isinstance(work, Copy):
                    usage[f"pcie{rank}"] += 1.0
                    usage[f"dram{rank // self.per_node}"] += 1.0
                else:
                    usage[f"port{rank}"] += (len(group) - 1) / len(group)
            if isinstance(work, Collective):
                for node in nodes:
                    usage[f"bus{node}"] += 0.5
                if len(nodes) > 1:
                    usage["spine"] += 0.75
        payload = work.nbytes if isinstance(work, Copy) else work.payload_bytes
        return Transfer(payload, dict(usage), self.latency, self.max_rate, "fake")

    def compute_slowdown(self, active) -> float:
        return 1.0 + sum(self.interference / (2 if isinstance(work, Copy) else 1) for work in active)

    def program(self, *steps: Builder, init: Builder | None = None) -> Program:
        """The last step repeats."""
        return Program(
            self.size, self.groups, init.instructions if init else [], tuple(step.instructions for step in steps)
        )


MILLISECONDS = st.integers(0, 40).map(lambda n: n / 10_000)
NUMELS = st.integers(0, 40).map(lambda n: n * 100_000)
DEVICE_LANES = (COMPUTE, ALL_GATHER, REDUCE_SCATTER, H2D, D2H, CPU)


@st.composite
def works(draw, lane: str) -> Work:
    if lane == COMPUTE:
        return kernels(draw(MILLISECONDS))
    if lane in (ALL_GATHER, REDUCE_SCATTER):
        if draw(st.integers(0, 4)) == 0:
            return kernels(draw(MILLISECONDS))  # copy-in and copy-out kernels run on these streams too
        return collective(draw(NUMELS), draw(st.sampled_from(["world", "node", "cross"])), lane)
    if lane == CPU:
        return CpuWork("adam", 1, draw(NUMELS))
    return Copy(lane, float(draw(NUMELS)))


@st.composite
def steps(draw, max_ops: int = 25, lanes: tuple[str, ...] = DEVICE_LANES, memory: bool = False) -> Builder:
    """A step of random ops that wait for random earlier ones (of this step or an earlier one)."""
    builder = Builder()
    launched: list[int] = []
    live: list[str] = []
    for index in range(draw(st.integers(1, max_ops))):
        action = draw(st.integers(0, 11))
        if action == 0:
            builder.host_work("hook", "forward", draw(st.integers(1, 20)))
        elif action == 1 and launched:
            builder.host_wait(draw(st.sampled_from([None, *launched, builder.last(draw(st.sampled_from(lanes)))])))
        elif memory and action == 2:
            live.append(f"t{index}")
            device = draw(st.sampled_from(["gpu", "gpu", "host"]))
            builder.alloc(
                live[-1], draw(st.sampled_from(["parameters", "gradients"])), draw(st.integers(0, 99)), device
            )
        elif memory and action == 3 and live:
            key = live.pop(draw(st.integers(0, len(live) - 1)))
            builder.free(key, draw(st.sampled_from([None, *launched])))
        else:
            lane = draw(st.sampled_from(lanes))
            for _ in range(draw(st.integers(0, 2))):
                event = draw(st.sampled_from(launched)) if launched and draw(st.booleans()) else None
                builder.stream_wait(lane, builder.last(draw(st.sampled_from(lanes))) if event is None else event)
            peak, after = draw(st.integers(0, 9)), draw(st.integers(0, 9))
            category = draw(st.sampled_from(["activations", "logits"]))
            op = builder.launch(
                lane, f"op{index}", "forward", draw(works(lane)),
                temp_peak=max(peak, after), temp_live=after, temp_category=category,
            )  # fmt: skip
            launched.append(op)
    if not launched:
        launched.append(builder.launch(COMPUTE, "op", "forward", kernels(1e-3)))
    for key in live:
        builder.free(key)
    if draw(st.booleans()):
        builder.host_wait(draw(st.sampled_from([None, launched[-1]])))
    note("step:\n" + "\n".join(str(getattr(instruction, "op", instruction)) for instruction in builder.instructions))
    return builder


@st.composite
def worlds(draw, classes: bool = False) -> World:
    nodes, per_node = draw(st.sampled_from([(1, 2), (2, 2), (2, 3), (3, 2)]))
    speed = tuple(draw(st.sampled_from([0.5, 1.0, 1.0, 1.7])) for _ in range(nodes)) if classes else ()
    return World(
        nodes, per_node,
        bus=draw(st.sampled_from([0.8e9, 1.5e9, 9e9])),
        dram=draw(st.sampled_from([0.7e9, 1.5e9, 9e9])),
        max_rate=draw(st.sampled_from([0.3e9, 0.9e9, float("inf")])),
        latency=draw(st.sampled_from([0.0, 1e-4, 1.3e-3])),
        issue=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        interference=draw(st.sampled_from([0.0, 0.25])),
        speed=speed,
    )  # fmt: skip


__all__ = ["HOST", "World", "collective", "kernels", "steps", "worlds"]
