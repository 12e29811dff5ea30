"""Decoders of Mamba-2's mixer and attention, in turn (Granite 4, Bamba) or side by side (Falcon-H1), each with an MLP.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_granitemoehybrid.py`,
`modeling_bamba.py`, `modeling_falcon_h1.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import Rotary, causal_mask, positions, rotate_part, split_heads
from zsim.model.decoder import run_block
from zsim.model.families import llama, mamba, moe_relatives
from zsim.model.families.internvl import Identity
from zsim.model.graph import Storage, Tensor, row_major
from zsim.model.layers import Activation, Blocks, Embedding, Linear, Module, Net, RMSNorm

# ---------------------------------------------------------------------------------------------------- Granite


class GraniteAttention(llama.Attention):
    """With rotary positions or none."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.rotates = net.arch.rotary

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        if self.rotates:
            return super().forward(x, *context)
        return super().forward(x, x, x, *context)  # in place of tables, that nobody reads


class GraniteMLP(Module):
    """Gate and up in one product; every token goes through it."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str, width: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}MLP"
        self.activation = Activation(net, net.arch.activation)
        self.input_linear = Linear(net, net.arch.hidden, 2 * width)
        self.output_linear = Linear(net, width, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_linear(x)
        gate, up = F.split(x, [x.shape[-1] // 2] * 2)
        x = F.mul(self.activation(gate), up)
        return self.output_linear(x)


class GraniteBlock(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name, self.attends = f"{prefix}DecoderLayer", arch.kinds[index].mixer == "attention"
        self.input_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.sparse = arch.kinds[index].sparse
        if self.sparse:
            self.block_sparse_moe = moe_relatives.GraniteMoE(net, prefix)
        self.shared_mlp = GraniteMLP(net, prefix, arch.intermediate)
        if self.attends:
            self.self_attn = GraniteAttention(net, prefix, index)
        else:
            self.mamba = mamba.Mixer(net, f"{prefix}MambaLayer", f"{prefix}RMSNormGated")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        if self.attends:
            x, _weights = self.self_attn(x, *context)
        else:
            x = self.mamba(x)
        x = F.add(residual, F.scale(x))
        residual = x
        x = self.post_attention_layernorm(x)
        if self.sparse:
            chosen = self.block_sparse_moe(x)
            x = F.add(chosen, self.shared_mlp(x))
        else:
            x = self.shared_mlp(x)
        return F.add(residual, F.scale(x))


class GraniteModel(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}Model"
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: GraniteBlock(net, prefix, index))
        self.norm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.norm.role = "norm"
        if arch.rotary:
            self.rotary_emb = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = F.scale(self.embed_tokens(ids))  # noqa: F841  the name outlives the blocks
        position_ids = F.pointwise(net.tape.empty((1, ids.shape[1]), "int64"))  # no argument of the blocks
        mask = causal_mask(net, *ids.shape)
        tables = self.rotary_emb(x, position_ids) if net.arch.rotary else ()
        for block in self.layers:
            x = run_block(net, block, x, *tables, mask if block.attends else None)  # type: ignore[attr-defined]
        return self.norm(x)


# ---------------------------------------------------------------------------------------------------- Bamba


class BambaAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_part(q, k, cos, sin)


class BambaBlock(Module):
    """Hands out the weights of attention, which live on while the next layer runs."""

    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name, self.attends = f"{prefix}DecoderLayer", arch.kinds[index].mixer == "attention"
        self.feed_forward = llama.MLP(net, prefix)
        self.input_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.pre_ff_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        if self.attends:
            self.self_attn = BambaAttention(net, prefix, index)
        else:
            self.mamba = mamba.Mixer(net, f"{prefix}Mixer", f"{prefix}RMSNormGated")

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None]:
        residual, weights = x, None
        x = self.input_layernorm(x)
        if self.attends:
            x, weights = self.self_attn(x, *context)
        else:
            x = self.mamba(x)
        x = F.add(residual, x)
        residual = x
        x = self.pre_ff_layernorm(x)
        x = self.feed_forward(x)
        return F.add(residual, x), weights


class BambaModel(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}Model"
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: BambaBlock(net, prefix, index))
        self.final_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.final_layernorm.role = "norm"
        self.rotary_emb = Rotary(net, arch.rotary_dim, f"{prefix}RotaryEmbedding")

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.embed_tokens(ids)  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        tables = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x, _weights = run_block(net, block, x, *tables, mask if block.attends else None)  # type: ignore[attr-defined]
        return self.final_layernorm(x)


# ---------------------------------------------------------------------------------------------------- Falcon


class FalconNorm(mamba.GatedNorm):
    """The gate multiplies before or behind it, the weight in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        space, dtype = self.net.arch.space, x.dtype
        if not space.norm_first:
            x = F.mul(x, F.activation(F.to(gate, "float32")))
        grouped = F.reshape(F.to(x, "float32"), *x.shape[:-1], space.groups, -1)
        del x
        variance = F.mean_last(F.power(grouped))
        grouped = F.mul(grouped, F.rsqrt(F.shift(variance)))
        grouped = F.mul(F.reshape(self.weight, space.groups, -1), grouped)
        grouped = F.reshape(grouped, *grouped.shape[:2], space.inner)
        if space.norm_first:
            grouped = F.mul(grouped, F.activation(F.to(gate, "float32")))
        return F.to(grouped, dtype)


