"""Matrix products, norms and embeddings on symbolic tensors (rules as in `functional`)."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model.functional import low, pointwise, reshape, to, wide
from zsim.model.graph import ITEM, Tensor
from zsim.model.tape import Tape


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, conv1d: bool = False) -> Tensor:
    """`x @ weight.T (+ bias)`: aten `mm`, or `addmm` with a bias. `conv1d`: weight is [in, out], as GPT-2 stores it.

    Shapes: x [..., k], weight [n, k], result [..., n]. Gradients: of the weight first under `mm`, of the input first
    under `addmm`; the bias' gradient is the column sum. Under torch.autocast they are of its dtype: a parameter's last
    one is left to the strategy, which widens it.
    """
    tape, x = x.tape, low(x)
    k = x.shape[-1]
    n = weight.shape[1] if conv1d else weight.shape[0]
    flat = x if len(x.shape) == 2 else reshape(x, -1, k)
    m, dtype = flat.shape[0], x.dtype
    odd = any(width * ITEM[dtype] % 4 for width in (n, k))  # rows of all operands are of n or k elements
    x_grad, w_grad = flat.needs_grad, weight.needs_grad
    b_grad = bias is not None and bias.needs_grad
    bias_bytes = bias.nbytes if bias is not None and tape.autocast and bias.dtype != dtype else 0
    leaf, size = weight if weight.param is not None else None, weight.shape  # another lives only as a saved tensor
    saved = tape.save(*([flat] if w_grad else []), *([weight] if x_grad else [])) if x_grad or w_grad else None

    def product() -> tuple[Tensor]:
        out = tape.empty((m, n), dtype)
        tape.gemm(m, n, k, dtype, unaligned=odd)
        return (out,)

    if bias_bytes:  # its cast
        tape.memory(bias_bytes, bias_bytes // 2)
    if bias is None and tape.frame is not None:
        (out,) = tape.frame.cached("mm", tape.open(), product)
    else:
        (out,) = product()

    def weight_grad() -> Tensor | None:
        if not w_grad:
            return None
        grad = tape.empty(size, dtype) if leaf is None else tape.gradient(leaf, size, dtype)
        tape.gemm(*((k, n) if conv1d else (n, k)), m, dtype, unaligned=odd)
        return grad

    def input_grad() -> Tensor | None:
        if not x_grad:
            return None
        grad = tape.empty((m, k), dtype)
        tape.gemm(m, k, n, dtype, unaligned=odd)
        return grad

    def mm_backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved() if saved else ()  # noqa: F841  alive until both gradients are computed
        grad_w = weight_grad()
        grad_x = input_grad()
        return grad_x, _widened(leaf, grad_w)

    def addmm_backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved() if saved else ()  # noqa: F841
        grad_x = input_grad()
        grad_w = weight_grad()
        if bias_bytes and b_grad:
            tape.memory(bias_bytes // 2, bias_bytes)
        return g if b_grad else None, grad_x, _widened(leaf, grad_w)

    if x_grad or w_grad or b_grad:
        if bias is None:
            tape.link((flat, weight), mm_backward, out)
        else:
            tape.link((bias, flat, weight), addmm_backward, out)
    return out if len(x.shape) == 2 else reshape(out, *x.shape[:-1], n)


def _widened(weight: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Under torch.autocast, a gradient that others are added to, in the weight's dtype."""
    if grad is None or weight is None or not weight.tape.autocast or weight.param.pending == 1:  # type: ignore[union-attr]
        return grad
    if grad.dtype == weight.dtype:
        return grad
    return pointwise(grad, dtype=weight.dtype)


def matmul(a: Tensor, b: Tensor, label: str = "attention") -> Tensor:
    """Batched product of [b, h, m, k] and [b, h, k, n] (`bmm` on flattened heads)."""
    tape, a, b = a.tape, low(a), low(b)
    *lead, m, k = a.shape
    n = b.shape[-1]
    left, right = reshape(a, -1, m, k), reshape(b, -1, k, n)
    batch, dtype = left.shape[0], a.dtype
    a_grad, b_grad = left.needs_grad, right.needs_grad
    saved = tape.save(*([left] if b_grad else []), *([right] if a_grad else []))
    out = tape.empty((batch, m, n), dtype)
    tape.gemm(m, n, k, dtype, batch, label)

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved()  # noqa: F841
        grad_a = grad_b = None
        if b_grad:
            grad_b = tape.empty((batch, k, n), dtype)
            tape.gemm(k, n, m, dtype, batch, label)
        if a_grad:
            grad_a = tape.empty((batch, m, k), dtype)
            tape.gemm(m, k, n, dtype, batch, label)
        return grad_a, grad_b

    if a_grad or b_grad:
        tape.link((left, right), backward, out)
    return reshape(out, *lead, m, n)


def baddbmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`bias.baddbmm(a, b, alpha=...)` of [n, m, k] and [n, k, j]: gradients are scaled by kernels of their own."""
    tape, a, b = a.tape, low(a), low(b)
    n, m, k = a.shape
    j, dtype = b.shape[-1], a.dtype
    saved = tape.save(a, b)
    out = tape.empty((n, m, j), dtype)
    tape.gemm(m, j, k, dtype, n, "attention")
    tape.link((a, b), _scaled_gradients(tape, saved, (n, m, k, j), dtype, "attention"), out)
    return out


def fold(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`torch.baddbmm(weight, left, right, alpha=...)` of a frozen weight [n, m, j], in its dtype: a copy of it, to
    which the product is added."""
    tape = left.tape
    n, m, k = left.shape
    j, dtype = right.shape[-1], weight.dtype
    saved = tape.save(left, right)
    out = tape.empty((n, m, j), dtype)
    tape.memory(weight.nbytes, out.nbytes, "copy")
    tape.gemm(m, j, k, dtype, n, "experts")
    tape.link((left, right), _scaled_gradients(tape, saved, (n, m, k, j), dtype, "experts"), out)
    return out


def _scaled_gradients(
    tape: Tape, saved: Callable[[], object], shape: tuple[int, int, int, int], dtype: str, label: str
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Backward of `n` products of [m, k] and [k, j], whose gradients `alpha` scales in kernels of their own."""
    n, m, k, j = shape

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        kept = saved()  # noqa: F841
        raw = tape.empty((n, m, k), dtype)
        tape.gemm(m, k, j, dtype, n, label)
        grad = pointwise(raw)
        raw = tape.empty((n, k, j), dtype)
        tape.gemm(k, j, m, dtype, n, label)
        return grad, pointwise(raw)

    return backward


def softmax(x: Tensor) -> Tensor:
    x = wide(x)
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes, "softmax")
    if x.needs_grad:
        saved = x.tape.save(out)

        def backward(g: Tensor) -> tuple[Tensor]:
            (result,) = saved()
            grad = g.tape.empty(result.shape, result.dtype)
            g.tape.memory(g.nbytes + result.nbytes, grad.nbytes, "softmax")
            return (grad,)

        x.tape.link((x,), backward, out)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`native_layer_norm`: saves its input, mean and 1/std (float32 on CUDA, the input's dtype on CPU)."""
    return _normalized(x, tuple(p for p in (weight, bias) if p is not None), 2)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`_fused_rms_norm` of torch 2.9 and later (pytorch pull request 153666): as layer_norm; saves its input and
    1/rms."""
    return _normalized(x, (weight,), 1)


def _normalized(x: Tensor, params: tuple[Tensor, ...], rows: int) -> Tensor:
    """`rows`: numbers per row that are kept."""
    tape, x = x.tape, wide(x)
    grad = x.needs_grad or any(p.needs_grad for p in params)
    saved = tape.save(x, *params) if grad else None
    stats_dtype = "float32" if tape.cuda else x.dtype
    out = tape.empty(x.shape, x.dtype)
    stats = [tape.empty((*x.shape[:-1], 1), stats_dtype) for _ in range(rows)]
    tape.memory(x.nbytes + sum(p.nbytes for p in params), out.nbytes + rows * stats[0].nbytes)
    if grad:
        saved_stats = tape.save(*stats)
        del stats
        x_grad, wanted = x.needs_grad, [p.needs_grad for p in params]
        leaves = [p if p.param is not None else None for p in params]  # the others live only as saved tensors

        def backward(g: Tensor) -> tuple[Tensor | None, ...]:
            x, *kept = saved()  # type: ignore[misc]
            first = saved_stats()[0]
            grads: list[Tensor | None] = [tape.empty(x.shape, x.dtype) if x_grad else None]
            for leaf, weight, grad in zip(leaves, kept, wanted, strict=True):
                grads.append(tape.gradient(leaf or weight, weight.shape, weight.dtype) if grad else None)
            reads = g.nbytes + x.nbytes + rows * first.nbytes + sum(weight.nbytes for weight in kept)
            tape.memory(reads, sum(grad.nbytes for grad in grads if grad is not None))
            return tuple(grads)

        tape.link((x, *params), backward, out)
    return out


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight`. Its gradient is dense (`embedding_dense_backward`)."""
    tape = indices.tape
    saved = tape.save(indices) if weight.needs_grad else None
    out = tape.empty((*indices.shape, weight.shape[1]), weight.dtype)
    tape.memory(indices.nbytes + out.nbytes, out.nbytes, "embedding")
    if weight.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            (indices,) = saved()  # type: ignore[misc]
            grad = tape.gradient(weight, weight.shape, weight.dtype)
            tape.memory(indices.nbytes + g.nbytes, grad.nbytes + g.nbytes, "embedding")
            return (grad,)

        tape.link((weight,), backward, out)
    return out


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False, rows: int | None = None
) -> Tensor:
    """`_grouped_mm`: rows of x [r, k], sorted by expert, times their expert's weight [e, n, k]. Rows taken as even.

    `transposed`: the weight is [e, k, n]. `rows`: those up to the last offset, of which alone products are made.

    torch.autocast does not know it, and transformers 5.24 casts the rows to the
    weight's dtype (integrations/moe.py `_grouped_mm`).
    """
    tape, x = x.tape, to(x, weight.dtype)
    held, k = x.shape
    rows = rows or held
    experts, n, _ = (weight.shape[0], weight.shape[2], k) if transposed else weight.shape
    dtype = x.dtype
    x_grad, w_grad = x.needs_grad, weight.needs_grad
    saved = tape.save(*([x] if w_grad else []), *([weight] if x_grad else []), offsets) if x_grad or w_grad else None
    leaf, size = weight if weight.param is not None else None, weight.shape  # another lives only as a saved tensor
    out = tape.empty((held, n), dtype)
    _grouped(tape, rows, experts, "m", n, k, dtype)

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        kept = saved()  # type: ignore[misc]  # noqa: F841
        grad_w = grad_x = None
        if w_grad:
            grad_w = tape.empty(size, dtype) if leaf is None else tape.gradient(leaf, size, dtype)
            _grouped(tape, rows, experts, "k", n, k, dtype)
        if x_grad:
            grad_x = tape.empty((held, k), dtype)
            _grouped(tape, rows, experts, "m", k, n, dtype)
        return grad_x, grad_w

    if x_grad or w_grad:
        tape.link((x, weight), backward, out)
    return out


