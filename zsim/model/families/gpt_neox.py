"""GPT-NeoX and Pythia: fused qkv per head, partial rotary embedding, attention and MLP in parallel or in sequence."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import Rotary, attend, causal_mask, positions, rotate_part
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net


class GPTNeoXAttention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.query_key_value = Linear(net, arch.hidden, 3 * arch.hidden, arch.attention_bias)
        self.dense = Linear(net, arch.hidden, arch.hidden, arch.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, _ = x.shape
        qkv = F.transpose(F.reshape(self.query_key_value(x), b, s, -1, 3 * d), 1, 2)
        q, k, v = F.split(qkv, [d, d, d])
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q, k = rotate_part(q, k, cos, sin)
        upcast = not self.net.older(4, 49)
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout, upcast=upcast)
        return self.dense(out), weights


class GPTNeoXMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.dense_h_to_4h = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.dense_4h_to_h = Linear(net, arch.intermediate, arch.hidden, bias=True)
        self.act = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_h_to_4h(x)
        x = self.act(x)
        return self.dense_4h_to_h(x)


class GPTNeoXLayer(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.input_layernorm = LayerNorm(net, arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, arch.hidden)
        self.post_attention_dropout = Dropout(net, arch.dropout)
        self.post_mlp_dropout = Dropout(net, arch.dropout)
        self.attention = GPTNeoXAttention(net)
        self.mlp = GPTNeoXMLP(net)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended, _weights = self.attention(self.input_layernorm(x), *context)
        attended = self.post_attention_dropout(attended)
        if self.net.arch.parallel:
            fed = self.mlp(self.post_attention_layernorm(x))
            fed = self.post_mlp_dropout(fed)
            return F.add(F.add(fed, attended), x)
        attended = F.add(attended, x)
        fed = self.mlp(self.post_attention_layernorm(attended))
        fed = self.post_mlp_dropout(fed)
        return F.add(fed, attended)


class GPTNeoXModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embed_in = Embedding(net, arch.vocab, arch.hidden)
        self.emb_dropout = Dropout(net, arch.dropout)
        self.layers = Blocks(net, arch.kinds, lambda index: GPTNeoXLayer(net))
        self.final_layer_norm = LayerNorm(net, arch.hidden)
        self.final_layer_norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.rotary_dim, "GPTNeoXRotaryEmbedding")

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        embeds = self.embed_in(ids)
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        x = self.emb_dropout(embeds)
        cos, sin = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, cos, sin, mask)
        return self.final_layer_norm(x)


class GPTNeoXForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.gpt_neox = GPTNeoXModel(net)
        self.lm_head = head(net, self.gpt_neox.embed_in)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.gpt_neox(ids), labels, self.lm_head)
