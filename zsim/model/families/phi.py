"""Phi (1, 1.5, 2): partial rotary embedding, one LayerNorm, attention and MLP in parallel. And Phi-3: a Llama with
fused projections and dropouts."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import liger
from zsim.model.attention import Rotary, attend, causal_mask, positions, rotate, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families import llama
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net, RMSNorm


class PhiAttention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = Linear(net, arch.hidden, q, bias=True)
        self.k_proj = Linear(net, arch.hidden, kv, bias=True)
        self.v_proj = Linear(net, arch.hidden, kv, bias=True)
        self.dense = Linear(net, q, arch.hidden, bias=True)
        if arch.qk_norm:
            self.q_layernorm = LayerNorm(net, arch.head_dim)
            self.k_layernorm = LayerNorm(net, arch.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        q, k, v = split_heads(self.q_proj(x), d), split_heads(self.k_proj(x), d), split_heads(self.v_proj(x), d)
        if arch.qk_norm:
            q = self.q_layernorm(q)
            k = self.k_layernorm(k)
        # the halves stay alive, by their names, until attention is done
        cos, sin, rotary = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1), arch.rotary_dim
        q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, d - rotary)
        k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, d - rotary)
        q_turned, k_turned = rotate(q_turned, cos, sin), rotate(k_turned, cos, sin)
        q, k = F.cat((q_turned, q_passed)), F.cat((k_turned, k_passed))
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout)
        return self.dense(out), weights


class PhiMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.activation_fn = Activation(net, arch.activation)
        self.fc1 = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.fc2 = Linear(net, arch.intermediate, arch.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.activation_fn(x)
        return self.fc2(x)


class PhiDecoderLayer(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.self_attn = PhiAttention(net)
        self.mlp = PhiMLP(net)
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.resid_dropout = Dropout(net, net.arch.dropout)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        attended, _weights = self.self_attn(x, *context)
        attended = self.resid_dropout(attended)
        fed = self.resid_dropout(self.mlp(x))
        return F.add(F.add(attended, fed), residual)


class PhiModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: PhiDecoderLayer(net))
        self.rotary_emb = Rotary(net, arch.rotary_dim, "PhiRotaryEmbedding")
        self.embed_dropout = Dropout(net, arch.embedding_dropout)
        self.final_layernorm = LayerNorm(net, arch.hidden)
        self.final_layernorm.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = self.embed_tokens(ids)
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        x = embeds = self.embed_dropout(x)  # noqa: F841  the name outlives the blocks
        cos, sin = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, cos, sin, mask)
        return self.final_layernorm(x)


class PhiForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = PhiModel(net)
        self.lm_head = head(net, self.model.embed_tokens, bias=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model(ids), labels, self.lm_head)


def _rotate_each(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_part`, but each of the two is concatenated before the other is rotated."""
    rotary = cos.shape[-1]
    q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, q.shape[-1] - rotary)
    k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, k.shape[-1] - rotary)
    q = F.cat((rotate(q_turned, cos, sin), q_passed))
    return q, F.cat((rotate(k_turned, cos, sin), k_passed))


class Phi3Attention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.widths = [arch.heads * arch.head_dim, *[arch.kv_heads * arch.head_dim] * 2]
        self.o_proj = Linear(net, self.widths[0], arch.hidden)
        self.qkv_proj = Linear(net, arch.hidden, sum(self.widths))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        qkv = self.qkv_proj(x)
        q, k, v = (F.narrow(qkv, -1, width) for width in self.widths)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        q, k = _rotate_each(q, k, F.unsqueeze(cos, 1), F.unsqueeze(sin, 1))
        out, weights = attend(self.net, q, k, v, mask, arch.window, arch.attention_dropout)
        return self.o_proj(out), weights


class Phi3MLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.gate_up_proj = Linear(net, arch.hidden, 2 * arch.intermediate)
        self.down_proj = Linear(net, arch.intermediate, arch.hidden)
        self.activation_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        width = self.net.arch.intermediate
        up = self.gate_up_proj(x)
        gate, up = F.split(up, [width, width])
        if self.net.kernels == "liger":  # LigerPhi3SwiGLUMLP
            return self.down_proj(liger.gated(gate, up))
        up = F.mul(up, self.activation_fn(gate))
        return self.down_proj(up)


class Phi3DecoderLayer(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        width = net.arch.hidden
        self.self_attn = Phi3Attention(net)
        self.mlp = Phi3MLP(net)
        self.input_layernorm = RMSNorm(net, width, "Phi3RMSNorm")
        self.post_attention_layernorm = RMSNorm(net, width, "Phi3RMSNorm")
        self.resid_attn_dropout = Dropout(net, net.arch.dropout)
        self.resid_mlp_dropout = Dropout(net, net.arch.dropout)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, self.resid_attn_dropout(x))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, self.resid_mlp_dropout(x))


class Phi3Model(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.dim = net.arch.rotary_dim

    def block(self, prefix: str, index: int) -> Module:
        return Phi3DecoderLayer(self.net)


class Phi3ForCausalLM(llama.LlamaForCausalLM):
    def decoder(self, prefix: str) -> llama.Model:
        return Phi3Model(self.net, prefix)
