"""Blocks of torch.nn.MultiheadAttention with their norms behind the residuals, as in nn.TransformerEncoderLayer.

The model of DeepSpeedExamples training/bf16_master_weight/train.py: learned positions, biases everywhere, no mask, a
head that is not tied, and a loss of every position in whatever type the logits have.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, LayerNorm, Linear, Module, Net, Weight
from zsim.model.loss import cross_entropy


class MultiheadAttention(Module):
    """torch 2.13 nn/functional.py, multi_head_attention_forward, with one input and its default need_weights=True: no
    fused kernel. The projection out is not called as a module: its weights are read here."""

    kind = "softmax"
    class_name = "MultiheadAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h = net.arch.hidden
        self.in_proj_weight = Weight(net, 3 * h, h)
        self.in_proj_bias = Weight(net, 3 * h)
        for name, shape in (("out_proj.weight", (h, h)), ("out_proj.bias", (h,))):
            setattr(self, name, Weight(net, *shape))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, h = x.shape
        heads, d = self.net.arch.heads, self.net.arch.head_dim
        packed = P.linear(F.transpose(x, 0, 1), self.in_proj_weight, self.in_proj_bias)  # [s, b, 3 h]
        packed = F.contiguous(F.permute(F.reshape(packed, s, b, 3, h), 2, 0, 1, 3))
        q, k, v = (F.transpose(F.reshape(F.select(packed, 0), s, b * heads, d), 0, 1) for _ in range(3))
        del packed
        weights = P.softmax(_product(F.scale(q), F.transpose(k, 1, 2)))
        out = _product(weights, v)
        flat = F.reshape(F.contiguous(F.transpose(out, 0, 1)), s * b, h)
        out = P.linear(flat, self.weights["out_proj.weight"], self.weights["out_proj.bias"])
        mean = self.net.tape.empty((b, s, s), weights.dtype)  # of all heads, returned
        self.net.tape.memory(weights.nbytes, mean.nbytes)
        return F.transpose(F.reshape(out, s, b, h), 0, 1), mean


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm` of [n, m, k] and [n, k, j]."""
    (n, m, k), j = a.shape, b.shape[-1]
    return F.reshape(P.matmul(F.reshape(a, 1, n, m, k), F.reshape(b, 1, n, k, j)), n, m, j)


class FeedForward(Module):
    class_name = "Sequential"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h, wide = net.arch.hidden, net.arch.intermediate
        self.layers = (Linear(net, h, wide, bias=True), Activation(net, "gelu"), Linear(net, wide, h, bias=True))
        for index, layer in enumerate(self.layers):
            setattr(self, str(index), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(Module):
    kind = "residual"
    class_name = "SimpleTransformerBlock"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.attention = MultiheadAttention(net)
        self.norm1 = LayerNorm(net, net.arch.hidden)
        self.norm2 = LayerNorm(net, net.arch.hidden)
        self.ff = FeedForward(net)

    def forward(self, x: Tensor) -> Tensor:
        attended, _weights = self.attention(x)
        x = self.norm1(F.add(x, attended))
        fed = self.ff(x)
        return self.norm2(F.add(x, fed))


class SimpleTransformerModel(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "SimpleTransformerModel"
        self.embedding = Embedding(net, arch.vocab, arch.hidden)
        self.pos_embedding = Embedding(net, arch.positions, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net))
        self.output_proj = head(net, self.embedding, bias=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = F.pointwise(self.net.tape.empty((1, ids.shape[1]), "int64"))
        places = F.expand(places, ids.shape)
        x = F.add(self.embedding(ids), self.pos_embedding(places))
        for block in self.layers:
            x = run_block(self.net, block, x)
        logits = self.output_proj(x)
        self.net.tape.share(logits)  # the loop's own variable
        flat = F.reshape(logits, -1, logits.shape[-1])
        return cross_entropy(F.wide(flat), F.reshape(labels, -1))
