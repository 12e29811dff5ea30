"""Gemma 1, 2 and 3 (text): norms whose weight multiplies in float32, scaled embeddings, sandwich norms from 2 on."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import liger
from zsim.model import products as P
from zsim.model.attention import causal_mask
from zsim.model.decoder import run_block
from zsim.model.families import llama
from zsim.model.graph import Tensor
from zsim.model.layers import Embedding, Linear, Module, Net, require_grad
from zsim.model.layers import RMSNorm as LlamaNorm

PER_TYPE = ("gemma3_text", "gemma3")


class RMSNorm(LlamaNorm):
    """`(x * (1 + weight))`, all in float32, then cast."""

    def forward(self, x: Tensor) -> Tensor:
        if self.net.kernels == "liger":  # LigerRMSNormForGemma
            return liger.rms_norm(x, self.weight)
        output = self._norm(F.to(x, "float32"))
        output = F.mul(output, F.shift(F.to(self.weight, "float32")))
        return F.to(output, x.dtype)

    def _norm(self, x: Tensor) -> Tensor:
        return F.mul(x, F.rsqrt(F.shift(F.mean_last(F.power(x)))))


class ScaledEmbedding(Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return require_grad(self.net, F.scale(P.embedding(indices, self.weight)), copied=self.net.images is not None)


class Attention(llama.Attention):
    """Gemma 3 norms queries and keys after transposing."""

    def norm(self, width: int, prefix: str) -> Module:
        return RMSNorm(self.net, width, f"{prefix}RMSNorm")

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = self.net.arch.head_dim
        q = llama.split_heads(self.q_proj(x), d)
        k = llama.split_heads(self.k_proj(x), d)
        v = llama.split_heads(self.v_proj(x), d)
        if self.net.arch.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v


class Block(llama.Block):
    """`sandwich`: Gemma 2 and 3 norm what attention and MLP return, too; VaultGemma has the names without that."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        name, width = f"{prefix}RMSNorm", net.arch.hidden
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Attention(net, prefix, index)
        self.mlp = llama.MLP(net, prefix)
        self.input_layernorm = RMSNorm(net, width, name)
        self.plain, self.sandwich = prefix == "Gemma", prefix not in ("Gemma", "VaultGemma")
        if self.plain or self.sandwich:
            self.post_attention_layernorm = RMSNorm(net, width, name)
        if not self.plain:
            self.pre_feedforward_layernorm = RMSNorm(net, width, name)
        if self.sandwich:
            self.post_feedforward_layernorm = RMSNorm(net, width, name)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        if self.sandwich:
            x = self.post_attention_layernorm(x)
        x = F.add(residual, x)
        residual = x
        x = (self.post_attention_layernorm if self.plain else self.pre_feedforward_layernorm)(x)
        x = self.mlp(x)
        if self.sandwich:
            x = self.post_feedforward_layernorm(x)
        return F.add(residual, x)


class Model(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix.removesuffix("Text"))
        self.class_name = f"{prefix}Model"

    def buffers_bytes(self) -> int:
        tables = 2 if self.net.arch.family in PER_TYPE else 1  # rotary frequencies per type of layer
        return tables * super().buffers_bytes() + 4  # the embedding's scale

    def embedding(self, prefix: str) -> Embedding:
        embedding = ScaledEmbedding(self.net, self.net.arch.vocab, self.net.arch.hidden)
        embedding.class_name = f"{prefix}TextScaledWordEmbedding"
        return embedding

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return RMSNorm(self.net, self.net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net, sliding = self.net, self.net.arch.window is not None
        x = embeds = self.inputs_embeds(ids, embeds)
        position_ids = self.positions(embeds if ids is None else ids)
        b, s = x.shape[:2]
        masks = {False: causal_mask(net, b, s)}
        masks[True] = causal_mask(net, b, s, net.arch.window) if sliding else None
        per_type = net.arch.family in PER_TYPE  # its rotary base differs between layer types
        tables = {False: self.rotary_emb(x, position_ids)}
        tables[True] = self.rotary_emb(x, position_ids) if per_type else tables[False]
        for block in self.layers:
            is_sliding = isinstance(block, Block) and block.self_attn.window is not None
            x = run_block(net, block, x, *tables[is_sliding], masks[is_sliding])
        return self.norm(x)


class GemmaForCausalLM(llama.LlamaForCausalLM):
    """`prefix`: "Gemma", "Gemma2", "Gemma3"."""

    def decoder(self, prefix: str) -> Model:
        return Model(self.net, "Gemma3Text" if prefix == "Gemma3" else prefix)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return capped(self.net, head(hidden))


def capped(net: Net, logits: Tensor) -> Tensor:
    """Through a tanh, from Gemma 2 on."""
    if net.arch.final_softcap:
        logits = F.scale(logits)
        logits = F.activation_by_result(logits)
        logits = F.scale(logits)
    return logits