class FalconMixer(mamba.Mixer):
    """Its input and what is projected are multiplied by numbers; there may be no norm behind the scan."""

    def gated_norm(self, class_name: str) -> Module:
        return FalconNorm(self.net, class_name) if self.net.arch.space.normed else Identity(self.net)

    def projected(self, x: Tensor) -> Tensor:
        x = F.scale(x)
        projected = self.in_proj(x)
        shape, dtype = (1, 1, projected.shape[-1]), self.net.dtype
        multipliers = Tensor(Storage(self.net.tape, shape, dtype, False), shape, row_major(shape), dtype)
        return F.mul(projected, multipliers)

    def normed(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x, gate) if self.net.arch.space.normed else F.mul(x, F.activation(gate))


class FalconAttention(llama.Attention):
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = self.net.arch.head_dim
        q, k = split_heads(self.q_proj(x), d), F.scale(split_heads(self.k_proj(x), d))
        return q, k, split_heads(self.v_proj(x), d)


class FalconMLP(llama.MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = F.mul(self.up_proj(x), self.act_fn(F.scale(self.gate_proj(x))))
        return F.scale(self.down_proj(y))


class FalconBlock(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}DecoderLayer"
        self.feed_forward = FalconMLP(net, prefix)
        self.mamba = FalconMixer(net, f"{prefix}Mixer", f"{prefix}RMSNormGated")
        self.self_attn = FalconAttention(net, prefix, index)
        self.input_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.pre_ff_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        mixed = self.mamba(x)
        mixed = F.scale(mixed)
        attended, _weights = self.self_attn(F.scale(x), *context)
        attended = F.scale(attended)
        x = F.add(mixed, attended)
        x = F.add(residual, x)
        residual = x
        x = self.pre_ff_layernorm(x)
        x = self.feed_forward(x)
        return F.add(residual, x)


class FalconModel(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        arch = net.arch
        self.class_name = f"{prefix}Model"
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: FalconBlock(net, prefix, index))
        self.final_layernorm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.final_layernorm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net = self.net
        assert ids is not None
        x = embeds = F.scale(self.embed_tokens(ids))  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        tables = self.rotary_emb(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, *tables, mask)
        return self.final_layernorm(x)

    def buffers_bytes(self) -> int:
        """Besides the rotary frequencies each layer's multipliers, in 16 bits."""
        space = self.net.arch.space
        return super().buffers_bytes() + 2 * len(self.net.arch.kinds) * (space.inner + space.channels + space.heads)


MODELS: dict[str, tuple[str, type[Module]]] = {  # model_type -> the prefix of its class names, its decoder
    "granitemoehybrid": ("GraniteMoeHybrid", GraniteModel),
    "bamba": ("Bamba", BambaModel),
    "falcon_h1": ("FalconH1", FalconModel),
}


class HybridForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, MODELS[net.arch.family][0])

    def decoder(self, prefix: str) -> llama.Model:
        return MODELS[self.net.arch.family][1](self.net, prefix)  # type: ignore[call-arg, return-value]

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        logits = head(hidden)
        return logits if self.net.arch.family == "bamba" else F.scale(logits)
