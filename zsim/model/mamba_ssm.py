"""Kernels of mamba-ssm and causal-conv1d in place of PyTorch code for a state space: all of a mixer behind its first
projection is one autograd function (rules as in `functional`).

Sources: mamba-ssm 2.3.2 `ops/triton/ssd_combined.py` (MambaSplitConv1dScanCombinedFn), whose names they are,
causal-conv1d 1.6.1. Kernels count as bound by memory: how fast they are was never measured here. Some buffers are cut
by the number of multiprocessors: that of an H100.
"""

from __future__ import annotations

from typing import NamedTuple

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model.architecture import StateSpace
from zsim.model.graph import Tensor
from zsim.model.kernels import Memory
from zsim.model.tape import Tape

MULTIPROCESSORS = 132


class Sizes(NamedTuple):
    batch: int
    tokens: int
    chunks: int
    splits: int  # of the heads of a group, whose sums are made apart
    space: StateSpace

    @classmethod
    def of(cls, projected: Tensor, space: StateSpace) -> Sizes:
        batch, tokens, _ = projected.shape
        chunks, ratio = -(-tokens // space.chunk), space.heads // space.groups
        program = max(min(-(-batch * chunks * space.heads // MULTIPROCESSORS), ratio), 1)
        return cls(batch, tokens, chunks, -(-ratio // program), space)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of what each token and head has."""
        return (self.batch, self.space.heads, self.chunks, self.space.chunk)

    @property
    def states(self) -> tuple[int, ...]:
        return (self.batch, self.chunks, self.space.heads, self.space.head_dim, self.space.state)

    @property
    def squares(self) -> tuple[int, ...]:
        return (self.batch, self.chunks, self.space.groups, self.space.chunk, self.space.chunk)

    @property
    def mixed(self) -> tuple[int, ...]:
        return (self.batch, self.tokens, self.space.inner)

    def products(self, states: int, squares: int) -> float:
        """FLOPs of so many products of all tokens with states, and of those with the others of their chunk."""
        space = self.space
        return 2.0 * self.batch * self.tokens * space.inner * (states * space.state + squares * space.chunk)


def split_conv1d_scan(
    projected: Tensor, conv: tuple[Tensor, Tensor | None], dt_bias: Tensor, a: Tensor, d: Tensor, norm: Tensor | None,
    out_proj: tuple[Tensor, Tensor | None], space: StateSpace, waiting: int = 0,
) -> Tensor:  # fmt: skip
    """`projected` [b, s, inner + channels + heads]; weights and biases of convolution and last projection, `norm` the
    weight of the gated norm, if there is one. Returns [b, s, hidden]. Saves its input and what the scan returns.
    `waiting`: nodes that are ready when its backward is over."""
    if space.channels % 8:
        raise NotModeled(f"causal-conv1d with {space.channels} channels", field="kernels", accepted="torch")
    tape, sizes, dtype = projected.tape, Sizes.of(projected, space), projected.dtype
    weight, bias = out_proj
    rows, width = sizes.batch * sizes.tokens, weight.shape[0]
    scanned, rstd, gated, held = _forward(projected, norm is not None, sizes)
    out = tape.empty((rows, width), dtype)
    tape.gemm(rows, width, space.inner, dtype)
    del gated, held
    kept = [t for t in (projected, *conv, scanned, a, d, dt_bias, norm, rstd, weight, bias) if t is not None]
    saved = tape.save(*kept)
    del kept, scanned, rstd
    inputs = {"projected": projected, "kernel": conv[0], "conv": conv[1], "dt_bias": dt_bias, "a": a, "d": d,
              "norm": norm, "weight": weight, "bias": bias}  # fmt: skip
    order = _arrival([name for name, tensor in inputs.items() if tensor is not None], waiting)
    shapes = {name: tensor.shape for name, tensor in inputs.items() if tensor is not None}

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        held = saved()
        found = _backward(g, held[0], shapes, sizes)
        del held
        found["dt_bias"] = F.pointwise(found["dt_bias"], dtype=dtype)
        return tuple(found.pop(name) for name in order)

    tape.link(tuple(inputs[name] for name in order), backward, out)  # type: ignore[misc]
    return F.reshape(out, sizes.batch, sizes.tokens, width)


def _arrival(names: list[str], waiting: int) -> list[str]:
    """In what order the engine runs what accumulates gradients: from a heap (std::priority_queue), where all of that is
    equal and before the rest."""
    rank = {"projected": 0, "a": 1, "kernel": 2}
    heap: list[tuple[int, str]] = []
    for entry in [(-1, "")] * waiting + [(rank.get(name, 3), name) for name in names]:
        heap.append(entry)
        _rise(heap, len(heap) - 1)
    order = []
    while heap:
        order.append(heap[0][1])
        last = heap.pop()
        if not heap:
            break
        hole = 0
        while (child := 2 * hole + 2) <= len(heap):
            if child == len(heap) or heap[child][0] < heap[child - 1][0]:
                child -= 1
            heap[hole] = heap[child]
            hole = child
        heap[hole] = last
        _rise(heap, hole)
    return [name for name in order if name]


def _rise(heap: list[tuple[int, str]], place: int) -> None:
    while place and heap[(place - 1) // 2][0] < heap[place][0]:
        above = (place - 1) // 2
        heap[above], heap[place] = heap[place], heap[above]
        place = above


def _forward(projected: Tensor, normed: bool, sizes: Sizes) -> tuple[Tensor, Tensor | None, Tensor, object]:
    """What the scan returns, 1/std of the norm's groups, what the last projection gets, and what lives as long."""
    tape, dtype, space = projected.tape, projected.dtype, sizes.space
    convolved = _convolved(projected, sizes)
    dt, sums = _new(tape, sizes.steps), _new(tape, sizes.steps)
    _work(tape, (), (dt, sums))
    states = _new(tape, sizes.states)
    _work(tape, (convolved, dt, sums), (states,), sizes.products(1, 0))
    passed, last = _passed(states, dtype, sizes)
    del states
    squares = _new(tape, sizes.squares)
    _work(tape, (convolved,), (squares,), sizes.products(0, 1))
    out = _new(tape, sizes.mixed, dtype)
    scanned = out if normed else _new(tape, sizes.mixed, dtype)
    _work(tape, (squares, convolved, dt, sums, passed), (out, scanned), sizes.products(1, 1))
    del squares
    rstd = None
    if normed:
        out = _new(tape, sizes.mixed, dtype)
        rstd = _new(tape, (space.groups * sizes.batch * sizes.tokens,))
        _work(tape, (scanned, scanned), (out, rstd))
    return scanned, rstd, out, (convolved, dt, sums, passed, last)


def _convolved(projected: Tensor, sizes: Sizes) -> Tensor:
    shape = (sizes.batch, sizes.tokens, sizes.space.channels)
    source = _aligned(projected, shape)  # noqa: F841  alive until the kernel has run
    out = _new(projected.tape, shape, projected.dtype)
    _work(projected.tape, (out,), (out,))
    return out


def _aligned(projected: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """ensure_stride: a copy where a row of `projected` is no multiple of eight elements."""
    if projected.shape[-1] % 8 == 0:
        return None
    out = _new(projected.tape, shape, projected.dtype)
    projected.tape.memory(out.nbytes, out.nbytes, "copy")
    return out


def _passed(states: Tensor, dtype: str, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """_state_passing_fwd: the state before each chunk, and the last one."""
    passed = _new(states.tape, states.shape, dtype)
    last = _new(states.tape, (states.shape[0], *states.shape[2:]))
    _work(states.tape, (states,), (passed, last))
    return passed, last


def _backward(g: Tensor, projected: Tensor, shapes: dict[str, tuple[int, ...]], sizes: Sizes) -> dict[str, Tensor]:
    """Gradients are counted as they are made, of parameters too."""
    tape, dtype, space = projected.tape, projected.dtype, sizes.space
    rows, width = sizes.batch * sizes.tokens, g.shape[-1]
    channels = (sizes.batch, sizes.tokens, space.channels)
    again = _new(tape, sizes.mixed, dtype)  # noqa: F841  what the last projection got
    convolved = _convolved(projected, sizes)
    found = {"projected": _new(tape, projected.shape, dtype)}
    grad_convolved = _new(tape, channels, dtype)
    grad_out = before = _new(tape, sizes.mixed, dtype)  # noqa: F841  lives to the end
    tape.gemm(rows, space.inner, width, dtype)
    if "norm" in shapes:
        grad_out, found["norm"] = _norm_backward(grad_out, sizes)
    found["a"], found["dt_bias"], found["d"], _again = _scan_backward(
        convolved, grad_convolved, grad_out, "norm" in shapes, sizes
    )
    found["weight"] = _new(tape, shapes["weight"], dtype)
    tape.gemm(width, space.inner, rows, dtype)
    if "bias" in shapes:
        found["bias"] = _new(tape, shapes["bias"], dtype)
        tape.memory(g.nbytes, found["bias"].nbytes, "gemm")
    source, into = _aligned(projected, channels), _aligned(projected, channels)  # noqa: F841
    names = [name for name in ("kernel", "conv") if name in shapes]
    sums = [_new(tape, shapes[name]) for name in names]
    _work(tape, (convolved, grad_convolved), (grad_convolved, *sums))
    for name in names:
        found[name] = F.pointwise(sums.pop(0), dtype=dtype)
    return found


def _norm_backward(grad: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """_layer_norm_bwd: sums of the weight's gradient by rows, and these summed."""
    tape, space = grad.tape, sizes.space
    out = _new(tape, grad.shape, grad.dtype)
    block = 1 << (space.inner // space.groups - 1).bit_length()
    warps = min(max(block // 256, 1), 8)
    parts = -(-MULTIPROCESSORS * -(-4 // warps) // space.groups)
    partial = _new(tape, (parts, space.inner))
    _work(tape, (grad, grad, grad), (out, grad, partial))
    return out, F.pointwise(F.pointwise(partial, shape=(space.inner,)), dtype=grad.dtype)


def _scan_backward(
    convolved: Tensor, grad_convolved: Tensor, grad_out: Tensor, normed: bool, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """_mamba_chunk_scan_combined_bwd: gradients of a, dt_bias and d, and the scan's result where it is gated here."""
    tape, dtype, space = convolved.tape, convolved.dtype, sizes.space
    groups = (sizes.batch, sizes.tokens, sizes.splits, space.groups, space.state)
    steps = _new(tape, (sizes.batch, sizes.tokens, space.heads), dtype)
    tape.memory(steps.nbytes, steps.nbytes, "copy")
    dt, sums = _new(tape, sizes.steps), _new(tape, sizes.steps)
    _work(tape, (steps,), (dt, sums))
    squares = _new(tape, sizes.squares)
    _work(tape, (convolved,), (squares,), sizes.products(0, 1))
    states = _new(tape, sizes.states)
    _work(tape, (convolved, dt, sums), (states,), sizes.products(1, 0))
    states, _last = _passed(states, "float32", sizes)
    gated = d_grad = None
    if not normed:
        parts = _new(tape, (-(-space.chunk // 32), sizes.batch, sizes.chunks, space.heads, 1))
        gated = _new(tape, sizes.mixed, dtype)
        grad_out = _new(tape, sizes.mixed, dtype)
        _work(tape, (convolved, grad_out, gated), (grad_out, gated, parts))
        d_grad = F.pointwise(F.pointwise(parts, shape=(space.heads,)), dtype=dtype)
        del parts
    wide = _new(tape, sizes.states)
    _work(tape, (convolved, sums, grad_out), (wide,), sizes.products(1, 0))
    state_grads, kept = _new(tape, sizes.states, dtype), _new(tape, sizes.states, dtype)
    parts = _new(tape, (*sizes.steps[:3], -(-space.head_dim * space.state // 64)))
    _work(tape, (wide, states), (state_grads, kept, parts))
    chunk_sums = F.pointwise(parts, shape=sizes.steps[:3])
    del parts, wide, states
    skips = _new(tape, (-(-space.chunk // 32), sizes.batch, sizes.chunks, space.heads, 1))
    tape.memory(0, skips.nbytes)
    dt_grad = _new(tape, sizes.steps)
    _work(tape, (convolved, squares, grad_out, dt, sums, state_grads), (grad_convolved, dt_grad), sizes.products(1, 1))
    skips = F.pointwise(skips, shape=(space.heads, 1))
    skips = F.pointwise(skips, shape=(space.heads,))
    skips = F.pointwise(skips, dtype=dtype)
    next_sums = _new(tape, sizes.steps)
    parts = _new(tape, groups)
    _work(tape, (convolved, dt, sums, state_grads), (parts, next_sums), sizes.products(1, 0))
    b_grad = F.pointwise(parts, shape=(*groups[:2], *groups[3:]))
    del parts
    tape.memory(next_sums.nbytes, next_sums.nbytes)
    previous = _new(tape, sizes.steps)
    parts = _new(tape, groups)
    _work(tape, (kept, sums, grad_out), (parts, previous), sizes.products(1, 0))
    c_grad = F.pointwise(parts, shape=(*groups[:2], *groups[3:]))
    del parts
    parts = _new(tape, (*sizes.squares[:2], sizes.splits, *sizes.squares[2:]))
    _work(tape, (convolved, dt, sums, grad_out), (parts,), sizes.products(0, 1))
    square_grads = F.pointwise(parts, shape=sizes.squares)
    del parts
    for residual in (b_grad, c_grad):
        _work(tape, (convolved, square_grads, residual), (residual,), sizes.products(0, 1))
    tape.memory(previous.nbytes, chunk_sums.nbytes)
    flipped = F.pointwise(previous)
    summed = F.pointwise(flipped)
    all_before = F.pointwise(summed)
    del flipped, summed
    parts = _new(tape, (*sizes.steps[:3], -(-space.chunk // 32), space.chunk))
    _work(tape, (convolved, dt, sums, grad_out, squares), (parts,), sizes.products(0, 1))
    total = F.pointwise(parts, shape=sizes.steps)
    del parts
    more = F.pointwise(next_sums, all_before)
    tape.memory(total.nbytes + more.nbytes, total.nbytes)
    del more
    dt_bias_grad, a_grad = _new(tape, (space.heads,)), _new(tape, (space.heads,))
    _work(tape, (total, dt_grad, steps), (steps, a_grad, dt_bias_grad))
    return a_grad, dt_bias_grad, skips if d_grad is None else d_grad, gated


def _new(tape: Tape, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return tape.empty(shape, dtype)


def _work(tape: Tape, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], flops: float = 0.0) -> None:
    """One kernel."""
    moved = sum(x.nbytes for x in reads), sum(x.nbytes for x in writes)
    tape.kernel(Memory(tape.label, *moved, flops=flops))
