"""What came out: the Result, frozen, with the JSON contract in `to_dict`. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from zsim.cost.profile import Profile
from zsim.engine.timeline import Timeline
from zsim.program.ops import Program
from zsim.result import tables
from zsim.result.critical_path import RankView, slowest_of
from zsim.result.textbook import Textbook

if TYPE_CHECKING:
    import pandas as pd

    from zsim.scenario import Setup


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the fullest GPU.

    `peak_allocated_bytes` and `peak_reserved_bytes` are `torch.cuda.max_memory_allocated` and `max_memory_reserved`;
    `framework_bytes` (CUDA context, NCCL) lies outside the allocator. `by_category` is the moment of the allocated
    peak plus the category "framework", so that it sums to peak_allocated_bytes + framework_bytes.

    The run fits when PyTorch's caching allocator gets through all simulated steps with capacity - framework bytes,
    giving cached blocks back where it must (`allocator_retries`, and of these in every steady step
    `allocator_retries_per_step`; the step's time has `remapping_s` of that, the rest is not known). If so,
    `headroom_bytes` is what is never reserved. If not, `out_of_memory_at` says where it fails first, the reserved peak
    is the least that it would have had to reserve, and the headroom is negative: at least this much is missing.

    `paged_bytes` of states lie in managed memory, outside the allocator too: on the GPU as far as there is room,
    `evicted_bytes` of them on the host. They never keep a run from fitting.

    `allowed_bytes` is what per_process_memory_fraction lets the allocator reserve; None without one.
    """

    capacity_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    framework_bytes: int
    by_category: Mapping[str, int]
    peak_at: str
    peak_rank: int
    headroom_bytes: int
    out_of_memory_at: str | None
    allocator_retries: int
    allocator_retries_per_step: int = 0
    remapping_s: float | None = None  # per step, of expandable segments' pages
    first_remapping_s: float | None = None  # of the first step
    paged_bytes: int = 0
    evicted_bytes: int = 0
    allowed_bytes: int | None = None

    @property
    def short_of_allowed(self) -> bool:
        """Whether the headroom is that of torch's own limit, and not of the device."""
        return self.allowed_bytes is not None and self.headroom_bytes == self.allowed_bytes - self.peak_reserved_bytes

    @property
    def without_cache_bytes(self) -> int:
        """What is allocated at the peak and what lies outside the allocator: all but what that caches."""
        return self.peak_allocated_bytes + self.framework_bytes

    @property
    def nvidia_smi_bytes(self) -> int:
        """What the driver sees this process hold: the allocator's segments and what lies outside it."""
        return self.peak_reserved_bytes + self.framework_bytes

    @property
    def fits(self) -> bool:
        return self.out_of_memory_at is None and self.headroom_bytes >= 0


