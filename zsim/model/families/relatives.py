"""Decoders that change a few lines of Llama: OLMo 1 and 3, Granite, Seed-OSS, HunYuan, EXAONE 4, Arcee, Nemotron,
Ministral 3.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_olmo.py` ...).
"""

from __future__ import annotations

from typing import ClassVar

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import causal_mask, mask_of_kind, positions, rotate, rotate_part
from zsim.model.decoder import run_block
from zsim.model.families import llama
from zsim.model.graph import Storage, Tensor
from zsim.model.layers import Activation, LayerNorm, Linear, Module, Net, RMSNorm, Weight


class Model(llama.Model):
    """`types`: layers with and without a window get masks of their own; `tables`: and rotary tables of their own."""

    types = tables = False

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        """`embeds`: what a vision-language model hands over instead of `ids`."""
        net = self.net
        if embeds is None:
            assert ids is not None
            embeds = self.embedded(ids)  # the name outlives the blocks
        x = F.dropout(embeds, net.arch.embedding_dropout)
        position_ids = positions(net, embeds if ids is None else ids)
        b, s, _ = x.shape
        window = net.arch.window if any(kind.sliding for kind in net.arch.kinds) else None
        masks = {False: mask_of_kind(net, b, s, False) if self.types else causal_mask(net, b, s, window)}
        masks[True] = mask_of_kind(net, b, s, True) if self.types else masks[False]
        rotary = {False: self.rotary_emb(x, position_ids)}
        rotary[True] = self.rotary_emb(x, position_ids) if self.tables else rotary[False]
        x = self.begun(x)
        for number, block in self.layers.numbered():
            sliding = net.arch.kinds[number].sliding
            x = run_block(net, block, x, *rotary[sliding], masks[sliding])
        return self.norm(x)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)

    def begun(self, x: Tensor) -> Tensor:
        """What the first layer gets."""
        return x


# ---------------------------------------------------------------------------------------------------- OLMo


class OlmoNorm(Module):
    """LayerNorm in float32, without weight and bias."""

    kind = "norm"
    class_name = "OlmoLayerNorm"

    def forward(self, x: Tensor) -> Tensor:
        return F.to(P.layer_norm(F.to(x, "float32"), None, None), x.dtype)


class OlmoAttention(llama.Olmo2Attention):
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.net.arch.clip_qkv:
            return super().heads(x)
        d = self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = clamped(q), clamped(k), clamped(v)
        return llama.split_heads(q, d), llama.split_heads(k, d), llama.split_heads(v, d)


def clamped(x: Tensor) -> Tensor:
    """`x.clamp_(...)`: autograd keeps a copy of what was there before."""
    if not x.needs_grad:
        x.tape.memory(x.nbytes, x.nbytes)
        return x
    before = F.clone(x)
    saved = x.tape.save(before)
    del before
    out = F.view_of(x, x.shape, x.strides)
    x.tape.memory(x.nbytes, x.nbytes)
    x.tape.link((x,), lambda g: (F.pointwise(g, *saved()),), out)
    return out


class OlmoBlock(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = "OlmoDecoderLayer"
        self.self_attn = OlmoAttention(net, prefix, index)
        self.mlp = llama.MLP(net, prefix)
        self.input_layernorm = OlmoNorm(net)
        self.post_attention_layernorm = OlmoNorm(net)


class OlmoModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.wide = True

    def block(self, prefix: str, index: int) -> Module:
        return OlmoBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return OlmoNorm(self.net)


class Olmo3Model(Model):
    """OLMo 2 with windows in three of four layers."""

    types = tables = True

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.wide = True

    def buffers_bytes(self) -> int:
        return 2 * super().buffers_bytes()  # frequencies per type of layer

    def block(self, prefix: str, index: int) -> Module:
        return llama.Olmo2Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return llama.Olmo2Norm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")


# ---------------------------------------------------------------------------------------------------- Granite


class GraniteBlock(llama.Block):
    """What attention and MLP return is multiplied before it is added."""

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, F.scale(x))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, F.scale(x))


class GraniteModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return GraniteBlock(self.net, prefix, index)

    def embedded(self, ids: Tensor) -> Tensor:
        return F.scale(self.embed_tokens(ids))


# ---------------------------------------------------------------------------------------------------- the others


class SeedOssAttention(llama.Attention):
    def projected(self, out: Tensor) -> Tensor:
        return F.dropout(self.o_proj(out), self.net.arch.dropout)


class SeedOssMLP(llama.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.net.arch.dropout)


class SeedOssBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return SeedOssAttention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        return SeedOssMLP(self.net, prefix)


