"""What config.json means in the families that differ from Llama by a few lines (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from zsim.model.architecture import Architecture, LayerKind
from zsim.model.families import ENCODERS, MOE_FURTHER
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    bias_of,
    common,
    read_activation,
    read_dropout,
    read_layers,
    read_rotary_dim,
    read_sliding,
    shape,
)


def _llama_like(fields: Fields, family: str) -> Architecture:
    """Granite, HunYuan, Arcee."""
    mlp_bias = family != "hunyuan_v1_dense" and fields.flag("mlp_bias", default=False)
    default = "relu2" if family == "arcee" else "silu"
    activation = read_activation(fields, "hidden_act", default=default)
    return Architecture(**common(fields, family, mlp_bias=mlp_bias, activation=activation, **bias_of(fields)))


def _olmo(fields: Fields, family: str) -> Architecture:
    clip = fields.number("clip_qkv", default=0.0, low=0.0, high=1e9) > 0
    return Architecture(**common(fields, family, clip_qkv=clip, **bias_of(fields)))


def windows(fields: Fields, window: int | None, period: int) -> list[bool]:
    """Which layers have a window: all but every `period`-th, unless the file lists them."""
    layers = read_layers(fields, "num_hidden_layers")
    sliding = read_sliding(fields, layers, lambda layer: window is not None and (layer + 1) % period != 0)
    return [is_sliding and window is not None for is_sliding in sliding]


def _olmo3(fields: Fields, family: str) -> Architecture:
    window = fields.size("sliding_window", default=4096)
    kinds = tuple(LayerKind(sliding=is_sliding) for is_sliding in windows(fields, window, 4))
    return Architecture(**common(fields, family, kinds=kinds, window=window, qk_norm="width", **bias_of(fields)))


def exaone_layers(fields: Fields) -> tuple[tuple[LayerKind, ...], int | None]:
    """And their window. Layers without one have no positions, if others have one."""
    window = fields.size("sliding_window", default=4096) if fields.given("sliding_window", default=True) else None
    pattern = fields.raw("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) and pattern else pattern or 4  # "LLLG"
    if isinstance(period, bool) or not isinstance(period, int):
        fields.fail("sliding_window_pattern", f"is {period!r}", 'a number of layers, or such as "LLLG"')
    sliding = windows(fields, window, period)
    return tuple(LayerKind(sliding=on, rotary=on or window is None) for on in sliding), window


def _exaone4(fields: Fields, family: str) -> Architecture:
    kinds, window = exaone_layers(fields)
    return Architecture(**common(fields, family, kinds=kinds, window=window, qk_norm="head"))


def _cohere(fields: Fields, family: str) -> Architecture:
    tied = fields.flag("tie_word_embeddings", default=True)
    if family == "cohere":
        norm = "each" if fields.flag("use_qk_norm", default=False) else ""
        return Architecture(**common(fields, family, tied=tied, qk_norm=norm, **bias_of(fields)))
    window = fields.size("sliding_window", default=4096)
    sliding = windows(fields, window, fields.size("sliding_window_pattern", default=4))
    kinds = tuple(LayerKind(sliding=is_sliding, rotary=is_sliding) for is_sliding in sliding)
    return Architecture(**common(fields, family, tied=tied, kinds=kinds, window=window, **bias_of(fields)))


def _glm(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, attention_bias=fields.flag("attention_bias", default=True))
    values["rotary_dim"] = read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=0.5)
    return Architecture(**values)


def _ernie(fields: Fields, family: str) -> Architecture:
    bias = fields.flag("use_bias", default=False)
    values = common(fields, family, mlp_bias=bias, attention_bias=bias, output_bias=bias, attention_dropout=0.0)
    values["tied"] = fields.flag("tie_word_embeddings", default=True)
    return Architecture(**values)


def _seed_oss(fields: Fields, family: str) -> Architecture:
    values = common(
        fields,
        family,
        attention_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        dropout=read_dropout(fields, "residual_dropout", default=0.1),
        attention_dropout=read_dropout(fields, "attention_dropout", default=0.1),
    )
    return Architecture(**values)


def _ministral3(fields: Fields, family: str) -> Architecture:
    window = fields.size("sliding_window", default=0, least=0) or None
    values = common(fields, family, window=window)
    return Architecture(**values | {"kinds": (LayerKind(sliding=window is not None),) * len(values["kinds"])})


def _nemotron(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, mlp_bias=fields.flag("mlp_bias", default=False), **bias_of(fields))
    values["activation"] = read_activation(fields, "hidden_act", default="relu2")
    names = ("partial_rotary_factor", "rope_percent", "rope_percentage")
    values["rotary_dim"] = read_rotary_dim(fields, values["head_dim"], *names, default=0.5)
    return Architecture(**values)


def _stablelm(fields: Fields, family: str) -> Architecture:
    values = common(
        fields,
        family,
        attention_bias=fields.flag("use_qkv_bias", default=False),
        parallel=fields.flag("use_parallel_residual", default=False),
        qk_norm="each" if fields.flag("qk_layernorm", default=False) else "",
        dropout=read_dropout(fields, "hidden_dropout"),
    )
    values["rotary_dim"] = read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=0.25)
    return Architecture(**values)


def _starcoder2(fields: Fields, family: str) -> Architecture:
    bias = fields.flag("use_bias", default=True)
    values = common(
        fields,
        family,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=read_activation(fields, "hidden_act", default="gelu_pytorch_tanh"),
        dropout=read_dropout(fields, "residual_dropout"),
        embedding_dropout=read_dropout(fields, "embedding_dropout"),
    )
    window = fields.size("sliding_window", default=0) or None
    return Architecture(
        **values | {"window": window, "kinds": (LayerKind(sliding=window is not None),) * len(values["kinds"])}
    )


def _gpt_neo(fields: Fields, family: str) -> Architecture:
    heads, layers = ("num_heads", "num_attention_heads"), ("num_layers", "num_hidden_layers")
    values = shape(fields, family, heads=heads, layers=layers)
    return Architecture(
        **values,
        intermediate=fields.size("intermediate_size", default=4 * values["hidden"]),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=2048),
        activation=read_activation(fields, "activation_function", default="gelu_new"),
        dropout=read_dropout(fields, "resid_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        embedding_dropout=read_dropout(fields, "embed_dropout"),
    )


def _gpt_bigcode(fields: Fields, family: str) -> Architecture:
    values = shape(
        fields,
        family,
        hidden=("n_embd", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )
    if fields.flag("multi_query", default=True):
        values["kv_heads"] = 1
    return Architecture(
        **values,
        intermediate=fields.size("n_inner", default=4 * values["hidden"]),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("n_positions", "max_position_embeddings", default=1024),
        activation=read_activation(fields, "activation_function", default="gelu_pytorch_tanh"),
        dropout=read_dropout(fields, "resid_pdrop", default=0.1),
        attention_dropout=read_dropout(fields, "attn_pdrop", default=0.1),
        embedding_dropout=read_dropout(fields, "embd_pdrop", default=0.1),
    )


def later(room: str) -> Callable[[Fields, str], Architecture]:
    """The readers of another file, which only who asks for one imports."""

    def read(fields: Fields, family: str) -> Architecture:
        return import_module(f"zsim.model.{room}").READERS[family](fields, family)

    return read


SIBLINGS = ("cwm", "ministral", "helium", "hyperclovax", "jais2", "apertus", "minicpm3", "nanochat", "bitnet")
MOE = (
    "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe", "granitemoeshared", "glm4_moe",
    "glm4_moe_lite", "dots1", "solar_open", "exaone_moe", "minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe", "youtu",
    "phimoe", "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip
RELATIVES: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("granite", "hunyuan_v1_dense", "arcee"), _llama_like),
    **dict.fromkeys(("cohere", "cohere2"), _cohere),
    **dict.fromkeys(("glm", "glm4"), _glm),
    **dict.fromkeys(ENCODERS, later("readers_encoders")),
    **dict.fromkeys(MOE, later("readers_moe")),
    **dict.fromkeys((*MOE_FURTHER, "cohere2_moe", "dbrx"), later("readers_moe_further")),
    **dict.fromkeys(SIBLINGS, later("readers_siblings")),
    "olmo": _olmo,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "nemotron": _nemotron,
    "ministral3": _ministral3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gpt_neo": _gpt_neo,
    "gpt_bigcode": _gpt_bigcode,
}
