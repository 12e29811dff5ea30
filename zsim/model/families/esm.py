"""ESM-2 and ESM-1b, which read proteins, trained to fill masks: RoBERTa with norms before attention and MLP, rotated
queries and keys, and what masked tokens leave out made up for.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_esm.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, positions
from zsim.model.decoder import Head, run_block
from zsim.model.families import bert
from zsim.model.families.llama import split_heads
from zsim.model.families.modernbert import rotated
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net, PositionEmbedding, Weight


def gelu(x: Tensor) -> Tensor:
    """`x * 0.5 * (1.0 + erf(x / sqrt(2)))`, an operation at a time."""
    half = F.scale(x)
    return F.mul(half, F.shift(erf(F.scale(x))))


def erf(x: Tensor) -> Tensor:
    """2 / sqrt(pi) * exp(-self.pow(2)) * grad."""
    if not x.needs_grad:
        return F.pointwise(x)
    saved = x.tape.save(x)
    out = F.pointwise(x)

    def backward(g: Tensor) -> tuple[Tensor]:
        (x,) = saved()
        square = F.pointwise(x)
        opposite = F.pointwise(square)
        exponential = F.pointwise(opposite)
        scaled = F.pointwise(exponential)
        return (F.pointwise(scaled, g),)

    x.tape.link((x,), backward, out)
    return out


class Embeddings(Module):
    kind = "embedding"
    class_name = "EsmEmbeddings"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.word_embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.layer_norm = LayerNorm(net, arch.hidden) if arch.embedding_norm else None
        self.dropout = Dropout(net, arch.dropout)
        self.position_embeddings = None if arch.rotary else PositionEmbedding(net, arch.positions, arch.hidden)

    def buffers_bytes(self) -> int:
        return 8 * self.net.arch.positions

    def index_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self, ids: Tensor) -> Tensor:
        places = bert.counted(ids)
        words = x = self.word_embeddings(ids)  # noqa: F841  the first name lives to the end
        if self.net.arch.token_dropout:
            x = F.masked_fill(x, F.reshape(F.pointwise(ids, dtype="bool"), *ids.shape, 1))
            seen = F.pointwise(F.pointwise(ids, dtype="bool"), shape=ids.shape[:1], dtype="int64")
            ratio = F.pointwise(F.pointwise(seen, dtype="float32"))
            del seen
            x = F.to(divided(F.scale(x), F.reshape(F.pointwise(ratio), -1, 1, 1)), x.dtype)
        if self.position_embeddings:
            position_embeddings = self.position_embeddings(places)
            x = F.add(x, position_embeddings)
        return self.layer_norm(x) if self.layer_norm else x


def divided(x: Tensor, by: Tensor) -> Tensor:
    """By a tensor without a gradient, in the wider type."""
    saved = x.tape.save(by) if x.needs_grad else None
    out, dtype = F.binary(x, by), x.dtype
    if saved is not None:
        x.tape.link((x,), lambda g: (F.cast(F.binary(g, *saved()), dtype),), out)
    return out


class SelfAttention(Module):
    """Queries are scaled before they are rotated."""

    kind = "softmax"
    class_name = "EsmSelfAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        h = net.arch.hidden
        self.query = Linear(net, h, h, bias=True)
        self.key = Linear(net, h, h, bias=True)
        self.value = Linear(net, h, h, bias=True)

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, _ = x.shape
        q, k, v = split_heads(self.query(x), d), split_heads(self.key(x), d), split_heads(self.value(x), d)
        q = F.scale(q)
        if arch.rotary:
            cos, sin = context
            q, k = rotated(q, k, F.unsqueeze(cos, 1), F.unsqueeze(sin, 1))
        weights = None
        if self.net.attention == "eager":
            weights = P.softmax(F.scale(P.matmul(q, F.transpose(k, 2, 3))))
            weights = F.dropout(weights, arch.attention_dropout)
            out = P.matmul(weights, v)
        else:
            out = flash_attention(q, k, v, self.net.attention, causal=False)
        return F.reshape(F.contiguous(F.transpose(out, 1, 2)), b, s, -1), weights


class Output(Module):
    kind = "residual"

    def __init__(self, net: Net, class_name: str, inputs: int) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.dense = Linear(net, inputs, net.arch.hidden, bias=True)
        self.dropout = Dropout(net, net.arch.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        return F.add(x, residual)


class Attention(Module):
    kind = "softmax"
    class_name = "EsmAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.self = SelfAttention(net)
        self.output = Output(net, "EsmSelfOutput", net.arch.hidden)
        self.LayerNorm = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        normed = self.LayerNorm(x)
        out, _weights = self.self(normed, *context)
        return self.output(out, x)


class Intermediate(Module):
    kind = "activation"
    class_name = "EsmIntermediate"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.dense = Linear(net, net.arch.hidden, net.arch.intermediate, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return gelu(x)


class Layer(Module):
    kind = "residual"
    class_name = "EsmLayer"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.attention = Attention(net)
        self.intermediate = Intermediate(net)
        self.output = Output(net, "EsmOutput", net.arch.intermediate)
        self.LayerNorm = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended = self.attention(x, *context)
        normed = self.LayerNorm(attended)
        between = self.intermediate(normed)
        return self.output(between, attended)


class Encoder(Module):
    kind = "copy"
    class_name = "EsmEncoder"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.layer = Blocks(net, net.arch.kinds, lambda _index: Layer(net))
        self.emb_layer_norm_after = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        for block in self.layer:
            x = run_block(self.net, block, x, *tables)
        return self.emb_layer_norm_after(x)


class Tables(Rotary):
    def buffers_bytes(self) -> int:
        return self.dim // 2 * 4


class Model(Module):
    kind = "copy"
    class_name = "EsmModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.embeddings = Embeddings(net)
        self.rotary_embeddings = Tables(net, arch.head_dim, "EsmRotaryEmbedding") if arch.rotary else None
        self.encoder = Encoder(net)
        self.contact_head = Contacts(net)

    def forward(self, ids: Tensor) -> Tensor:
        embeds = self.embeddings(ids)
        tables: tuple[Tensor, ...] = ()
        if self.rotary_embeddings:
            places = positions(self.net, embeds, of_blocks=False)  # the name outlives the blocks
            tables = self.rotary_embeddings(embeds, places)
        return self.encoder(embeds, tables)


class Contacts(Module):
    """Predicts which residues touch, and is never called in training."""

    class_name = "EsmContactPredictionHead"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.regression = Linear(net, net.arch.layers * net.arch.heads, 1, bias=True)


class LMHead(Module):
    kind = "activation"
    class_name = "EsmLMHead"

    def __init__(self, net: Net, words: Embedding) -> None:
        super().__init__(net)
        arch = net.arch
        self.dense = Linear(net, arch.hidden, arch.hidden, bias=True)
        self.layer_norm = LayerNorm(net, arch.hidden)
        self.decoder = Head(net, arch.hidden, arch.vocab)
        if arch.tied:
            self.decoder.weight = words.weight
        self.bias = Weight(net, arch.vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = gelu(x)
        x = self.layer_norm(x)
        return F.add(self.decoder(x), self.bias)


class EsmForMaskedLM(bert.MaskedLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Esm")
        self.esm = Model(net)
        self.lm_head = LMHead(net, self.esm.embeddings.word_embeddings)

    def scores(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.esm(ids))
