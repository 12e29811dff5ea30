"""Operations on symbolic tensors: the kernels torch launches for each, what it saves, and its backward.

One function per operation of aten, with the formula of `tools/autograd/derivatives.yaml` (torch 2.13): results are
allocated where torch allocates them, temporaries live as long as the C++ expression that holds them, and gradients
of one node are computed in alphabetical order of its arguments' names, as the generated code does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zsim.model.tape import Tensor, row_major

# ---------------------------------------------------------------------------------------------- pointwise


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
    shape = shape or first.shape
    strides = layout(first) if shape == first.shape else None
    out = first.tape.empty(shape, dtype or first.dtype, strides)
    first.tape.memory(sum(t.nbytes for t in inputs), out.nbytes)
    return out


_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int32": 2, "int64": 3, "float16": 4, "bfloat16": 4, "float32": 5, "float64": 6}


def _promote(a: Tensor, b: Tensor) -> str:
    return a.dtype if _RANK[a.dtype] >= _RANK[b.dtype] else b.dtype


def _broadcast(a: Tensor, b: Tensor) -> tuple[int, ...]:
    if a.shape == b.shape:
        return a.shape
    rank = max(len(a.shape), len(b.shape))
    left = (1,) * (rank - len(a.shape)) + a.shape
    right = (1,) * (rank - len(b.shape)) + b.shape
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))


def _binary(a: Tensor, b: Tensor) -> Tensor:
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
        source = x.dtype
        x.tape.link((x,), lambda g: (pointwise(g, dtype=source),), out)
    return out


def add(a: Tensor, b: Tensor, in_place: bool = False) -> Tensor:
    """`a + b`, or `a += b`."""
    a_grad, b_grad = a.needs_grad, b.needs_grad
    if in_place:
        out = _view(a, a.shape, a.strides)
        a.tape.memory(a.nbytes + b.nbytes, a.nbytes)
    else:
        out = _binary(a, b)
    if a_grad or b_grad:
        a.tape.link((a, b), lambda g: (g if a_grad else None, g if b_grad else None), out)
    return out


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, value)`: saves the mask."""
    if not x.needs_grad:
        return pointwise(x, mask)
    saved = x.tape.save(mask)
    out = pointwise(x, mask)
    x.tape.link((x,), lambda g: (pointwise(g, *saved()),), out)
    return out


def mul(a: Tensor, b: Tensor) -> Tensor:
    a_grad, b_grad = a.needs_grad, b.needs_grad
    if not (a_grad or b_grad):
        return _binary(a, b)
    saved = a.tape.save(*([a] if b_grad else []), *([b] if a_grad else []))
    out = _binary(a, b)
    a_dtype, b_dtype = a.dtype, b.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved()
        grad_b = _cast(_binary(g, kept[0]), b_dtype) if b_grad else None
        grad_a = _cast(_binary(g, kept[-1]), a_dtype) if a_grad else None
        return grad_a, grad_b

    a.tape.link((a, b), backward, out)
    return out


def _cast(x: Tensor, dtype: str) -> Tensor:
    return x if x.dtype == dtype else pointwise(x, dtype=dtype)


def scale(x: Tensor) -> Tensor:
    """Multiplication by (or of a negation, or division by) a Python number: saves nothing on the device."""
    out = pointwise(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (pointwise(g),), out)
    return out


neg = scale


