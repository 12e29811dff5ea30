"""What config.json means in the families that differ from Llama by a few lines (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.errors import NotModeled
from zsim.model.architecture import Architecture, Latent, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    read_activation,
    read_dropout,
    read_heads,
    read_kv_heads,
    read_layers,
    read_rotary_dim,
    read_sliding,
    read_top_k,
)


def common(fields: Fields, family: str, **families: Any) -> dict[str, Any]:
    """The fields that all of them name as Llama does; `families`: what this one sets otherwise."""
    hidden = fields.size("hidden_size")
    heads, head_dim = read_heads(fields, hidden, "num_attention_heads", family=family)
    return {
        "family": family,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": read_kv_heads(fields, heads, "num_key_value_heads", family=family),
        "head_dim": head_dim,
        "intermediate": fields.size("intermediate_size"),
        "vocab": fields.size("vocab_size"),
        "kinds": (LayerKind(),) * read_layers(fields, "num_hidden_layers"),
        "tied": fields.flag("tie_word_embeddings", default=False),
        "positions": fields.size("max_position_embeddings", default=2048),
        "activation": read_activation(fields, "hidden_act", default="silu"),
        "attention_dropout": read_dropout(fields, "attention_dropout"),
    } | families


def _bias(fields: Fields, name: str = "attention_bias", default: bool = False) -> dict[str, bool]:
    """Of all four projections of attention."""
    bias = fields.flag(name, default=default)
    return {"attention_bias": bias, "output_bias": bias}


def _llama_like(fields: Fields, family: str) -> Architecture:
    """Granite, HunYuan, Arcee."""
    mlp_bias = family != "hunyuan_v1_dense" and fields.flag("mlp_bias", default=False)
    default = "relu2" if family == "arcee" else "silu"
    activation = read_activation(fields, "hidden_act", default=default)
    return Architecture(**common(fields, family, mlp_bias=mlp_bias, activation=activation, **_bias(fields)))


def _olmo(fields: Fields, family: str) -> Architecture:
    clip = fields.number("clip_qkv", default=0.0, low=0.0, high=1e9) > 0
    return Architecture(**common(fields, family, clip_qkv=clip, **_bias(fields)))


def _windows(fields: Fields, window: int | None, period: int) -> list[bool]:
    """Which layers have a window: all but every `period`-th, unless the file lists them."""
    layers = read_layers(fields, "num_hidden_layers")
    sliding = read_sliding(fields, layers, lambda layer: window is not None and (layer + 1) % period != 0)
    return [is_sliding and window is not None for is_sliding in sliding]


def _olmo3(fields: Fields, family: str) -> Architecture:
    window = fields.size("sliding_window", default=4096)
    kinds = tuple(LayerKind(sliding=is_sliding) for is_sliding in _windows(fields, window, 4))
    return Architecture(**common(fields, family, kinds=kinds, window=window, qk_norm="width", **_bias(fields)))


def _exaone4(fields: Fields, family: str) -> Architecture:
    """Layers without a window have no positions, if others have one."""
    window = fields.size("sliding_window", default=4096) if fields.given("sliding_window", default=True) else None
    pattern = fields.raw("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) and pattern else pattern or 4  # "LLLG"
    if isinstance(period, bool) or not isinstance(period, int):
        fields.fail("sliding_window_pattern", f"is {period!r}", 'a number of layers, or such as "LLLG"')
    sliding = _windows(fields, window, period)
    kinds = tuple(LayerKind(sliding=is_sliding, rotary=is_sliding or window is None) for is_sliding in sliding)
    return Architecture(**common(fields, family, kinds=kinds, window=window, qk_norm="head"))


def _cohere(fields: Fields, family: str) -> Architecture:
    tied = fields.flag("tie_word_embeddings", default=True)
    if family == "cohere":
        norm = "each" if fields.flag("use_qk_norm", default=False) else ""
        return Architecture(**common(fields, family, tied=tied, qk_norm=norm, **_bias(fields)))
    window = fields.size("sliding_window", default=4096)
    sliding = _windows(fields, window, fields.size("sliding_window_pattern", default=4))
    kinds = tuple(LayerKind(sliding=is_sliding, rotary=is_sliding) for is_sliding in sliding)
    return Architecture(**common(fields, family, tied=tied, kinds=kinds, window=window, **_bias(fields)))


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
    values = common(fields, family, mlp_bias=fields.flag("mlp_bias", default=False), **_bias(fields))
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
    hidden = fields.size("hidden_size")
    heads, head_dim = read_heads(fields, hidden, "num_heads", "num_attention_heads")
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=fields.size("intermediate_size", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        kinds=(LayerKind(),) * read_layers(fields, "num_layers", "num_hidden_layers"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=2048),
        activation=read_activation(fields, "activation_function", default="gelu_new"),
        dropout=read_dropout(fields, "resid_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        embedding_dropout=read_dropout(fields, "embed_dropout"),
    )


def _gpt_bigcode(fields: Fields, family: str) -> Architecture:
    hidden = fields.size("n_embd", "hidden_size")
    heads, head_dim = read_heads(fields, hidden, "n_head", "num_attention_heads")
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if fields.flag("multi_query", default=True) else heads,
        head_dim=head_dim,
        intermediate=fields.size("n_inner", default=4 * hidden),
        vocab=fields.size("vocab_size"),
        kinds=(LayerKind(),) * read_layers(fields, "n_layer", "num_hidden_layers"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("n_positions", "max_position_embeddings", default=1024),
        activation=read_activation(fields, "activation_function", default="gelu_pytorch_tanh"),
        dropout=read_dropout(fields, "resid_pdrop", default=0.1),
        attention_dropout=read_dropout(fields, "attn_pdrop", default=0.1),
        embedding_dropout=read_dropout(fields, "embd_pdrop", default=0.1),
    )


def _gpt_oss(fields: Fields, family: str) -> Architecture:
    layers = read_layers(fields, "num_hidden_layers")
    window = fields.size("sliding_window", default=128)
    sliding = read_sliding(fields, layers, lambda layer: layer % 2 == 0)
    experts = fields.size("num_local_experts", default=128)
    top_k = read_top_k(fields, experts, "experts_per_token", default=4)
    values = common(
        fields,
        family,
        kinds=tuple(LayerKind(sliding=is_sliding, sparse=True) for is_sliding in sliding),
        window=window,
        moe=Moe(experts, top_k, fields.size("intermediate_size")),
        **_bias(fields, default=True),
    )
    return Architecture(**values)


def _bert(fields: Fields, family: str) -> Architecture:
    """Encoders that are trained to fill masks. Their files stand for models with other heads as well, and say so."""
    modeled = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}[family]
    said = fields.items("architectures") or []
    if modeled not in said or fields.flag("is_decoder", default=False):
        name = "architectures" if said else "model_type"
        what = ", ".join(map(str, said)) or f"{family} without architectures, which say with what head it trains"
        raise NotModeled(what, fields.path, fields.line(name), name, accepted=f'"architectures": ["{modeled}"]')
    hidden = fields.size("hidden_size")
    heads, head_dim = read_heads(fields, hidden, "num_attention_heads")
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        kinds=(LayerKind(),) * read_layers(fields, "num_hidden_layers"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", default=512),
        token_types=fields.size("type_vocab_size", default=2),
        activation=read_activation(fields, "hidden_act", default="gelu"),
        dropout=read_dropout(fields, "hidden_dropout_prob", default=0.1),
        attention_dropout=read_dropout(fields, "attention_probs_dropout_prob", default=0.1),
    )


def _deepseek(fields: Fields, family: str) -> Architecture:
    """transformers 5.24 reads neither moe_layer_freq nor scoring_func, and of topk_method only V2's."""
    second = family == "deepseek_v2"
    layers = read_layers(fields, "num_hidden_layers")
    dense = fields.size("first_k_dense_replace", default=0 if second else 3, least=0)
    latent = Latent(
        query_rank=fields.size("q_lora_rank", default=1536 if fields.absent("q_lora_rank") else 0),
        key_value_rank=fields.size("kv_lora_rank", default=512),
        nope=fields.size("qk_nope_head_dim", default=128),
        rope=fields.size("qk_rope_head_dim", default=64),
        value=fields.size("v_head_dim", default=128),
        interleaved=second or fields.flag("rope_interleave", default=True),
    )
    if latent.rope % 2:
        fields.fail("qk_rope_head_dim", f"is {latent.rope}", "an even number")
    bias = fields.flag("attention_bias", default=False)
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", default=heads) < heads:
        fields.fail("num_key_value_heads", "is less than the heads", f"{heads}: each has a key of its own")
    return Architecture(
        family=family,
        hidden=fields.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=latent.nope + latent.rope,
        intermediate=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size"),
        kinds=tuple(LayerKind(sparse=layer >= dense) for layer in range(layers)),
        tied=fields.flag("tie_word_embeddings", default=False),
        positions=fields.size("max_position_embeddings", default=2048),
        activation=read_activation(fields, "hidden_act", default="silu"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        mlp_bias=second and fields.flag("mlp_bias", default=False),
        moe=_deepseek_experts(fields, second),
        latent=latent,
        attention_bias=bias,
        output_bias=bias,
    )


def _deepseek_experts(fields: Fields, second: bool) -> Moe:
    experts = fields.size("n_routed_experts", "num_experts", "num_local_experts", default=64 if second else 256)
    width = fields.size("moe_intermediate_size", default=1407 if second else 2048)
    method = fields.text("topk_method", default="greedy") if second else "group_limited_greedy"
    if method not in ("greedy", "group_limited_greedy"):
        fields.fail("topk_method", f"is {method!r}", "greedy, group_limited_greedy")
    groups = 0
    if method != "greedy":
        groups = fields.size("n_group", default=None if second else 8)
        if experts % groups:
            fields.fail("n_group", f"is {groups}, which does not divide the {experts} experts", "a divisor")
        if fields.size("topk_group", default=None if second else 4) > groups:
            fields.fail("topk_group", f"is more than the {groups} groups", f"1 to {groups}")
    top_k = read_top_k(fields, experts, default=None if second else 8)
    shared = width * fields.size("n_shared_experts", default=2 if second else 1)
    norm = not second and fields.flag("norm_topk_prob", default=True)
    return Moe(experts, top_k, width, norm, shared, groups=groups)


def _glm4_moe(fields: Fields, family: str) -> Architecture:
    """GLM-4.5: the router of DeepSeek-V3, attention of GLM-4. Layers that predict further tokens are not built."""
    values = common(fields, family, attention_bias=fields.flag("attention_bias", default=False))
    values["rotary_dim"] = read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=0.5)
    values["qk_norm"] = "head" if fields.flag("use_qk_norm", default=False) else ""
    dense = fields.size("first_k_dense_replace", default=1, least=0)
    values["kinds"] = tuple(LayerKind(sparse=layer >= dense) for layer in range(len(values["kinds"])))
    experts, groups = fields.size("n_routed_experts", "num_local_experts"), fields.size("n_group", default=1)
    if experts % groups:
        fields.fail("n_group", f"is {groups}, which does not divide the {experts} experts", "a divisor")
    width, top_k = fields.size("moe_intermediate_size"), read_top_k(fields, experts, default=8)
    shared = width * fields.size("n_shared_experts", default=1)
    norm = fields.flag("norm_topk_prob", default=True)
    return Architecture(**values, moe=Moe(experts, top_k, width, norm, shared, groups=groups))


