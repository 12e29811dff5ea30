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
from zsim.model.sequences import cumsum, last, pad_tokens, repeat_interleave, subtract
from zsim.model.tape import Tape

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
        query = repeat_interleave(query, heads // key_heads)
        key = repeat_interleave(key, heads // key_heads)
    query, key, value, beta, decay = [_contiguous_float(F.transpose(x, 1, 2)) for x in (query, key, value, beta, decay)]
    query = _l2norm(query)
    key = _l2norm(key)
    query = F.scale(query)

    padding = -s % CHUNK
    query, key, value = (pad_tokens(x, padding, 2) for x in (query, key, value))
    beta, decay = (pad_tokens(x, padding, 2) for x in (beta, decay))
    chunks = (s + padding) // CHUNK

    v_beta = F.mul(value, last(beta))
    k_beta = F.mul(key, last(beta))
    query, key, k_beta, v_beta = [F.reshape(x, b, heads, -1, CHUNK, x.shape[-1]) for x in (query, key, k_beta, v_beta)]
    decay = F.reshape(decay, b, heads, -1, CHUNK)
    upper = F.pointwise(query.tape.empty((CHUNK, CHUNK), "bool"))  # ones, and of these a triangle
    cum_decay = cumsum(decay, -1)

    pairwise = subtract(last(cum_decay), F.reshape(cum_decay, b, heads, chunks, 1, CHUNK))
    pairwise = F.masked_fill(pairwise, upper)
    pairwise = F.activation_by_result(pairwise)  # exp

    system = F.mul(P.matmul(k_beta, F.transpose(key, -1, -2)), pairwise)
    intra = F.mul(P.matmul(query, F.transpose(key, -1, -2)), pairwise)
    decayed_k_beta = F.mul(k_beta, last(F.activation_by_result(cum_decay)))
    new_values = _solve_triangular(system, v_beta)
    k_cumdecay = _solve_triangular(system, decayed_k_beta)

    state = query.tape.empty((b, heads, k_dim, v_dim), "float32")
    query.tape.memory(0, state.nbytes, "copy")
    out = query.tape.empty(new_values.shape, "float32", F.layout(new_values))
    query.tape.memory(0, out.nbytes, "copy")

    query = F.mul(query, last(F.activation_by_result(cum_decay)))
    with _unread(query.tape, chunks == 1):
        key = F.mul(key, last(F.activation_by_result(subtract(F.narrow(cum_decay, 3, 1), cum_decay))))
        chunk_decay = F.reshape(F.activation_by_result(F.select(cum_decay, 3)), b, heads, chunks, 1, 1)

    for chunk in range(chunks):
        v_new = subtract(F.select(new_values, 2), P.matmul(F.select(k_cumdecay, 2), state))
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


def _l2norm(x: Tensor) -> Tensor:
    inverse = F.rsqrt(F.shift(F.sum_last(F.mul(x, x))))
    return F.mul(x, inverse)


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
