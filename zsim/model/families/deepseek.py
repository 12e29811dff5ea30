"""DeepSeek-V2 and V3 (R1, Moonlight, Kimi K2): latent attention, dense layers first, then experts beside shared ones.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_deepseek_v2.py`,
`modeling_deepseek_v3.py`). The router's weight has the run's dtype, as engines make it of
all parameters; its class keeps it in float32 where nobody does. Layers for predicting several tokens (MTP) are no part
of what is trained.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import (
    Rotary,
    attend,
    causal_mask,
    complex_pairs,
    complex_product,
    rotate,
)
from zsim.model.decoder import run_block
from zsim.model.families import llama, moe
from zsim.model.graph import Tensor
from zsim.model.layers import Linear, Module, Net, RMSNorm, Weight


class Attention(Module):
    """Multi-head latent attention: keys and values of all heads come out of one narrow vector per token."""

    kind = "rotary"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch, mla = net.arch, net.arch.mla
        self.class_name = f"{prefix}Attention"
        queries = arch.heads * arch.head_dim
        if mla.query_rank:
            self.q_a_proj = Linear(net, arch.hidden, mla.query_rank, arch.attention_bias)
            self.q_a_layernorm = RMSNorm(net, mla.query_rank, f"{prefix}RMSNorm")
            self.q_b_proj = Linear(net, mla.query_rank, queries)
        else:
            self.q_proj = Linear(net, arch.hidden, queries)
        self.kv_a_proj_with_mqa = Linear(net, arch.hidden, mla.key_value_rank + mla.rope, arch.attention_bias)
        self.kv_a_layernorm = RMSNorm(net, mla.key_value_rank, f"{prefix}RMSNorm")
        self.kv_b_proj = Linear(net, mla.key_value_rank, arch.heads * (mla.nope + mla.value))
        self.o_proj = Linear(net, arch.heads * mla.value, arch.hidden, arch.output_bias)

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None]:
        out, weights, _held = self.attended(x, *context)
        return out, weights

    def attended(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """What attention returns, its weights, and what an indexer chose."""
        arch, mla = self.net.arch, self.net.arch.mla
        b, s, _ = x.shape
        latent_q = self.q_a_layernorm(self.q_a_proj(x)) if mla.query_rank else x
        q = self.q_b_proj(latent_q) if mla.query_rank else self.q_proj(x)
        if not mla.index:
            del latent_q
        q = F.transpose(F.reshape(q, b, s, arch.heads, arch.head_dim), 1, 2)
        q_pass, q_rot = F.split(q, [mla.nope, mla.rope])
        compressed = self.kv_a_proj_with_mqa(x)
        latent, k_rot = F.split(compressed, [mla.key_value_rank, mla.rope])
        latent = F.reshape(self.kv_a_layernorm(latent), b, 1, s, mla.key_value_rank)
        k_rot = F.reshape(k_rot, b, 1, s, mla.rope)
        tables, mask = self.tables(context)
        q_rot, k_rot = self.rotated(q_rot, k_rot, tables)
        query = self.scaled(F.cat((q_pass, q_rot)))
        key, value = self.expanded(latent, k_rot)
        held: tuple[Tensor, ...] = ()
        if mla.index:
            mask, held = self.selected(x, latent_q, tables, mask, *context[3:])
        out, weights = attend(self.net, query, key, value, mask, None, arch.attention_dropout)
        return self.o_proj(out), weights, held

    def scaled(self, query: Tensor) -> Tensor:
        return query

    def tables(self, context: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Those of the rotation, and the mask if there is one."""
        cos, sin, *mask = context
        return (cos, sin), mask[0] if mask else None

    def expanded(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """`expand_kv`: keys and values of all heads, [b, h, s, d]."""
        mla, heads = self.net.arch.mla, self.net.arch.heads
        b, _, s, _ = latent.shape
        both = F.transpose(F.reshape(self.kv_b_proj(latent), b, s, heads, mla.nope + mla.value), 1, 2)
        k_pass, value = F.split(both, [mla.nope, mla.value])
        k_rot = F.expand(k_rot, (b, heads, s, mla.rope))
        return F.fill((k_pass, k_rot)), value

    def rotated(self, q: Tensor, k: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def selected(
        self, x: Tensor, latent_q: Tensor, tables: tuple[Tensor, ...], mask: Tensor | None, *before: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The mask under an indexer, and what is alive as long as it. `before`: what the layer before chose."""
        raise NotImplementedError


class V3Attention(Attention):
    """Rotates neighbours, or halves (`rope_interleave: false`)."""

    def rotated(self, q: Tensor, k: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if not self.net.arch.mla.interleaved:
            cos, sin = (F.unsqueeze(table, 1) for table in tables)
            return rotate(q, cos, sin), rotate(k, cos, sin)
        return turned_pairs(q, k, tables, dim=1)


class EarlierAttention(Attention):
    """Before transformers 5 (4.57): keys and values of all heads first, then the rotation, and keys by `torch.cat`."""

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None]:
        arch, mla = self.net.arch, self.net.arch.mla
        b, s, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if mla.query_rank else self.q_proj(x)
        q = F.transpose(F.reshape(q, b, s, arch.heads, arch.head_dim), 1, 2)
        q_pass, q_rot = F.split(q, [mla.nope, mla.rope])
        compressed = self.kv_a_proj_with_mqa(x)
        latent, k_rot = F.split(compressed, [mla.key_value_rank, mla.rope])
        both = self.kv_b_proj(self.kv_a_layernorm(latent))
        both = F.transpose(F.reshape(both, b, s, arch.heads, mla.nope + mla.value), 1, 2)
        k_pass, value = F.split(both, [mla.nope, mla.value])
        tables, mask = self.tables(context)
        q_rot, k_rot = self.rotated(q_rot, F.reshape(k_rot, b, 1, s, mla.rope), tables)
        k_rot = F.expand(k_rot, (b, arch.heads, s, mla.rope))
        query, key = F.cat((q_pass, q_rot)), F.cat((k_pass, k_rot))
        out, weights = attend(self.net, query, key, value, mask, None, arch.attention_dropout)
        return self.o_proj(out), weights


def turned_pairs(q: Tensor, k: Tensor, tables: tuple[Tensor, ...], dim: int) -> tuple[Tensor, Tensor]:
    """Neighbours rotated; `dim` is that of heads."""
    cos, sin = (F.unsqueeze(F.narrow(table, -1, table.shape[-1] // 2), dim) for table in tables)
    q1, q2 = _neighbours(q)
    k1, k2 = _neighbours(k)
    q = _turned(q1, q2, cos, sin)
    return q, _turned(k1, k2, cos, sin)


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x[..., 0::2], x[..., 1::2]`"""
    half = x.shape[-1] // 2
    return F.narrow(x, -1, half), F.narrow(x, -1, half)


def _turned(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.cat((F.add(F.mul(x1, cos), F.mul(x2, sin)), F.add(F.mul(x2, cos), F.mul(x1, sin))))


class V2Attention(Attention):
    """Rotates by complex multiplication, in float32."""

    def tables(self, context: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        table, *mask = context
        return (table,), mask[0] if mask else None

    def rotated(self, q: Tensor, k: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (table,) = tables
        q_pairs, k_pairs = complex_pairs(q), complex_pairs(k)
        turned = F.to(F.reshape(complex_product(q_pairs, table), *q.shape), q.dtype)
        return turned, F.to(F.reshape(complex_product(k_pairs, table), *k.shape), k.dtype)


class EarlierV2Attention(EarlierAttention, V2Attention):
    pass


class EarlierV3Attention(EarlierAttention, V3Attention):
    pass


class Router(Module):
    """V3: sigmoid scores, groups by the sum of their two best."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopkRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def buffers_bytes(self) -> int:
        return 4 * self.net.arch.experts.experts  # e_score_correction_bias

    def product(self, x: Tensor) -> Tensor:
        x = F.reshape(x, -1, x.shape[-1])
        return P.linear(F.to(x, "float32"), F.to(self.weight, "float32"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.net.arch.experts
        logits = self.product(x)
        scores = F.activation_by_result(logits)
        choice = F.pointwise(scores)  # plus the bias; no gradient comes back this way
        choice, _held = self.limited(choice, best=2)
        indices = P.topk(choice, experts.top_k)[1]
        values = P.gather_last(scores, indices)
        if experts.norm_top_k:
            denominator = F.shift(F.sum_last(values))
            values = F.divide(values, denominator, in_place=True)
        return logits, F.scale(values), indices

    def limited(self, scores: Tensor, best: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`scores` outside of the best groups masked; besides, what is alive to the end of the function.

        A group's score is the sum of its `best` scores, or its largest.
        """
        tape, groups = scores.tape, self.net.arch.experts.groups
        tokens, experts = scores.shape
        picked = tape.empty((tokens, groups, best), "int64")
        group_scores = F.pointwise(scores.detach(), shape=(tokens, groups))
        group_ids = tape.empty((tokens, groups), "int64")
        group_mask = F.pointwise(group_scores)
        score_mask = F.pointwise(group_mask, shape=(tokens, experts))
        outside = F.pointwise(F.pointwise(score_mask, dtype="bool"))
        return F.masked_fill(scores, outside), (picked, group_scores, group_ids, group_mask, score_mask)


class V2Router(Router):
    """Softmax scores; any experts, or those of the groups with the best one."""

    def buffers_bytes(self) -> int:
        return 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.net.arch.experts
        logits = self.product(x)
        scores = P.softmax(logits)
        held: tuple[Tensor, ...] = ()
        if experts.groups:
            scores, held = self.limited(scores, best=1)
        values, indices = P.topk(scores, experts.top_k)
        del held
        return logits, F.scale(values), indices


class MoE(Module):
    kind = "experts"
    router: type[Module] = Router

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Moe" if prefix == "DeepseekV2" else f"{prefix}MoE"
        self.experts = moe.Experts(net, prefix)
        self.gate = (V2Router if prefix == "DeepseekV2" else self.router)(net, prefix)  # type: ignore[call-arg]
        self.shared_experts = llama.MLP(net, prefix, net.arch.experts.shared)

    def forward(self, x: Tensor) -> Tensor:
        _logits, weights, chosen = self.gate(x)
        flat = F.reshape(x, -1, x.shape[-1])
        out = F.reshape(self.experts(flat, chosen, weights), *x.shape)
        return F.add(out, self.shared_experts(x))


ATTENTION = {"DeepseekV2": V2Attention, "DeepseekV3": V3Attention}
EARLIER = {"DeepseekV2": EarlierV2Attention, "DeepseekV3": EarlierV3Attention}


class Block(llama.Block):
    def attention(self, prefix: str, index: int) -> Module:  # type: ignore[override]
        return (EARLIER if self.net.arch.experts.modules else ATTENTION)[prefix](self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        if self.net.arch.kinds[index].sparse:
            return experts(self.net, prefix)
        return llama.MLP(self.net, prefix)


def experts(net: Net, prefix: str) -> Module:
    """As modules where transformers is older than 5."""
    if net.arch.experts.modules:
        from zsim.model.families import moe_modules

        return (moe_modules.V2MoE if prefix == "DeepseekV2" else moe_modules.GroupedMoE)(net, prefix)
    return MoE(net, prefix)


class Model(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = Rotary(net, net.arch.mla.rope, f"{prefix}RotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)


class ComplexRotary(Rotary):
    """The table as complex numbers, [1, s, dim / 2]."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        s, half = positions.shape[-1], self.dim // 2
        angles = F.pointwise(F.pointwise(positions, dtype="float32"), shape=(positions.shape[0], s, half))
        ones = F.pointwise(angles)
        table = F.pointwise(ones, angles, dtype="complex64")
        del ones
        table = F.pointwise(table)
        if self.net.layers_save(x):
            self.net.tape.share(table)
        return table


class V2Model(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = ComplexRotary(net, net.arch.mla.rope, f"{prefix}RotaryEmbedding")

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.inputs_embeds(ids, embeds)
        position_ids = self.positions(embeds if ids is None else ids)
        mask = causal_mask(net, *x.shape[:2])
        table = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, table, mask)
        return self.norm(x)


PREFIX = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
MODELS = {"DeepseekV2": V2Model, "DeepseekV3": Model}


class DeepseekForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, PREFIX[net.arch.family])

    def decoder(self, prefix: str) -> llama.Model:
        return MODELS[prefix](self.net, prefix)
