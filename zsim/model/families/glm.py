"""GLM-4 and ERNIE 4.5: pairs of neighbours are rotated, with tables that every layer repeats for itself."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import Rotary
from zsim.model.families import llama
from zsim.model.families.phi import Phi3MLP
from zsim.model.families.relatives import Model
from zsim.model.graph import Tensor
from zsim.model.layers import Module, Net, RMSNorm


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` with entries 0::2 and 1::2 as the halves."""
    return F.add(F.mul(x, cos), F.mul(turned(x), sin))


def turned(x: Tensor) -> Tensor:
    """`stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)`: the bytes of a concatenation of halves."""
    half = x.shape[-1] // 2
    first, second = F.narrow(x, -1, half), F.narrow(x, -1, half)
    return F.cat((F.neg(second), first))


class Tables(Rotary):
    """Nobody saves them: every layer saves copies of its own."""

    def shares(self, x: Tensor) -> bool:
        return self.net.checkpointing != "none"  # arguments of every block


class GlmAttention(llama.Attention):
    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = F.pointwise(cos), F.pointwise(sin)  # repeat_interleave
        rotary = cos.shape[-1]
        q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, q.shape[-1] - rotary)
        k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, k.shape[-1] - rotary)
        q = rotate_neighbours(q_turned, cos, sin)
        k = rotate_neighbours(k_turned, cos, sin)
        q = F.cat((q, q_passed))
        return q, F.cat((k, k_passed))


class ErnieAttention(llama.Attention):
    """All of a head is rotated, in float32."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = F.pointwise(cos), F.pointwise(sin)
        wide_q, wide_k = self._wide(q, cos, sin), self._wide(k, cos, sin)
        return F.to(wide_q, q.dtype), F.to(wide_k, k.dtype)

    def _wide(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return F.add(F.mul(F.to(x, "float32"), cos), F.mul(F.to(turned(x), "float32"), sin))


class Block(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return (ErnieAttention if prefix == "Ernie4_5" else GlmAttention)(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        if prefix == "Ernie4_5":
            return llama.MLP(self.net, prefix)
        mlp = Phi3MLP(self.net)
        mlp.class_name = f"{prefix}MLP"
        return mlp


class Glm4Block(Block):
    """GLM-4-0414 norms what attention and MLP return, too."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.post_self_attn_layernorm = RMSNorm(net, net.arch.hidden, "Glm4RMSNorm")
        self.post_mlp_layernorm = RMSNorm(net, net.arch.hidden, "Glm4RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = self.post_self_attn_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = self.post_mlp_layernorm(x)
        return F.add(residual, x)


class GlmModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = Tables(net, net.arch.rotary_dim or net.arch.head_dim, f"{prefix}RotaryEmbedding")
        self.rotary_emb.wide = prefix == "Ernie4_5"

    def block(self, prefix: str, index: int) -> Module:
        return (Glm4Block if prefix == "Glm4" else Block)(self.net, prefix, index)


PREFIX = {"glm": "Glm", "glm4": "Glm4", "ernie4_5": "Ernie4_5"}


class GlmForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, PREFIX[net.arch.family])

    def decoder(self, prefix: str) -> llama.Model:
        return GlmModel(self.net, prefix)
