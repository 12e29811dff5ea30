"""Further decoders that change a few lines of Llama: CWM, Ministral (2410), Helium, HyperCLOVA X, Jais 2, Apertus.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_cwm.py` ...).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.families import glm, llama, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import Identity, LayerNorm, Module, Net, RMSNorm


class TypesModel(relatives.Model):
    """Makes both masks, whichever its layers use."""

    types = True

    def block(self, prefix: str, index: int) -> Module:
        return llama.Block(self.net, prefix, index)


# ---------------------------------------------------------------------------------------------------- Helium


class HeliumNorm(RMSNorm):
    """All in float32, the weight as well, then cast."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = F.to(x, "float32")
        x = F.mul(x, F.rsqrt(F.shift(F.mean_last(F.power(x)))))
        return F.to(F.mul(F.to(self.weight, "float32"), x), dtype)


class HeliumAttention(llama.Attention):
    """Rotates pairs of neighbours, with tables that every layer repeats for itself."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = F.pointwise(cos), F.pointwise(sin)  # repeat_interleave
        q = glm.rotate_neighbours(q, cos, sin)
        return q, glm.rotate_neighbours(k, cos, sin)


class HeliumBlock(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.input_layernorm = HeliumNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.post_attention_layernorm = HeliumNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def attention(self, prefix: str, index: int) -> llama.Attention:
        return HeliumAttention(self.net, prefix, index)


class HeliumModel(relatives.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = glm.Tables(net, net.arch.head_dim, f"{prefix}RotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return HeliumBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return HeliumNorm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")


# ---------------------------------------------------------------------------------------------------- HyperCLOVA X


class HyperClovaBlock(llama.Block):
    """Granite's, with norms of what attention and MLP return (`use_post_norm`)."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.post_norm1 = self.post_norm(prefix)
        self.post_norm2 = self.post_norm(prefix)

    def post_norm(self, prefix: str) -> Module:
        net = self.net
        return RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm") if net.arch.sandwich else Identity(net)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = self.post_norm1(x)
        x = F.add(residual, F.scale(x))
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = self.post_norm2(x)
        return F.add(residual, F.scale(x))


class HyperClovaModel(relatives.GraniteModel):
    def block(self, prefix: str, index: int) -> Module:
        return HyperClovaBlock(self.net, prefix, index)


# ---------------------------------------------------------------------------------------------------- Jais


class JaisBlock(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)

    def feed_forward(self, prefix: str, index: int) -> Module:
        return relatives.PlainMLP(self.net, prefix)


class JaisModel(relatives.Model):
    def block(self, prefix: str, index: int) -> Module:
        return JaisBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return LayerNorm(self.net, self.net.arch.hidden)


class SiblingForCausalLM(relatives.RelativeForCausalLM):
    models = {  # model_type -> the prefix of its class names, its decoder
        "cwm": ("Cwm", TypesModel),
        "ministral": ("Ministral", TypesModel),
        "helium": ("Helium", HeliumModel),
        "hyperclovax": ("HyperCLOVAX", HyperClovaModel),
        "jais2": ("Jais2", JaisModel),
    }
