"""OPT: learned positions computed from the padding mask, biases everywhere, ReLU, pre-norm (350m: post-norm)."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import attend, causal_mask, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, LayerNorm, Linear, Module, Net, PositionEmbedding


class OPTLearnedPositionalEmbedding(PositionEmbedding):
    class_name = "OPTLearnedPositionalEmbedding"

    def forward(self, position_ids: Tensor) -> Tensor:
        return super().forward(F.pointwise(position_ids))  # + offset


class OPTAttention(Module):
    kind = "attention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h, bias = net.arch.hidden, net.arch.attention_bias
        self.k_proj = Linear(net, h, h, bias)
        self.v_proj = Linear(net, h, h, bias)
        self.q_proj = Linear(net, h, h, bias)
        self.out_proj = Linear(net, h, h, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        q = split_heads(F.scale(self.q_proj(x)), d)
        k, v = self.k_proj(x), self.v_proj(x)
        k, v = split_heads(k, d), split_heads(v, d)
        old = self.net.older(4, 49)
        upcast = not old or self.net.dtype == "float16"
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout, upcast=upcast, floor=old)
        return self.out_proj(out), weights


class OPTDecoderLayer(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.self_attn = OPTAttention(net)
        self.activation_fn = Activation(net, arch.activation)
        self.self_attn_layer_norm = LayerNorm(net, arch.hidden, affine=arch.norm_affine)
        self.fc1 = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.fc2 = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)
        self.final_layer_norm = LayerNorm(net, arch.hidden, affine=arch.norm_affine)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        arch = self.net.arch
        residual = x
        if arch.pre_norm:
            x = self.self_attn_layer_norm(x)
        x, _weights = self.self_attn(x, mask)
        x = F.dropout(x, arch.dropout)
        x = F.add(residual, x)
        if not arch.pre_norm:
            x = self.self_attn_layer_norm(x)
        shape = x.shape
        x = F.reshape(x, -1, shape[-1])
        residual = x
        if arch.pre_norm:
            x = self.final_layer_norm(x)
        x = self.fc1(x)
        x = self.activation_fn(x)
        x = self.fc2(x)
        x = F.dropout(x, arch.dropout)
        x = F.reshape(F.add(residual, x), *shape)
        if not arch.pre_norm:
            x = self.final_layer_norm(x)
        return x


class OPTDecoder(Module):
    kind = "embedding"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embed_tokens = Embedding(net, arch.vocab, arch.embed_width)
        self.embed_positions = OPTLearnedPositionalEmbedding(net, arch.positions + 2, arch.hidden)
        self.project_out = self.project_in = None
        if arch.embed_width != arch.hidden:
            self.project_out = Linear(net, arch.hidden, arch.embed_width)
            self.project_in = Linear(net, arch.embed_width, arch.hidden)
        self.final_layer_norm = None
        if arch.final_norm:
            self.final_layer_norm = LayerNorm(net, arch.hidden, affine=arch.norm_affine)
            self.final_layer_norm.role = "norm"
        self.layers = Blocks(net, arch.kinds, lambda index: OPTDecoderLayer(net))

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        embeds = self.embed_tokens(ids)
        ones = net.tape.empty(ids.shape, "float32")
        net.tape.memory(0, ones.nbytes)
        position_ids = F.pointwise(ones)  # cumsum
        position_ids = F.pointwise(F.pointwise(F.pointwise(position_ids, ones)), dtype="int64")
        if net.checkpointing != "none":
            net.tape.share(position_ids)
        mask = causal_mask(net, *ids.shape)
        position_embeds = self.embed_positions(position_ids)
        if self.project_in is not None:
            embeds = self.project_in(embeds)
        x = F.add(embeds, position_embeds)
        for block in self.layers:
            x = run_block(net, block, x, mask)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return x


class OPTModel(Module):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.decoder = OPTDecoder(net)


class OPTForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = OPTModel(net)
        self.lm_head = head(net, self.model.decoder.embed_tokens)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model.decoder(ids), labels, self.lm_head)