def _grouped(tape: Tape, rows: int, experts: int, along: str, n: int, k: int, dtype: str) -> None:
    """One product per expert that has rows. `along`: rows are the result's ("m") or are summed over ("k")."""
    share, more = divmod(rows, experts)
    for height, count in ((share + 1, more), (share, experts - more)):
        if height and count:
            shape = (height, n, k) if along == "m" else (n, k, height)
            tape.gemm(*shape, dtype, count, "grouped_gemm")


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest per row and their indices, which are saved; backward scatters into zeros."""
    tape = x.tape
    values = tape.empty((x.shape[0], k), x.dtype)
    indices = tape.empty((x.shape[0], k), "int64")
    tape.memory(x.nbytes, values.nbytes + indices.nbytes)
    if x.needs_grad:
        saved = tape.save(indices)
        shape, dtype = x.shape, x.dtype

        def backward(g: Tensor) -> tuple[Tensor]:
            (indices,) = saved()
            zeros = tape.empty(shape, dtype)
            tape.memory(g.nbytes, zeros.nbytes)
            grad = tape.empty(shape, dtype)
            tape.memory(zeros.nbytes + indices.nbytes + g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, values)
    return values, indices


def gather_last(x: Tensor, indices: Tensor) -> Tensor:
    """`x.gather(-1, indices)`: saves both; backward scatters into zeros, in place."""
    tape = x.tape
    saved = tape.save(x, indices) if x.needs_grad else None
    out = tape.empty(indices.shape, x.dtype)
    tape.memory(indices.nbytes + out.nbytes, out.nbytes)
    if x.needs_grad:
        shape = x.shape

        def backward(g: Tensor) -> tuple[Tensor]:
            kept = saved()  # type: ignore[misc]  # noqa: F841
            grad = tape.empty(shape, g.dtype)
            tape.memory(2 * g.nbytes, grad.nbytes + g.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def scatter_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`zeros[rows] = x`: saves the rows; backward picks them."""
    tape = x.tape
    out = tape.empty(x.shape, x.dtype)
    saved = tape.save(rows) if x.needs_grad else None
    tape.memory(x.nbytes + rows.nbytes, 2 * out.nbytes)
    if x.needs_grad:
        tape.link((x,), lambda g: (pointwise(g, *saved()),), out)  # type: ignore[misc]
    return out


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`: backward adds into zeros (`index_put` with accumulation)."""
    tape = x.tape
    saved = tape.save(rows) if x.needs_grad else None
    out = tape.empty((*rows.shape, *x.shape[1:]), x.dtype)
    tape.memory(out.nbytes + rows.nbytes, out.nbytes)
    if x.needs_grad:
        shape, dtype, leaf = x.shape, x.dtype, x if x.param is not None else None

        def backward(g: Tensor) -> tuple[Tensor]:
            (rows,) = saved()  # type: ignore[misc]
            if leaf is not None and tape.cuda:
                zeros = tape.gradient(leaf, shape, dtype)
                tape.memory(rows.nbytes + g.nbytes, 2 * zeros.nbytes)
                return (zeros,)
            zeros = tape.empty(shape, dtype)
            tape.memory(g.nbytes, zeros.nbytes)
            if leaf is not None:
                grad = tape.gradient(leaf, shape, dtype)
                tape.memory(zeros.nbytes + rows.nbytes + g.nbytes, grad.nbytes)
                return (grad,)
            if tape.cuda:  # in place: autograd has no other use for the zeros
                tape.memory(zeros.nbytes + rows.nbytes + g.nbytes, zeros.nbytes)
                return (zeros,)
            grad = tape.empty(shape, dtype)
            tape.memory(zeros.nbytes + rows.nbytes + g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out
