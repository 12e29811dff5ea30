"""What only Gemma 3n's decoder does to tensors: sums in place of views, deviations, streams stacked and repeated."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.graph import Tensor
from zsim.model.views import clone, link_slice


def stack(parts: list[Tensor]) -> Tensor:
    """`torch.stack(parts)`; backward gives views."""
    return F.cat([F.reshape(part, 1, *part.shape) for part in parts], dim=0)


def add_to_view(view: Tensor, other: Tensor) -> Tensor:
    """`view += other`. Backward goes through the whole (CopySlices): its copy, and one of the part."""
    tape = view.tape
    out = F.view_of(view, view.shape, view.strides)
    tape.memory(2 * view.nbytes, view.nbytes)

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        whole = clone(g)
        part = clone(whole)
        tape.memory(part.nbytes, part.nbytes, "copy")
        return whole, part

    tape.link((view, other), backward, out)
    return out


def add_behind(streams: Tensor, part: Tensor) -> None:
    """`streams[1:] += part`: added in place, and then the sum is copied onto itself."""
    tape, rest = streams.tape, F.narrow(streams.detach(), 0, streams.shape[0] - 1)
    before = F.view_of(streams, streams.shape, streams.strides)
    before.node, before.index = streams.node, streams.index
    tape.memory(2 * rest.nbytes, rest.nbytes)
    shape = part.shape

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        whole = clone(g)
        mine = tape.empty(rest_shape, g.dtype)
        tape.memory(mine.nbytes, mine.nbytes, "copy")
        tape.memory(mine.nbytes, mine.nbytes, "copy")  # back into its place
        summed = tape.empty(shape, g.dtype)
        tape.memory(mine.nbytes, summed.nbytes)
        return whole, summed

    rest_shape = rest.shape
    del rest
    tape.link((before, part), backward, streams)
    again = F.narrow(streams, 0, streams.shape[0] - 1)
    tape.memory(again.nbytes, again.nbytes, "copy")
    link_slice(streams, again, written_before=True)


def deviation(x: Tensor) -> Tensor:
    """`x.std(-1, keepdim=True, unbiased=False)`"""
    out = F.pointwise(x, shape=(*x.shape[:-1], 1))
    saved = x.tape.save(x, out) if x.needs_grad else None
    if saved is None:
        return out

    def backward(g: Tensor) -> tuple[Tensor]:
        x, result = saved()
        doubled = F.pointwise(result)
        of_variance = F.pointwise(g, doubled)
        del doubled
        zero = F.pointwise(result, dtype="bool")
        x.tape.memory(of_variance.nbytes + zero.nbytes, of_variance.nbytes)
        del zero
        scaled = F.pointwise(of_variance)
        mean = F.pointwise(x, shape=result.shape)
        distance = F.pointwise(x, mean)
        del mean
        return (F.binary(scaled, distance),)

    x.tape.link((x,), backward, out)
    return out


def root(x: Tensor) -> Tensor:
    """`torch.sqrt(x)`: saves its result. grad / (2 * result)."""
    out = F.pointwise(x)
    if x.needs_grad:
        saved = x.tape.save(out)
        x.tape.link((x,), lambda g: (F.pointwise(g, F.pointwise(*saved())),), out)
    return out


def repeated(x: Tensor, times: int) -> Tensor:
    """`x.repeat(times, 1, ...)` with a new first dimension; backward sums."""
    out = x.tape.empty((times, *x.shape), x.dtype)
    x.tape.memory(out.nbytes, out.nbytes, "copy")
    if x.needs_grad:
        shape, dtype = x.shape, x.dtype

        def backward(g: Tensor) -> tuple[Tensor]:
            summed = g.tape.empty(shape, dtype)
            g.tape.memory(g.nbytes, summed.nbytes)
            return (summed,)

        x.tape.link((x,), backward, out)
    return out


def mean_first(x: Tensor) -> Tensor:
    """`x.mean(0)`"""
    out = F.pointwise(x, shape=x.shape[1:])
    if x.needs_grad:
        shape, dtype = x.shape, x.dtype

        def backward(g: Tensor) -> tuple[Tensor]:
            grad = g.tape.empty(shape, dtype)
            g.tape.memory(grad.nbytes, grad.nbytes)
            return (grad,)

        x.tape.link((x,), backward, out)
    return out


def subtract_row(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, `b` one number per row."""
    out = F.binary(a, b)
    if a.needs_grad:
        shape, dtype = b.shape, b.dtype

        def backward(g: Tensor) -> tuple[Tensor, Tensor]:
            negative = F.pointwise(g)
            summed = g.tape.empty(shape, dtype)
            g.tape.memory(negative.nbytes, summed.nbytes)
            return g, summed

        a.tape.link((a, b), backward, out)
    return out
