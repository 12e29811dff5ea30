"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and the generator of ELECTRA, trained to fill masks: attention both ways, norms
after residuals, a loss in the model's type."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.decoder import CausalLM, Head, run_block
from zsim.model.families.llama import split_heads
from zsim.model.fused_attention import flash_attention
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
    Weight,
)
from zsim.model.loss import cross_entropy


class Embeddings(Module):
    kind = "embedding"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch, width = net.arch, net.arch.embed_width or net.arch.hidden
        self.class_name, self.counts = f"{prefix}Embeddings", prefix not in ("Bert", "Electra")
        self.word_embeddings = Embedding(net, arch.vocab, width)
        if not self.counts:
            self.position_embeddings = PositionEmbedding(net, arch.positions, width)
        self.token_type_embeddings = PositionEmbedding(net, arch.token_types, width)
        self.LayerNorm = LayerNorm(net, width)
        self.dropout = Dropout(net, arch.dropout)
        if self.counts:
            self.position_embeddings = PositionEmbedding(net, arch.positions, width)

    def buffers_bytes(self) -> int:
        return 2 * 8 * self.net.arch.positions  # positions and types of tokens

    def index_buffers_bytes(self) -> int:
        return self.buffers_bytes()

    def forward(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        places = self._positions(ids)
        types = F.pointwise(places)  # gathered from a buffer, and expanded
        types = F.view_of(types, (b, s), (0 if places.shape[0] == 1 else s, 1))
        words = self.word_embeddings(ids)
        kinds = self.token_type_embeddings(types)
        x = F.add(words, kinds)
        position_embeds = self.position_embeddings(places)
        x = F.add(x, position_embeds)
        x = self.LayerNorm(x)
        return self.dropout(x)

    def _positions(self, ids: Tensor) -> Tensor:
        """A row of a buffer; in RoBERTa counted past the padding of each sequence."""
        s = ids.shape[1]
        if not self.counts:
            return Tensor(Storage(self.net.tape, (1, s), "int64", False), (1, s), row_major((1, s)), "int64")
        return counted(ids)


def counted(ids: Tensor) -> Tensor:
    """`create_position_ids_from_input_ids`"""
    mask = F.pointwise(F.pointwise(ids, dtype="bool"), dtype="int32")
    counts = F.pointwise(F.pointwise(mask, dtype="int64"), dtype="int32")
    return F.pointwise(F.pointwise(F.pointwise(counts, mask), dtype="int64"))


class SelfAttention(Module):
    kind = "softmax"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        h = net.arch.hidden
        self.class_name = f"{prefix}SelfAttention"
        self.query = Linear(net, h, h, bias=True)
        self.key = Linear(net, h, h, bias=True)
        self.value = Linear(net, h, h, bias=True)
        self.dropout = Dropout(net, net.arch.attention_dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, _ = x.shape
        q, k, v = (split_heads(projected, d) for projected in self.projections(x))
        weights = None
        if self.net.attention == "eager":
            weights = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
            if mask is not None:
                weights = F.add(weights, mask)
            weights = P.softmax(weights)
            weights = F.dropout(weights, arch.attention_dropout)
            out = P.matmul(weights, v)
        else:
            out = flash_attention(q, k, v, self.net.attention, causal=False)
        return F.reshape(F.contiguous(F.transpose(out, 1, 2)), b, s, -1), weights

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)


class Output(Module):
    """Projection, dropout, and the norm of the sum with what came in."""

    kind = "residual"

    def __init__(self, net: Net, class_name: str, inputs: int) -> None:
        super().__init__(net)
        self.class_name = class_name
        self.dense = Linear(net, inputs, net.arch.hidden, bias=True)
        self.LayerNorm = LayerNorm(net, net.arch.hidden)
        self.dropout = Dropout(net, net.arch.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        return self.LayerNorm(F.add(x, residual))


class Attention(Module):
    kind = "softmax"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Attention"
        self.self = SelfAttention(net, prefix)
        self.output = Output(net, f"{prefix}SelfOutput", net.arch.hidden)

    def forward(self, x: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor | None]:
        out, weights = self.self(x, *mask)
        out = self.output(out, x)
        return out, weights


class Intermediate(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Intermediate"
        self.dense = Linear(net, net.arch.hidden, net.arch.intermediate, bias=True)
        self.intermediate_act_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return self.intermediate_act_fn(x)


class Layer(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Layer"
        self.attention = Attention(net, prefix)
        self.intermediate = Intermediate(net, prefix)
        self.output = Output(net, f"{prefix}Output", net.arch.intermediate)

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        attended, _weights = self.attention(x, *mask)
        between = self.intermediate(attended)
        return self.output(between, attended)


class Encoder(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Encoder"
        self.layer = Blocks(net, net.arch.kinds, lambda index: Layer(net, prefix))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = run_block(self.net, block, x)
        return x


class Model(Module):
    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Model"
        width = net.arch.embed_width or net.arch.hidden
        self.embeddings = Embeddings(net, prefix)
        self.embeddings_project = Linear(net, width, net.arch.hidden, bias=True) if width != net.arch.hidden else None
        self.encoder = Encoder(net, prefix)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        if self.embeddings_project:
            x = self.embeddings_project(x)
        return self.encoder(x)


class Transform(Module):
    kind = "activation"
    class_name = "BertPredictionHeadTransform"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.dense = Linear(net, net.arch.hidden, net.arch.hidden, bias=True)
        self.transform_act_fn = Activation(net, net.arch.activation)
        self.LayerNorm = LayerNorm(net, net.arch.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.transform_act_fn(x)
        return self.LayerNorm(x)


class Predictions(Module):
    kind = "activation"
    class_name = "BertLMPredictionHead"

    def __init__(self, net: Net, words: Embedding) -> None:
        super().__init__(net)
        self.transform = Transform(net)
        self.decoder, self.bias = tied_decoder(net, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transform(x)
        return self.decoder(x)


class MaskedHead(Module):
    class_name = "BertOnlyMLMHead"

    def __init__(self, net: Net, words: Embedding) -> None:
        super().__init__(net)
        self.predictions = Predictions(net, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.predictions(x)


class RobertaHead(Module):
    """RoBERTa calls gelu as a function."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str, words: Embedding) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}LMHead"
        self.dense = Linear(net, net.arch.hidden, net.arch.hidden, bias=True)
        self.layer_norm = LayerNorm(net, net.arch.hidden)
        self.decoder, self.bias = tied_decoder(net, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = F.activation(x)
        x = self.layer_norm(x)
        return self.decoder(x)


def tied_decoder(net: Net, words: Embedding) -> tuple[Head, Weight]:
    """The projection onto the vocabulary, whose bias is the head's own as well."""
    decoder = Head(net, net.arch.hidden, net.arch.vocab, bias=True)
    if net.arch.tied:
        decoder.weight = words.weight
    assert decoder.bias is not None
    return decoder, decoder.bias


class GeneratorPredictions(Module):
    kind = "activation"
    class_name = "ElectraGeneratorPredictions"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        self.activation = Activation(net, "gelu")
        self.LayerNorm = LayerNorm(net, width)
        self.dense = Linear(net, net.arch.hidden, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.activation(x)
        return self.LayerNorm(x)


class MaskedLM(CausalLM):
    """`prefix` names the classes."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}ForMaskedLM"
        if net.attention == "efficient":
            raise NotModeled("padded batches of an encoder", field="attention", accepted="flash, sdpa, eager")
        if net.loss not in ("hf", "held") or net.kernels != "torch":
            raise NotModeled("a fused loss of an encoder", field="loss", accepted="hf")

    def scores(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return masked_loss(self.scores(ids), labels)


class BertForMaskedLM(MaskedLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Bert")
        self.bert = Model(net, "Bert")
        self.cls = MaskedHead(net, self.bert.embeddings.word_embeddings)

    def scores(self, ids: Tensor) -> Tensor:
        return self.cls(self.bert(ids))


ROBERTA = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


class RobertaForMaskedLM(MaskedLM):
    def __init__(self, net: Net) -> None:
        prefix = ROBERTA[net.arch.family]
        super().__init__(net, prefix)
        model = Model(net, prefix)
        head = RobertaHead(net, prefix, model.embeddings.word_embeddings)
        if prefix == "Roberta":
            self.roberta, self.lm_head = model, head
        else:
            self.lm_head, self.roberta = head, model

    def scores(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.roberta(ids))


class ElectraForMaskedLM(MaskedLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Electra")
        width = net.arch.embed_width or net.arch.hidden
        self.electra = Model(net, "Electra")
        self.generator_predictions = GeneratorPredictions(net, width)
        self.generator_lm_head = Head(net, width, net.arch.vocab, bias=True)
        if net.arch.tied:
            self.generator_lm_head.weight = self.electra.embeddings.word_embeddings.weight

    def scores(self, ids: Tensor) -> Tensor:
        return self.generator_lm_head(self.generator_predictions(self.electra(ids)))


def masked_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(F.reshape(scores, -1, scores.shape[-1]), F.reshape(labels, -1))
