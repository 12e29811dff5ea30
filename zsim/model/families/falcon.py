"""Falcon: 7b (one key head, parallel, one norm), 40b and 180b (grouped, parallel, two norms), rw (sequential, alibi).

Attention is taken as its FlashAttention path; the models with alibi have none and are refused.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, positions, rotate
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net


class FalconLinear(Linear):
    """`x @ weight.T + bias`: the bias is added by a kernel of its own."""

    class_name = "FalconLinear"

    def forward(self, x: Tensor) -> Tensor:
        out = P.linear(x, self.weight)
        return out if self.bias is None else F.add(out, self.bias)


class FalconAttention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        width = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        self.query_key_value = FalconLinear(net, arch.hidden, width, arch.attention_bias)
        self.dense = FalconLinear(net, arch.hidden, arch.hidden, arch.attention_bias)
        self.attention_dropout = Dropout(net, arch.attention_dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        arch = self.net.arch
        b, s, h = x.shape
        q, k, v = self._split(self.query_key_value(x))
        q, k, v = (F.reshape(F.transpose(t, 1, 2), b, -1, s, arch.head_dim) for t in (q, k, v))
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = flash_attention(q, k, v, self.net.attention)
        out = F.reshape(F.transpose(out, 1, 2), b, s, h)
        return self.dense(out)

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, heads, d] each. Grouped keys and values are repeated, one key head is picked by index: copies."""
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, _ = fused.shape
        if arch.grouped:
            grouped = F.reshape(fused, b, s, arch.kv_heads, -1, d)
            q = F.narrow(grouped, 3, arch.heads // arch.kv_heads)
            k, v = (F.repeat_heads(F.pick(grouped, 3), arch.heads // arch.kv_heads, 3) for _ in range(2))
            return tuple(F.reshape(t, b, s, arch.heads, d) for t in (q, k, v))  # type: ignore[return-value]
        if arch.kv_heads == arch.heads:
            fused = F.reshape(fused, b, s, arch.heads, 3, d)
            return F.select(fused, 3), F.select(fused, 3), F.select(fused, 3)
        heads = F.reshape(fused, b, s, arch.heads + 2, d)
        return F.narrow(heads, 2, arch.heads), F.pick(heads, 2), F.pick(heads, 2)


class FalconMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.dense_h_to_4h = FalconLinear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.act = Activation(net, arch.activation)
        self.dense_4h_to_h = FalconLinear(net, arch.intermediate, arch.hidden, arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.dense_h_to_4h(x))
        return self.dense_4h_to_h(x)


class FalconDecoderLayer(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.self_attention = FalconAttention(net)
        self.mlp = FalconMLP(net)
        if not arch.parallel:
            self.post_attention_layernorm = LayerNorm(net, arch.hidden)
            self.input_layernorm = LayerNorm(net, arch.hidden)
        elif arch.two_norms:
            self.ln_attn = LayerNorm(net, arch.hidden)
            self.ln_mlp = LayerNorm(net, arch.hidden)
        else:
            self.input_layernorm = LayerNorm(net, arch.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        arch = self.net.arch
        residual = x
        if arch.two_norms:
            attention_in = self.ln_attn(x)
            mlp_in = self.ln_mlp(x)
        else:
            attention_in = mlp_in = self.input_layernorm(x)
        attended = self.self_attention(attention_in, cos, sin)
        if not arch.parallel:
            residual = F.add(residual, F.dropout(attended, arch.attention_dropout))
            mlp_in = self.post_attention_layernorm(residual)
        fed = self.mlp(mlp_in)
        if arch.parallel:
            fed = F.add(fed, attended, in_place=True)
        return F.add(residual, F.dropout(fed, arch.dropout))


class FalconModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.word_embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.h = Blocks(net, arch.kinds, lambda index: FalconDecoderLayer(net))
        self.ln_f = LayerNorm(net, arch.hidden)
        self.ln_f.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, "FalconRotaryEmbedding")

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.word_embeddings(ids)  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids)
        cos, sin = self.rotary_emb(x, position_ids)
        for block in self.h:
            x = run_block(net, block, x, cos, sin)
        return self.ln_f(x)


class FalconForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        if net.attention == "eager":
            raise NotModeled("Falcon with eager attention", field="attention", accepted="flash")
        self.transformer = FalconModel(net)
        self.lm_head = head(net, self.transformer.word_embeddings)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)
