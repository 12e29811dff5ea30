"""Mixtures of experts that change a few lines of others: GLM-4.5 and GLM-4.7-Flash (`glm4_moe`, `glm4_moe_lite`),
dots.llm1, Solar Open, K-EXAONE, MiniMax-M2, HunYuan-A13B, ERNIE 4.5, Granite MoE.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_glm4_moe.py` ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import rotate_part
from zsim.model.families import deepseek, glm, llama, moe, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Linear, Module, Net, RMSNorm, Weight

# ---------------------------------------------------------------------------------------------------- GLM, EXAONE


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


class ExaoneMoE(deepseek.MoE):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}SparseMoEBlock"


# ---------------------------------------------------------------------------------------------------- MiniMax


class PartAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_part(q, k, cos, sin)


class MiniMaxRouter(Module):
    """Sigmoid scores in float32; their bias is the block's."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def buffers_bytes(self) -> int:
        return 4 * self.net.arch.experts.experts  # e_score_correction_bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = P.linear(x, self.weight)
        scores = F.activation_by_result(F.to(logits, "float32"))
        biased = F.pointwise(scores)
        _best, chosen = P.topk(biased, self.net.arch.experts.top_k)
        values = P.gather_last(scores, chosen)
        return logits, F.divide(values, F.sum_last(values), in_place=True), chosen


class MiniMaxMoE(moe.SparseMoeBlock):
    router = MiniMaxRouter


# ---------------------------------------------------------------------------------------------------- HunYuan


class HunYuanGate(moe.Router):
    """A Linear with softmax and choice behind it."""

    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}Gate"
        self.wg = Linear(net, net.arch.hidden, net.arch.experts.experts)
        self.mixtral = False

    def scored(self, x: Tensor) -> Tensor:
        return self.wg(x)


class HunYuanMoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Moe"
        self.gate = HunYuanGate(net, prefix)
        self.experts = moe.Experts(net, prefix)
        self.shared_mlp = llama.MLP(net, prefix)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_mlp(x)
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.gate(flat)
        out = F.reshape(self.experts(flat, chosen, weights), *x.shape)
        return F.add(out, shared)


def hunyuan_experts(net: Net, prefix: str) -> Module:
    """As modules where transformers is older than 5."""
    if net.arch.experts.modules:
        from zsim.model.families import moe_modules

        return moe_modules.HunYuanMoE(net, prefix)
    return HunYuanMoE(net, prefix)


# ---------------------------------------------------------------------------------------------------- ERNIE


class ErnieStatics(Module):
    """Adds the bias that spreads tokens over experts: a parameter that is not trained."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Statics"
        self.e_score_correction_bias = Weight(net, 1, net.arch.experts.experts)
        self.e_score_correction_bias.frozen = True

    def forward(self, scores: Tensor) -> Tensor:
        bias = self.e_score_correction_bias
        return F.add(scores, F.view_of(bias, bias.shape[1:], (1,)))


class ErnieRouter(Module):
    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)
        self.moe_statics = ErnieStatics(net, prefix)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = P.linear(F.to(x, "float32"), F.to(self.weight, "float32"))
        scores = P.softmax(logits)
        _best, chosen = P.topk(self.moe_statics(scores), self.net.arch.experts.top_k)
        values = P.gather_last(scores, chosen)
        values = F.divide(values, F.activation(F.sum_last(values)))  # clamped
        return logits, F.to(values, x.dtype), chosen


class ErnieMoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        shared = net.arch.experts.shared
        self.class_name = f"{prefix}SparseMoeBlock"
        self.gate = ErnieRouter(net, prefix)
        self.experts = moe.Experts(net, prefix)
        self.shared_experts = llama.MLP(net, prefix, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        shared = self.shared_experts(flat) if self.shared_experts else None
        _logits, weights, chosen = self.gate(flat)
        out = self.experts(flat, chosen, weights)
        return F.reshape(out if shared is None else F.add(out, shared), *x.shape)


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


class GraniteShared(Module):
    """The expert that every token goes through."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name, self.width = f"{prefix}MLP", net.arch.experts.shared
        self.activation = Activation(net, net.arch.activation)
        self.input_linear = Linear(net, net.arch.hidden, 2 * self.width)
        self.output_linear = Linear(net, self.width, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.split(self.input_linear(x), [self.width, self.width])
        return self.output_linear(F.mul(self.activation(gate), up))


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
        self.shared_mlp = GraniteShared(net, prefix) if net.arch.experts.shared else None

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, F.scale(x))
        residual = x
        x = self.post_attention_layernorm(x)
        out = self.block_sparse_moe(x)
        x = F.add(out, self.shared_mlp(x)) if self.shared_mlp else out
        del out
        return F.add(residual, F.scale(x))


# ---------------------------------------------------------------------------------------------------- the models


class Family(NamedTuple):
    """`attention`: of all layers, built with the number of its layer. `experts`: in place of the MLP of sparse ones."""

    prefix: str  # of its class names
    attention: type[Module]
    experts: Callable[[Net, str], Module] = deepseek.experts
    types: bool = False  # layers with and without a window have masks of their own


FAMILIES = {
    "glm4_moe": Family("Glm4Moe", GlmAttention),
    "glm4_moe_lite": Family("Glm4MoeLite", deepseek.V3Attention),
    "dots1": Family("Dots1", llama.Attention, types=True),
    "solar_open": Family("SolarOpen", llama.Attention),
    "exaone_moe": Family("ExaoneMoe", relatives.Exaone4Attention, ExaoneMoE, types=True),
    "minimax_m2": Family("MiniMaxM2", PartAttention, MiniMaxMoE),
    "hunyuan_v1_moe": Family("HunYuanMoEV1", relatives.HunYuanAttention, hunyuan_experts),
    "ernie4_5_moe": Family("Ernie4_5_Moe", glm.ErnieAttention, ErnieMoE),
    "youtu": Family("Youtu", deepseek.V3Attention),  # without experts
}


class Block(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return FAMILIES[self.net.arch.family].attention(self.net, prefix, index)  # type: ignore[call-arg, return-value]

    def feed_forward(self, prefix: str, index: int) -> Module:
        if self.net.arch.kinds[index].sparse:
            return FAMILIES[self.net.arch.family].experts(self.net, prefix)
        return llama.MLP(self.net, prefix)


class Model(relatives.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        arch, sliding = net.arch, {kind.sliding for kind in net.arch.kinds}
        self.types = FAMILIES[arch.family].types and len(sliding) > 1
        self.rotary_emb.dim = arch.mla.rope if arch.latent else arch.rotary_dim or arch.head_dim
        if arch.family == "ernie4_5_moe":
            self.rotary_emb = glm.Tables(net, arch.head_dim, f"{prefix}RotaryEmbedding")
            self.rotary_emb.wide = True

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)


class GraniteModel(relatives.GraniteModel):
    def block(self, prefix: str, index: int) -> Module:
        return GraniteBlock(self.net, prefix, index)


GRANITE = {"granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared"}


class MoeRelativeForCausalLM(relatives.RelativeForCausalLM):
    models = {
        **{name: (family.prefix, Model) for name, family in FAMILIES.items()},
        **{name: (prefix, GraniteModel) for name, prefix in GRANITE.items()},
    }
