"""Mixtures of experts that change a few lines of others: GLM-4.5 and GLM-4.6 (`glm4_moe`), Granite MoE.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_glm4_moe.py`,
`modeling_granitemoe.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, rotate_part
from zsim.model.families import deepseek, llama, moe, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import Module, Net, RMSNorm, Weight

# ---------------------------------------------------------------------------------------------------- GLM


class GlmAttention(llama.Attention):
    """Rotates a part of each head; all three are projected before queries and keys are normed."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch, (b, s, _) = self.net.arch, x.shape
        q, k, v = (F.reshape(y, b, s, -1, arch.head_dim) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if arch.qk_norm:
            q = self.children["q_norm"](q)
            k = self.children["k_norm"](k)
        return F.transpose(q, 1, 2), F.transpose(k, 1, 2), F.transpose(v, 1, 2)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_part(q, k, cos, sin)


class GlmBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return GlmAttention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        sparse = self.net.arch.kinds[index].sparse
        return deepseek.MoE(self.net, prefix) if sparse else llama.MLP(self.net, prefix)


class GlmModel(deepseek.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        llama.Model.__init__(self, net, prefix)
        self.rotary_emb = Rotary(net, net.arch.rotary_dim, f"{prefix}RotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return GlmBlock(self.net, prefix, index)


# ---------------------------------------------------------------------------------------------------- Granite


class GraniteRouter(Module):
    """The largest logits, and of these the softmax."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.to(P.linear(x, self.weight), "float32")
        values, chosen = P.topk(logits, self.net.arch.experts.top_k)
        return logits, F.to(P.softmax(values), x.dtype), chosen


class GraniteMoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}MoE"
        self.router = GraniteRouter(net, prefix)
        self.experts = moe.Experts(net, prefix)

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.router(flat)
        return F.reshape(self.experts(flat, chosen, weights), *x.shape)


class GraniteBlock(Module):
    """What attention and experts return is multiplied before it is added."""

    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = llama.Attention(net, prefix, index)
        self.input_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.block_sparse_moe = GraniteMoE(net, prefix)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, F.scale(x))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.block_sparse_moe(x)
        return F.add(residual, F.scale(x))


class GraniteModel(relatives.GraniteModel):
    def block(self, prefix: str, index: int) -> Module:
        return GraniteBlock(self.net, prefix, index)


MODELS: dict[str, tuple[str, type[llama.Model]]] = {  # model_type -> the prefix of its class names, its decoder
    "glm4_moe": ("Glm4Moe", GlmModel),
    "granitemoe": ("GraniteMoe", GraniteModel),
}


class MoeRelativeForCausalLM(relatives.RelativeForCausalLM):
    models = MODELS