def _llama4(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, **_bias(fields))
    layers = len(values["kinds"])
    step = fields.size("interleave_moe_layer_step", default=1)
    sparse = fields.items("moe_layers")
    sparse = list(range(step - 1, layers, step)) if sparse is None else sparse
    interval = fields.size("no_rope_layer_interval", default=4)
    ropes = fields.items("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(ropes) != layers:
        fields.fail("no_rope_layers", f"has {len(ropes)} entries", f"{layers} entries, one per layer")
    experts = fields.size("num_local_experts", default=16)
    top_k = read_top_k(fields, experts, default=1)
    width = fields.size("intermediate_size")
    values |= {
        "kinds": tuple(LayerKind(sparse=i in sparse, rotary=bool(rope)) for i, rope in enumerate(ropes)),
        "intermediate": fields.size("intermediate_size_mlp", default=16384),
        "qk_norm": "head" if fields.flag("use_qk_norm", default=True) else "",
        "window": fields.size("attention_chunk_size", default=8192 if fields.absent("attention_chunk_size") else 0)
        or None,
    }
    tuned = fields.flag("attn_temperature_tuning", default=True)
    return Architecture(**values, moe=Moe(experts, top_k, width, shared=width, scales_queries=tuned))


def _granitemoe(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, **_bias(fields))
    experts = fields.size("num_local_experts", default=8)
    top_k = read_top_k(fields, experts, default=2)
    values["kinds"] = (LayerKind(sparse=True),) * len(values["kinds"])
    return Architecture(**values, moe=Moe(experts, top_k, fields.size("intermediate_size")))


RELATIVES: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("granite", "hunyuan_v1_dense", "arcee"), _llama_like),
    **dict.fromkeys(("cohere", "cohere2"), _cohere),
    **dict.fromkeys(("glm", "glm4"), _glm),
    **dict.fromkeys(("bert", "roberta"), _bert),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "glm4_moe": _glm4_moe,
    "granitemoe": _granitemoe,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
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
