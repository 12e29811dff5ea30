"""DeepSeek-V3.2 and GLM-5: attention to the tokens that an indexer chooses, in GLM-5 one for several layers.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_deepseek_v32.py`,
`modeling_glm_moe_dsa.py`).
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.architecture import Index
from zsim.model.attention import causal_mask, dense_mask, rotate, shared_mask
from zsim.model.decoder import run_block
from zsim.model.families import deepseek, llama
from zsim.model.graph import Tensor
from zsim.model.layers import LayerNorm, Linear, Module, Net

Chosen = tuple[Tensor, ...]  # the tokens that a layer attends to, and the mask of all others


class Indexer(Module):
    """Which tokens each token attends to: [b, s, k] int32. It is never trained: it runs under torch.no_grad."""

    kind = "index"

    def __init__(self, net: Net, prefix: str, index: Index) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Indexer"
        hidden, mla = net.arch.hidden, net.arch.mla
        self.index = index
        self.wq_b = Linear(net, mla.query_rank, index.heads * index.head_dim)
        self.wk = Linear(net, hidden, index.head_dim)
        self.k_norm = LayerNorm(net, index.head_dim)
        self.weights_proj = Linear(net, hidden, index.heads)

    def forward(self, x: Tensor, latent_q: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        with self.net.tape.no_grad():
            return self._chosen(x, latent_q, cos, sin, mask)

    def _chosen(self, x: Tensor, latent_q: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        (b, s, _), width, heads = x.shape, self.index.head_dim, self.index.heads
        rope = self.net.arch.mla.rope
        q = F.reshape(self.wq_b(latent_q), b, s, heads, width)
        q_rot, q_pass = F.split(q, [rope, width - rope])
        k = F.unsqueeze(self.k_norm(self.wk(x)), 2)
        k_rot, k_pass = F.split(k, [rope, width - rope])
        q_rot, k_rot = self.rotated(q_rot, k_rot, cos, sin)
        q = F.cat((q_rot, q_pass))
        k = F.select(F.cat((k_rot, k_pass)), 2)
        scores = F.scale(self._products(q, k))
        scores = F.activation_by_result(scores)
        weights = F.scale(F.to(self.weights_proj(x), "float32"))
        sums = F.select(P.matmul(F.unsqueeze(weights, 2), scores, "index"), 2)
        sums = F.binary(sums, mask) if mask.dtype != "bool" else F.masked_fill(sums, F.pointwise(mask))
        _values, indices = P.topk(F.reshape(sums, b * s, s), min(self.index.top_k, s))
        del _values
        return F.reshape(F.pointwise(indices, dtype="int32"), b, s, -1)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = F.unsqueeze(cos, 2), F.unsqueeze(sin, 2)
        q = rotate(q, cos, sin)
        return q, rotate(k, cos, sin)

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        """Of each token's heads with all keys, [b, s, heads, s]: with several sequences a copy of the keys for each."""
        b, s, _, width = q.shape
        keys = F.expand(F.unsqueeze(F.to(F.transpose(k, 1, 2), "float32"), 1), (b, s, width, s))
        return P.matmul(F.to(q, "float32"), keys, "index")


class GlmIndexer(Indexer):
    """Rotates neighbours."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return deepseek.turned_pairs(q, k, (cos, sin), dim=2)


class V32Attention(deepseek.V3Attention):
    """To the tokens that an indexer chooses, by a mask: the work is that of all of them."""

    indexer_class = Indexer

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        assert net.arch.mla.index is not None
        self.shares = net.arch.kinds[index].shares_choice
        if not self.shares:
            self.indexer = self.indexer_class(net, prefix, net.arch.mla.index)

    def selected(
        self, x: Tensor, latent_q: Tensor, tables: tuple[Tensor, ...], mask: Tensor | None, *before: Tensor
    ) -> tuple[Tensor, Chosen]:
        assert mask is not None
        tape, (b, s, _) = self.net.tape, x.shape
        chosen = before[0] if self.shares else self.indexer(x, latent_q, *tables, F.select(mask, 1))
        out = tape.empty((b, s, s), "bool")
        left = F.pointwise(out, F.pointwise(chosen, dtype="int64"), shape=(b, s, s), dtype="bool")  # scatter
        left = F.unsqueeze(left, 1)
        del out
        mask = F.binary(mask, F.pointwise(left)) if mask.dtype == "bool" else F.masked_fill(mask, left)
        return mask, (chosen, left)


class Block(llama.Block):
    def attention(self, prefix: str, index: int) -> Module:  # type: ignore[override]
        return V32Attention(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        if self.net.arch.kinds[index].sparse:
            return deepseek.MoE(self.net, prefix)
        return llama.MLP(self.net, prefix)


class Model(deepseek.Model):
    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net = self.net
        if net.attention not in ("sdpa", "eager"):
            what = f"{net.attention} attention in {net.arch.family}, which chooses tokens by a mask"
            raise NotModeled(what, field="attention", accepted="sdpa, eager")
        x = embeds = self.inputs_embeds(ids, embeds)
        position_ids = self.positions(embeds if ids is None else ids)
        b, s = x.shape[:2]
        if net.attention == "eager":
            mask = causal_mask(net, b, s)
        else:
            mask = shared_mask(net, F.expand(dense_mask(net, 1, s, "bool"), (b, 1, s, s)))
        cos, sin = self.rotary_emb(x, position_ids)
        return self.norm(self.through_layers(x, cos, sin, mask))

    def through_layers(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.layers:
            x = run_block(self.net, block, x, cos, sin, mask)
        return x


# ---------------------------------------------------------------------------------------------------- GLM-5


class GlmAttention(V32Attention):
    """`shares_choice`: to the tokens that the last layer with an indexer chose."""

    indexer_class = GlmIndexer

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:  # type: ignore[override]
        out, weights, (chosen, _left) = self.attended(x, *context)
        return out, weights, chosen


class GlmBlock(Block):
    """Hands on the tokens that were chosen, whether the next layer has an indexer or not."""

    several_results = True

    def attention(self, prefix: str, index: int) -> Module:  # type: ignore[override]
        return GlmAttention(self.net, prefix, index)

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        residual = x
        x = self.input_layernorm(x)
        x, _weights, chosen = self.self_attn(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return F.add(residual, x), chosen


class GlmModel(Model):
    def block(self, prefix: str, index: int) -> Module:
        return GlmBlock(self.net, prefix, index)

    def through_layers(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        chosen = None
        for block in self.layers:
            x, chosen = run_block(self.net, block, x, cos, sin, mask, chosen)
        return x


MODELS = {"deepseek_v32": ("DeepseekV32", Model), "glm_moe_dsa": ("GlmMoeDsa", GlmModel)}


class IndexedForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, MODELS[net.arch.family][0])

    def decoder(self, prefix: str) -> llama.Model:
        return MODELS[self.net.arch.family][1](self.net, prefix)
