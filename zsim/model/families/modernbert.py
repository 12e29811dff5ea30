"""ModernBERT trained to fill masks, and its decoder (Ettin): rotary positions of two bases, windows in two of three
layers, no norm before the first attention.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_modernbert.py`,
`modeling_modernbert_decoder.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import Rotary, attend, causal_mask, mask_of_kind, positions, rotate_half, split_heads
from zsim.model.decoder import CausalLM, Head, run_block
from zsim.model.families.bert import MaskedLM, masked_loss
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, Identity, LayerNorm, Linear, Module, Net


def norm(net: Net) -> LayerNorm:
    return LayerNorm(net, net.arch.hidden, bias=net.arch.norm_bias)


class Embeddings(Module):
    kind = "embedding"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Embeddings"
        self.tok_embeddings = Embedding(net, net.arch.vocab, net.arch.hidden)
        self.norm = norm(net)
        self.drop = Dropout(net, net.arch.embedding_dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.norm(self.tok_embeddings(ids)))


class MLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}MLP"
        self.Wi = Linear(net, arch.hidden, 2 * arch.intermediate, arch.mlp_bias)
        self.act = Activation(net, arch.activation)
        self.drop = Dropout(net, arch.dropout)
        self.Wo = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        width = self.net.arch.intermediate
        value, gate = F.split(self.Wi(x), [width, width])
        return self.Wo(self.drop(F.mul(self.act(value), gate)))


class Attention(Module):
    """Queries, keys and values in one product (the decoder's: each its own), rotated in float32."""

    kind = "rotary"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        arch, h, bias = net.arch, net.arch.hidden, net.arch.attention_bias
        self.class_name, self.causal = f"{prefix}Attention", prefix == "ModernBertDecoder"
        if self.causal:
            self.q_proj = Linear(net, h, h, bias)
            self.k_proj = Linear(net, h, h, bias)
            self.v_proj = Linear(net, h, h, bias)
        else:
            self.Wqkv = Linear(net, h, 3 * h, bias)
        self.window = arch.window if arch.kinds[index].sliding else None
        self.Wo = Linear(net, h, h, bias)
        p = arch.attention_dropout
        self.out_drop: Module = Dropout(net, p) if p or self.causal else Identity(net)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        if self.causal:
            q, k, v = (split_heads(y, d) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        else:
            qkv = F.reshape(self.Wqkv(x), *x.shape[:2], 3, -1, d)
            q, k, v = (F.transpose(y, 1, 2) for y in F.unbind(qkv, -3))
        q, k = rotated(q, k, F.unsqueeze(cos, 1), F.unsqueeze(sin, 1))
        out, weights = attend(
            self.net, q, k, v, mask, self.window, self.net.arch.attention_dropout, causal=self.causal
        )  # fmt: skip
        return self.out_drop(self.Wo(out)), weights


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    wide_q, wide_k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return F.to(wide_q, q.dtype), F.to(wide_k, k.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.add(F.mul(F.to(x, "float32"), cos), F.mul(rotate_half(F.to(x, "float32")), sin))


class Layer(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}{'Layer' if prefix == 'ModernBertDecoder' else 'EncoderLayer'}"
        self.attn_norm: Module = Identity(net) if net.arch.kinds[index].first else norm(net)
        self.attn = Attention(net, prefix, index)
        self.mlp_norm = norm(net)
        self.mlp = MLP(net, prefix)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended, _weights = self.attn(self.attn_norm(x), *context)  # both names live to the end
        x = F.add(x, attended)
        return F.add(x, self.mlp(self.mlp_norm(x)))


class Model(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name, self.causal = f"{prefix}Model", prefix == "ModernBertDecoder"
        self.embeddings = Embeddings(net, prefix)
        self.layers = Blocks(net, arch.kinds, lambda index: Layer(net, prefix, index))
        self.final_norm = norm(net)
        self.final_norm.role = "norm"
        self.rotary_emb = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")

    def buffers_bytes(self) -> int:
        types = {kind.sliding for kind in self.net.arch.kinds}
        return len(types) * super().buffers_bytes()  # frequencies per type of layer

    def forward(self, ids: Tensor) -> Tensor:
        net, (b, s) = self.net, ids.shape
        places = None if self.causal else net.tape.empty((1, s), "int64")
        x = embeds = self.embeddings(ids)  # noqa: F841  the name outlives the layers
        if places is None:
            places = F.expand(positions(net, ids), (b, s))
        masks = {False: causal_mask(net, b, s) if self.causal else None, True: mask_of_kind(net, b, s, True)}
        types = {kind.sliding for kind in net.arch.kinds}
        tables = {sliding: self.rotary_emb(x, places) for sliding in sorted(types)}
        for number, block in self.layers.numbered():
            sliding = net.arch.kinds[number].sliding
            x = run_block(net, block, x, *tables[sliding], masks[sliding])
        return self.final_norm(x)


class PredictionHead(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}PredictionHead"
        self.dense = Linear(net, net.arch.hidden, net.arch.hidden, bias=False)
        self.act = Activation(net, "gelu")
        self.norm = norm(net)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(x)))


def vocabulary(net: Net, words: Embedding) -> Head:
    decoder = Head(net, net.arch.hidden, net.arch.vocab, net.arch.head_bias)
    if net.arch.tied:
        decoder.weight = words.weight
    return decoder


class ModernBertForMaskedLM(MaskedLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "ModernBert")
        self.model = Model(net, "ModernBert")
        self.head = PredictionHead(net, "ModernBert")
        self.decoder = vocabulary(net, self.model.embeddings.tok_embeddings)

    def scores(self, ids: Tensor) -> Tensor:
        return self.decoder(self.head(self.model(ids)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.scores(ids)
        return masked_loss(F.to(scores, "float32"), labels)  # ForMaskedLMLoss


class ModernBertDecoderForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.model = Model(net, "ModernBertDecoder")
        self.lm_head = PredictionHead(net, "ModernBertDecoder")
        self.decoder = vocabulary(net, self.model.embeddings.tok_embeddings)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.model(ids), labels, self.decoder)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return head(self.lm_head(hidden))
