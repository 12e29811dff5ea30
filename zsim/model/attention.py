"""What attention layers of all families are made of: rotary tables and rotation, heads, masks, the attention itself."""

from __future__ import annotations

from functools import partial

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model import ulysses
from zsim.model.fused_attention import WIDEST_FLASH, flash_attention
from zsim.model.graph import Tensor
from zsim.model.kernels import FLASH
from zsim.model.layers import Module, Net
from zsim.model.views import clone


class Rotary(Module):
    """cos and sin for all positions, [1 or b, s, dim]. They live as long as the blocks that multiply with them."""

    kind = "rotary"
    wide = False  # tables stay in float32
    kept = False  # by later layers, where what comes in needs no gradient

    def __init__(self, net: Net, dim: int, class_name: str) -> None:
        super().__init__(net)
        self.dim, self.class_name = dim, class_name

    def buffers_bytes(self) -> int:
        moe = self.net.arch.moe
        copies = 1 if moe and moe.modules else 2  # the original frequencies are kept, too, since transformers 5
        return copies * (self.dim // 2) * 4

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        s, d = positions.shape[-1], self.dim
        angles = F.pointwise(F.pointwise(positions, dtype="float32"), shape=(positions.shape[0], s, d // 2))
        table = F.cat((angles, angles))
        cos = F.pointwise(F.pointwise(table))
        sin = F.pointwise(F.pointwise(table))
        tables = (cos, sin) if self.wide else (F.to(cos, x.dtype), F.to(sin, x.dtype))
        if self.shares(x):
            self.net.tape.share(*tables)
        return tables

    def shares(self, x: Tensor) -> bool:
        return self.net.layers_save(x) or self.kept


def positions(net: Net, tokens: Tensor, of_blocks: bool = True) -> Tensor:
    """`torch.arange(s) + 0`, [1, s] int64; an input [b, s] where `tokens`, [b, s] or embedded, are a part of each
    sequence. `of_blocks`: each block gets them, and checkpointing keeps them for it."""
    if net.sequence_parallel_size > 1:
        return tokens
    ids = F.pointwise(net.tape.empty((1, tokens.shape[1]), "int64"))
    if net.checkpointing != "none" and of_blocks:
        net.tape.share(ids)
    return ids


def causal_mask(net: Net, b: int, s: int, window: int | None = None) -> Tensor | None:
    """The mask [b, 1, s, s] that is added to the scores; kernels that know what is causal need none.

    `window`: of the layers it is for. SDPA knows of none, and is given a mask once the sequence fills it: of bools and
    for all sequences at once (transformers 5.24 masking_utils.py `_ignore_causal_mask_sdpa`), before 4.53 as eager's.
    """
    if net.sequence_parallel_size > 1:  # ulysses_sp.py drops masks
        return None
    if net.attention == "sdpa" and window is not None and s >= window:
        if net.older(4, 53):
            mask = dense_mask(net, b, s, net.dtype)
            net.tape.share(mask)  # saved in each block
            return mask
        return shared_mask(net, F.expand(dense_mask(net, 1, s, "bool"), (b, 1, s, s)))
    if net.attention not in ("eager", "efficient"):
        return None
    mask = dense_mask(net, b, s, net.dtype)
    if net.checkpointing != "none" or net.attention == "efficient":  # an argument of every block, or saved in each
        net.tape.share(mask)
    return mask


def mask_of_kind(net: Net, b: int, s: int, sliding: bool) -> Tensor | None:
    """Of the layers with a window or without; made all the same where there are none, and then kept by nobody."""
    if any(kind.sliding is sliding for kind in net.arch.kinds):
        return causal_mask(net, b, s, net.arch.window if sliding else None)
    return dense_mask(net, b, s, net.dtype) if net.attention in ("eager", "efficient") else None


def shared_mask(net: Net, mask: Tensor) -> Tensor:
    """An argument of every block."""
    if net.checkpointing != "none":
        net.tape.share(mask)
    return mask


def dense_mask(net: Net, b: int, s: int, dtype: str) -> Tensor:
    allowed = net.tape.empty((1, 1, s, s), "bool")
    net.tape.memory(0, allowed.nbytes)
    return F.pointwise(allowed, shape=(b, 1, s, s), dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [b, h, s, d]: `x * cos + rotate_half(x) * sin`."""
    return F.add(F.mul(x, cos), F.mul(rotate_half(x), sin))


def rotate_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first `cos.shape[-1]` entries of each head; the rest passes through a concatenation."""
    rotary = cos.shape[-1]
    q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, q.shape[-1] - rotary)
    k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, k.shape[-1] - rotary)
    q_turned = rotate(q_turned, cos, sin)
    k_turned = rotate(k_turned, cos, sin)
    q = F.cat((q_turned, q_passed))
    return q, F.cat((k_turned, k_passed))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first = F.narrow(x, -1, half)
    second = F.narrow(x, -1, half)
    return F.cat((F.neg(second), first))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[b, s, h * d] -> [b, h, s, d]."""
    b, s, _ = x.shape
    return F.transpose(F.reshape(x, b, s, -1, head_dim), 1, 2)


def attend(
    net: Net,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    dropout: float = 0.0,
    upcast: bool = True,
    softcap: bool = False,
    wide: bool = False,
    floor: bool = False,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Scaled-dot-product attention of [b, h, s, d]: the result, [b, s, h * d], and the weights if there are any.

    Eager: keys and values repeated for grouped queries, the softmax in float32 if `upcast`, `softcap` as in Gemma 2,
    queries and keys in float32 if `wide` (GPT-J), masked scores held to a `floor` (the first Llama). Efficient: see
    `_efficient`. What is not `causal` looks both ways.
    Callers hand the weights on as transformers does, which keeps them alive to the end of the block.
    """
    shared = net.sequence_parallel_size > 1
    if shared and net.attention == "sdpa":
        window = None  # is in the mask that ulysses_sp.py drops
    core = partial(_attend, net, mask, window, dropout, upcast, softcap, wide, floor, causal)
    if shared:
        return ulysses.attend(net, q, k, v, core)
    out, weights = core(q, k, v)
    return F.reshape(out, *out.shape[:2], -1), weights


def _attend(
    net: Net,
    mask: Tensor | None,
    window: int | None,
    dropout: float,
    upcast: bool,
    softcap: bool,
    wide: bool,
    floor: bool,
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' attention functions: the result as [b, s, h, d], contiguous, and the weights."""
    h = q.shape[1]
    weights = None
    too_wide = q.shape[-1] > WIDEST_FLASH
    if too_wide and net.attention not in ("sdpa", "efficient", "eager"):
        raise NotModeled(
            f"{net.attention} attention of heads of {q.shape[-1]}, which its kernels do not take (at most "
            f"{WIDEST_FLASH})",
            field="attention",
            accepted="sdpa, efficient, eager",
        )
    if net.attention == "efficient" or (net.attention == "sdpa" and (too_wide or mask is not None)):
        masks = net.attention == "sdpa" or net.cudnn_masks
        out = _efficient(q, k, v, mask, "masked" if masks and mask is not None else "efficient")
    elif net.attention in FLASH and v.shape[-1] != q.shape[-1]:
        # transformers 5.24 integrations/flash_attention.py: values are padded, and the result is cut
        width = v.shape[-1]
        v = F.pad(v, q.shape[-1])
        out = F.narrow(flash_attention(q, k, v, net.attention, window=window, causal=causal), -1, width)
    elif net.attention != "eager":
        out = flash_attention(q, k, v, net.attention, window=window, causal=causal)
    else:
        k, v = F.repeat_heads(k, h // k.shape[1]), F.repeat_heads(v, h // v.shape[1])
        outer, net.tape.label = net.tape.label, "softmax"
        dtype = q.dtype
        weights = F.scale(_scores(q, k, wide))
        if softcap:
            weights = F.scale(F.activation_by_result(F.scale(weights)))
        if mask is not None:
            weights = F.add(weights, mask)
            if floor:
                weights = F.at_least(weights)
        weights = F.to(P.softmax(F.to(weights, "float32")), dtype) if upcast else F.to(P.softmax(weights), v.dtype)
        weights = F.dropout(weights, dropout)
        out = P.matmul(weights, v)
        net.tape.label = outer
    return F.contiguous(F.transpose(out, 1, 2)), weights


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, impl: str) -> Tensor:
    """What torch's scaled_dot_product_attention does with a mask, as transformers hands it over for padded batches, and
    in 4.38 to 4.40 always (huggingface/transformers#30070).

    Its FlashAttention takes no mask, so the memory-efficient kernel runs, over the whole square, or cuDNN's, where that
    one is first (`masked`; allocated as if it were the other). transformers 4.39,
    LlamaSdpaAttention: keys and values repeated, all three made contiguous. ATen/native/transformers/cuda/attention.cu:
    the result lies in memory as [b, s, h, d].
    """
    repeats = q.shape[1] // k.shape[1]
    if mask is None or mask.dtype == "bool":  # as transformers 5 has it: widened in every call, and saved in each
        k, v = F.repeat_heads(k, repeats), F.repeat_heads(v, repeats)
        mask = mask if mask is None else F.pointwise(mask, dtype=q.dtype)
        return flash_attention(q, k, v, impl, mask=mask)
    q, k, v = (F.contiguous(x) for x in (q, F.repeat_heads(k, repeats), F.repeat_heads(v, repeats)))
    return flash_attention(q, k, v, impl, mask=mask)


def _scores(q: Tensor, k: Tensor, wide: bool) -> Tensor:
    if wide:
        return P.matmul(F.to(q, "float32"), F.transpose(F.to(k, "float32"), 2, 3))
    return P.matmul(q, F.transpose(k, 2, 3))


def complex_rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of [b, s, h, d] by complex multiplication (torchtitan): in float32 and back. Saves `table`."""
    wide = complex_pairs(x)
    out = complex_product(wide, table)
    del wide
    return F.to(F.reshape(out, *x.shape), x.dtype)


def complex_pairs(x: Tensor) -> Tensor:
    """Neighbours as complex numbers, [..., d / 2, 2] in float32."""
    return F.reshape(F.to(x, "float32"), *x.shape[:-1], x.shape[-1] // 2, 2)


def complex_product(pairs: Tensor, table: Tensor) -> Tensor:
    if not pairs.needs_grad:
        return F.pointwise(pairs)
    tape = pairs.tape
    saved = tape.save(table)
    out = F.pointwise(pairs)

    def backward(g: Tensor) -> tuple[Tensor]:
        (table,) = saved()
        conjugate = clone(table)  # noqa: F841
        return (F.pointwise(g),)

    tape.link((pairs,), backward, out)
    return out


def rotate_complex(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions as Llama 4 has them: both as pairs, both turned by a complex table, then both cast."""
    q_pairs, k_pairs = complex_pairs(q), complex_pairs(k)
    q_turned = F.reshape(complex_product(q_pairs, table), *q.shape)
    k_turned = F.reshape(complex_product(k_pairs, table), *k.shape)
    return F.to(q_turned, q.dtype), F.to(k_turned, k.dtype)
