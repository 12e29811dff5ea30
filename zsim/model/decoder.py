"""What all causal language models of transformers share: embedding, blocks, final norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.checkpoint import checkpoint
from zsim.model.graph import Tensor
from zsim.model.layers import Embedding, Linear, Module, Net


def run_block(net: Net, block: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Call a block on the tensors that are there, checkpointed if the workload says so."""
    present = [tensor for tensor in tensors if tensor is not None]
    if net.checkpointing == "none":
        return block(*present)
    return checkpoint(block, present, net.checkpointing)


class CausalLM(Module):
    """The root. A family's subclass makes `self.model` (or another name), `self.lm_head`, and calls `finish`."""

    kind = "cross_entropy"
    role = "root"
    logits = True

    def finish(self, hidden: Tensor, labels: Tensor, head: Linear) -> Tensor:
        """Head and loss of transformers 5.24 (`ForCausalLMLoss`: logits in float32)."""
        logits = self.logits_of(hidden, head)
        return causal_loss(logits, labels)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return head(hidden)


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
