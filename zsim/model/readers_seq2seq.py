"""What config.json of models with an encoder and a decoder means (transformers 5.24)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.model.activations import ACTIVATIONS
from zsim.model.architecture import Architecture, LayerKind, Pair
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout, read_layers


def _t5(fields: Fields, family: str) -> Architecture:
    """Where `tie_word_embeddings` is false (T5 1.1, FLAN-T5, and mT5 if nothing is said) the checkpoint has an output
    projection of its own, which loading it keeps; and T5 and UMT5 scale what the decoder returns only if it is true."""
    name = fields.text("feed_forward_proj", default="relu" if family == "t5" else "gated-gelu")
    gated = name.startswith("gated-")
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    if activation not in ACTIVATIONS:
        fields.fail("feed_forward_proj", f"is {name!r}", "relu, gated-gelu, gated-silu ...")
    layers = read_layers(fields, "num_layers", "num_hidden_layers")
    heads = fields.size("num_heads", "num_attention_heads")
    tied = fields.flag("tie_word_embeddings", default=family != "mt5")
    stack = Architecture(
        family=family,
        hidden=fields.size("d_model", "hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.size("d_kv", "head_dim", default=64),
        intermediate=fields.size("d_ff"),
        vocab=fields.size("vocab_size"),
        kinds=(LayerKind(),) * layers,
        tied=tied,
        activation=activation,
        dropout=read_dropout(fields, "dropout_rate", default=0.1),
    )
    pair = Pair(
        decoder=stack,
        gated=gated,
        buckets=fields.size("relative_attention_num_buckets", default=32),
        scaled=family != "mt5" and tied,
    )
    decoder_layers = fields.size("num_decoder_layers", default=layers, most=10_000)
    decoder = replace(stack, kinds=(LayerKind(),) * decoder_layers, seq2seq=pair)
    return replace(stack, seq2seq=replace(pair, decoder=decoder))


def _refuse_layerdrop(fields: Fields, default: float = 0.0) -> None:
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if fields.number(name, default=default, low=0.0, high=1.0):
            fields.refuse(name, f"{name}, which leaves out layers at random", "0")


def _whisper(fields: Fields, family: str) -> Architecture:
    _refuse_layerdrop(fields)
    if fields.flag("apply_spec_augment", default=False):
        fields.refuse("apply_spec_augment", "SpecAugment", "false")
    width = fields.size("d_model")

    def stack(which: str, positions: str, default: int) -> Architecture:
        heads = fields.size(f"{which}_attention_heads")
        if width % heads:
            fields.fail(f"{which}_attention_heads", f"is {heads}, which does not divide {width}", "a divisor")
        return Architecture(
            family=family,
            hidden=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=fields.size(f"{which}_ffn_dim"),
            vocab=fields.size("vocab_size"),
            kinds=(LayerKind(),) * read_layers(fields, f"{which}_layers"),
            tied=fields.flag("tie_word_embeddings", default=True),
            positions=fields.size(positions, default=default),
            activation=read_activation(fields, "activation_function", default="gelu"),
            dropout=read_dropout(fields, "dropout"),
            attention_dropout=read_dropout(fields, "attention_dropout"),
            embedding_dropout=read_dropout(fields, "activation_dropout"),
        )

    pair = Pair(stack("decoder", "max_target_positions", 448), inputs=fields.size("num_mel_bins", default=80))
    return replace(stack("encoder", "max_source_positions", 1500), seq2seq=pair)


def _bart(fields: Fields, family: str) -> Architecture:
    """Fields that are left out take the defaults of the configuration classes, which are BART's large ones."""
    m2m = family == "m2m_100"
    _refuse_layerdrop(fields, default=0.05 if m2m else 0.0)
    for name in ("tie_word_embeddings", "share_encoder_decoder_embeddings"):
        if not fields.flag(name, default=True):
            fields.refuse(name, f"{family} without {name}", "true")
    width, vocab = fields.size("d_model", "hidden_size", default=1024), fields.size("vocab_size")
    if (other := fields.size("decoder_vocab_size", default=vocab)) != vocab:
        fields.fail("decoder_vocab_size", f"is {other}, and the embedding is that of both", str(vocab))

    def stack(which: str) -> Architecture:
        heads = fields.size(f"{which}_attention_heads", default=16)
        if width % heads:
            fields.fail(f"{which}_attention_heads", f"is {heads}, which does not divide {width}", "a divisor")
        return Architecture(
            family=family,
            hidden=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=fields.size(f"{which}_ffn_dim", default=4096),
            vocab=vocab,
            kinds=(LayerKind(),) * fields.size(f"{which}_layers", default=12, most=10_000),
            tied=True,
            positions=fields.size("max_position_embeddings", default=1024),
            activation=read_activation(fields, "activation_function", default="relu" if m2m else "gelu"),
            dropout=read_dropout(fields, "dropout", default=0.1),
            attention_dropout=read_dropout(fields, "attention_dropout", default=0.1 if m2m else 0.0),
            embedding_dropout=read_dropout(fields, "activation_dropout"),
        )

    return replace(stack("encoder"), seq2seq=Pair(stack("decoder")))


SEQ2SEQ_READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    "whisper": _whisper,
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100"), _bart),
}
