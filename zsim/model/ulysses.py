"""Attention of a sequence that several ranks share (Ulysses): heads are exchanged for sequence, and back.

DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF, in its variable names: each rank comes
with all heads of its part of the sequence and attends with its part of the heads over all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from zsim.model import functional as F
from zsim.model.graph import Tensor
from zsim.model.kernels import Exchange
from zsim.model.layers import Net
from zsim.model.views import clone

Core = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, "Tensor | None"]]


def attend(net: Net, q: Tensor, k: Tensor, v: Tensor, core: Core) -> tuple[Tensor, Tensor | None]:
    """As `zsim.model.attention.attend`, of [b, heads, s / ranks, d]: the result, [b, s / ranks, h * d].

    `core` attends: [b, h, s, d] three times -> [b, s, h, d], and its weights if there are any.
    """
    query, key, value = (F.permute(x, 2, 0, 1, 3) for x in (q, k, v))
    _parts, _positions = _gather_positions(net, *query.shape[:2])  # alive until attention is done
    query_layer, key_layer, value_layer = _combine_local_sequences(net, query, key, value)
    query_layer = F.contiguous(F.permute(query_layer, 1, 2, 0, 3))
    key_layer = F.contiguous(F.permute(key_layer, 1, 2, 0, 3))
    value_layer = F.contiguous(F.permute(value_layer, 1, 2, 0, 3))
    context_layer, weights = core(query_layer, key_layer, value_layer)
    context_layer = F.permute(context_layer, 1, 0, 2, 3)
    context_layer = F.reshape(context_layer, *context_layer.shape[:2], -1)
    output = F.permute(_partition_global_sequence(net, context_layer), 1, 0, 2)
    return F.contiguous(output), weights


def _gather_positions(net: Net, local: int, batch: int) -> tuple[Tensor, Tensor]:
    """The positions of the whole sequence, which every attention asks the others for."""
    tape, ranks = net.tape, net.sequence_parallel_size
    parts = tape.empty((ranks, batch, local), "int64")
    tape.kernel(Exchange("all_gather", "int64", batch * local, parts.numel))
    return parts, F.pointwise(parts, shape=(batch, ranks * local))


def _combine_local_sequences(net: Net, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s / ranks, b, heads, d] each -> [s, b, heads of this rank, d]."""
    return _combined(net, query), _combined(net, key), _combined(net, value)


def _combined(net: Net, x: Tensor) -> Tensor:
    ranks = net.sequence_parallel_size
    if (copies := ranks // x.shape[2]) > 1:  # fewer key and value heads than ranks
        x = F.contiguous(F.repeat_heads(x, copies, dim=2))
    local, batch, heads, d = x.shape
    x = F.reshape(x, local, batch, ranks, heads // ranks, d)
    x = F.contiguous(F.permute(x, 2, 0, 1, 3, 4))
    output = _all_to_all(x)
    return F.reshape(output, ranks * local, batch, heads // ranks, d)


def _partition_global_sequence(net: Net, x: Tensor) -> Tensor:
    """[s, b, width / ranks] -> [s / ranks, b, width]."""
    ranks = net.sequence_parallel_size
    s, batch, width = x.shape
    x = F.contiguous(F.reshape(x, ranks, s // ranks, batch, width))
    output = F.permute(_all_to_all(x), 1, 2, 0, 3)
    return F.contiguous(F.reshape(output, s // ranks, batch, ranks * width))


def _all_to_all(x: Tensor) -> Tensor:
    """sequence/layer.py _dim_zero_all_to_all_op: part i of the first dimension goes to rank i."""
    out = _exchanged(x)
    if x.needs_grad:
        x.tape.link((x,), lambda g: (_exchanged(g if g.is_contiguous() else clone(g)),), out)
    return out


def _exchanged(x: Tensor) -> Tensor:
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.kernel(Exchange("all_to_all", x.dtype, x.numel, x.numel))
    return out
