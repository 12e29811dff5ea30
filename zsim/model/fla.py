"""Kernels of flash-linear-attention and causal-conv1d in place of PyTorch code for linear attention (rules as in
`functional`).

Sources: fla-core 0.6.0 `ops/gated_delta_rule/chunk.py` (ChunkGatedDeltaRuleFunction), causal-conv1d 1.6.1
`causal_conv1d_interface.py` (CausalConv1dFn). Kernels count as bound by memory: how fast they are was never measured
here. FLOPs of a chunk are those of its matrix products.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.graph import Tensor
from zsim.model.kernels import Memory
from zsim.model.tape import Tape

CHUNK = 64  # tokens
TILE = 128  # of a key that one block of threads has, on Ampere and later with 16 bits


def causal_conv1d(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel of x [b, c, s] with its own filter, weight [c, 1, k], and silu: one kernel, which saves its input.

    Input and result lie in memory alike. The weight's gradient is summed in float32.
    """
    tape, x_grad, w_grad = x.tape, x.needs_grad, weight.needs_grad
    out = F.pointwise(x)
    if x_grad or w_grad:
        saved = tape.save(x)

        def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
            (x,) = saved()
            grad = tape.empty(x.shape, x.dtype, F.layout(x))
            wide = tape.empty(weight.shape, "float32")
            tape.memory(0, wide.nbytes)
            tape.memory(g.nbytes + x.nbytes, grad.nbytes + wide.nbytes)
            if not w_grad:
                return grad, None
            narrow = tape.gradient(weight, weight.shape, weight.dtype)
            tape.memory(wide.nbytes, narrow.nbytes)
            return grad if x_grad else None, narrow

        tape.link((x, weight), backward, out)
    return out


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Shapes as in `linear_attention`. Saves what its kernels read: queries and keys normed, in whole, and for each
    token and head the row of a triangular matrix; states are computed again in backward."""
    tape, inputs = q.tape, (q, k, v, g, beta)
    wanted = [x.needs_grad for x in inputs]
    guarded = [_contiguous(x.detach()) for x in inputs]  # what the function is called with
    q, q_rstd = _normed(guarded[0])
    k, k_rstd = _normed(guarded[1])
    v, g, beta = guarded[2:]
    g = F.pointwise(g)
    out, system = _forward(q, k, v, g, beta)
    if any(wanted):
        saved = tape.save(q, q_rstd, k, k_rstd, v, g, beta, system)

        def backward(do: Tensor) -> tuple[Tensor | None, ...]:
            q, q_rstd, k, k_rstd, v, g, beta, system = saved()
            do = _contiguous(do)
            dq, dk, dv, db, dg = _backward(q, k, v, g, beta, system, do)
            dq = _kernel((q, q_rstd, dq), q.shape, q.dtype)
            dk = _kernel((k, k_rstd, dk), k.shape, k.dtype)
            found = dq, dk, dv, dg, db
            return tuple(grad if want else None for grad, want in zip(found, wanted, strict=True))

        tape.link(inputs, backward, out)
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    tape, (b, s, heads, _), width = q.tape, v.shape, k.shape[-1]
    system = tape.empty((b, s, heads, CHUNK), k.dtype)
    tape.memory(0, system.nbytes)
    _work(tape, (k, g, beta), (system,), 2 * b * s * heads * CHUNK * width)
    w, u = _representation(k, v, beta, system, g)
    h, v_new = _states(k, w, u, g)
    out = tape.empty(v.shape, v.dtype)
    _work(tape, (q, k, v_new, h, g), (out,), _products(v, width, 1, 2))
    return out, system


def _representation(k: Tensor, v: Tensor, beta: Tensor, system: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """recompute_w_u_fwd"""
    w = k.tape.empty((*v.shape[:3], k.shape[-1]), k.dtype)
    u = k.tape.empty(v.shape, v.dtype)
    _work(k.tape, (k, v, beta, system, g), (w, u), _products(v, k.shape[-1], 0, 2))
    return w, u


def _states(k: Tensor, w: Tensor, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """chunk_gated_delta_rule_fwd_h: the state before each chunk, and values less what it predicts."""
    b, s, heads, width = u.shape
    h = k.tape.empty((b, -(-s // CHUNK), heads, k.shape[-1], width), k.dtype)
    v_new = k.tape.empty(u.shape, u.dtype)
    _work(k.tape, (k, w, u, g), (h, v_new), _products(u, k.shape[-1], 2, 0))
    return h, v_new


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, system: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """chunk_gated_delta_rule_bwd, whose names they are."""
    tape, (b, s, heads, _), width = q.tape, v.shape, k.shape[-1]
    each = (b, s, heads, width)
    w, u = _representation(k, v, beta, system, g)
    h, v_new = _states(k, w, u, g)
    dv = tape.empty(do.shape, do.dtype)
    _work(tape, (q, k, g, do), (dv,), _products(v, width, 0, 2))
    dh, before = tape.empty(h.shape, q.dtype), dv
    dv = tape.empty(before.shape, before.dtype)
    _work(tape, (q, k, w, g, do, before), (dh, dv), _products(v, width, 3, 0))
    del before
    tiles = -(-width // min(max(16, 1 << (width - 1).bit_length()), TILE))
    dq, dk = tape.empty(each, q.dtype), tape.empty(each, k.dtype)
    dg, dw = tape.empty((tiles, *g.shape), "float32"), tape.empty(w.shape, w.dtype)
    _work(tape, (q, k, v_new, w, g, h, dv, do, dh), (dq, dk, dg, dw), _products(v, width, 3, 3))
    dq = _of_key_heads(dq, k)
    dk = _of_key_heads(dk, k)
    dg = F.pointwise(dg, shape=g.shape)
    dk2, dv2 = tape.empty(each, k.dtype), tape.empty(v.shape, v.dtype)
    dg2, db = tape.empty(g.shape, g.dtype), tape.empty(beta.shape, beta.dtype)
    _work(tape, (k, v, beta, g, system, dw, dv), (dk2, dv2, dg2, db), _products(v, width, 0, 6))
    dk2 = _of_key_heads(dk2, k)
    dv = dv2
    for into, more in ((dk, dk2), (dg, dg2)):
        tape.memory(into.nbytes + more.nbytes, into.nbytes)
    return dq, dk, dv, db, F.pointwise(dg)


def _products(v: Tensor, width: int, states: int, squares: int) -> float:
    """FLOPs of so many products of a chunk with a state, and of its tokens with each other."""
    b, s, heads, d = v.shape
    return 2.0 * b * s * heads * (states * width * d + squares * CHUNK * (width + d) / 2)


def _work(tape: Tape, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], flops: float) -> None:
    """One kernel."""
    moved = sum(x.nbytes for x in reads), sum(x.nbytes for x in writes)
    tape.kernel(Memory(tape.label, *moved, flops=flops))


def _kernel(reads: tuple[Tensor, ...], shape: tuple[int, ...], dtype: str) -> Tensor:
    out = reads[0].tape.empty(shape, dtype)
    out.tape.memory(sum(x.nbytes for x in reads), out.nbytes)
    return out


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """l2norm_fwd"""
    out, rstd = x.tape.empty(x.shape, x.dtype), x.tape.empty(x.shape[:-1], "float32")
    x.tape.memory(x.nbytes, out.nbytes + rstd.nbytes)
    return out, rstd


def _contiguous(x: Tensor) -> Tensor:
    """input_guard"""
    return F.contiguous(x.detach())


def _of_key_heads(grad: Tensor, k: Tensor) -> Tensor:
    """Summed over the heads of values that share one of keys."""
    if grad.shape == k.shape:
        return grad
    return _kernel((grad,), k.shape, grad.dtype)
