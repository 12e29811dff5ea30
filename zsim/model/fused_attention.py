"""Attention in one kernel on symbolic tensors (rules as in `functional`): FlashAttention's, cuDNN's, and the
memory-efficient one of torch."""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import NotModeled
from zsim.model.functional import layout, low, narrow, pad
from zsim.model.graph import Tensor
from zsim.model.kernels import Attention
from zsim.model.tape import Tape

# Elements of a head: FlashAttention 2 and 3 (csrc/flash_attn/flash_api.cpp), which torch's SDPA then passes over for
# its memory-efficient kernel (sdp_utils.cpp `check_head_dim_size_flash`), as transformers knows (integrations/
# sdpa_attention.py `use_gqa_in_sdpa`: heads are repeated). cuDNN's are no wider.
WIDEST_FLASH = 256


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    impl: str,
    window: int | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    segments: dict[int, int] | None = None,
) -> Tensor:
    """One fused kernel. q [b, h, s, d]; k and v may have fewer heads. Saves q, k, v, the result and its log-sum-exp.
    `impl` masked: cuDNN's kernel where SDPA takes it first, else the memory-efficient one.
    `segments`: how many sequences there are of each length, which lie one behind the other in s (flash_attn_varlen).

    Causal, as the memory-efficient kernel is of heads that FlashAttention does not take, or under the `mask` that this
    kernel takes, and saves. The result lies in memory as q does, the gradients as their inputs (`empty_like` in the
    kernels of FlashAttention); that of the memory-efficient kernel as [b, s, h, d], and so do its gradients where
    values have another width, which FlashAttention does not take.
    """
    kernel, impl = impl, "efficient" if impl == "masked" else impl
    if impl == "efficient" and mask is None and q.shape[-1] <= WIDEST_FLASH:
        raise NotModeled("the memory-efficient kernel in this model", field="attention", accepted="flash, sdpa")
    tape, q, k, v = q.tape, low(q), low(k), low(v)
    mask = None if mask is None else _aligned(low(mask))
    b, h, s, d = q.shape
    kv_heads, kv_len, width = k.shape[1], k.shape[2], v.shape[-1]
    narrow = width != d
    masked, dtype = causal and mask is None, q.dtype

    def launch(backward: bool) -> None:
        for number, (length, count) in enumerate((segments or {s: b}).items()):
            keys = length if segments else kv_len
            work = Attention(count, h, kv_heads, length, keys, d, masked, kernel, dtype, backward, window)
            tape.kernel(replace(work, launches=0 if number else 1, value_dim=width if narrow else 0))

    mask_shape = mask.shape if mask is not None and mask.needs_grad else None  # of a learned bias
    grad = q.needs_grad or k.needs_grad or v.needs_grad or mask_shape is not None
    inputs = tape.save(q, k, v, *([] if mask is None else [mask])) if grad else None

    def attend() -> tuple[Tensor, ...]:
        strides = _by_tokens((b, h, s, width)) if impl == "efficient" or narrow else layout(q)
        out = tape.empty((b, h, s, width), q.dtype, strides)
        flash = not narrow and impl != "efficient"
        lse = tape.empty((b, h, s if flash else _up(s, 32)), "float32")  # kAlignLSE of the memory-efficient kernel
        rng_state, unused = tape.empty((2,) if flash else (), "uint64"), tape.empty((), "uint64")
        launch(backward=False)
        return out, lse, rng_state, unused

    results = tape.frame.cached("attention", tape.open(), attend) if tape.frame is not None else attend()
    out = results[0]
    if grad:
        outputs = tape.save(*results)
        del results
        shapes = [(t.shape, _by_tokens(t.shape) if narrow else layout(t)) for t in (q, k, v)]
        padded = s + 128 * sum(segments.values()) if segments else _up(s, 128)

        def backward(g: Tensor) -> tuple[Tensor, ...]:
            kept = inputs(), outputs()  # type: ignore[misc]  # noqa: F841
            grads = tuple(tape.empty(shape, dtype, strides) for shape, strides in shapes)
            grads += (tape.empty(mask_shape, dtype),) if mask_shape else ()
            scratch = _backward_scratch(tape, impl, b, h, kv_heads, padded, kv_len, d, dtype)  # noqa: F841
            launch(backward=True)
            return grads

        tape.link((q, k, v) if mask_shape is None or mask is None else (q, k, v, mask), backward, out)
    return out


def _aligned(mask: Tensor) -> Tensor:
    """ATen/native/transformers/attention.cpp preprocess_mask of torch 2.1 and later: rows of a multiple of eight
    elements, or a copy that has them. CUDA only: recordings on the CPU call the kernel itself."""
    keys = mask.shape[-1]
    return narrow(pad(mask, _up(keys, 8)), -1, keys) if mask.tape.cuda and keys % 8 else mask


def _by_tokens(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of [b, h, s, d] that lies in memory as [b, s, h, d]."""
    _, h, s, d = shape
    return (s * h * d, d, h * d, 1)


def _backward_scratch(
    tape: Tape, impl: str, b: int, h: int, kv_heads: int, rows: int, kv_len: int, d: int, dtype: str
) -> list[Tensor]:
    """What FlashAttention's backward allocates besides gradients (`mha_bwd` in csrc/flash_attn/flash_api.cpp of 2.x
    and hopper/flash_api.cpp of 3, `_flash_attn_bwd` in flash_attn/cute/interface.py of 4): float32 sums for dq, one
    value per row, and dk, dv of grouped heads. `rows`: whole tiles of tokens; of packed sequences 128 more than tokens
    for each (`mha_varlen_bwd`). CUDA only: recordings on the CPU never ran the kernel. cuDNN's workspace is not known
    and left out.
    """
    if not tape.cuda or impl == "cudnn":
        return []
    width = _up(d, 32)
    scratch = [tape.empty((b, h, rows), "float32"), tape.empty((b, rows, h, width), "float32")]
    if kv_heads != h:
        later = impl in ("flash3", "flash4")
        shape, sums = ((b, kv_heads, _up(kv_len, 128), width), "float32") if later else ((b, kv_len, h, d), dtype)
        scratch += [tape.empty(shape, sums), tape.empty(shape, sums)]
    return scratch


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
