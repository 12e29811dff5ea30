"""What `torch.compile` makes of memory-bound kernels: chains between matrix products become one kernel each.

`SHARE` is the traffic that is left, by kind, counted on a Llama block in bfloat16 (bytes per element of the block's
input or of the MLP's width): what a fused kernel must read and write once, over what the eager kernels of this package
move. Norm forward 4 of 36, backward 10 of 102 (the weight's gradient reads twice); rotary 4 of 20, both ways; SiLU and
product forward 6 of 10, backward 10 of 18; a residual sum saves the read that the next norm shares with it; sums of
gradients and transposes disappear into what reads them, all but one of each pair. Eager attention's softmax with its
scale, mask and casts forward 4 of 28, backward 6 of 26. An activation without a gate reads what a product made and
writes as much, backward it reads that and a gradient, however many kernels it has (NewGELUActivation: eight). Loss
and logits are outside the compiled blocks (torchtitan and fms-fsdp compile each block), embeddings and fused attention
are kernels of their own.

What is saved shrinks likewise: a norm keeps its input as it came, an activation what matrix products made; the rest is
computed again in the backward kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zsim.model.kernels import DTYPE_BYTES, Memory, Work
from zsim.model.spec import Saved

SHARE = {
    "norm": 0.1,
    "rotary": 0.2,
    "activation": 0.57,
    "softmax": 0.2,
    "residual": 0.8,
    "gemm": 0.5,
    "copy": 0.5,
    "cast": 0.5,
    "pointwise": 0.5,
}


def fused(kernels: Sequence[Work], ungated: int = 0, backward: bool = False) -> tuple[Work, ...]:
    """The kernels of one piece of work as compiled. `ungated`: bytes of what an activation without a gate makes."""

    def activation(kernel: Memory) -> Memory:
        return Memory(kernel.label, (1 + backward) * ungated, ungated, 1, kernel.flops)

    return tuple(
        kernel
        if not isinstance(kernel, Memory)
        else activation(kernel)
        if ungated and kernel.label == "activation"
        else _fused(kernel)
        for kernel in kernels
    )


def ungated_bytes(label: str, saved: Sequence[Saved], dtype: str) -> int:
    """Bytes of the result of an activation without a gate, by what autograd keeps for it; 0: of other work."""
    sizes = [prod(tensor.shape) for tensor in saved] if label.startswith("activation") else []
    return round(max(sizes, default=0) * DTYPE_BYTES[dtype])


def _fused(kernel: Memory) -> Memory:
    share = SHARE.get(kernel.label)
    if share is None:
        return kernel
    return Memory(kernel.label, share * kernel.read_bytes, share * kernel.write_bytes, 1, kernel.flops)


def kept(label: str, saved: Sequence[Saved], dtype: str) -> tuple[Saved, ...]:
    """What autograd keeps of the tensors that a piece of eager work saves; `dtype` is the activations'."""
    if label.startswith("norm"):
        whole = [tensor for tensor in saved if tensor.shape[-1] > 1]
        rest = tuple(tensor for tensor in saved if tensor.shape[-1] <= 1)
        return (Saved(whole[0].name, whole[0].shape, dtype), *rest) if whole else rest
    if label.startswith("activation"):
        # Products write [tokens, width]; what pointwise kernels make has the model's shape [batch, sequence, width].
        return tuple(tensor for tensor in saved if len(tensor.shape) == 2)
    return tuple(saved)
