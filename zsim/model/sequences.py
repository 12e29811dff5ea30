"""What layers that read a sequence from its start, step by step or in chunks, are made of besides what all layers are
(rules as in `functional`)."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.graph import Tensor
from zsim.model.views import view_of


def last(x: Tensor) -> Tensor:
    """`x.unsqueeze(-1)`"""
    return F.reshape(x, *x.shape, 1)


def repeat_interleave(x: Tensor, repeats: int) -> Tensor:
    """Heads [b, s, h, d] repeated: expanded and cloned. Backward sums, in the gradient's order in memory."""
    b, s, h, d = x.shape
    out = x.tape.empty((b, s, h * repeats, d), x.dtype)
    x.tape.memory(out.nbytes, out.nbytes, "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            first = view_of(g, (b, s, h, d), (*g.strides[:2], g.strides[2] * repeats, g.strides[3]))
            summed = g.tape.empty((b, s, h, d), g.dtype, F.layout(first))
            g.tape.memory(g.nbytes, summed.nbytes, "copy")
            return (summed,)

        x.tape.link((x,), backward, out)
    return out


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, either broadcast, of which `b` may be the narrower dtype."""
    a_grad, b_grad, narrow = a.needs_grad, b.needs_grad, b.dtype
    out = F.binary(a, b)
    if a_grad or b_grad:
        a.tape.link((a, b), lambda g: (g if a_grad else None, F.cast(F.pointwise(g), narrow) if b_grad else None), out)
    return out


def cumsum(x: Tensor, dim: int) -> Tensor:
    """`grad.flip(dim).cumsum(dim).flip(dim)` backward."""
    x = F.wide(x)
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes)
    if x.needs_grad and x.shape[dim] > 1:

        def backward(g: Tensor) -> tuple[Tensor]:
            flipped = F.pointwise(g)
            summed = g.tape.empty(g.shape, g.dtype)
            g.tape.memory(flipped.nbytes, summed.nbytes)
            return (F.pointwise(summed),)

        x.tape.link((x,), backward, out)
    elif x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def pad_tokens(x: Tensor, padding: int, dim: int) -> Tensor:
    """`F.pad` behind a dimension. Even by nothing it is a copy, forward and backward (`constant_pad_nd`). Padded it
    lies as its input does if that lies as images with channels last do."""
    tape, shape = x.tape, x.shape
    padded = (*shape[:dim], shape[dim] + padding, *shape[dim + 1 :])
    out = tape.empty(padded, x.dtype, _padded_layout(x, padded) if padding else F.layout(x))
    if padding:
        tape.memory(0, out.nbytes, "copy")
    tape.memory(x.nbytes, x.nbytes, "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            mine = view_of(g, shape, g.strides)
            grad = tape.empty(shape, g.dtype, F.layout(mine))
            tape.memory(grad.nbytes, grad.nbytes, "copy")
            return (grad,)

        tape.link((x,), backward, out)
    return out


def _padded_layout(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if len(shape) != 4 or x.strides[1] != 1 or not x.strides[2] >= x.strides[3] >= x.shape[1]:
        return None
    _, tokens, heads, width = shape
    return (tokens * heads * width, 1, tokens * width, tokens)