def shift(x: Tensor) -> Tensor:
    """Addition of a Python number."""
    out = pointwise(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def power(x: Tensor) -> Tensor:
    """`x.pow(n)`. grad * (n * self.pow(n - 1))."""
    if not x.needs_grad:
        return pointwise(x)
    saved = x.tape.save(x)
    out = pointwise(x)

    def backward(g: Tensor) -> tuple[Tensor]:
        (x,) = saved()
        lower = pointwise(x)
        factor = pointwise(lower)
        return (pointwise(g, factor),)

    x.tape.link((x,), backward, out)
    return out


def rsqrt(x: Tensor) -> Tensor:
    """-0.5 * grad * result.pow(3)."""
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
    if not x.needs_grad:
        return pointwise(x)
    saved = x.tape.save(x)
    out = pointwise(x)

    def backward(g: Tensor) -> tuple[Tensor]:
        return (pointwise(g, *saved()),)

    x.tape.link((x,), backward, out)
    return out


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
        out = _binary(x, mask)
    if x.needs_grad:
        tape.link((x,), lambda g: (pointwise(g, *saved()),), out)  # type: ignore[misc]
    return out


# -------------------------------------------------------------------------------------------- views and copies


def _view(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return Tensor(x.storage, shape, strides, x.dtype)


def _view_strides(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that show `x` in another shape without a copy, or None (`at::detail::computeStride`)."""
    if x.is_contiguous():
        return row_major(shape)
    old_shape, old_strides = x.shape, x.strides
    strides = [0] * len(shape)
    view_d = len(shape) - 1
    chunk_stride, tensor_numel, view_numel = old_strides[-1], 1, 1
    for d in range(len(old_shape) - 1, -1, -1):
        tensor_numel *= old_shape[d]
        if d == 0 or (old_shape[d - 1] != 1 and old_strides[d - 1] != tensor_numel * chunk_stride):
            while view_d >= 0 and (view_numel < tensor_numel or shape[view_d] == 1):
                strides[view_d] = view_numel * chunk_stride
                view_numel *= shape[view_d]
                view_d -= 1
            if view_numel != tensor_numel:
                return None
            if d > 0:
                chunk_stride, tensor_numel, view_numel = old_strides[d - 1], 1, 1
    return tuple(strides) if view_d == -1 else None


def _reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without autograd: a view if the strides allow, else a copy."""
    strides = _view_strides(x, shape)
    if strides is None:
        x, strides = _clone(x), row_major(shape)
    return _view(x, shape, strides)


def _clone(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes, "copy")
    return out


def contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    out = _clone(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (g,), out)
    return out


def reshape(x: Tensor, *shape: int) -> Tensor:
    """`x.reshape(shape)` and, where no copy is needed, `x.view(shape)`. One size may be -1."""
    if -1 in shape:
        rest = -prod(shape)
        shape = tuple(x.numel // rest if size == -1 else size for size in shape)
    strides = _view_strides(x, shape)
    if strides is None:
        x, strides = contiguous(x), row_major(shape)
    out = _view(x, shape, strides)
    if x.needs_grad:
        source = x.shape
        x.tape.link((x,), lambda g: (_reshape(g, source),), out)
    return out


def _swapped(x: Tensor, a: int, b: int) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return _view(x, tuple(shape), tuple(strides))


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    out = _swapped(x, a, b)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (_swapped(g, a, b),), out)
    return out


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A view with a dimension of size 1 inserted; for tensors that need no gradient."""
    assert not x.needs_grad
    shape, strides = list(x.shape), list(x.strides)
    shape.insert(dim, 1)
    strides.insert(dim, strides[dim] * x.shape[dim])
    return _view(x, tuple(shape), tuple(strides))


def _narrow(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return _view(x, tuple(shape), x.strides)


def narrow(x: Tensor, dim: int, size: int) -> Tensor:
    """`size` of the entries along `dim`. Backward writes a zeroed tensor of the full shape (`slice_backward`)."""
    dim %= len(x.shape)
    if size == x.shape[dim]:
        return x
    out = _narrow(x, dim, size)
    if x.needs_grad:
        x.tape.open()  # its backward is work of the caller's
        shape, dtype = x.shape, x.dtype
        x.tape.link((x,), lambda g: (_scatter(g, shape, dtype),), out)
    return out


def _scatter(g: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    out = g.tape.empty(shape, dtype)
    g.tape.memory(g.nbytes, out.nbytes, "copy")
    return out


def select(x: Tensor, dim: int) -> Tensor:
    """One entry of `dim`, as a view without it. Backward writes a zeroed tensor of the full shape."""
    shape, strides = list(x.shape), list(x.strides)
    del shape[dim], strides[dim]
    out = _view(x, tuple(shape), tuple(strides))
    if x.needs_grad:
        x.tape.open()
        full, dtype = x.shape, x.dtype
        x.tape.link((x,), lambda g: (_scatter(g, full, dtype),), out)
    return out


def pick(x: Tensor, dim: int) -> Tensor:
    """`x[..., [i], ...]`: one entry of `dim`, copied; backward adds it into zeros."""
    shape = list(x.shape)
    shape[dim] = 1
    out = x.tape.empty(tuple(shape), x.dtype)
    x.tape.memory(out.nbytes, out.nbytes, "copy")
    if x.needs_grad:
        saved = x.tape.save(x.tape.empty((1,), "int64"))  # the index
        full, dtype = x.shape, x.dtype

        def backward(g: Tensor) -> tuple[Tensor]:
            saved()
            zeros = _scatter(g, full, dtype)
            if g.tape.cuda:
                g.tape.memory(g.nbytes, g.nbytes, "copy")
                return (zeros,)
            return (pointwise(zeros, g),)

        x.tape.link((x,), backward, out)
    return out


def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """Views along `dim`; their gradients are concatenated."""
    dim %= len(x.shape)
    parts = [_narrow(x, dim, size) for size in sizes]
    if x.needs_grad:
        shape, dtype = x.shape, x.dtype

        def backward(*grads: Tensor) -> tuple[Tensor]:
            out = x_tape.empty(shape, dtype)
            x_tape.memory(sum(g.nbytes for g in grads if g is not None), out.nbytes, "copy")
            return (out,)

        x_tape = x.tape
        x_tape.open()
        x_tape.link((x,), backward, *parts)
    return parts


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """A copy of all parts; backward gives views."""
    first = parts[0]
    dim %= len(first.shape)
    sizes = [part.shape[dim] for part in parts]
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    out = first.tape.empty(tuple(shape), first.dtype)
    first.tape.memory(sum(part.nbytes for part in parts), out.nbytes)
    if any(part.needs_grad for part in parts):
        first.tape.link(tuple(parts), lambda g: tuple(_narrow(g, dim, size) for size in sizes), out)
    return out


def repeat_heads(x: Tensor, repeats: int, dim: int = 1) -> Tensor:
    """Key or value heads (dimension `dim`) repeated for grouped queries: expand and copy; backward sums."""
    if repeats == 1:
        return x
    source = x.shape
    shape = (*source[:dim], source[dim] * repeats, *source[dim + 1 :])
    out = x.tape.empty(shape, x.dtype)
    x.tape.memory(out.nbytes, out.nbytes, "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            summed = g.tape.empty(source, g.dtype)
            g.tape.memory(g.nbytes, summed.nbytes, "copy")
            return (summed,)

        x.tape.link((x,), backward, out)
    return out


def complex_rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of [b, s, h, d] by complex multiplication (torchtitan): in float32 and back. Saves `table`."""
    tape, dtype, shape = x.tape, x.dtype, x.shape
    wide = to(x, "float32")
    pairs = reshape(wide, *shape[:-1], shape[-1] // 2, 2)
    if not x.needs_grad:
        return to(pointwise(pairs), dtype)
    saved = tape.save(table)
    out = pointwise(pairs)

    def backward(g: Tensor) -> tuple[Tensor]:
        (table,) = saved()
        conjugate = _clone(table)  # noqa: F841
        return (pointwise(g),)

    tape.link((pairs,), backward, out)
    del wide, pairs
    return to(reshape(out, *shape), dtype)


# ------------------------------------------------------------------------------------------------- reductions


def sum_last(x: Tensor) -> Tensor:
    """`x.sum(-1, keepdim=True)`; backward is a view."""
    out = pointwise(x, shape=(*x.shape[:-1], 1))
    if x.needs_grad:
        shape = x.shape
        x.tape.link((x,), lambda g: (_expanded(g, shape),), out)
    return out


def sum_middle(x: Tensor) -> Tensor:
    """`x.sum(1)` of [a, b, c]; backward is a view."""
    a, _, c = x.shape
    out = pointwise(x, shape=(a, c))
    if x.needs_grad:
        shape = x.shape
        x.tape.link((x,), lambda g: (_expanded(_view(g, (a, 1, c), (c, c, 1)), shape),), out)
    return out


def _expanded(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`g.expand(shape)`: dimensions of size one repeated with stride zero."""
    strides = tuple(0 if size == 1 != full else stride for size, full, stride in zip(g.shape, shape, g.strides, strict=True))
    return _view(g, shape, strides)


def divide(x: Tensor, by: Tensor, in_place: bool = False) -> Tensor:
    """x / by. Gradients: grad / other, and -grad * ((self / other) / other)."""
    grad = x.needs_grad or by.needs_grad
    if grad:
        source = _clone(x) if in_place else x
        saved = x.tape.save(source, by)
        del source
    out = _view(x, x.shape, x.strides) if in_place else _binary(x, by)
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
