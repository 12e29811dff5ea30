"""Further mixtures of experts that change a few lines of others: Mistral 4, A.X K1, Hunyuan 3 (`hy_v3`), Mellum 2,
FlexOlmo, AFMoE (Trinity), Kolibri.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_mistral4.py` ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import deepseek, glm, llama, moe, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import Linear, Module, Net, RMSNorm, Weight

# ---------------------------------------------------------------------------------------------------- latent attention


class MistralAttention(deepseek.V3Attention):
    """Scales its queries by where they are."""

    def scaled(self, query: Tensor) -> Tensor:
        return relatives.scaled_by_position(self.net, query)


class MistralRouter(deepseek.Router):
    """Softmax scores in the run's dtype."""

    def buffers_bytes(self) -> int:
        return 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.net.arch.experts
        logits = P.linear(F.reshape(x, -1, x.shape[-1]), self.weight)
        scores = P.softmax(logits)
        choice, _held = self.limited(scores.detach(), best=2)
        indices = P.topk(choice, experts.top_k)[1]
        values = P.gather_last(scores, indices)
        if experts.norm_top_k:
            denominator = F.shift(F.sum_last(values))
            values = F.divide(values, denominator, in_place=True)
        return logits, F.scale(values), indices


class MistralMoE(deepseek.MoE):
    router = MistralRouter


class AxkMoE(deepseek.MoE):
    """Norms what it returns."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.post_mlp_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        return self.post_mlp_layernorm(super().forward(x))


# ---------------------------------------------------------------------------------------------------- Hunyuan


class BiasedRouter(Module):
    """Sigmoid scores in float32; a bias takes part in the choice alone, and is another's."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = P.linear(F.to(x, "float32"), F.to(self.weight, "float32"))
        return logits, F.activation_by_result(logits)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores = self.scores(x)
        biased = F.pointwise(scores)
        _best, chosen = P.topk(biased, self.net.arch.experts.top_k)
        values = P.gather_last(scores, chosen)
        values = F.divide(values, F.shift(F.sum_last(values)))
        return logits, F.scale(values), chosen


class HunyuanMoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}MoE"
        self.gate = BiasedRouter(net, prefix)
        self.experts = moe.Experts(net, prefix)
        self.shared_experts = llama.MLP(net, prefix, net.arch.experts.shared)

    def buffers_bytes(self) -> int:
        return 4 * self.net.arch.experts.experts  # e_score_correction_bias

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.gate(flat)
        routed = self.experts(flat, chosen, weights)
        if self.net.arch.experts.wide_sum:
            out = F.to(F.add(F.to(routed, "float32"), F.to(self.shared_experts(flat), "float32")), x.dtype)
        else:
            out = F.add(routed, self.shared_experts(flat))
        return F.reshape(out, *x.shape)


# ---------------------------------------------------------------------------------------------------- AFMoE


