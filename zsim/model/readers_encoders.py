"""What config.json means in encoders trained to fill masks or to tell sequences apart, and in ModernBERT's decoder
(rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.model.architecture import Architecture, LayerKind
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout, read_layers, read_sliding, shape

PREFIXES = {
    "bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "electra": "Electra",
    "modernbert": "ModernBert", "esm": "Esm", "distilbert": "DistilBert",
}  # fmt: skip
CLASSIFIES = "ForSequenceClassification"


def _fills_masks(fields: Fields, family: str) -> bool:
    """Their files stand for models with one head or another, and say so. Raises NotModeled where they do not."""
    masked, classifier = (f"{PREFIXES[family]}{head}" for head in ("ForMaskedLM", CLASSIFIES))
    said = fields.items("architectures") or []
    if not {masked, classifier} & {*map(str, said)} or fields.flag("is_decoder", default=False):
        name = "architectures" if said else "model_type"
        what = ", ".join(map(str, said)) or f"{family} without architectures, which say with what head it trains"
        fields.refuse(name, what, f'"architectures": ["{masked}"] or ["{classifier}"]')
    return masked in said


def _read_head(fields: Fields, family: str, arch: Architecture) -> Architecture:
    if _fills_masks(fields, family):
        return arch
    named = fields.raw("id2label")
    labels = fields.size("num_labels", default=len(named) if isinstance(named, dict) and named else 2)
    kind = fields.text("problem_type", default="regression" if labels == 1 else "single_label_classification")
    if kind != "single_label_classification":
        name = "problem_type" if "problem_type" in fields else "num_labels"
        fields.refuse(name, f"{family} trained for {kind}", "2 or more labels, of which a sequence has one")
    if (pooling := fields.text("classifier_pooling", default="cls")) != "cls":
        fields.refuse("classifier_pooling", f"a mean over tokens ({pooling})", "cls")
    if family == "distilbert":
        return replace(arch, labels=labels, head_dropout=read_dropout(fields, "seq_classif_dropout", default=0.2))
    own = 0.0 if family == "modernbert" else arch.dropout
    dropout = own if family == "esm" else read_dropout(fields, "classifier_dropout", default=own)
    return replace(arch, labels=labels, head_dropout=dropout)


def _bert(fields: Fields, family: str) -> Architecture:
    _fills_masks(fields, family)  # first: a file without a head may not be in transformers' words at all
    arch = Architecture(
        **shape(fields, family),
        intermediate=fields.size("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=512),
        embed_width=fields.size("embedding_size", default=128) if family == "electra" else 0,
        token_types=fields.size("type_vocab_size", default=2),
        activation=read_activation(fields, "hidden_act", default="gelu"),
        dropout=read_dropout(fields, "hidden_dropout_prob", default=0.1),
        attention_dropout=read_dropout(fields, "attention_probs_dropout_prob", default=0.1),
    )
    return _read_head(fields, family, arch)


def _modernbert(fields: Fields, family: str) -> Architecture:
    """Every third layer, the first among these, attends to all tokens; the others to as many as half of
    local_attention on both sides, itself among them (of the decoder: before it)."""
    decoder = family == "modernbert-decoder"
    for name, accepted in (("classifier_bias", False), ("sparse_prediction", False)):
        if fields.flag(name, default=accepted):
            fields.refuse(name, f"{family} with it", "false")
    if (name := fields.text("classifier_activation", default="gelu")) != "gelu":
        fields.fail("classifier_activation", f"is {name!r}", "gelu")
    period = fields.size("global_attn_every_n_layers", default=3)
    sliding = read_sliding(fields, read_layers(fields, "num_hidden_layers"), lambda layer: layer % period != 0)
    kinds = tuple(LayerKind(sliding=on, first=layer == 0) for layer, on in enumerate(sliding))
    arch = Architecture(
        **shape(fields, family) | {"kinds": kinds},
        intermediate=fields.size("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=8192),
        activation=read_activation(fields, "hidden_activation", default="gelu"),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        head_bias=fields.flag("decoder_bias", default=True),
        norm_bias=fields.flag("norm_bias", default=False),
        dropout=read_dropout(fields, "mlp_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        embedding_dropout=read_dropout(fields, "embedding_dropout"),
        window=fields.size("local_attention", default=128) // 2 + (0 if decoder else 1),
    )
    return arch if decoder else _read_head(fields, family, arch)


def _esm(fields: Fields, family: str) -> Architecture:
    if fields.flag("is_folding_model", default=False):
        fields.refuse("is_folding_model", "ESMFold", "false")
    positions = fields.text("position_embedding_type", default="absolute")
    if positions not in ("absolute", "rotary"):
        fields.fail("position_embedding_type", f"is {positions!r}", "absolute, rotary")
    arch = Architecture(
        **shape(fields, family),
        intermediate=fields.size("intermediate_size", default=3072),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=1026),
        dropout=read_dropout(fields, "hidden_dropout_prob", default=0.1),
        attention_dropout=read_dropout(fields, "attention_probs_dropout_prob", default=0.1),
        rotary=positions == "rotary",
        embedding_norm=fields.flag("emb_layer_norm_before", default=False),
        token_dropout=fields.flag("token_dropout", default=False),
    )
    return _read_head(fields, family, arch)


def _distilbert(fields: Fields, family: str) -> Architecture:
    if fields.flag("sinusoidal_pos_embds", default=False):
        fields.refuse("sinusoidal_pos_embds", "positions that are sines", "false")
    sizes = {"dim": 768, "n_heads": 12, "n_layers": 6, "vocab_size": 30522}
    fields = fields.renamed({"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"})
    arch = Architecture(
        **shape(fields.over(sizes), family, hidden=("dim",), heads=("n_heads",), layers=("n_layers",)),
        intermediate=fields.size("hidden_dim", default=3072),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=512),
        activation=read_activation(fields, "activation", default="gelu"),
        dropout=read_dropout(fields, "dropout", default=0.1),
        attention_dropout=read_dropout(fields, "attention_dropout", default=0.1),
    )
    return _read_head(fields, family, arch)


READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _bert),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _modernbert),
    "esm": _esm,
    "distilbert": _distilbert,
}
