"""The kernels that Tiny Llamas are trained with (jzhang38/TinyLlama, whyNLP/tinyllama): RMSNorm, rotary embedding and
cross-entropy of flash-attn 2.3, SwiGLU of xformers 0.0.22 to 0.0.25 (rules as in `functional`)."""

from __future__ import annotations

from zsim.model.functional import layout
from zsim.model.graph import Tensor


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """ops/layer_norm.py DropoutAddLayerNormFn without dropout and residual: saves its input, mean and 1/rms per row."""
    tape = x.tape
    needs_grad = x.needs_grad or weight.needs_grad
    saved = tape.save(x) if needs_grad else None
    out = tape.empty(x.shape, x.dtype, layout(x))
    stats = [tape.empty(x.shape[:-1], "float32") for _ in range(2)]
    tape.memory(x.nbytes + weight.nbytes, out.nbytes + 2 * stats[0].nbytes)
    if needs_grad:
        saved_stats = tape.save(*stats)
        del stats
        x_grad, w_grad = x.needs_grad, weight.needs_grad

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            (x,), (mean, _) = saved(), saved_stats()  # type: ignore[misc]
            grad_x = tape.empty(x.shape, x.dtype, layout(x))
            grad_w = tape.gradient(weight, weight.shape, weight.dtype) if w_grad else None
            tape.memory(g.nbytes + x.nbytes + 2 * mean.nbytes + weight.nbytes, grad_x.nbytes)
            return grad_x if x_grad else None, grad_w

        tape.link((x, weight), backward, out)
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """layers/rotary.py ApplyRotaryEmb: one kernel each way, saves the tables."""
    tape = x.tape
    saved = tape.save(cos, sin) if x.needs_grad else None
    out = tape.empty(x.shape, x.dtype, layout(x))
    tape.memory(x.nbytes + cos.nbytes + sin.nbytes, out.nbytes)
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            cos, sin = saved()  # type: ignore[misc]
            grad = tape.empty(g.shape, g.dtype, layout(g))
            tape.memory(g.nbytes + cos.nbytes + sin.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """csrc/swiglu/swiglu_packedw.cpp: `down(silu(gate(x)) * up(x))`, x [tokens, k]; saves both products.

    Two products and the activation are one kernel (dual_gemm_silu_identity_mul); backward makes the activation again.
    """
    tape, dtype = x.tape, x.dtype
    m, k = x.shape
    n = gate.shape[0]
    saved = tape.save(x, gate, up, down)
    gated, upped, hidden = (tape.empty((m, n), dtype) for _ in range(3))
    tape.gemm(m, 2 * n, k, dtype)
    tape.memory(0, hidden.nbytes)
    kept = tape.save(gated, upped)
    del gated, upped
    out = tape.empty((m, k), dtype)
    tape.gemm(m, k, n, dtype)
    del hidden

    def backward(g: Tensor) -> tuple[Tensor, ...]:
        inputs, products = saved(), kept()  # noqa: F841  the node's, until it is done
        grad_hidden = tape.empty((m, n), dtype)
        tape.gemm(m, n, k, dtype)
        both, hidden = tape.empty((m, 2 * n), dtype), tape.empty((m, n), dtype)
        tape.memory(3 * hidden.nbytes, both.nbytes + hidden.nbytes)
        del grad_hidden
        grad_down = tape.gradient(down, down.shape, dtype)
        tape.gemm(k, n, m, dtype)
        del hidden
        grad_x = tape.empty((m, k), dtype)
        tape.gemm(m, k, 2 * n, dtype)
        grad_gate, grad_up = (tape.gradient(weight, weight.shape, dtype) for weight in (gate, up))
        tape.gemm(2 * n, k, m, dtype)
        return grad_x, grad_gate, grad_up, grad_down

    tape.link((x, gate, up, down), backward, out)
    return out
