"""Work descriptors of GPU kernels: what is computed and how many bytes move, never how long it takes.

`cost` turns them into seconds. They are shared (interned by value) between the blocks of a model, so a
model of 64 equal blocks holds each descriptor once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DTYPE_BYTES: dict[str, float] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1, "nf4": 0.5, "uint64": 8, "complex64": 8,
}  # fmt: skip


FLASH = ("flash", "flash3", "flash4")  # FlashAttention 2, 3 and 4, as `Attention.impl`


@dataclass(frozen=True, slots=True)
class Gemm:
    """C[m, n] += A[m, k] B[k, n], `batch` times. 2 m n k FLOP each.

    `float8`: how a product of that dtype sums and scales, with a result in 16 bits: "tensorwise" (cuBLAS), "rowwise"
    (CUTLASS), "split" (cuBLAS, sums promoted to float32 as they go).
    """

    m: int
    n: int
    k: int
    dtype: str
    batch: int = 1
    label: str = "gemm"
    launches: int = 1
    float8: str = ""
    unaligned: bool = False  # a row of some operand is no whole number of 4 bytes

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def bytes(self) -> float:
        operands, result = self.m * self.k + self.k * self.n, self.m * self.n
        if self.float8:
            result *= 2
        return (operands + result) * self.batch * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled-dot-product attention as one fused kernel (those of FLASH, `cudnn`, `efficient`, `sdpa`, `masked`).

    Unfused (`eager`) attention is written as two batched Gemms and Memory kernels instead.
    `flops` counts the full square, as torch's FLOP counter does: 2 b h q k (d + d_v) forward,
    2 b h q k (3 d + 2 d_v) backward; `causal` tells the cost model that a good kernel skips half of it.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    impl: str
    dtype: str
    backward: bool = False
    window: int | None = None
    label: str = "attention"
    launches: int = 1
    value_dim: int = 0  # of a head of values, where it is not `head_dim`

    @property
    def flops(self) -> float:
        square = 2.0 * self.batch * self.heads * self.q_len * self.kv_len
        value_dim = self.value_dim or self.head_dim
        return square * (3 * self.head_dim + 2 * value_dim if self.backward else self.head_dim + value_dim)

    @property
    def bytes(self) -> float:
        widths = self.head_dim + (self.value_dim or self.head_dim)
        q_and_out = self.batch * self.heads * self.q_len * widths
        k_and_v = self.batch * self.kv_heads * self.kv_len * widths
        passes = 2 if self.backward else 1
        return passes * (q_and_out + k_and_v) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory-bound kernel, or a run of `launches` of them: bytes read and written in device memory.

    `label` names the kind for reports and for kind-specific efficiencies: norm, rotary, activation, residual,
    dropout, softmax, cross_entropy, embedding, copy (clones, concatenations, zeroed gradients of slices), router,
    experts, gemm (column sums for biases, sums of gradients), attention, pointwise; of strategies cast, optimizer,
    grad_norm; float8 (casts to it, and their scales).
    """

    label: str
    read_bytes: float
    write_bytes: float
    launches: int = 1
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes


Kernel = Gemm | Attention | Memory


# Groups of ranks that share one micro-batch's work, and of those that have the same experts
SEQUENCE_PARALLEL, EXPERT_PARALLEL = "sequence_parallel", "expert_parallel"
EXPERT_DATA_PARALLEL = "expert_data_parallel"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective in the middle of a module's own work, among ranks that share its sequences (Ulysses) or its experts.

    `kind`, `group` and element counts as in `zsim.program.ops.Collective`. `awaited`: the host waits for what comes.
    """

    kind: str
    dtype: str
    in_numel: int
    out_numel: int
    group: str = SEQUENCE_PARALLEL
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waits for the kernels up to here: it reads a number off the GPU, or how many entries are not zero."""


WAIT = Wait()
Work = Kernel | Exchange | Wait


class Calls(NamedTuple):
    """What the issuing thread goes through besides launching kernels: calls of modules, operators that launch nothing
    (`views`), nodes of autograd that run (`nodes`), gradients that arrive at parameters (`grads`), and tensors that
    autograd would save in a region of activation checkpointing, which has it save stand-ins (`saves`), until it saves
    them in its second run and asks for them (`rebuilds`).

    `models`: whole models of transformers, which make masks and outputs; `backwards`: calls of `loss.backward()`;
    `graphs`: what torch.compile made of a block, which is entered in place of all these."""

    models: int = 0
    backwards: int = 0
    modules: int = 0
    views: int = 0
    nodes: int = 0
    grads: int = 0
    saves: int = 0
    rebuilds: int = 0
    graphs: int = 0


NO_CALLS = Calls()


def kernels_of(work: tuple[Work, ...]) -> tuple[Kernel, ...]:
    """All but collectives and waits; the same tuple where there are none, as prices are remembered by its identity."""
    kernels = tuple(item for item in work if not isinstance(item, Exchange | Wait))
    return kernels if len(kernels) < len(work) else work  # type: ignore[return-value]
