"""Operations on symbolic tensors: the kernels torch launches for each, what it saves, and its backward.

One function per operation of aten, with the formula of `tools/autograd/derivatives.yaml` (torch 2.13): results are
allocated where torch allocates them, temporaries live as long as the C++ expression that holds them, and gradients
of one node are computed in alphabetical order of its arguments' names, as the generated code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zsim.model import views
from zsim.model.graph import Tensor
from zsim.model.views import (
    clone,
    contiguous,
    fill,
    narrow,
    pad,
    permute,
    pick,
    put,
    repeat_heads,
    reshape,
    select,
    split,
    transpose,
    unbind,
    unsqueeze,
    view_of,
)

__all__ = [
    "activation", "activation_by_result", "add", "at_least", "binary", "cast", "cat", "contiguous", "divide",
    "dropout", "expand", "fill", "layout", "low", "masked_fill", "mean_last", "mul", "narrow", "neg", "pad",
    "permute", "pick", "pointwise", "power", "put", "repeat_heads", "reshape", "rsqrt", "scale", "scale_in_place",
    "select", "shift", "split", "sum_last", "sum_middle", "to", "touch", "transpose", "unbind", "unsqueeze", "wide",
]  # fmt: skip


def layout(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides of what is made like `tensor`: dense, dimensions in its order in memory (None: row-major)."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(len(tensor.shape)), key=lambda d: (-tensor.strides[d], d))
    strides, step = [0] * len(order), 1
    for d in reversed(order):
        strides[d] = step
        step *= tensor.shape[d]
    return tuple(strides)


def pointwise(*inputs: Tensor, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> Tensor:
    """One kernel over its inputs: the result of the first one's layout, without autograd."""
    first = inputs[0]
    shape = first.shape if shape is None else shape
    strides = layout(first) if shape == first.shape else None
    out = first.tape.empty(shape, dtype or first.dtype, strides)
    first.tape.memory(sum(t.nbytes for t in inputs), out.nbytes)
    return out


def clamped(x: Tensor, bounds: int, *limits: Tensor) -> Tensor:
    """`x.clamp(...)`: where its backward finds an entry inside, in booleans, the gradient passes. Bounds that are
    tensors are kept as well."""
    if not x.needs_grad:
        return pointwise(x)
    saved = x.tape.save(x, *limits)
    out = pointwise(x)

    def backward(g: Tensor) -> tuple[Tensor]:
        x, *kept = saved()  # noqa: RUF059
        inside = pointwise(x, dtype="bool")
        if bounds == 2:
            below = pointwise(x, dtype="bool")
            x.tape.memory(inside.nbytes + below.nbytes, inside.nbytes)
            del below
        return (pointwise(g, inside),)

    x.tape.link((x,), backward, out)
    return out


_RANK = {
    "bool": 0, "uint8": 1, "int8": 1, "int32": 2, "int64": 3, "float16": 4, "bfloat16": 4, "float32": 5, "float64": 6,
}  # fmt: skip


def _promote(a: Tensor, b: Tensor) -> str:
    return a.dtype if _RANK[a.dtype] >= _RANK[b.dtype] else b.dtype


def _broadcast(a: Tensor, b: Tensor) -> tuple[int, ...]:
    if a.shape == b.shape:
        return a.shape
    rank = max(len(a.shape), len(b.shape))
    left = (1,) * (rank - len(a.shape)) + a.shape
    right = (1,) * (rank - len(b.shape)) + b.shape
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))


def binary(a: Tensor, b: Tensor) -> Tensor:
    """One kernel over two tensors, either broadcast, in the wider dtype, without autograd."""
    shape = _broadcast(a, b)
    lead = a if a.shape == shape else b
    out = a.tape.empty(shape, _promote(a, b), layout(lead) if lead.shape == shape else None)
    a.tape.memory(a.nbytes + b.nbytes, out.nbytes)
    return out


def to(x: Tensor, dtype: str) -> Tensor:
    """A cast; the tensor itself if it has that dtype."""
    if x.dtype == dtype:
        return x
    out = pointwise(x, dtype=dtype)
    if x.needs_grad:
        source, leaf = x.dtype, x if x.param is not None else None

        def backward(g: Tensor) -> tuple[Tensor]:
            if leaf is None:
                return (pointwise(g, dtype=source),)
            grad = g.tape.gradient(leaf, leaf.shape, source)
            g.tape.memory(g.nbytes, grad.nbytes)
            return (grad,)

        x.tape.link((x,), backward, out)
    return out


def low(x: Tensor) -> Tensor:
    """What torch.autocast hands to matrix products and attention (AT_FORALL_LOWER_PRECISION_FP)."""
    return to(x, x.tape.autocast) if x.tape.autocast else x


