"""The Program: what one rank's host does, in order. Pure data, no durations.

Four instructions are enough: `Launch` an op on a lane, `Alloc` and `Free` memory in issue order, `HostWait`
until an op is done. The engine gives them times; the validation room holds them against recordings.

Instructions are named tuples: a step has thousands, and these are made four times as fast as frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from zsim.model.kernels import DTYPE_BYTES, NO_CALLS, Calls, Kernel
from zsim.model.spec import Unsaved

# Lanes of a rank. The host issues; each other lane runs its ops in order (a CUDA stream, the copy engines,
# the optimizer threads of the CPU, the NVMe queue).
HOST, COMPUTE, ALL_GATHER, REDUCE_SCATTER = "host", "compute", "all_gather", "reduce_scatter"
H2D, D2H, CPU, NVME = "h2d", "d2h", "cpu", "nvme"
COPY_IN, ALL_REDUCE = "copy_in", "all_reduce"  # FSDP2's streams for all-gather inputs and for HSDP's all-reduces
WORKER = "cpu_worker"  # SuperOffload's process for Adam
LANES = (COMPUTE, ALL_GATHER, REDUCE_SCATTER, H2D, D2H, CPU, NVME, COPY_IN, ALL_REDUCE, WORKER)
OFF_GPU = (CPU, NVME, WORKER)

# reference: the forward without gradients of what a trained model is compared with
PHASES = ("init", "forward", "reference", "recompute", "backward", "optimizer", "evaluation")
FORWARDS = ("forward", "reference", "recompute", "evaluation")


@dataclass(frozen=True, slots=True)
class Compute:
    """Kernels run back to back on the compute lane, and what the host does on the way to them."""

    kernels: tuple[Kernel, ...]
    calls: Calls = NO_CALLS


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call as torch.distributed sees it; element counts are per rank.

    `kind`: all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, barrier. `group` names an entry of
    `Program.groups`. `in_numel` is what a rank passes in, `out_numel` what it holds afterwards; both are the whole
    buffer for an all_to_all, of which each rank gets its share.
    """

    kind: str
    dtype: str
    in_numel: int
    out_numel: int
    group: str = "world"
    reduce_op: str | None = None
    root: int | None = None

    @property
    def payload_bytes(self) -> float:
        """The full buffer: gathered output, scattered input, or the reduced tensor."""
        return max(self.in_numel, self.out_numel) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes between this rank's GPU and its host memory (h2d, d2h), or host memory and NVMe.

    Of NVMe reads: `in_flight`, the most bytes requested and not there yet; `direct`, straight to the GPU. `paged`: of
    managed memory, which moves only where it does not fit beside everything else.
    """

    direction: str  # h2d | d2h | nvme_read | nvme_write
    nbytes: float
    pinned: bool = True
    in_flight: float = inf
    direct: bool = False
    paged: bool = False


# Equal copies as one object: a step may have a thousand of a few sizes.
copy_of = lru_cache(maxsize=4096, typed=True)(Copy)


@dataclass(frozen=True, slots=True)
class CpuWork:
    """Optimizer arithmetic on the host: `numel` parameters, `nbytes` of DRAM traffic, on a share of the cores.

    `moments`: the type of DeepSpeedCPUAdam's, where the weights are not float32 and each element has to be converted.
    `pinned`: of `nbytes`, those in pinned buffers, which one thread allocates: on one NUMA node.
    """

    label: str
    numel: int
    nbytes: float
    cores: float = 1.0
    moments: str | None = None
    pinned: float = 0.0


@dataclass(frozen=True, slots=True)
class HostWork:
    """Python time of the issuing thread that launches nothing: `count` calls of the kind `label` (module hooks...)."""

    label: str
    count: int = 1


Work = Compute | Collective | Copy | CpuWork | HostWork


class Op(NamedTuple):
    """Something a lane runs. `id` is unique within its step program and is the event others wait for.

    `waits` are ids of earlier ops of the same step on other lanes, or `-1 - LANES.index(lane)`: the last op
    that an *earlier step* issued on that lane. Order on its own lane is implied. `temp_peak` and `temp_live`
    are bytes of unsaved tensors (activation gradients, temporaries, the residual stream) alive inside this
    op and after it, until the next compute op says otherwise; `temp_tensors` and `temp_left` are these tensors, oldest
    first (none: it is one).
    """

    id: int
    lane: str
    label: str
    phase: str
    work: Work
    waits: tuple[int, ...] = ()
    module: str = ""
    layer: int | None = None
    micro: int = 0
    temp_peak: int = 0
    temp_live: int = 0
    temp_category: str = "activations"
    temp_tensors: Unsaved = ()
    temp_left: Unsaved = ()


class Launch(NamedTuple):
    op: Op


class Alloc(NamedTuple):
    """`key` identifies the tensor until its Free. `device`: gpu | host (pinned) | nvme | managed (CUDA's, of both).

    Tensors that live and die together may go by one key; then `tensors` are their sizes, the last of which repeats
    until `nbytes` is reached (none: it is one).

    `lane` is the stream that was current: PyTorch's allocator reuses cached blocks only on the stream that got them.
    """

    key: str
    category: str
    nbytes: int
    device: str = "gpu"
    lane: str = COMPUTE
    tensors: tuple[int, ...] = ()


class Free(NamedTuple):
    """`after`: the allocator may reuse the bytes only when that op is done (`record_stream`)."""

    key: str
    after: int | None = None


class HostWait(NamedTuple):
    """The host blocks until op `op` is done (`.item()`, `event.synchronize()`); `None`: device idle."""

    op: int | None


Instruction = Launch | Alloc | Free | HostWait

# Freed, but an op on another stream still reads it (record_stream): torch no longer counts it as allocated, nor can it
# be reused.
DELAYED_FREES = "delayed_frees"

DEVICES = ("gpu", "host", "nvme", "managed")

RANK_0 = "rank_0"  # host memory that only one rank of the job holds


@dataclass(frozen=True)
class Program:
    """`init` allocates persistent state; `steps[k]` is training step k+1. Later steps repeat the last one.

    `groups`: name -> all groups of that kind, each a tuple of ranks ("world" is always there). Step programs
    that are equal are the same object.
    """

    world_size: int
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    init: Sequence[Instruction]
    steps: tuple[Sequence[Instruction], ...]
    assumptions: tuple[str, ...] = ()
    not_modeled: tuple[str, ...] = ()