class AfmoeAttention(llama.Attention):
    """What attention returns is multiplied by a gate; layers without a window have no positions."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.gate_proj = Linear(net, net.arch.hidden, net.arch.heads * net.arch.head_dim)

    def norm(self, width: int, prefix: str) -> Module:
        return llama.Olmo2Norm(self.net, width, f"{prefix}RMSNorm")

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (b, s, _), d = x.shape, self.net.arch.head_dim
        q, k, v = (F.reshape(project(x), b, s, -1, d) for project in (self.q_proj, self.k_proj, self.v_proj))
        self.gate = self.gate_proj(x)
        q, k = F.transpose(self.q_norm(q), 1, 2), F.transpose(self.k_norm(k), 1, 2)
        return q, k, F.transpose(v, 1, 2)

    def projected(self, out: Tensor) -> Tensor:
        gate = self.gate
        del self.gate
        return self.o_proj(F.mul(out, F.activation_by_result(gate)))


class AfmoeRouter(Module):
    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TokenChoiceRouter"
        self.gate = Linear(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.to(self.gate(F.reshape(x, -1, x.shape[-1])), "float32")
        scores = F.activation_by_result(logits)
        biased = F.pointwise(scores, bias)
        _best, chosen = P.topk(biased, self.net.arch.experts.top_k)
        del biased
        values = P.gather_last(scores, chosen)
        denominator = F.shift(F.sum_last(values))
        values = F.divide(values, denominator)
        return logits, F.scale(values), chosen


class AfmoeMoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name, experts = f"{prefix}SparseMoeBlock", net.arch.experts
        self.expert_bias = Weight(net, experts.experts)
        self.expert_bias.frozen = True
        self.router = AfmoeRouter(net, prefix)
        self.shared_experts = llama.MLP(net, prefix, experts.shared)
        self.experts = moe.Experts(net, prefix)

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.router(x, self.expert_bias)
        shared = F.reshape(self.shared_experts(flat), *x.shape)
        routed = F.reshape(self.experts(flat, chosen, weights), *x.shape)
        return F.add(shared, routed)


# ---------------------------------------------------------------------------------------------------- Kolibri


class KolibriRouter(BiasedRouter):
    """Chooses by logits."""

    def buffers_bytes(self) -> int:
        return 4 * self.net.arch.experts.experts  # e_score_correction_bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.reshape(x, -1, x.shape[-1])
        logits = P.linear(F.to(x, "float32"), F.to(self.weight, "float32"))
        chosen = P.topk(F.pointwise(logits), self.net.arch.experts.top_k)[1]
        values = F.activation_by_result(P.gather_last(logits, chosen))
        if self.net.arch.experts.norm_top_k:
            values = F.divide(values, F.sum_last(values))
        return logits, values, chosen


class KolibriMoE(deepseek.MoE):
    router = KolibriRouter

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}SparseMoeBlock"


# ---------------------------------------------------------------------------------------------------- the models


class Family(NamedTuple):
    """`attention`: of all layers. `experts`: in place of the MLP of sparse ones. `types`: layers with and without a
    window have masks of their own, `tables`: and rotary tables."""

    attention: type[llama.Attention] | type[deepseek.Attention]
    experts: Callable[[Net, str], Module]
    types: bool = False
    tables: bool = False


FAMILIES = {  # by the prefix of their class names
    "Mistral4": Family(MistralAttention, MistralMoE),
    "AXK1": Family(deepseek.V3Attention, AxkMoE),
    "HYV3": Family(relatives.Exaone4Attention, HunyuanMoE),
    "Mellum": Family(llama.Attention, moe.SparseMoeBlock, types=True, tables=True),
    "Afmoe": Family(AfmoeAttention, AfmoeMoE, types=True),
    "FlexOlmo": Family(llama.Olmo2Attention, moe.SparseMoeBlock),
    "Kolibri1": Family(relatives.Exaone4Attention, KolibriMoE, types=True),
}


class Parts(llama.Block):
    """What layers are made of."""

    def attention(self, prefix: str, index: int) -> llama.Attention:
        return FAMILIES[prefix].attention(self.net, prefix, index)  # type: ignore[return-value]

    def feed_forward(self, prefix: str, index: int) -> Module:
        if self.net.arch.kinds[index].sparse:
            return FAMILIES[prefix].experts(self.net, prefix)
        return llama.MLP(self.net, prefix)


class Model(relatives.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        family = FAMILIES[prefix]
        self.both = len({kind.sliding for kind in net.arch.kinds}) > 1
        self.types, self.tables = family.types, family.tables and self.both

    def buffers_bytes(self) -> int:
        rotary = self.rotary_emb.buffers_bytes()
        return super().buffers_bytes() + (rotary if self.tables else 0)

    def block(self, prefix: str, index: int) -> Module:
        return Parts(self.net, prefix, index)


class LatentModel(deepseek.Model):
    def block(self, prefix: str, index: int) -> Module:
        return Parts(self.net, prefix, index)


class PerTypeModel(Model):
    """Makes the masks that its layers use."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.types = self.both


class AfmoeBlock(Parts):
    """Norms before and behind attention and MLP."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name, width = f"{prefix}DecoderLayer", net.arch.hidden
        self.self_attn = self.attention(prefix, index)
        self.input_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.post_attention_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.pre_mlp_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.post_mlp_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.mlp = self.feed_forward(prefix, index)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = self.post_attention_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = self.pre_mlp_layernorm(x)
        x = self.mlp(x)
        x = self.post_mlp_layernorm(x)
        return F.add(residual, x)


class AfmoeModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return AfmoeBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return llama.Olmo2Norm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")

    def embedded(self, ids: Tensor) -> Tensor:
        embeds = self.embed_tokens(ids)
        return F.scale(embeds) if self.net.arch.scaled_embedding else embeds


class FlexOlmoBlock(Parts):
    """Norms behind attention and experts."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name, width = f"{prefix}DecoderLayer", net.arch.hidden
        self.self_attn = self.attention(prefix, index)
        self.mlp = self.feed_forward(prefix, index)
        self.post_attention_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.post_feedforward_layernorm = llama.Olmo2Norm(net, width, f"{prefix}RMSNorm")

    forward = llama.Olmo2Block.forward


class FlexOlmoModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.wide = True

    def block(self, prefix: str, index: int) -> Module:
        return FlexOlmoBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return llama.Olmo2Norm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")


class KolibriBlock(Parts):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.post_self_attn_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.post_mlp_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    forward = glm.Glm4Block.forward


class KolibriModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return KolibriBlock(self.net, prefix, index)


class MoeFurtherForCausalLM(relatives.RelativeForCausalLM):
    models = {  # model_type -> the prefix of its class names, its decoder
        "mistral4": ("Mistral4", LatentModel),
        "axk1": ("AXK1", LatentModel),
        "hy_v3": ("HYV3", Model),
        "mellum": ("Mellum", PerTypeModel),
        "afmoe": ("Afmoe", AfmoeModel),
        "flex_olmo": ("FlexOlmo", FlexOlmoModel),
        "kolibri1": ("Kolibri1", KolibriModel),
    }