def wide(x: Tensor) -> Tensor:
    """What torch.autocast hands to operators that it runs in float32 (AT_FORALL_FP32)."""
    return to(x, "float32") if x.tape.autocast else x


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """A copy of all parts, in the widest of their dtypes (torch casts on the way; here before)."""
    widest = max((part.dtype for part in parts), key=_RANK.__getitem__)
    return views.cat([to(part, widest) for part in parts], dim)


def add(a: Tensor, b: Tensor, in_place: bool = False) -> Tensor:
    """`a + b`, or `a += b`. The engine casts a gradient to the dtype of what it is of (validate_outputs)."""
    a_grad, b_grad = a.needs_grad, b.needs_grad
    a_dtype, b_dtype = a.dtype, b.dtype
    if in_place:
        out = view_of(a, a.shape, a.strides)
        a.tape.memory(a.nbytes + b.nbytes, a.nbytes)
    else:
        out = binary(a, b)
    if a_grad or b_grad:
        a.tape.link((a, b), lambda g: (cast(g, a_dtype) if a_grad else None, cast(g, b_dtype) if b_grad else None), out)
    return out


def touch(x: Tensor, weight: Tensor) -> Tensor:
    """`x`, with `weight` taking part in backward and in nothing else."""
    out = view_of(x, x.shape, x.strides)
    x.tape.link((x, weight), lambda g: (g, x_tape.gradient(weight, weight.shape, weight.dtype)), out)
    x_tape = x.tape
    return out


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, value)`: saves the mask."""
    if not x.needs_grad:
        return pointwise(x, mask)
    saved = x.tape.save(mask)
    out = pointwise(x, mask)
    x.tape.link((x,), lambda g: (pointwise(g, *saved()),), out)
    return out


def at_least(x: Tensor) -> Tensor:
    """`torch.max(x, floor)` of a tensor without dimensions: saves `x`. Where both are equal each has half a gradient:
    where(self == other, grad / 2, grad).masked_fill_(self < other, 0)."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        equal, half = pointwise(x, dtype="bool"), pointwise(g)
        result = pointwise(g, half, equal)
        less = pointwise(x, dtype="bool")
        g.tape.memory(result.nbytes + less.nbytes, result.nbytes)
        return result

    return _saving(x, backward)


def _saving(x: Tensor, backward: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A function of each element of `x` that saves it for `backward`, which gets the gradient and `x`."""
    if not x.needs_grad:
        return pointwise(x)
    saved = x.tape.save(x)
    out = pointwise(x)
    x.tape.link((x,), lambda g: (backward(g, *saved()),), out)
    return out


def mul(a: Tensor, b: Tensor) -> Tensor:
    a_grad, b_grad = a.needs_grad, b.needs_grad
    if not (a_grad or b_grad):
        return binary(a, b)
    saved = a.tape.save(*([a] if b_grad else []), *([b] if a_grad else []))
    out = binary(a, b)
    a_dtype, b_dtype = a.dtype, b.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved()
        grad_b = binary(g, kept[0]) if b_grad else None
        grad_a = binary(g, kept[-1]) if a_grad else None
        del kept  # the engine casts, when the function is over
        if grad_a is not None:
            grad_a = cast(grad_a, a_dtype)
        return grad_a, None if grad_b is None else cast(grad_b, b_dtype)

    a.tape.link((a, b), backward, out)
    return out


def cast(x: Tensor, dtype: str) -> Tensor:
    """`to` without autograd."""
    return x if x.dtype == dtype else pointwise(x, dtype=dtype)


def scale(x: Tensor) -> Tensor:
    """Multiplication by (or of a negation, or division by) a Python number: saves nothing on the device."""
    out = pointwise(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (pointwise(g),), out)
    return out


neg = scale


def scale_in_place(x: Tensor) -> Tensor:
    """`x *= buffer`, a buffer of one number, which is saved: no bytes, but checkpointing sees that it is asked for."""
    saved = x.tape.save(x.tape.empty((0,), x.dtype)) if x.needs_grad else None
    out = view_of(x, x.shape, x.strides)
    x.tape.memory(x.nbytes, x.nbytes)
    if saved is not None:

        def backward(g: Tensor) -> tuple[Tensor]:
            kept = saved()  # noqa: F841
            return (pointwise(g),)

        x.tape.link((x,), backward, out)
    return out


def shift(x: Tensor) -> Tensor:
    """Addition of a Python number."""
    out = pointwise(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def power(x: Tensor) -> Tensor:
    """`x.pow(n)`. grad * (n * self.pow(n - 1))."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        lower = pointwise(x)
        factor = pointwise(lower)
        return pointwise(g, factor)

    return _saving(wide(x), backward)


def rsqrt(x: Tensor) -> Tensor:
    """-0.5 * grad * result.pow(3)."""
    x = wide(x)
    out = pointwise(x)
    if x.needs_grad:
        saved = x.tape.save(out)

        def backward(g: Tensor) -> tuple[Tensor]:
            (result,) = saved()
            cube = pointwise(result)
            half = pointwise(g)
            return (pointwise(half, cube),)

        x.tape.link((x,), backward, out)
    return out


def mean_last(x: Tensor) -> Tensor:
    """`x.mean(-1, keepdim=True)`."""
    out = pointwise(x, shape=(*x.shape[:-1], 1))
    if x.needs_grad:
        shape = x.shape
        # grad.expand(sizes) / n: the expanded view is read as one element per row
        x.tape.link((x,), lambda g: (_expanded_div(g, shape),), out)
    return out


def _expanded_div(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    out = g.tape.empty(shape, g.dtype)
    g.tape.memory(out.nbytes, out.nbytes)
    return out


def activation(x: Tensor) -> Tensor:
    """silu, relu-like and fused gelu: one kernel, saves its input, one kernel backward."""
    return _saving(x, pointwise)


def activation_by_result(x: Tensor) -> Tensor:
    """tanh, relu, sigmoid: saves its result."""
    out = pointwise(x)
    if x.needs_grad:
        saved = x.tape.save(out)
        x.tape.link((x,), lambda g: (pointwise(g, *saved()),), out)
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """In training. On CUDA one kernel writes the result and a bool mask; on CPU the mask has the input's dtype."""
    if p == 0.0:
        return x
    tape = x.tape
    if tape.cuda:
        out = tape.empty(x.shape, x.dtype, layout(x))
        mask = tape.empty(x.shape, "bool", layout(x))
        tape.memory(x.nbytes, out.nbytes + mask.nbytes, "dropout")
        saved = tape.save(mask) if x.needs_grad else None
    else:
        mask = tape.empty(x.shape, x.dtype, layout(x))
        tape.memory(mask.nbytes, mask.nbytes, "dropout")  # bernoulli_
        tape.memory(mask.nbytes, mask.nbytes, "dropout")  # div_
        saved = tape.save(mask) if x.needs_grad else None
        out = binary(x, mask)
    if x.needs_grad:
        tape.link((x,), lambda g: (pointwise(g, *saved()),), out)  # type: ignore[misc]
    return out


def sum_last(x: Tensor) -> Tensor:
    """`x.sum(-1, keepdim=True)`; backward is a view."""
    out = pointwise(x, shape=(*x.shape[:-1], 1), dtype=_sum_dtype(x))
    if x.needs_grad:
        shape, dtype = x.shape, x.dtype
        x.tape.link((x,), lambda g: (cast(_expanded(g, shape), dtype),), out)
    return out


def sum_middle(x: Tensor) -> Tensor:
    """`x.sum(1)` of [a, b, c]; backward is a view."""
    a, _, c = x.shape
    out = pointwise(x, shape=(a, c), dtype=_sum_dtype(x))
    if x.needs_grad:
        shape, dtype = x.shape, x.dtype
        x.tape.link((x,), lambda g: (cast(_expanded(view_of(g, (a, 1, c), (c, c, 1)), shape), dtype),), out)
    return out


def _sum_dtype(x: Tensor) -> str:
    """torch.autocast lets a sum return float32, without a cast of what it reads (AT_FORALL_FP32_SET_OPT_DTYPE)."""
    return "float32" if x.tape.autocast else x.dtype


def expand(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.expand(shape)`, whose backward sums."""
    out = _expanded(x, shape)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def _expanded(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`g.expand(shape)`: new dimensions in front, and those of size one repeated with stride zero."""
    new = len(shape) - len(g.shape)
    sizes = zip((1,) * new + g.shape, shape, (0,) * new + g.strides, strict=True)
    strides = tuple(0 if size == 1 != full else stride for size, full, stride in sizes)
    return view_of(g, shape, strides)


def divide(x: Tensor, by: Tensor, in_place: bool = False) -> Tensor:
    """x / by. Gradients: grad / other, and -grad * ((self / other) / other)."""
    grad = x.needs_grad or by.needs_grad
    if grad:
        source = clone(x) if in_place else x
        saved = x.tape.save(source, by)
        del source
    out = view_of(x, x.shape, x.strides) if in_place else binary(x, by)
    if in_place:
        x.tape.memory(x.nbytes + by.nbytes, x.nbytes)
    if grad:

        def backward(g: Tensor) -> tuple[Tensor, Tensor]:
            x, by = saved()
            ratio = pointwise(x, by)
            twice = pointwise(ratio, by)
            opposite = pointwise(g)
            grad_by = pointwise(opposite, twice)
            del ratio, twice, opposite
            return pointwise(g, by), grad_by

        x.tape.link((x, by), backward, out)
    return out
