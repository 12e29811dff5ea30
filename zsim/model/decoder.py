"""What all causal language models of transformers share: embedding, blocks, final norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.checkpoint import checkpoint
from zsim.model.layers import Embedding, Linear, Module, Net
from zsim.model.tape import Tensor


def run_block(net: Net, block: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Call a block on the tensors that are there, checkpointed if the workload says so."""
    present = [tensor for tensor in tensors if tensor is not None]
    if net.checkpointing == "none":
        return block(*present)
    return checkpoint(block, present, net.checkpointing)


def positions(net: Net, s: int) -> Tensor:
    """`torch.arange(s) + 0`, [1, s] int64."""
    ids = F.pointwise(net.tape.empty((1, s), "int64"))
    if net.checkpointing != "none":  # an argument of every block
        net.tape.share(ids)
    return ids


def causal_mask(net: Net, b: int, s: int) -> Tensor | None:
    """The float mask [b, 1, s, s] that eager attention adds; fused attention needs none."""
    if net.attention != "eager":
        return None
    allowed = net.tape.empty((1, 1, s, s), "bool")
    net.tape.memory(0, allowed.nbytes)
    mask = F.pointwise(allowed, shape=(b, 1, s, s), dtype=net.dtype)
    if net.checkpointing != "none":
        net.tape.share(mask)
    return mask


class CausalLM(Module):
    """The root. A family's subclass makes `self.model` (or another name), `self.lm_head`, and calls `finish`."""

    kind = "cross_entropy"
    role = "root"
    logits = True

    def finish(self, hidden: Tensor, labels: Tensor, head: Linear) -> Tensor:
        """Head and loss: `ForCausalLMLoss` (transformers 5.24, loss_utils.py), logits in float32."""
        logits = head(hidden)
        return causal_loss(logits, labels)


def head(net: Net, embedding: Embedding, bias: bool = False) -> Linear:
    """The output projection, sharing the embedding's weight if the model ties them."""
    linear = Linear(net, net.arch.hidden, net.arch.vocab, bias)
    if net.arch.tied:
        linear.weight = embedding.weight
    linear.role, linear.logits = "head", True
    return linear


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    logits = F.to(logits, "float32")
    b, s = labels.shape
    padded = labels.tape.empty((b, s + 1), labels.dtype)
    labels.tape.memory(labels.nbytes, padded.nbytes)
    shifted = F.contiguous(F.narrow(padded, 1, s))
    logits = F.reshape(logits, -1, logits.shape[-1])
    shifted = F.reshape(shifted, -1)
    return P.cross_entropy(logits, shifted)