# Of the host's memory: beyond it the system and other processes decide, which take 3 to 12 GiB of a workstation's 126.
HOST_TIGHT = 0.9


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of one node that the run pins or fills. `nvme_*` likewise. Zero capacity: not known."""

    capacity_bytes: int
    peak_bytes: int
    per_rank_bytes: int
    by_category: Mapping[str, int]
    nvme_capacity_bytes: int
    nvme_peak_bytes: int
    peak_at: str = ""  # as GpuMemory.peak_at

    @property
    def fits(self) -> bool:
        dram = not self.capacity_bytes or self.peak_bytes <= self.capacity_bytes
        return dram and self.nvme_peak_bytes <= self.nvme_capacity_bytes


@dataclass(frozen=True, slots=True)
class MomentMemory:
    """Memory at the peak of an evaluation, or of writing or reading a checkpoint, where it is more than training's.

    `gpu_bytes`: as GpuMemory.nvidia_smi_bytes, 0 where training takes as much. `host_*`: of the fullest node, as
    HostMemory.
    """

    moment: str
    cause: str
    gpu_bytes: int
    gpu_fits: bool
    gpu_tight: bool  # the allocator has to give cached memory back
    host_bytes: int
    host_by_category: Mapping[str, int]
    host_fits: bool
    host_tight: bool

    @property
    def fits(self) -> bool:
        return self.gpu_fits and self.host_fits


@dataclass(frozen=True, slots=True)
class Time:
    """One steady step as its compute lane sees it; the four parts add up to `step_s`.

    `compute_s`: kernels run. `exposed_comm_s`: idle, waiting for a collective. `host_s`: idle because the host had not
    issued the next kernel. `idle_s`: idle for anything else (copies to and from the host, the CPU optimizer, the end of
    the step), itemized in `idle_by`. `exposed_by` has keys "all_gather/forward". `comm_s` is what collectives take
    in all, `overlapped_comm_s` the part of it under compute.
    """

    step_s: float
    compute_s: float
    exposed_comm_s: float
    host_s: float
    idle_s: float
    compute_by_phase: Mapping[str, float]
    compute_by_family: Mapping[str, float]
    exposed_by: Mapping[str, float]
    idle_by: Mapping[str, float]
    comm_s: float
    overlapped_comm_s: float
    first_step_s: float


@dataclass(frozen=True, slots=True)
class Temporal:
    """HolisticTraceAnalysis' temporal breakdown of the steady step's kernels, all streams together.

    From the start of the first kernel to the end of the last, `kernel_s`: some compute kernel runs (`compute_s`), only
    collectives or copies run (`non_compute_s`), nothing runs (`idle_s`). `comm_comp_overlap`: the share of the
    collectives' time under compute.
    """

    kernel_s: float
    compute_s: float
    non_compute_s: float
    idle_s: float
    comm_comp_overlap: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """MFU: model FLOPs (forward and backward, no recomputation) per second over peak; HFU: with recomputation."""

    tokens_per_s_per_gpu: float
    tokens_per_s: float
    mfu: float | None
    hfu: float | None
    model_flops: float
    hardware_flops: float
    peak_flops: float | None
    formula: str


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The largest cause inside the largest group of causes (compute, communication, host ...).

    Shares of the step's critical path, which is as long as the step; `path`: of every group.
    """

    name: str
    share: float
    group: str
    group_share: float
    path: Mapping[str, float]
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Meta:
    zsim_version: str
    simulated_ranks: int
    rank_classes: int
    events: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Expected relative error of the step time (None: unknown), and what it was measured on."""

    device: str
    stack: str
    step_time_error: float | None
    evidence: str


@dataclass(frozen=True, slots=True)
class Headline:
    """What was simulated, in plain JSON types."""

    model: str
    cluster: str
    devices: tuple[str, ...]
    world_size: int
    gpus_per_node: int
    framework: str
    stage: int | None
    tokens_per_step: int
    workload: Mapping[str, Any]
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What one simulated scenario says. `to_dict()` is the JSON contract."""

    name: str
    headline: Headline
    gpu: GpuMemory
    host: HostMemory
    textbook: Textbook
    time: Time
    throughput: Throughput
    bottleneck: Bottleneck
    params: int
    trainable_params: int
    assumptions: tuple[str, ...]
    not_modeled: tuple[str, ...]
    accuracy: Accuracy
    meta: Meta
    setup: Setup = field(repr=False, compare=False)
    program: Program = field(repr=False, compare=False)
    timeline: Timeline = field(repr=False, compare=False)
    profile: Profile = field(repr=False, compare=False)
    moments: tuple[MomentMemory, ...] = ()  # beside the steps, that need more memory than training does

    @property
    def fits(self) -> bool:
        return self.trains and all(moment.fits for moment in self.moments)

    @property
    def trains(self) -> bool:
        """Whether the steps fit, whatever becomes of evaluations and checkpoints."""
        return self.gpu.fits and self.host.fits

    @property
    def short_of(self) -> str | None:
        """What there is too little of."""
        if not self.gpu.fits:
            return "GPU memory"
        return None if self.fits else "memory beside the steps" if self.trains else "host memory or NVMe space"

    @property
    def host_fits(self) -> bool:
        return self.host.fits and all(moment.host_fits for moment in self.moments)

    @property
    def tight(self) -> bool:
        """Whether a few percent more would not fit: the allocator has to give cached memory back, or hardly any of the
        host's is left for the system."""
        host = self.host
        if self.gpu.allocator_retries > 0 or host.peak_bytes > HOST_TIGHT * host.capacity_bytes > 0:
            return True
        return any(each.gpu_tight or each.host_tight for each in self.moments)

    @property
    def slowest(self) -> RankView:
        """The records of the rank whose steady step takes longest."""
        return slowest_of(RankView(self.program, self.timeline, ranks[0]) for ranks in self.timeline.rank_classes)

    @property
    def temporal(self) -> Temporal:
        from zsim.result.breakdown import temporal

        return temporal(self.slowest)

    @property
    def ops(self) -> pd.DataFrame:
        """Every op of each simulated rank and step (see `tables.op_rows`)."""
        return _frame(tables.op_rows(self))

    @property
    def memory(self) -> pd.DataFrame:
        """Every allocation and free in the host's order (see `tables.memory_rows`)."""
        return _frame(tables.memory_rows(self))

    @property
    def links(self) -> pd.DataFrame:
        """Every link used in the steady step, the fullest first (see `tables.link_rows`)."""
        return _frame(tables.link_rows(self))

    def __str__(self) -> str:
        """The verdict in one line."""
        from zsim.result.render.terminal import verdict

        return verdict(self)

    def _repr_html_(self) -> str:
        from zsim.result.render.notebook import summary

        return summary(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types. Time is simulated as if the run fitted; `time.valid` says whether it does."""
        from zsim.result.reported import record

        gpu, host, bottleneck, known = self.gpu, self.host, self.bottleneck, record(self)
        return {
            "name": self.name,
            "fits": self.fits,
            "tight": self.fits and self.tight,
            "short_of": self.short_of,
            "setup": asdict(self.headline),
            "memory": {
                "gpu": asdict(gpu) | {"nvidia_smi_bytes": gpu.nvidia_smi_bytes, "fits": gpu.fits},
                "host": asdict(host) | {"fits": host.fits},
                "textbook": asdict(self.textbook),
                "moments": [asdict(each) | {"fits": each.fits} for each in self.moments],
            },
            "time": asdict(self.time) | {"valid": self.trains, "temporal": asdict(self.temporal)},
            "throughput": asdict(self.throughput),
            "bottleneck": asdict(bottleneck),
            "model": {"params": self.params, "trainable_params": self.trainable_params},
            "accuracy": asdict(self.accuracy) | {"gpu_memory": known and asdict(known)},
            "assumptions": list(self.assumptions),
            "not_modeled": list(self.not_modeled),
            "meta": asdict(self.meta),
        }


def _frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
