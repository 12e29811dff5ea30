"""Llama and its relatives: Mistral, Qwen2, Qwen3, and the MoE ones that only replace the MLP.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_llama.py` ...).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.decoder import CausalLM, causal_mask, head, positions, run_block
from zsim.model.layers import Activation, Blocks, Embedding, Linear, Module, Net, RMSNorm, Rotary, attend, rotate, split_heads
from zsim.model.tape import Tensor


class Attention(Module):
    kind = "rotary"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}Attention"
        self.q_proj = Linear(net, arch.hidden, arch.heads * arch.head_dim, arch.attention_bias)
        self.k_proj = Linear(net, arch.hidden, arch.kv_heads * arch.head_dim, arch.attention_bias)
        self.v_proj = Linear(net, arch.hidden, arch.kv_heads * arch.head_dim, arch.attention_bias)
        self.o_proj = Linear(net, arch.heads * arch.head_dim, arch.hidden, arch.output_bias)
        if arch.qk_norm:
            self.q_norm = RMSNorm(net, arch.head_dim, f"{prefix}RMSNorm")
            self.k_norm = RMSNorm(net, arch.head_dim, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        d = self.net.arch.head_dim
        if self.net.arch.qk_norm:
            q = F.transpose(self.q_norm(F.reshape(self.q_proj(x), b, s, -1, d)), 1, 2)
            k = F.transpose(self.k_norm(F.reshape(self.k_proj(x), b, s, -1, d)), 1, 2)
        else:
            q = split_heads(self.q_proj(x), d)
            k = split_heads(self.k_proj(x), d)
        v = split_heads(self.v_proj(x), d)
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attend(self.net, q, k, v, mask, self.net.arch.window)
        return self.o_proj(F.reshape(out, b, s, -1))


class MLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}MLP"
        self.gate_proj = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.up_proj = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.down_proj = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x)))


class Block(Module):
    kind = "residual"
    role = "block"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Attention(net, prefix)
        self.mlp = MLP(net, prefix)
        self.input_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x = self.self_attn(x, cos, sin, mask)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, x)


class Model(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}Model"
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net, prefix, index))
        self.norm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.embed_tokens(ids)  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids.shape[1])
        mask = causal_mask(net, *ids.shape)
        cos, sin = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, cos, sin, mask)
        return self.norm(x)


class LlamaForCausalLM(CausalLM):
    def __init__(self, net: Net, prefix: str = "Llama") -> None:
        super().__init__(net)
        self.class_name = f"{prefix}ForCausalLM"
        self.model = Model(net, prefix)
        self.lm_head = head(net, self.model.embed_tokens)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model(ids), labels, self.lm_head)
