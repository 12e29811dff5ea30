"""Further decoders that change a few lines of others: MiniCPM 3, nanochat, BitNet.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_minicpm3.py` ...).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.families import deepseek, llama, relatives
from zsim.model.families.gemma import ScaledEmbedding, capped
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Embedding, Linear, Module, Net, RMSNorm

# ---------------------------------------------------------------------------------------------------- MiniCPM


class MiniCpmBlock(relatives.GraniteBlock):
    """Attention of DeepSeek-V3, sums of Granite."""

    def attention(self, prefix: str, index: int) -> Module:  # type: ignore[override]
        return deepseek.V3Attention(self.net, prefix, index)


class MiniCpmModel(relatives.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.dim = net.arch.mla.rope

    def buffers_bytes(self) -> int:
        return super().buffers_bytes() + 4  # the embedding's scale

    def embedding(self, prefix: str) -> Embedding:
        embedding = ScaledEmbedding(self.net, self.net.arch.vocab, self.net.arch.hidden)
        embedding.class_name = f"{prefix}ScaledWordEmbedding"
        return embedding

    def block(self, prefix: str, index: int) -> Module:
        return MiniCpmBlock(self.net, prefix, index)


# ---------------------------------------------------------------------------------------------------- nanochat


class PlainNorm(Module):
    """In float32, without a weight."""

    kind = "norm"
    class_name = "NanoChatRMSNorm"

    def forward(self, x: Tensor) -> Tensor:
        return F.to(self._norm(F.to(x, "float32")), x.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        return F.mul(x, F.rsqrt(F.shift(F.mean_last(F.power(x)))))


class NanoAttention(llama.Attention):
    """Norms queries and keys after they are rotated."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.q_norm = PlainNorm(net)
        self.k_norm = PlainNorm(net)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotated(q, k, cos, sin)
        q = self.q_norm(q)
        return q, self.k_norm(k)


class NanoMLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name, arch = f"{prefix}MLP", net.arch
        self.activation_fn = Activation(net, arch.activation)
        self.fc1 = Linear(net, arch.hidden, arch.intermediate)
        self.fc2 = Linear(net, arch.intermediate, arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.activation_fn(x)
        return self.fc2(x)


class NanoBlock(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = NanoAttention(net, prefix, index)
        self.mlp = NanoMLP(net, prefix)
        self.input_layernorm = PlainNorm(net)
        self.post_attention_layernorm = PlainNorm(net)


class NanoModel(relatives.Model):
    """What is embedded is normed, too."""

    def block(self, prefix: str, index: int) -> Module:
        return NanoBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return PlainNorm(self.net)

    def begun(self, x: Tensor) -> Tensor:
        return self.norm(x)


# ---------------------------------------------------------------------------------------------------- BitNet


class BitNetAttention(llama.Attention):
    """Norms what it projects."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.attn_sub_norm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def projected(self, out: Tensor) -> Tensor:
        out = self.attn_sub_norm(out)
        return self.o_proj(out)


class BitNetMLP(llama.MLP):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.ffn_sub_norm = RMSNorm(net, net.arch.intermediate, f"{prefix}RMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ffn_sub_norm(F.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x))))


class BitNetBlock(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return BitNetAttention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        return BitNetMLP(self.net, prefix)


class BitNetModel(relatives.Model):
    def block(self, prefix: str, index: int) -> Module:
        return BitNetBlock(self.net, prefix, index)


class FurtherForCausalLM(relatives.RelativeForCausalLM):
    models = {  # model_type -> the prefix of its class names, its decoder
        "minicpm3": ("MiniCPM3", MiniCpmModel),
        "nanochat": ("NanoChat", NanoModel),
        "bitnet": ("BitNet", BitNetModel),
    }

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return capped(self.net, head(F.scale(hidden) if self.net.arch.family == "minicpm3" else hidden))
