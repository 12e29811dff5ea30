"""Qwen3-Next and Qwen3.5, dense and with experts: three layers of linear attention (the gated delta rule) to each one
of full attention, whose result is gated.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_qwen3_next.py`,
`modeling_qwen3_5.py`, `modeling_qwen3_5_moe.py`) where flash-linear-attention and causal-conv1d are not installed.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import fla
from zsim.model import functional as F
from zsim.model.activations import ACTIVATIONS
from zsim.model.attention import Rotary, attend, causal_mask, rotate_part
from zsim.model.causal_conv import causal_conv1d
from zsim.model.decoder import run_block
from zsim.model.families import gemma, llama, moe, towers, vlm
from zsim.model.graph import Tensor
from zsim.model.layers import Convolution, Linear, Module, Net, RMSNorm, Weight
from zsim.model.linear_attention import chunk_gated_delta_rule


class GatedNorm(RMSNorm):
    """The weight multiplies in the input's dtype, and the gate, activated in float32, what comes of it."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        dtype = x.dtype
        x = F.to(x, "float32")
        variance = F.mean_last(F.power(x))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        x = F.mul(self.weight, F.to(x, dtype))
        x = F.mul(x, F.activation(F.to(gate, "float32")))
        return F.to(x, dtype)


def check_kernels(net: Net) -> None:
    """Raises NotModeled for what flash-linear-attention and causal-conv1d refuse."""
    if net.kernels != "fla":
        return
    if net.arch.activation not in ("silu", "swish"):
        raise NotModeled(
            f"causal-conv1d with {net.arch.activation}", field="kernels", accepted="torch, or hidden_act: silu"
        )
    if net.arch.linear.key_dim > 256:
        raise NotModeled(
            f"flash-linear-attention with keys of {net.arch.linear.key_dim}", field="kernels", accepted="torch"
        )


