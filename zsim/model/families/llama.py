"""Llama and its relatives: Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2, and the MoE models that only replace the MLP.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_llama.py` ...).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import liger
from zsim.model.attention import Rotary, attend, causal_mask, positions, rotate, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, Linear, Module, Net, RMSNorm, Weight


class Attention(Module):
    """`prefix` names the classes. Queries and keys may be normed per head (Qwen3) or over their width (OLMo 2)."""

    kind = "rotary"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch = net.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.class_name = f"{prefix}Attention"
        self.q_proj = Linear(net, arch.hidden, q, arch.attention_bias)
        self.k_proj = Linear(net, arch.hidden, kv, arch.attention_bias)
        self.v_proj = Linear(net, arch.hidden, kv, arch.attention_bias)
        self.o_proj = Linear(net, q, arch.hidden, arch.output_bias)
        self.window = arch.window if arch.kinds[index].sliding else None
        self.rotates = arch.kinds[index].rotary
        if arch.qk_norm == "head":
            self.q_norm = self.norm(arch.head_dim, prefix)
            self.k_norm = self.norm(arch.head_dim, prefix)
        elif arch.qk_norm == "width":
            self.q_norm = self.norm(q, prefix)
            self.k_norm = self.norm(kv, prefix)

    def norm(self, width: int, prefix: str) -> Module:
        return RMSNorm(self.net, width, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch = self.net.arch
        q, k, v = self.heads(x)
        if self.rotates:
            if self.net.older(4, 45):  # each layer made tables of its own
                cos, sin = F.pointwise(cos), F.pointwise(sin)
            cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
            q, k = self.rotated(q, k, cos, sin)
        out, weights = attend(
            self.net, q, k, v, mask, self.window, arch.attention_dropout, softcap=arch.softcap,
            floor=self.net.older(4, 31),
        )  # fmt: skip
        return self.projected(out), weights

    def projected(self, out: Tensor) -> Tensor:
        return self.o_proj(out)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.net.kernels.startswith("flash-attn"):
            from zsim.model import flash_attn

            return flash_attn.rotary(q, cos, sin), flash_attn.rotary(k, cos, sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, _ = x.shape
        if arch.qk_norm == "head":
            q = F.transpose(self.q_norm(F.reshape(self.q_proj(x), b, s, -1, d)), 1, 2)
            k = F.transpose(self.k_norm(F.reshape(self.k_proj(x), b, s, -1, d)), 1, 2)
            return q, k, split_heads(self.v_proj(x), d)
        if arch.qk_norm == "width":
            q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
            return split_heads(q, d), split_heads(k, d), split_heads(v, d)
        return split_heads(self.q_proj(x), d), split_heads(self.k_proj(x), d), split_heads(self.v_proj(x), d)


class MLP(Module):
    kind = "activation"
    fused = True  # by Liger, where it is asked for

    def __init__(self, net: Net, prefix: str, width: int | None = None) -> None:
        super().__init__(net)
        arch, width = net.arch, width or net.arch.intermediate
        self.class_name = f"{prefix}MLP"
        self.gate_proj = Linear(net, arch.hidden, width, arch.mlp_bias)
        self.up_proj = Linear(net, arch.hidden, width, arch.mlp_bias)
        self.down_proj = Linear(net, width, arch.hidden, arch.mlp_bias)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and self.net.kernels == "liger":  # LigerSwiGLUMLP, and LigerGEGLUMLP of Gemma
            return self.down_proj(liger.gated(self.gate_proj(x), self.up_proj(x)))
        if self.net.kernels == "flash-attn packed":
            from zsim.model import flash_attn

            flat = F.reshape(x, -1, x.shape[-1])
            out = flash_attn.swiglu(flat, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
            return F.reshape(out, *x.shape)
        return self.down_proj(F.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x)))


class Block(Module):
    kind = "residual"
    input_layernorm: Module
    post_attention_layernorm: Module
    post_feedforward_layernorm: Module

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = self.attention(prefix, index)
        self.mlp = self.feed_forward(prefix, index)
        self.input_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        # modeling_layers.py GradientCheckpointingLayer, until it wrapped `forward` in transformers 5
        self.called_again = bool(net.arch.moe and net.arch.moe.modules)

    def attention(self, prefix: str, index: int) -> Attention:
        return Attention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        return MLP(self.net, prefix)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
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
        self.embed_tokens = self.embedding(prefix)
        self.layers = Blocks(net, arch.kinds, lambda index: self.block(prefix, index))
        self.norm = self.final_norm(prefix)
        self.norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")
        self.rotary_emb.wide = prefix == "Olmo2"

    def embedding(self, prefix: str) -> Embedding:
        return Embedding(self.net, self.net.arch.vocab, self.net.arch.hidden)

    def block(self, prefix: str, index: int) -> Module:
        return (Olmo2Block if prefix == "Olmo2" else Block)(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return (Olmo2Norm if prefix == "Olmo2" else RMSNorm)(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")

    def inputs_embeds(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        if embeds is None:
            assert ids is not None
            embeds = self.embed_tokens(ids)
        return embeds

    def positions(self, tokens: Tensor) -> Tensor:
        return positions(self.net, tokens)

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        """`embeds`: what a vision-language model hands over instead of `ids`; `extra`: for `between` and `run`."""
        net = self.net
        x = embeds = self.inputs_embeds(ids, embeds)
        position_ids = self.positions(embeds if ids is None else ids)
        (b, s), kinds = x.shape[:2], [kind.sliding for kind in net.arch.kinds]
        masks = {on: causal_mask(net, b, s, net.arch.window if on else None) for on in sorted(set(kinds))}
        cos, sin = self.rotary_emb(x, position_ids)
        for number, block in self.layers.numbered():
            x = self.run(block, x, (cos, sin, masks[kinds[number]]), extra)
            x = self.between(number, x, extra)
        return self.norm(x)

    def run(self, block: Module, x: Tensor, context: tuple[Tensor | None, ...], extra: tuple[Tensor, ...]) -> Tensor:
        return run_block(self.net, block, x, *context)

    def between(self, number: int, x: Tensor, extra: tuple[Tensor, ...]) -> Tensor:
        """What a model does to the output of layer `number`."""
        return x


class LlamaForCausalLM(CausalLM):
    """`prefix`: "Llama", "Mistral", "Qwen2" ..."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}ForCausalLM"
        self.model = self.decoder(prefix)
        self.lm_head = head(net, self.model.embed_tokens, net.arch.head_bias)
        self.remainder = Weight(net, net.arch.remainder) if net.arch.remainder else None

    def decoder(self, prefix: str) -> Model:
        return Model(self.net, prefix)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = self.finish(self.model(ids), labels, self.lm_head)
        return loss if self.remainder is None else F.touch(loss, self.remainder)


class Olmo2Norm(RMSNorm):
    """The weight multiplies in float32."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = F.to(x, "float32")
        variance = F.mean_last(F.power(x))
        x = F.mul(x, F.rsqrt(F.shift(variance)))
        return F.to(F.mul(self.weight, x), dtype)


class Olmo2Attention(Attention):
    def norm(self, width: int, prefix: str) -> Module:
        return Olmo2Norm(self.net, width, f"{prefix}RMSNorm")

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        wide_q, wide_k = rotate(q, cos, sin), rotate(k, cos, sin)  # its tables are float32
        return F.to(wide_q, q.dtype), F.to(wide_k, k.dtype)


class Olmo2Block(Block):
    """Norms after attention and MLP instead of before."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        width = net.arch.hidden
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Olmo2Attention(net, prefix, index)
        self.mlp = MLP(net, prefix)
        self.post_attention_layernorm = Olmo2Norm(net, width, f"{prefix}RMSNorm")
        self.post_feedforward_layernorm = Olmo2Norm(net, width, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x, _weights = self.self_attn(x, *context)
        x = self.post_attention_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        return F.add(residual, x)
