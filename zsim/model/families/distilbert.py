"""DistilBERT (transformers 5.24, modeling_distilbert.py): BERT without types of tokens, trained to fill masks; with
labels see `classifiers`."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.decoder import Head, run_block
from zsim.model.families import bert
from zsim.model.graph import Storage, Tensor, row_major
from zsim.model.layers import (
    Activation,
    Blocks,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    Net,
    PositionEmbedding,
)


class Embeddings(Module):
    kind = "embedding"
    class_name = "Embeddings"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.word_embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.position_embeddings = PositionEmbedding(net, arch.positions, arch.hidden)
        self.LayerNorm = LayerNorm(net, arch.hidden)
        self.dropout = Dropout(net, arch.dropout)

    def buffers_bytes(self) -> int:
        return 8 * self.net.arch.positions

    def index_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self, ids: Tensor) -> Tensor:
        shape = (1, ids.shape[1])
        words = self.word_embeddings(ids)
        places = self.position_embeddings(
            Tensor(Storage(self.net.tape, shape, "int64", False), shape, row_major(shape), "int64")
        )
        x = F.add(words, places)
        x = self.LayerNorm(x)
        return self.dropout(x)


class Attention(bert.SelfAttention):
    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        h = net.arch.hidden
        self.class_name = "DistilBertSelfAttention"
        self.q_lin = Linear(net, h, h, bias=True)
        self.k_lin = Linear(net, h, h, bias=True)
        self.v_lin = Linear(net, h, h, bias=True)
        self.out_lin = Linear(net, h, h, bias=True)
        self.dropout = Dropout(net, net.arch.attention_dropout)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_lin(x), self.k_lin(x), self.v_lin(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out, weights = super().forward(x, mask)
        out = self.out_lin(out)
        return out, weights


class FFN(Module):
    kind = "activation"
    class_name = "FFN"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.dropout = Dropout(net, arch.dropout)
        self.lin1 = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.lin2 = Linear(net, arch.intermediate, arch.hidden, bias=True)
        self.activation = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin1(x)
        x = self.activation(x)
        x = self.lin2(x)
        return self.dropout(x)


class Block(Module):
    kind = "residual"
    class_name = "TransformerBlock"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.attention = Attention(net)
        self.sa_layer_norm = LayerNorm(net, net.arch.hidden)
        self.ffn = FFN(net)
        self.output_layer_norm = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        attended, _weights = self.attention(x)
        attended = self.sa_layer_norm(F.add(attended, x))
        fed = self.ffn(attended)
        return self.output_layer_norm(F.add(fed, attended))


class Transformer(Module):
    kind = "copy"
    class_name = "Transformer"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.layer = Blocks(net, net.arch.kinds, lambda _index: Block(net))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = run_block(self.net, block, x)
        return x


class Model(Module):
    kind = "copy"
    class_name = "DistilBertModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.embeddings = Embeddings(net)
        self.transformer = Transformer(net)

    def forward(self, ids: Tensor) -> Tensor:
        embeds = self.embeddings(ids)  # the name outlives the blocks
        return self.transformer(embeds)


class Loss(Module):
    kind = "cross_entropy"
    class_name = "CrossEntropyLoss"
    logits = True

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return bert.masked_loss(scores, labels)


class DistilBertForMaskedLM(bert.MaskedLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "DistilBert")
        width = net.arch.hidden
        self.activation = Activation(net, net.arch.activation)
        self.distilbert = Model(net)
        self.vocab_transform = Linear(net, width, width, bias=True)
        self.vocab_layer_norm = LayerNorm(net, width)
        self.vocab_projector = Head(net, width, net.arch.vocab, bias=True)
        if net.arch.tied:
            self.vocab_projector.weight = self.distilbert.embeddings.word_embeddings.weight
        self.mlm_loss_fct = Loss(net)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.mlm_loss_fct(self.scores(ids), labels)

    def scores(self, ids: Tensor) -> Tensor:
        hidden = self.distilbert(ids)
        x = self.vocab_transform(hidden)
        x = self.activation(x)
        x = self.vocab_layer_norm(x)
        return self.vocab_projector(x)
