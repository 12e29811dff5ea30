"""Further decoders that change a few lines of Llama: CWM, Ministral (2410), Helium, HyperCLOVA X, Jais 2, Apertus.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_cwm.py` ...).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.families import glm, llama, relatives
from zsim.model.graph import ITEM, Tensor
from zsim.model.layers import Identity, LayerNorm, Linear, Module, Net, RMSNorm, Weight


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


# ---------------------------------------------------------------------------------------------------- Apertus


class XIELU(Module):
    """transformers 5.24 activations.py, in Python, as it runs where the package xielu is not installed:
    where(x > 0, p * x * x + beta * x, (expm1(min(x, eps)) - x) * n + beta * x), of which p and n are trained."""

    kind = "activation"
    class_name = "XIELUActivation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.alpha_p = Weight(net, 1)
        self.alpha_n = Weight(net, 1)

    def buffers_bytes(self) -> int:
        return 2 * ITEM[self.net.dtype]  # beta and eps

    def forward(self, x: Tensor) -> Tensor:
        p = F.activation(F.wide(self.alpha_p))  # softplus
        n = F.shift(F.activation(F.wide(self.alpha_n)))
        positive = F.pointwise(x, dtype="bool")
        return _where(
            positive,
            F.add(F.mul(F.mul(p, x), x), F.scale(x)),
            F.add(F.mul(_minus(_expm1(F.at_least(x)), x), n), F.scale(x)),
        )


def _expm1(x: Tensor) -> Tensor:
    """grad * (result + 1)"""
    x = F.wide(x)
    out = F.pointwise(x)
    if x.needs_grad:
        saved = x.tape.save(out)

        def backward(g: Tensor) -> tuple[Tensor]:
            more = F.pointwise(*saved())
            return (F.pointwise(g, more),)

        x.tape.link((x,), backward, out)
    return out


def _minus(a: Tensor, b: Tensor) -> Tensor:
    out = F.pointwise(a, b)
    a.tape.link((a, b), lambda g: (g, F.pointwise(g)), out)
    return out


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Saves the condition; two gradients, each zero where the other is not."""
    tape = a.tape
    saved = tape.save(condition)
    out = F.pointwise(a, condition, b)

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        (condition,) = saved()
        grad_b = F.pointwise(g, condition)
        return F.pointwise(g, condition), grad_b

    tape.link((a, b), backward, out)
    return out


class ApertusMLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}MLP"
        self.up_proj = Linear(net, arch.hidden, arch.intermediate)
        self.down_proj = Linear(net, arch.intermediate, arch.hidden)
        self.act_fn = XIELU(net)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ApertusBlock(llama.Block):
    """Llama's under other names."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = relatives.Exaone4Attention(net, prefix, index)
        self.mlp = ApertusMLP(net, prefix)
        self.attention_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.feedforward_layernorm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.attention_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.feedforward_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, x)


class ApertusModel(relatives.Model):
    def block(self, prefix: str, index: int) -> Module:
        return ApertusBlock(self.net, prefix, index)


class SiblingForCausalLM(relatives.RelativeForCausalLM):
    models = {  # model_type -> the prefix of its class names, its decoder
        "cwm": ("Cwm", TypesModel),
        "ministral": ("Ministral", TypesModel),
        "helium": ("Helium", HeliumModel),
        "hyperclovax": ("HyperCLOVAX", HyperClovaModel),
        "jais2": ("Jais2", JaisModel),
        "apertus": ("Apertus", ApertusModel),
    }
