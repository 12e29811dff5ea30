"""UMT5 (transformers 5.24, modeling_umt5.py): T5 whose every layer learns a bias of its own."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import causal_mask, split_heads
from zsim.model.decoder import run_block
from zsim.model.families import t5
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Embedding, Net


class Attention(t5.Attention):
    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        q = split_heads(self.q(x), d)
        read = x if memory is None else memory
        k, v = self.k(read), self.v(read)
        k, v = split_heads(k, d), split_heads(v, d)
        bias = self._zeros(q, k) if self.crosses else self._bias(q.shape[2])
        out, weights = self._attended(q, k, v, mask, bias)
        out = F.contiguous(F.reshape(out, *x.shape[:2], -1))
        return self.o(out), weights

    def _zeros(self, q: Tensor, k: Tensor) -> Tensor:
        zeros = self.net.tape.empty((1, q.shape[1], q.shape[2], k.shape[2]), q.dtype)
        self.net.tape.memory(0, zeros.nbytes, "copy")
        return zeros

    def _far(self, behind: Tensor) -> tuple[Tensor, Tensor | None]:
        far = F.pointwise(F.pointwise(F.pointwise(F.pointwise(behind, dtype="float32"))))
        far = F.pointwise(far)
        return F.pointwise(far, dtype="int64"), far


class AttentionLayer(t5.AttentionLayer):
    def forward(  # type: ignore[override]
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.layer_norm(x)
        out, weights = self.children[self.attention](normed, memory, mask)
        return F.add(x, self.dropout(out)), weights


class Block(t5.Block):
    attention, attention_layer = Attention, AttentionLayer

    def __init__(self, net: Net, prefix: str, decodes: bool) -> None:
        super().__init__(net, prefix, decodes, first=True)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:  # type: ignore[override]
        """`given`, as far as they are there: mask, what the encoder returned."""
        rest = list(given)
        layers = list(self.layer.children.values())
        mask = rest.pop(0) if self.decodes and self.net.attention == "eager" else None
        x, _weights = layers[0](x, None, mask)
        x, bound = t5.finite(x)
        if self.decodes:
            x, _weights = layers[1](x, rest[0], None)
            x, bound = t5.finite(x)  # noqa: RUF059  which lives on
        return t5.finite(layers[-1](x))[0]


class Stack(t5.Stack):
    def blocks(self, prefix: str) -> Blocks:
        kinds = t5.sharing(self.net) if self.decodes else self.net.arch.kinds
        return Blocks(self.net, kinds, lambda _index: Block(self.net, prefix, self.decodes))

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        net = self.net
        embeds = self.embed_tokens(ids)  # the name outlives the blocks
        mask = causal_mask(net, *ids.shape) if self.decodes and net.attention == "eager" else None
        x = self.dropout(embeds)
        for block in self.block:
            x = run_block(net, block, x, mask, memory)
        x = self.final_layer_norm(x)
        return self.dropout(x)


class UMT5ForConditionalGeneration(t5.T5ForConditionalGeneration):
    def stack(self, net: Net, prefix: str, shared: Embedding, decodes: bool) -> Stack:
        return Stack(net, prefix, shared, decodes)
