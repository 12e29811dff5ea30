"""The selective state space of Mamba-2 as torch code on symbolic tensors (rules as in `functional`), and the operators
that nothing else needs.

Source: transformers 5.24 `mamba2_chunk_scan`, the same in all its models: what runs where mamba_ssm is not installed.
"""

from __future__ import annotations

from math import prod

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.graph import Tensor
from zsim.model.sequences import cumsum, last, pad_tokens, repeat_interleave, subtract
from zsim.model.views import clone, view_of


def chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int, d: Tensor, dt_bias: Tensor
) -> Tensor:
    """x [batch, s, heads, p], steps [batch, s, heads], decay and skip [heads], B and C [batch, s, groups, n]. Returns
    [batch, s, heads, p] in float32. Sequences are padded to whole chunks.

    Everything between is float32, and what is as large as chunk x chunk for each head and chunk there several times.
    """
    batch, s, heads, p = x.shape
    dt = F.add(dt, F.to(dt_bias, dt.dtype))
    dt = F.activation(F.wide(dt))  # softplus
    dt = clamped(dt)

    x = F.to(x, "float32")
    b = repeat_interleave(F.to(b, "float32"), heads // b.shape[2])
    c = repeat_interleave(F.to(c, "float32"), heads // c.shape[2])

    padding = -s % chunk
    skipped = F.mul(F.reshape(d, heads, 1), pad_tokens(x, padding, 1))

    x = F.mul(x, F.to(F.reshape(dt, *dt.shape, 1), "float32"))
    a = F.mul(F.to(a, x.dtype), F.to(dt, "float32"))

    x, a, b, c = [_chunks(tensor, padding, chunk) for tensor in (x, a, b, c)]

    a = F.permute(a, 0, 3, 1, 2)
    a_sums = cumsum(a, -1)

    decay = F.activation_by_result(segment_sum(a))
    scores = einsum("bclhn,bcshn->bclsh", c, b)
    masked = F.mul(scores, F.permute(decay, 0, 2, 3, 4, 1))
    diagonal = einsum("bclsh,bcshp->bclhp", masked, x)

    decay_states = F.activation_by_result(subtract(F.narrow(a_sums, -1, 1), a_sums))
    b_decay = F.mul(b, last(F.permute(decay_states, 0, 2, 3, 1)))
    states = einsum("bclhn,bclhp->bchpn", b_decay, x)

    previous = zeros_like(F.narrow(states, 1, 1))
    states = F.cat([previous, states], 1)
    decay_chunk = F.transpose(F.activation_by_result(segment_sum(_pad_front(F.select(a_sums, 3)))), 1, 3)
    new_states = einsum("bzch,bzhpn->bchpn", decay_chunk, states)
    states = F.narrow(new_states, 1, new_states.shape[1] - 1)

    state_decay = F.activation_by_result(a_sums)
    c_states = einsum("bclhn,bchpn->bclhp", c, states)
    others = F.mul(c_states, last(F.permute(state_decay, 0, 2, 3, 1)))

    out = F.contiguous(F.add(diagonal, others))
    out = F.reshape(out, batch, -1, heads, p)
    out = F.add(out, skipped)
    return F.narrow(out, 1, s)


def zeros_like(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype, F.layout(x))
    x.tape.memory(0, out.nbytes, "copy")
    return out


def _chunks(x: Tensor, padding: int, chunk: int) -> Tensor:
    x = pad_tokens(x, padding, 1)
    return F.reshape(x, x.shape[0], -1, chunk, *x.shape[2:])


def segment_sum(x: Tensor) -> Tensor:
    """Sums of x [..., n] over what lies between each two places, [..., n, n]."""
    mask = _triangle(x)
    x = masked_copy(x, (*x.shape, x.shape[-1]), mask)
    sums = cumsum(x, -2)
    mask = _triangle(x)
    return masked_copy(sums, sums.shape, mask)


def _triangle(x: Tensor) -> Tensor:
    """`torch.tril(torch.ones(n, n, dtype=bool))`"""
    ones = x.tape.empty((x.shape[-1], x.shape[-1]), "bool")
    x.tape.memory(0, ones.nbytes)
    return F.pointwise(ones)


def masked_copy(x: Tensor, shape: tuple[int, ...], mask: Tensor) -> Tensor:
    """`x.masked_fill(~mask, value)`, of x [..., n] expanded to `shape` [..., n, n] if it has not that: a contiguous
    copy that is then filled. Backward the same, and sums what was expanded."""
    tape, source = x.tape, x.shape
    inverse = F.pointwise(mask)
    saved = tape.save(inverse) if x.needs_grad else None
    out = _filled(x, shape, inverse)
    if saved:

        def backward(g: Tensor) -> tuple[Tensor]:
            grad = _filled(g, shape, *saved())
            if shape != source:
                summed = tape.empty(source, g.dtype)
                tape.memory(grad.nbytes, summed.nbytes)
                return (summed,)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def _filled(x: Tensor, shape: tuple[int, ...], mask: Tensor) -> Tensor:
    out = x.tape.empty(shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes, "copy")
    x.tape.memory(mask.nbytes, out.nbytes)
    return out


def clamped(x: Tensor) -> Tensor:
    """`torch.clamp(x, low, high)`: where((self >= min).logical_and_(self <= max), grad, 0)."""
    saved = x.tape.save(x) if x.needs_grad else None
    out = F.pointwise(x)
    if saved:

        def backward(g: Tensor) -> tuple[Tensor]:
            (x,) = saved()
            zero = g.tape.empty((), g.dtype)
            g.tape.memory(0, zero.nbytes)
            least, most = F.pointwise(x, dtype="bool"), F.pointwise(x, dtype="bool")
            g.tape.memory(least.nbytes + most.nbytes, least.nbytes)
            return (F.pointwise(g, least),)

        x.tape.link((x,), backward, out)
    return out


def _pad_front(x: Tensor) -> Tensor:
    """`F.pad(x, (1, 0))`"""
    tape, shape = x.tape, x.shape
    out = tape.empty((*shape[:-1], shape[-1] + 1), x.dtype)
    tape.memory(0, out.nbytes, "copy")
    tape.memory(x.nbytes, x.nbytes, "copy")
    if x.needs_grad:
        tape.link((x,), lambda g: (clone(view_of(g, shape, g.strides)),), out)
    return out


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two tensors as at::sumproduct_pair does it: both are permuted and reshaped, which may copy,
    multiplied in one batched product, and the result is a permuted view."""
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    a, b = F.low(a), F.low(b)
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    wide_left, wide_right = ({name for name in names if sizes[name] > 1} for names in (left, right))
    both = [name for name in result if name in wide_left & wide_right]
    first = [name for name in result if name in wide_left - wide_right]
    second = [name for name in result if name not in {*both, *first}]
    summed = [name for name in left if name not in result]

    def flat(x: Tensor, names: str, *groups: list[str]) -> Tensor:
        order = [name for group in groups for name in group if name in names]
        order += [name for name in names if name not in order]
        x = F.permute(x, *(names.index(name) for name in order))
        return F.reshape(x, *(prod(sizes[name] for name in group) for group in groups))

    product = P.matmul(flat(a, left, both, first, summed), flat(b, right, both, summed, second))
    made = [*both, *first, *second]
    product = F.reshape(product, *(sizes[name] for name in made))
    return F.permute(product, *(made.index(name) for name in result))
