"""What all causal language models of transformers share: embedding, blocks, final norm, head and loss."""

from __future__ import annotations

from functools import partial
from typing import Any

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model.checkpoint import checkpoint
from zsim.model.graph import ITEM, Tensor
from zsim.model.layers import Embedding, Linear, Module, Net
from zsim.model.loss import cross_entropy, cross_entropy_compiled, cross_entropy_of_logits, linear_cross_entropy
from zsim.model.preference import preference_loss


def run_block(net: Net, block: Module, *tensors: Tensor | None, shared: dict[Any, Any] | None = None) -> Any:
    """Call a block on the tensors that are there, checkpointed if the workload says so. `shared`: comes first, where
    blocks hand tensors on to each other that way."""
    present = [tensor for tensor in tensors if tensor is not None]
    run = block if shared is None else partial(block, shared)
    if not block.checkpointed:
        return run(*present)
    return checkpoint(run, present, net.checkpointing, net.breaks_graphs, net.early_stop)


class Head(Linear):
    """The output projection. Under the fused loss it is called with the labels and returns the loss."""

    role = "head"
    logits = True
    kind = "cross_entropy"

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            self.net.tape.label = Linear.kind
            return super().forward(hidden)
        if self.bias is not None:
            raise NotModeled("the fused loss of a head with a bias", field="loss", accepted="hf")
        _padded, target = shifted(self.net, labels)
        return linear_cross_entropy(F.reshape(hidden, -1, hidden.shape[-1]), self.weight, target)


class CausalLM(Module):
    """The root. A family's subclass makes its decoder and `self.lm_head`, and calls `finish`."""

    kind = "cross_entropy"
    role = "root"
    logits = True

    def finish(self, hidden: Tensor, labels: Tensor, head: Linear) -> Tensor:
        """Head and loss of transformers 5.24 (`ForCausalLMLoss`: logits in float32), or Liger's fused one."""
        if self.net.preference is not None:
            return preference_loss(self.net, self.logits_of(hidden, head), labels)
        if self.net.loss == "fused":
            return head(hidden, labels)
        logits = self.logits_of(hidden, head)
        own_loss = self.net.kernels not in ("torch", "liger", "fla", "mamba-ssm")
        if own_loss or (self.net.loss in ("copied", "copied_held") and not self.net.loss_is_a_function):
            logits = F.to(logits, "float32")  # under the same name: the others are gone
        loss = (shortened_loss if own_loss else causal_loss)(self.net, logits, labels)
        cache = wide_cache(self.net, labels) if self.net.wide_cache else ()  # noqa: F841  handed back beside the logits
        return loss

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return head(hidden)


def wide_cache(net: Net, labels: Tensor) -> list[Tensor]:
    """Keys and values of all layers, cast to float32."""
    shape = (labels.shape[0], net.arch.kv_heads, labels.shape[1], net.arch.head_dim)
    cache = [net.tape.empty(shape, "float32") for _ in range(2 * len(net.arch.kinds))]
    for tensor in cache:
        net.tape.memory(tensor.numel * ITEM[net.dtype], tensor.nbytes, "copy")
    return cache


def head(net: Net, embedding: Embedding, bias: bool = False) -> Head:
    """The output projection, sharing the embedding's weight if the model ties them."""
    linear = Head(net, net.arch.hidden, net.arch.vocab, bias)
    if net.arch.tied:
        linear.weight = embedding.weight
    return linear


def causal_loss(net: Net, logits: Tensor, labels: Tensor) -> Tensor:
    logits = cast_and_held(net, logits)
    if net.copies_logits:
        short, target = all_but_last(logits), F.reshape(all_but_last(labels), -1)
        flat = F.reshape(short, -1, short.shape[-1])
        if net.loss == "copied_compiled":
            return cross_entropy_compiled(flat, target)
        return cross_entropy(F.to(flat, "float32") if net.loss == "copied_cast" else flat, target)
    _padded, target = shifted(net, labels)
    logits = F.reshape(logits, -1, logits.shape[-1])
    return (cross_entropy_compiled if net.loss == "compiled" else cross_entropy)(logits, target)


def cast_and_held(net: Net, logits: Tensor) -> Tensor:
    """As the loss takes them, and shared with the training loop where that holds them."""
    if net.loss not in ("uncast", "uncast_held", "copied_uncast", "copied_cast", "compiled", "copied_compiled"):
        logits = F.to(logits, "float32")
    if net.loss in ("held", "uncast_held", "copied_held"):
        logits.tape.share(logits)
    return logits


def all_but_last(tokens: Tensor) -> Tensor:
    """Of [batch, tokens, ...]; a copy, but of a single sequence, where they are contiguous."""
    return F.contiguous(F.narrow(tokens, 1, tokens.shape[1] - 1))


def shortened_loss(net: Net, logits: Tensor, labels: Tensor) -> Tensor:
    """fms-acceleration's `FastCrossEntropyLoss` or that of flash-attn in transformers 4.35 to 4.45, whose models cast
    their logits to float32 before they copy all tokens but the last."""
    short, target = all_but_last(logits), F.reshape(all_but_last(labels), -1)
    return cross_entropy_of_logits(F.reshape(short, -1, short.shape[-1]), target, in_place=net.kernels == "unsloth")


def shifted(net: Net, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels padded by one column, and the targets in it, flat: token n predicts token n + 1.

    Where ranks share a sequence, its labels were shifted before it was cut (UlyssesSPDataLoaderAdapter).
    """
    if net.sequence_parallel_size > 1:
        return labels, F.reshape(labels, -1)
    b, s = labels.shape
    padded = labels.tape.empty((b, s + 1), labels.dtype)
    labels.tape.memory(labels.nbytes, padded.nbytes)
    return padded, F.reshape(F.contiguous(F.narrow(padded, 1, s)), -1)
