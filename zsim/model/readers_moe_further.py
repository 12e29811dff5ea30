"""What config.json means in further mixtures of experts (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.model.architecture import Architecture, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    bias_of,
    common,
    read_activation,
    read_dropout,
    read_kv_heads,
    read_layers,
    read_sliding,
    read_top_k,
    shape,
)
from zsim.model.readers_moe import deepseek, sparse


def _mistral4(fields: Fields, family: str) -> Architecture:
    """Attention and experts of DeepSeek-V3."""
    ours = {
        "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 128,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
    }  # fmt: skip
    return deepseek(fields.over(ours), family)


def _axk1(fields: Fields, family: str) -> Architecture:
    """DeepSeek-V3, whose queries always come out of a narrow projection."""
    ours = {"q_lora_rank": 1536, "n_routed_experts": 192, "first_k_dense_replace": 1}
    arch = deepseek(fields.over(ours), family)
    fields.size("q_lora_rank", default=1536)
    step = fields.size("moe_layer_freq", default=1)
    kinds = tuple(replace(kind, sparse=kind.sparse and layer % step == 0) for layer, kind in enumerate(arch.kinds))
    if "mlp_layer_types" in fields:
        kinds = sparse(fields, arch.kinds, 0)
    return replace(arch, kinds=kinds)


def _hy_v3(fields: Fields, family: str) -> Architecture:
    """Attention of Qwen3, norms behind the transposition."""
    values = common(fields, family, qk_norm="head", mlp_bias=fields.flag("mlp_bias", default=False), **bias_of(fields))
    experts, width = fields.size("num_experts", "num_local_experts", default=192), _expert_width(fields, 1536)
    moe = Moe(
        experts,
        read_top_k(fields, experts, default=8),
        width,
        shared=width * fields.size("num_shared_experts", default=1),
        wide_sum=fields.flag("enable_moe_fp32_combine", default=True),
    )
    return Architecture(**values | {"kinds": sparse(fields, values["kinds"], dense=1)}, moe=moe)


def _expert_width(fields: Fields, default: int) -> int:
    return fields.size("moe_intermediate_size", default=default)


def _mellum(fields: Fields, family: str) -> Architecture:
    """Qwen3-MoE whose layers with a window have rotary tables of their own."""
    values = common(fields, family, qk_norm="head", **bias_of(fields))
    layers = len(values["kinds"])
    window = fields.size("sliding_window", default=1024 if fields.absent("sliding_window") else 0, least=0) or None
    sliding = read_sliding(fields, layers, lambda _layer: False)
    kinds = tuple(LayerKind(sliding=on and window is not None) for on in sliding)
    experts = fields.size("num_experts", "num_local_experts", default=64)
    norm = fields.flag("norm_topk_prob", default=True)
    moe = Moe(experts, read_top_k(fields, experts, default=8), _expert_width(fields, 896), norm)
    return Architecture(**values | {"kinds": sparse(fields, kinds, dense=0), "window": window}, moe=moe)


def _afmoe(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, qk_norm="head", **bias_of(fields))
    layers = len(values["kinds"])
    window = fields.size("sliding_window", default=1024)
    period = fields.size("global_attn_every_n_layers", default=4)
    dense = fields.size("num_dense_layers", default=1, least=0)
    sliding = read_sliding(fields, layers, lambda layer: (layer + 1) % period != 0)
    kinds = tuple(LayerKind(on, sparse=layer >= dense, rotary=on) for layer, on in enumerate(sliding))
    experts, width = fields.size("num_experts", default=64), _expert_width(fields, 1408)
    shared = width * fields.size("num_shared_experts", default=2)
    values |= {
        "kinds": kinds,
        "window": window,
        "scaled_embedding": fields.flag("mup_enabled", default=False),
    }
    return Architecture(**values, moe=Moe(experts, read_top_k(fields, experts, default=6), width, shared=shared))


def _flex_olmo(fields: Fields, family: str) -> Architecture:
    """OLMoE with OLMo 2's norms."""
    values = common(fields, family, qk_norm="width", **bias_of(fields))
    experts = fields.size("num_experts", "num_local_experts", default=7)
    norm = fields.flag("norm_topk_prob", default=False)
    moe = Moe(experts, read_top_k(fields, experts, default=5), values["intermediate"], norm)
    return Architecture(**values | {"kinds": (LayerKind(sparse=True),) * len(values["kinds"])}, moe=moe)


