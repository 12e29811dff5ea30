"""What a profiler's trace of one rank says, whoever wrote it: lanes, kernels by class, collectives, steps, totals.

Totals are defined as HolisticTraceAnalysis does: compute is the union of kernels that are neither communication nor
copies, communication the union of communication kernels, overlap what both share, idle what no kernel covers between
the first and the last one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.program.ops import DTYPE_BYTES

Span = tuple[float, float]

COMMUNICATION, COPY = "communication", "copy"
# First match counts. Names of CUDA and ROCm kernels, and of ATen operators where a trace has no device.
_CLASSES = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (COMMUNICATION, r"nccl|msccl|^gloo:|^(ucc|mpi|xccl|hccl):"),
        (COPY, r"^(?-i:Memcpy|Memset|dma)|CopyHostToDevice|CopyDeviceToHost"),
        ("attention", r"flash|fmha|attention|sdpa|mha_|attn"),
        ("optimizer", r"adam|lamb|multi_tensor|_foreach|_fused_sgd|lion_"),
        ("gemm", r"gemm|cutlass|cublas|_s\d+gemm|xmma|\bMT\d+x\d+|Cijk_|aten::(mm|addmm|bmm|baddbmm|_scaled_mm|matmul)$"
                 r"|mkldnn_linear|nvjet|wgrad|dgrad|conv\d|convolution|splitK|^bmm_|scudnn|conv_"),
        ("norm", r"norm|rsqrt|bn_[fb]w"),
        ("softmax", r"softmax|cross_entropy|nll_loss"),
        ("embedding", r"embedding|index_?select|indexing_backward|gather|scatter"),
        ("elementwise", r"elementwise|triton|vectorized|copy_|act_and_mul|transpose|cat|aten::"),
        ("reduction", r"reduce"),
    )
)  # fmt: skip


def classify(name: str) -> str:
    """The class of a kernel or operator by its name; "other" where nothing in it is known."""
    return next((kind for kind, pattern in _CLASSES if pattern.search(name)), "other")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as its caller sees it. Elements are None where the trace does not say them."""

    kind: str  # all_gather | reduce_scatter | all_reduce | broadcast | reduce | all_to_all | send_recv | ...
    dtype: str | None = None
    in_numel: int | None = None
    out_numel: int | None = None
    group_size: int | None = None
    group: str = ""

    @property
    def nbytes(self) -> int | None:
        """Of the full buffer: gathered output, scattered input, or the reduced tensor."""
        sizes = [numel for numel in (self.in_numel, self.out_numel) if numel is not None]
        if not sizes or self.dtype not in DTYPE_BYTES:
            return None
        return int(max(sizes) * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Slice:
    """Something a lane ran. `gemm`: (batch, m, n, k) and dtype where shapes were recorded."""

    name: str
    kind: str
    lane: str
    start_s: float
    end_s: float
    call: Call | None = None
    gemm: tuple[int, int, int, int, str] | None = None
    phase: str = ""
    module: str = ""
    launched_s: float | None = None  # when the CPU launched it

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds. `span`: first start to last end; span = compute + exposed communication + exposed copies + idle."""

    compute: float
    communication: float
    overlap: float
    idle: float
    span: float

    @property
    def exposed(self) -> float:
        return self.communication - self.overlap


@dataclass(frozen=True)
class Trace:
    """One rank's trace; times count from the first event read. `on_device`: False where only the CPU was profiled."""

    path: Path
    rank: int | None
    world_size: int | None
    backend: str
    device: str
    on_device: bool
    slices: tuple[Slice, ...]
    steps: tuple[Step, ...]

    @property
    def lanes(self) -> dict[str, list[Slice]]:
        lanes: dict[str, list[Slice]] = {}
        for piece in self.slices:
            lanes.setdefault(piece.lane, []).append(piece)
        return lanes

    @property
    def collectives(self) -> list[Slice]:
        return [piece for piece in self.slices if piece.call is not None]

    def within(self, start_s: float, end_s: float) -> list[Slice]:
        """Slices that were launched (or, where the launch is unknown, began) in [start_s, end_s)."""
        begins = [(p.start_s if p.launched_s is None else p.launched_s, p) for p in self.slices]
        return [piece for begin, piece in begins if start_s <= begin < end_s]

    def profiled(self) -> list[Slice]:
        """Slices launched until the end of the last step, which are those that HolisticTraceAnalysis takes; all of them
        where fewer than two steps are marked."""
        if len(self.steps) < 2:
            return list(self.slices)
        until = self.steps[-1].end_s
        if not self.on_device:
            return [piece for piece in self.slices if piece.start_s < until]
        return [piece for piece in self.slices if piece.launched_s is not None and piece.launched_s < until]

    def totals(self) -> Totals:
        return totals(self.profiled())


def totals(slices: Iterable[Slice]) -> Totals:
    """Compute, communication, overlap and idle of some slices of one rank."""
    pieces = list(slices)
    everything = union((p.start_s, p.end_s) for p in pieces)
    compute = union((p.start_s, p.end_s) for p in pieces if p.kind not in (COMMUNICATION, COPY))
    communication = union((p.start_s, p.end_s) for p in pieces if p.kind == COMMUNICATION)
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    return Totals(
        compute=length(compute),
        communication=length(communication),
        overlap=length(compute) + length(communication) - length(union((*compute, *communication))),
        idle=span - length(everything),
        span=span,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover what `spans` cover."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


class Nested:
    """Finds which of one thread's slices, properly nested, was innermost at a moment."""

    def __init__(self, spans: Iterable[tuple[float, float, int]]) -> None:
        self._edges: list[float] = []
        self._inside: list[int] = []  # from the edge on; -1: none
        stack: list[tuple[float, int]] = []
        for start, end, what in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1][0] <= start:
                closed = stack.pop()[0]
                self._mark(closed, stack[-1][1] if stack else -1)
            stack.append((end, what))
            self._mark(start, what)
        while stack:
            closed = stack.pop()[0]
            self._mark(closed, stack[-1][1] if stack else -1)

    def _mark(self, edge: float, what: int) -> None:
        if self._edges and self._edges[-1] >= edge:  # profilers' clocks: a child may outlast its parent by a tick
            self._inside[-1] = what
            return
        self._edges.append(edge)
        self._inside.append(what)

    def at(self, moment: float) -> int:
        """Index given for the innermost slice at `moment`, -1 where there is none."""
        place = bisect_right(self._edges, moment) - 1
        return self._inside[place] if place >= 0 else -1
