"""The gated delta rule, which layers of linear attention compute, as torch code on symbolic tensors (rules as in
`functional`), and the operators that nothing else needs.

Source: transformers 5.24 `modeling_qwen3_next.py` and `modeling_qwen3_5.py`, `torch_chunk_gated_delta_rule`: what runs
where flash-linear-attention is not installed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.graph import Tensor, row_major
from zsim.model.kernels import Memory
from zsim.model.tape import Tape
from zsim.model.views import view_of

CHUNK = 64  # tokens


def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Queries and keys [b, s, heads, d], values [b, s, value heads, d_v], decay and step [b, s, value heads]. Returns
    [b, s, value heads, d_v]. Chunks of tokens one after the other; all in float32.

    Names are those of the source, as what they hold lives as long as they do.
    """
    initial_dtype = query.dtype
    b, s, key_heads, k_dim = key.shape
    heads, v_dim = value.shape[-2:]
    decay = g
    if key_heads != heads:
        query = _repeat_interleave(query, heads // key_heads)
        key = _repeat_interleave(key, heads // key_heads)
    query, key, value, beta, decay = [_contiguous_float(F.transpose(x, 1, 2)) for x in (query, key, value, beta, decay)]
    query = _l2norm(query)
    key = _l2norm(key)
    query = F.scale(query)

    padding = -s % CHUNK
    query, key, value = (_pad_tokens(x, padding) for x in (query, key, value))
    beta, decay = (_pad_tokens(x, padding) for x in (beta, decay))
    chunks = (s + padding) // CHUNK

    v_beta = F.mul(value, _last(beta))
    k_beta = F.mul(key, _last(beta))
    query, key, k_beta, v_beta = [F.reshape(x, b, heads, -1, CHUNK, x.shape[-1]) for x in (query, key, k_beta, v_beta)]
    decay = F.reshape(decay, b, heads, -1, CHUNK)
    upper = F.pointwise(query.tape.empty((CHUNK, CHUNK), "bool"))  # ones, and of these a triangle
    cum_decay = _cumsum(decay)

    pairwise = _sub(_last(cum_decay), F.reshape(cum_decay, b, heads, chunks, 1, CHUNK))
    pairwise = F.masked_fill(pairwise, upper)
    pairwise = F.activation_by_result(pairwise)  # exp

    system = F.mul(P.matmul(k_beta, F.transpose(key, -1, -2)), pairwise)
    intra = F.mul(P.matmul(query, F.transpose(key, -1, -2)), pairwise)
    decayed_k_beta = F.mul(k_beta, _last(F.activation_by_result(cum_decay)))
    new_values = _solve_triangular(system, v_beta)
    k_cumdecay = _solve_triangular(system, decayed_k_beta)

    state = query.tape.empty((b, heads, k_dim, v_dim), "float32")
    query.tape.memory(0, state.nbytes, "copy")
    out = query.tape.empty(new_values.shape, "float32", F.layout(new_values))
    query.tape.memory(0, out.nbytes, "copy")

    query = F.mul(query, _last(F.activation_by_result(cum_decay)))
    with _unread(query.tape, chunks == 1):
        key = F.mul(key, _last(F.activation_by_result(_sub(F.narrow(cum_decay, 3, 1), cum_decay))))
        chunk_decay = F.reshape(F.activation_by_result(F.select(cum_decay, 3)), b, heads, chunks, 1, 1)

    for chunk in range(chunks):
        v_new = _sub(F.select(new_values, 2), P.matmul(F.select(k_cumdecay, 2), state))
        inter = P.matmul(F.select(query, 2), state)
        F.put(out, F.add(inter, P.matmul(F.select(intra, 2), v_new)))
        with _unread(query.tape, chunk == chunks - 1):
            state = F.add(
                F.mul(state, F.select(chunk_decay, 2)),
                P.matmul(F.transpose(F.select(key, 2), -1, -2), v_new),
            )

    del state
    out = F.reshape(out, b, heads, -1, v_dim)
    out = F.narrow(out, 2, s)
    return _contiguous(F.transpose(out, 1, 2), initial_dtype)


def _unread(tape: Tape, unread: bool) -> AbstractContextManager[None]:
    """The last chunk's state is computed, and read by nothing."""
    return tape.without_backward(holding=tape.frame is None) if unread else nullcontext()


def _last(x: Tensor) -> Tensor:
    """`x.unsqueeze(-1)`"""
    return F.reshape(x, *x.shape, 1)


def _l2norm(x: Tensor) -> Tensor:
    inverse = F.rsqrt(F.shift(F.sum_last(F.mul(x, x))))
    return F.mul(x, inverse)


def _repeat_interleave(x: Tensor, repeats: int) -> Tensor:
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


def _contiguous(x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype, memory_format=torch.contiguous_format)`: `x` itself, however it lies, if it has that dtype."""
    if x.dtype == dtype:
        return x
    source, out = x.dtype, x.tape.empty(x.shape, dtype)
    x.tape.memory(x.nbytes, out.nbytes)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (F.pointwise(g, dtype=source),), out)
    return out


def _contiguous_float(x: Tensor) -> Tensor:
    return _contiguous(x, "float32")


def _pad_tokens(x: Tensor, padding: int) -> Tensor:
    """`F.pad` of dimension 2. Even by nothing it is a copy, forward and backward (`constant_pad_nd`)."""
    tape, dims, tokens = x.tape, x.shape, x.shape[2]
    strides = None if padding else F.layout(x)
    out = tape.empty((*dims[:2], tokens + padding, *dims[3:]), x.dtype, strides)
    tape.memory(x.nbytes, out.nbytes + (out.nbytes if padding else 0), "copy")
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            mine = view_of(g, dims, g.strides)
            grad = tape.empty(dims, g.dtype, F.layout(mine))
            tape.memory(grad.nbytes, grad.nbytes, "copy")
            return (grad,)

        tape.link((x,), backward, out)
    return out


def _cumsum(x: Tensor) -> Tensor:
    """Along the last dimension. `grad.flip(dim).cumsum(dim).flip(dim)`."""
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.memory(x.nbytes, out.nbytes)
    if x.needs_grad:

        def backward(g: Tensor) -> tuple[Tensor]:
            flipped = F.pointwise(g)
            summed = F.pointwise(flipped)
            return (F.pointwise(summed),)

        x.tape.link((x,), backward, out)
    return out


def _sub(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, either broadcast, of which `b` may be the narrower dtype."""
    a_grad, b_grad, narrow = a.needs_grad, b.needs_grad, b.dtype
    out = F.binary(a, b)
    if a_grad or b_grad:
        a.tape.link((a, b), lambda g: (g if a_grad else None, F.cast(F.pointwise(g), narrow) if b_grad else None), out)
    return out


def _solve_triangular(a: Tensor, b: Tensor) -> Tensor:
    """`torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)` of [..., n, n] and [..., n, m].

    linalg_solve_triangular_backward: one more solution, which is the gradient of `b`; of `a`, a product of it with the
    result, negated and cut to a triangle.
    """
    tape, shape = a.tape, a.shape
    n, m = b.shape[-2:]
    count, triangle = b.numel // (n * m), a.nbytes // 2
    strides = (*row_major(b.shape)[:-2], 1, n)  # column by column, whatever `b` is
    a_grad, b_grad = a.needs_grad, b.needs_grad
    saved = tape.save(a) if a_grad or b_grad else None

    def solve(of: Tensor) -> Tensor:
        result = tape.empty(of.shape, of.dtype, strides)
        tape.memory(of.nbytes, result.nbytes, "copy")
        tape.kernel(Memory("attention", result.nbytes + triangle, result.nbytes, flops=float(count * n * n * m)))
        return result

    out = solve(b)
    if a_grad or b_grad:
        result_of = tape.save(out)

        def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
            kept = saved(), result_of()  # type: ignore[misc]  # noqa: F841
            grad_b = solve(g)
            if not a_grad:
                return None, grad_b
            product = tape.empty(shape, grad_b.dtype)
            tape.gemm(n, n, m, grad_b.dtype, count, "attention")
            negated = F.pointwise(product)
            del product
            return F.pointwise(negated), grad_b if b_grad else None

        tape.link((a, b), backward, out)
    return out