class HunYuanAttention(llama.Attention):
    """Queries and keys are normed per head after they were rotated."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.query_layernorm = RMSNorm(net, net.arch.head_dim, f"{prefix}RMSNorm")
        self.key_layernorm = RMSNorm(net, net.arch.head_dim, f"{prefix}RMSNorm")

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = self.query_layernorm(q)
        return q, self.key_layernorm(k)


class HunYuanBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return HunYuanAttention(self.net, prefix, index)


class Exaone4Attention(llama.Attention):
    """Norms per head after the transposition."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = self.net.arch.head_dim
        q = llama.split_heads(self.q_proj(x), d)
        k = llama.split_heads(self.k_proj(x), d)
        v = llama.split_heads(self.v_proj(x), d)
        q = self.q_norm(q)
        k = self.k_norm(k)
        return q, k, v


class Exaone4Block(llama.Olmo2Block):
    """Norms after attention and MLP, as in OLMo 2, but Llama's."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        width = net.arch.hidden
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Exaone4Attention(net, prefix, index)
        self.mlp = llama.MLP(net, prefix)
        self.post_attention_layernorm = RMSNorm(net, width, f"{prefix}RMSNorm")
        self.post_feedforward_layernorm = RMSNorm(net, width, f"{prefix}RMSNorm")


class Exaone4Model(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.types = any(kind.sliding for kind in net.arch.kinds)

    def block(self, prefix: str, index: int) -> Module:
        return Exaone4Block(self.net, prefix, index)


class PlainMLP(Module):
    """Up, activation, down."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}MLP"
        self.up_proj = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.down_proj = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ArceeBlock(llama.Block):
    def feed_forward(self, prefix: str, index: int) -> Module:
        return PlainMLP(self.net, prefix)


class NemotronNorm(LayerNorm):
    """LayerNorm whose weight is added to 1."""

    class_name = "NemotronLayerNorm1P"
    weight: Weight

    def forward(self, x: Tensor) -> Tensor:
        return P.layer_norm(x, F.shift(self.weight), self.bias)


class NemotronAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_part(q, k, cos, sin)


class NemotronBlock(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = NemotronAttention(net, prefix, index)
        self.mlp = PlainMLP(net, prefix)
        self.input_layernorm = NemotronNorm(net, net.arch.hidden)
        self.post_attention_layernorm = NemotronNorm(net, net.arch.hidden)


class NemotronModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.dim = net.arch.rotary_dim

    def block(self, prefix: str, index: int) -> Module:
        return NemotronBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return NemotronNorm(self.net, self.net.arch.hidden)


class SeedOssModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return SeedOssBlock(self.net, prefix, index)


class HunYuanModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return HunYuanBlock(self.net, prefix, index)


class ArceeModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return ArceeBlock(self.net, prefix, index)


class MinistralAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotated(q, k, cos, sin)
        return scaled_by_position(self.net, q), k


def scaled_by_position(net: Net, q: Tensor) -> Tensor:
    """`q * get_llama_4_attn_scale(position_ids, ...)`, queries scaled by where they are."""
    tape, tokens = net.tape, q.shape[2]
    places = Tensor(Storage(tape, (1, tokens), "int64", False), (1, tokens), (tokens, 1), "int64")
    scales = F.pointwise(F.pointwise(F.pointwise(places, dtype="float32")))
    scales = F.pointwise(F.pointwise(F.pointwise(scales)))
    return F.mul(q, F.to(F.reshape(scales, 1, 1, tokens, 1), q.dtype))


class MinistralBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return MinistralAttention(self.net, prefix, index)


class MinistralModel(llama.Model):
    def block(self, prefix: str, index: int) -> Module:
        return MinistralBlock(self.net, prefix, index)


MODELS: dict[str, tuple[str, type[llama.Model]]] = {  # model_type -> the prefix of its class names, its decoder
    "olmo": ("Olmo", OlmoModel),
    "olmo3": ("Olmo3", Olmo3Model),
    "seed_oss": ("SeedOss", SeedOssModel),
    "hunyuan_v1_dense": ("HunYuanDenseV1", HunYuanModel),
    "exaone4": ("Exaone4", Exaone4Model),
    "arcee": ("Arcee", ArceeModel),
    "nemotron": ("Nemotron", NemotronModel),
    "granite": ("Granite", GraniteModel),
    "ministral3": ("Ministral3", MinistralModel),
}


class RelativeForCausalLM(llama.LlamaForCausalLM):
    models: ClassVar[dict[str, tuple[str, type[llama.Model]]]] = MODELS

    def __init__(self, net: Net) -> None:
        super().__init__(net, self.models[net.arch.family][0])

    def decoder(self, prefix: str) -> llama.Model:
        return self.models[self.net.arch.family][1](self.net, prefix)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        logits = head(hidden)
        return F.scale(logits) if self.net.arch.family.startswith(("granite", "hyperclovax")) else logits