def _kolibri1(fields: Fields, family: str) -> Architecture:
    values = common(fields.over({"intermediate_size": 1, "sliding_window": 513}), family, qk_norm="head")
    window = fields.size("sliding_window", default=513)
    sliding = read_sliding(fields, len(values["kinds"]), lambda layer: (layer + 1) % 5 != 0)
    kinds = tuple(LayerKind(on, sparse=True, rotary=on) for on in sliding)
    experts = fields.size("num_experts", "num_local_experts", default=384)
    shared = fields.size("shared_expert_intermediate_size", default=512)
    norm = fields.flag("norm_topk_prob", default=False)
    moe = Moe(experts, read_top_k(fields, experts, default=6), _expert_width(fields, 512), norm, shared)
    return Architecture(**values | {"kinds": kinds, "window": window}, moe=moe)


def _dbrx(fields: Fields, family: str) -> Architecture:
    """Sizes of attention and experts stand in sections of their own."""
    sizes = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 32000}
    fields = fields.over(sizes)
    attention, ffn = fields.section("attn_config"), fields.section("ffn_config")
    values = shape(fields, family, hidden=("d_model",), heads=("n_heads",), layers=("n_layers",))
    if not attention.number("clip_qkv", default=0.0, low=0.0, high=1e9):
        attention.fail("clip_qkv", "is missing, without which its class fails", "a number above 0")
    if ffn.number("moe_normalize_expert_weights", default=1.0, low=0.0, high=9.0) != 1.0:
        ffn.refuse("moe_normalize_expert_weights", "weights of experts divided by another norm than their sum", "1")
    experts, top_k = ffn.size("moe_num_experts", default=4), ffn.size("moe_top_k", default=1)
    if top_k > experts:
        ffn.fail("moe_top_k", f"is {top_k}, more than the {experts} experts", f"1 to {experts}")
    width = ffn.size("ffn_hidden_size", default=3584)
    return Architecture(
        **values
        | {
            "kv_heads": read_kv_heads(attention, values["heads"], "kv_n_heads", family=family),
            "kinds": (LayerKind(sparse=True),) * len(values["kinds"]),
        },
        intermediate=width,
        tied=False,
        positions=fields.size("max_seq_len", default=2048),
        activation=read_activation(ffn.section("ffn_act_fn"), "name", default="silu"),
        dropout=read_dropout(fields, "resid_pdrop"),
        attention_dropout=read_dropout(attention, "attn_pdrop"),
        clip_qkv=True,
        moe=Moe(
            experts,
            top_k,
            width,
            ffn.given("moe_normalize_expert_weights", default=True),
            noise=ffn.number("moe_jitter_eps", default=0.0, low=0.0, high=1.0) > 0,
        ),
    )


def _cohere2_moe(fields: Fields, family: str) -> Architecture:
    """Layers without a window do not rotate, but for dense ones at the start where these have no windows."""
    dense, layers = fields.size("first_k_dense_replace", default=0, least=0), read_layers(fields, "num_hidden_layers")
    window = fields.size("sliding_window", default=4096)
    ahead = fields.size("prefix_dense_sliding_window_pattern", default=1)
    period = fields.size("sliding_window_pattern", default=4)
    sliding = read_sliding(
        fields, layers, lambda i: (i + 1) % ahead != 0 if i < dense else (i - dense + 1) % period != 0
    )
    kinds = sparse(fields, tuple(LayerKind(sliding=on, rotary=on) for on in sliding), dense)
    kinds = tuple(replace(kind, rotary=kind.rotary or (not kind.sparse and ahead == 1)) for kind in kinds)
    heads = fields.size("num_attention_heads")
    values = common(fields.over({"num_key_value_heads": heads}), family, kinds=kinds, window=window, **bias_of(fields))
    experts, width = fields.size("num_experts", default=8), values["intermediate"]
    scores = fields.text("expert_selection_fn", default="softmax")
    sums = fields.text("shared_expert_combination_strategy", default="average")
    for name, value, accepted in (
        ("expert_selection_fn", scores, ("softmax", "sigmoid")),
        ("shared_expert_combination_strategy", sums, ("average", "sum")),
    ):
        if value not in accepted:
            fields.fail(name, f"is {value!r}", ", ".join(accepted))
    return Architecture(
        **values
        | {
            "tied": fields.flag("tie_word_embeddings", default=True),
            "intermediate": fields.size("prefix_dense_intermediate_size", default=width),
        },
        rms_norms=fields.given("rms_norm_eps", default=False),
        moe=Moe(
            experts,
            read_top_k(fields, experts, default=2),
            width,
            fields.flag("norm_topk_prob", default=True),
            width * fields.size("num_shared_experts", default=0, least=0),
            sigmoid=scores == "sigmoid",
            averages=sums == "average",
        ),
    )


READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    "mistral4": _mistral4,
    "axk1": _axk1,
    "hy_v3": _hy_v3,
    "mellum": _mellum,
    "cohere2_moe": _cohere2_moe,
    "dbrx": _dbrx,
    "afmoe": _afmoe,
    "flex_olmo": _flex_olmo,
    "kolibri1": _kolibri1,
}
