"""Kernels of Liger 0.5 to 0.6 in place of chains of elementwise ones: RMSNorm, SwiGLU and GEGLU, which are bound by
memory (rules as in `functional`)."""

from __future__ import annotations

from zsim.model.functional import layout
from zsim.model.graph import Tensor
from zsim.model.views import clone

NORMS_RESULTS = ("olmo2", "glm4")  # blocks that norm what attention and MLP return, whose gradient the residual needs


def rms_norm(x: Tensor, weight: Tensor, in_place: bool = True) -> Tensor:
    """ops/rms_norm.py: saves its input and 1/rms per row; backward writes the gradient over the incoming one if it is
    `in_place`.

    Unsloth's kernels/rms_layernorm.py does the same.
    """
    tape = x.tape
    needs_grad = x.needs_grad or weight.needs_grad
    saved = tape.save(x) if needs_grad else None
    out = tape.empty(x.shape, x.dtype, layout(x))
    rstd = tape.empty(x.shape[:-1], "float32")
    tape.memory(x.nbytes + weight.nbytes, out.nbytes + rstd.nbytes)
    if needs_grad:
        saved_rstd = tape.save(rstd)
        del rstd
        x_grad, w_grad = x.needs_grad, weight.needs_grad

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            (x,), (rstd,) = saved(), saved_rstd()  # type: ignore[misc]
            if not in_place:
                g = tape.empty(g.shape, g.dtype, layout(g))
                tape.memory(0, g.nbytes)  # zeros
            tape.memory(g.nbytes + x.nbytes + rstd.nbytes + weight.nbytes, g.nbytes)
            grad = tape.gradient(weight, weight.shape, weight.dtype) if w_grad else None
            return g if x_grad else None, grad

        tape.link((x, weight), backward, out)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """ops/swiglu.py LigerSiLUMulFunction and ops/geglu.py LigerGELUMulFunction: save both inputs, over which backward
    writes their gradients; of halves of one product, copies (ensure_contiguous)."""
    tape, parents = gate.tape, (gate, up)
    needs_grad = gate.needs_grad or up.needs_grad
    if not gate.is_contiguous():
        gate, up = clone(gate), clone(up)
    saved = tape.save(gate, up) if needs_grad else None
    out = tape.empty(gate.shape, gate.dtype, layout(gate))
    tape.memory(gate.nbytes + up.nbytes, out.nbytes)
    if needs_grad:
        gate_grad, up_grad = (parent.needs_grad for parent in parents)

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            a, b = saved()  # type: ignore[misc]
            tape.memory(g.nbytes + a.nbytes + b.nbytes, a.nbytes + b.nbytes)
            return a if gate_grad else None, b if up_grad else None

        tape.link(parents, backward, out)
    return out
