"""Views and copies of symbolic tensors: what shares memory, what is copied, and what the gradients of views cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zsim.model.graph import Tensor, row_major


def view_of(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    x.tape.viewed()
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
        x, strides = clone(x), row_major(shape)
    return view_of(x, shape, strides)


def clone(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes, "copy")
    return out


def contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    out = clone(x)
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
    out = view_of(x, shape, strides)
    if x.needs_grad:
        source = x.shape
        x.tape.link((x,), lambda g: (_reshape(g, source),), out)
    return out


def _swapped(x: Tensor, a: int, b: int) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return view_of(x, tuple(shape), tuple(strides))


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    out = _swapped(x, a, b)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (_swapped(g, a, b),), out)
    return out


def permute(x: Tensor, *order: int) -> Tensor:
    """Dimension i of the result is `order[i]` of `x`."""
    out = _permuted(x, order)
    if x.needs_grad:
        back = tuple(sorted(range(len(order)), key=order.__getitem__))
        x.tape.link((x,), lambda g: (_permuted(g, back),), out)
    return out


def _permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return view_of(x, tuple(x.shape[d] for d in order), tuple(x.strides[d] for d in order))


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A view with a dimension of size 1 inserted; for tensors that need no gradient."""
    assert not x.needs_grad
    shape, strides = list(x.shape), list(x.strides)
    shape.insert(dim, 1)
    strides.insert(dim, strides[dim] * x.shape[dim])
    return view_of(x, tuple(shape), tuple(strides))


def _narrow(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return view_of(x, tuple(shape), x.strides)


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
    out = view_of(x, tuple(shape), tuple(strides))
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
            grad = g.tape.empty(full, dtype)
            g.tape.memory(zeros.nbytes + g.nbytes, grad.nbytes, "copy")
            return (grad,)

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


def unbind(x: Tensor, dim: int) -> list[Tensor]:
    """Every entry of `dim` as a view without it; their gradients are stacked."""
    dim %= len(x.shape)
    shape, strides = list(x.shape), list(x.strides)
    entries = shape.pop(dim)
    del strides[dim]
    parts = [view_of(x, tuple(shape), tuple(strides)) for _ in range(entries)]
    if x.needs_grad:
        full, dtype, tape = x.shape, x.dtype, x.tape

        def backward(*grads: Tensor) -> tuple[Tensor]:
            out = tape.empty(full, dtype)
            tape.memory(sum(g.nbytes for g in grads if g is not None), out.nbytes, "copy")
            return (out,)

        tape.open()
        tape.link((x,), backward, *parts)
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


def pad(x: Tensor, width: int) -> Tensor:
    """A copy with zeros behind the last dimension; backward copies what is not padding (`constant_pad_nd`)."""
    out = x.tape.empty((*x.shape[:-1], width), x.dtype)
    x.tape.memory(0, out.nbytes, "copy")
    x.tape.memory(x.nbytes, x.nbytes, "copy")
    if x.needs_grad:
        size = x.shape[-1]
        x.tape.link((x,), lambda g: (clone(_narrow(g, len(g.shape) - 1, size)),), out)
    return out


def fill(parts: Sequence[Tensor]) -> Tensor:
    """An empty tensor, of which each part is copied into its slice of the last dimension: `out[..., a:b].copy_(part)`.

    Parts of the same shape but for that dimension; one of them may be expanded. Backward is `CopySlices`, the last
    slice first: a copy of the gradient, of its slice another one, which is the part's, and zeros that overwrite it.
    """
    first = parts[0]
    tape, dtype = first.tape, first.dtype
    out = tape.empty((*first.shape[:-1], sum(part.shape[-1] for part in parts)), dtype)
    for number, part in enumerate(parts):
        tape.memory(part.nbytes, part.nbytes, "copy")
        if part.needs_grad or out.needs_grad:
            link_slice(out, part, written_before=number > 0)
    return out


def link_slice(out: Tensor, part: Tensor, written_before: bool) -> None:
    """The backward of a part that is copied into its slice of `out`."""
    before = view_of(out, out.shape, out.strides)
    before.node, before.index = out.node, out.index
    shape, dtype = part.shape, part.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor]:
        result = clone(g)
        mine = g.tape.empty(shape, g.dtype)
        g.tape.memory(mine.nbytes, mine.nbytes, "copy")
        if written_before:
            zeros = g.tape.empty(mine.shape, mine.dtype)
            g.tape.memory(0, zeros.nbytes, "copy")
            g.tape.memory(zeros.nbytes, zeros.nbytes, "copy")
        if dtype != g.dtype:
            wide, mine = mine, g.tape.empty(shape, dtype)
            g.tape.memory(wide.nbytes, mine.nbytes, "copy")
        return result if written_before else None, mine

    out.tape.link((before, part), backward, out)


def put(out: Tensor, part: Tensor) -> None:
    """`out[..., i, ...] = part`, an entry of one dimension, as `fill` does it slice by slice."""
    out.tape.memory(part.nbytes, part.nbytes, "copy")
    if part.needs_grad or out.needs_grad:
        link_slice(out, part, written_before=out.needs_grad)


def repeat_heads(x: Tensor, repeats: int, dim: int = 1) -> Tensor:
    """Key or value heads (dimension `dim`) repeated for grouped queries: expanded, and copied unless it is one head;
    backward sums."""
    if repeats == 1:
        return x
    source = x.shape
    shape = (*source[:dim], source[dim] * repeats, *source[dim + 1 :])
    if source[dim] == 1:
        out = view_of(x, shape, (*x.strides[:dim], 0, *x.strides[dim + 1 :]))
    else:
        out = x.tape.empty(shape, x.dtype)
        x.tape.memory(out.nbytes, out.nbytes, "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            summed = g.tape.empty(source, g.dtype)
            g.tape.memory(g.nbytes, summed.nbytes, "copy")
            return (summed,)

        x.tape.link((x,), backward, out)
    return out