class GatedDeltaNet(Module):
    """A subclass projects: queries, keys and values side by side, the gate, step and decay."""

    kind = "linear_attention"
    in_order = True  # the projections are made before the parameters of decay

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        check_kernels(net)
        arch, linear = net.arch, net.arch.linear
        self.class_name = f"{prefix}GatedDeltaNet"
        self.keys, self.values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        self.conv1d = Convolution(net, 2 * self.keys + self.values, arch.conv_kernel, bias=False)
        if self.in_order:
            self.make_projections(net)
        self.dt_bias = Weight(net, linear.value_heads)
        self.A_log = Weight(net, linear.value_heads)
        self.norm = GatedNorm(net, linear.value_dim, f"{prefix}RMSNormGated")
        self.out_proj = Linear(net, self.values, arch.hidden)
        if not self.in_order:
            self.make_projections(net)

    def make_projections(self, net: Net) -> None:
        raise NotImplementedError

    def mixed(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [b, s, width], the gate [b, s, heads, value_dim], step and decay [b, s, heads]; and
        what else lives as long."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        linear, (b, s, _) = self.net.arch.linear, x.shape
        mixed, z, step, a, *_held = self.mixed(x)
        mixed = F.transpose(mixed, 1, 2)
        self.net.tape.part()
        self.net.tape.read(self.conv1d.weight)
        mixed = self.convolved(mixed)
        mixed = F.transpose(mixed, 1, 2)
        query, key, value = F.split(mixed, [self.keys, self.keys, self.values])
        query = F.reshape(query, b, s, -1, linear.key_dim)
        key = F.reshape(key, b, s, -1, linear.key_dim)
        value = F.reshape(value, b, s, -1, linear.value_dim)
        beta = F.activation_by_result(step)
        rate = F.neg(F.activation_by_result(F.to(self.A_log, "float32")))  # -exp
        g = F.mul(rate, F.activation(F.add(F.to(a, "float32"), self.dt_bias)))
        del rate
        self.net.tape.part()
        rule = fla.chunk_gated_delta_rule if self.net.kernels == "fla" else chunk_gated_delta_rule
        out = rule(query, key, value, g, beta)
        out = F.reshape(out, -1, linear.value_dim)
        z = F.reshape(z, -1, linear.value_dim)
        out = self.norm(out, z)
        out = F.reshape(out, b, s, -1)
        return self.out_proj(out)

    def convolved(self, x: Tensor) -> Tensor:
        """And activated."""
        if self.net.kernels == "fla":
            return fla.causal_conv1d(x, self.conv1d.weight)
        return ACTIVATIONS[self.net.arch.activation][1](causal_conv1d(x, self.conv1d.weight, None))


class Qwen35DeltaNet(GatedDeltaNet):
    in_order = False

    def make_projections(self, net: Net) -> None:
        width, heads = net.arch.hidden, net.arch.linear.value_heads
        self.in_proj_qkv = Linear(net, width, 2 * self.keys + self.values)
        self.in_proj_z = Linear(net, width, self.values)
        self.in_proj_b = Linear(net, width, heads)
        self.in_proj_a = Linear(net, width, heads)

    def mixed(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, _ = x.shape
        mixed = self.in_proj_qkv(x)
        z = F.reshape(self.in_proj_z(x), b, s, -1, self.net.arch.linear.value_dim)
        return mixed, z, self.in_proj_b(x), self.in_proj_a(x)


class Qwen3NextDeltaNet(GatedDeltaNet):
    """All of one key head lies together."""

    def make_projections(self, net: Net) -> None:
        width, heads = net.arch.hidden, net.arch.linear.value_heads
        self.in_proj_qkvz = Linear(net, width, 2 * self.keys + 2 * self.values)
        self.in_proj_ba = Linear(net, width, 2 * heads)

    def mixed(self, x: Tensor) -> tuple[Tensor, ...]:
        linear, (b, s, _) = self.net.arch.linear, x.shape
        qkvz = self.in_proj_qkvz(x)
        ba = self.in_proj_ba(x)
        group = linear.value_heads // linear.key_heads
        widths = [linear.key_dim, linear.key_dim, group * linear.value_dim, group * linear.value_dim]
        query, key, value, z = F.split(F.reshape(qkvz, b, s, linear.key_heads, -1), widths)
        step, a = F.split(F.reshape(ba, b, s, linear.key_heads, -1), [group, group])
        value = F.reshape(value, b, s, -1, linear.value_dim)
        z = F.reshape(z, b, s, -1, linear.value_dim)
        step = F.reshape(step, b, s, linear.value_heads)
        a = F.reshape(a, b, s, linear.value_heads)
        query, key, value = (F.reshape(part, b, s, -1) for part in (query, key, value))
        return F.cat((query, key, value)), z, step, a, qkvz, ba


class Attention(llama.Attention):
    """Queries come with a gate, whose sigmoid multiplies the result; a part of each head is rotated."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        arch = net.arch
        self.q_proj = Linear(net, arch.hidden, 2 * arch.heads * arch.head_dim, arch.attention_bias)

    def norm(self, width: int, prefix: str) -> Module:
        return gemma.RMSNorm(self.net, width, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d, (b, s, _) = self.net.arch, self.net.arch.head_dim, x.shape
        q, gate = F.split(F.reshape(self.q_proj(x), b, s, -1, 2 * d), [d, d])
        gate = F.reshape(gate, b, s, -1)
        q = F.transpose(self.q_norm(q), 1, 2)
        k = F.transpose(self.k_norm(F.reshape(self.k_proj(x), b, s, -1, d)), 1, 2)
        v = llama.split_heads(self.v_proj(x), d)
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q, k = rotate_part(q, k, cos, sin)
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout)
        out = F.mul(out, F.activation_by_result(gate))
        return self.o_proj(out), weights


class Block(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch, kind = net.arch, net.arch.kinds[index]
        self.class_name, self.linear = f"{prefix}DecoderLayer", kind.mixer == "delta"
        if self.linear:
            self.linear_attn = DELTA[prefix](net, prefix)
        else:
            self.self_attn = Attention(net, prefix, index)
        self.mlp = moe.SharedMoeBlock(net, prefix) if kind.sparse else llama.MLP(net, prefix)
        self.input_layernorm = gemma.RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = gemma.RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        if self.linear:
            x = self.linear_attn(x)
        else:
            x, _weights = self.self_attn(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, x)


class Model(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = Rotary(net, net.arch.rotary_dim, f"{prefix}RotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return gemma.RMSNorm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.inputs_embeds(ids, embeds)
        position_ids = self.positions(embeds if ids is None else ids)
        mask = causal_mask(net, *x.shape[:2])
        cos, sin = self.rotary_emb(x, position_ids)
        for _number, block in self.layers.numbered():
            linear = isinstance(block, Block) and block.linear
            x = run_block(net, block, x, cos, sin, None if linear else mask)
        return self.norm(x)


class Qwen35Model(Model):
    """Positions of time, row and column, which are one for text."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}TextModel"
        self.rotary_emb = vlm.InterleavedRotary(net, net.arch.rotary_dim, f"{prefix}TextRotaryEmbedding")

    def positions(self, tokens: Tensor) -> Tensor:
        return F.expand(super().positions(tokens), (3, *tokens.shape[:2]))


class SeeingModel(Qwen35Model):
    """Beside a tower, where a collator hands its positions over."""

    def positions(self, tokens: Tensor) -> Tensor:
        return towers.given(self.net, (3, *tokens.shape[:2]), "int64")


DELTA: dict[str, type[GatedDeltaNet]] = {
    "Qwen3Next": Qwen3NextDeltaNet, "Qwen3_5": Qwen35DeltaNet, "Qwen3_5Moe": Qwen35DeltaNet,
}  # fmt: skip
PREFIXES = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}


class QwenNextForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, PREFIXES[net.arch.family])

    def decoder(self, prefix: str) -> Model:
        return (Model if prefix == "Qwen3Next" else Qwen35Model)(self.net, prefix)


class Combined(vlm.QwenModel):
    def text_model(self, prefix: str) -> llama.Model:
        return SeeingModel(self.net, prefix)


class Qwen35ForConditionalGeneration(vlm.QwenForConditionalGeneration):
    def combined(self, prefix: str) -> vlm.QwenModel:
        return Combined(self.net, prefix)
