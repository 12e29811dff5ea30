"""Encoders that tell sequences apart (`...ForSequenceClassification` of transformers 5.24): what the first token
became, through a product or two onto as many labels as there are."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model.decoder import CausalLM
from zsim.model.families import bert, distilbert, esm, modernbert
from zsim.model.families.bert import masked_loss
from zsim.model.families.towers import given
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Dropout, Linear, Module, Net


class Pooler(Module):
    kind = "activation"
    class_name = "BertPooler"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.dense = Linear(net, net.arch.hidden, net.arch.hidden, bias=True)
        self.activation = Activation(net, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        first = F.select(x, 1)
        pooled = self.dense(first)
        return self.activation(pooled)


class PooledBert(bert.Model):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Bert")
        self.pooler = Pooler(net)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(ids)
        return hidden, self.pooler(hidden)


class Head(Module):
    """Of RoBERTa and its kin; ELECTRA's has a module for its activation."""

    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}ClassificationHead"
        self.dense = Linear(net, arch.hidden, arch.hidden, bias=True)
        self.activation = Activation(net, "gelu") if prefix == "Electra" else None
        self.dropout = Dropout(net, arch.head_dropout)
        self.out_proj = Linear(net, arch.hidden, arch.labels, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        x = F.select(features, 1)
        x = self.dropout(x)
        x = self.dense(x)
        x = self.activation(x) if self.activation else F.activation_by_result(x)
        x = self.dropout(x)
        return self.out_proj(x)


PREFIXES = {
    "bert": "Bert", "electra": "Electra", "esm": "Esm", "modernbert": "ModernBert", "distilbert": "DistilBert",
    **bert.ROBERTA,
}  # fmt: skip


class SequenceClassification(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        family, arch = net.arch.family, net.arch
        if net.attention == "efficient":
            raise NotModeled("padded batches of an encoder", field="attention", accepted="flash, sdpa, eager")
        if net.loss not in ("hf", "held") or net.kernels != "torch":
            raise NotModeled("a fused loss of an encoder", field="loss", accepted="hf")
        prefix = PREFIXES[family]
        self.class_name, self.family = f"{prefix}ForSequenceClassification", family
        if family == "bert":
            self.bert = PooledBert(net)
            self.dropout = Dropout(net, arch.head_dropout)
            self.classifier: Module = Linear(net, arch.hidden, arch.labels, bias=True)
        elif family == "modernbert":
            self.model = modernbert.Model(net, prefix)
            self.head = modernbert.PredictionHead(net, prefix)
            self.drop = Dropout(net, arch.head_dropout)
            self.classifier = Linear(net, arch.hidden, arch.labels, bias=True)
        elif family == "distilbert":
            self.distilbert = distilbert.Model(net)
            self.pre_classifier = Linear(net, arch.hidden, arch.hidden, bias=True)
            self.classifier = Linear(net, arch.hidden, arch.labels, bias=True)
            self.dropout = Dropout(net, arch.head_dropout)
        elif family in bert.ROBERTA:
            model, head = bert.Model(net, prefix), Head(net, prefix)
            names = ("roberta", model), ("classifier", head)
            for name, module in names if prefix == "Roberta" else reversed(names):
                setattr(self, name, module)
        else:
            setattr(self, family, esm.Model(net) if family == "esm" else bert.Model(net, prefix))
            self.classifier = Head(net, prefix)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores, _held = self.scores(ids)
        return masked_loss(scores, given(self.net, ids.shape[:1], "int64"))

    def scores(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """And what lives to the end beside them."""
        if self.family == "bert":
            hidden, pooled = self.bert(ids)
            return self.classifier(self.dropout(pooled)), (hidden, pooled)
        if self.family == "modernbert":
            hidden = self.model(ids)
            pooled = self.head(F.select(hidden, 1))
            return self.classifier(self.drop(pooled)), (hidden,)
        if self.family == "distilbert":
            hidden = self.distilbert(ids)
            pooled = F.activation_by_result(self.pre_classifier(F.select(hidden, 1)))
            pooled = self.dropout(pooled)
            return self.classifier(pooled), (hidden, pooled)
        hidden = self.children["roberta" if self.family in bert.ROBERTA else self.family](ids)
        return self.classifier(hidden), (hidden,)
