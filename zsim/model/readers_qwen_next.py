"""What config.json means in Qwen3-Next and Qwen3.5 (rules as in `readers`)."""

from __future__ import annotations

from zsim.model.architecture import Architecture, LayerKind, LinearAttention, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    bias_of,
    read_activation,
    read_dropout,
    read_kv_heads,
    read_layers,
    read_rotary_dim,
    read_top_k,
    read_types,
    shape,
)


def read_qwen_next(fields: Fields, family: str) -> Architecture:
    """Dense (`qwen3_5_text`), with experts in all layers (`qwen3_5_moe_text`) or in those that its file says."""
    layers = read_layers(fields, "num_hidden_layers")
    sparse = _sparse(fields, family, layers)
    linear = _linear(fields, layers)
    values = shape(fields, family) | bias_of(fields)
    values["kv_heads"] = read_kv_heads(fields, values["heads"], "num_key_value_heads", family=family)
    values["kinds"] = tuple(
        LayerKind(sparse=sparse[layer], mixer="delta" if linear[layer] else "attention") for layer in range(layers)
    )
    return Architecture(
        **values,
        intermediate=fields.size("intermediate_size") if not all(sparse) else 0,
        tied=fields.flag("tie_word_embeddings", default=False),
        positions=fields.size("max_position_embeddings", default=32768),
        activation=read_activation(fields, "hidden_act", default="silu"),
        qk_norm="head",
        rotary_dim=read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=0.25),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        moe=_experts(fields, family) if any(sparse) else None,
        delta=_delta(fields),
        conv_kernel=fields.size("linear_conv_kernel_dim", default=4),
    )


def _linear(fields: Fields, layers: int) -> list[bool]:
    """Which layers have linear attention: all but every fourth, or every `full_attention_interval`-th."""
    types = read_types(fields, layers, "layer_types", "full_attention", "linear_attention")
    if types is None:
        interval = fields.size("full_attention_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    return [entry == "linear_attention" for entry in types]


def _delta(fields: Fields) -> LinearAttention:
    keys = fields.size("linear_num_key_heads", default=16)
    values = fields.size("linear_num_value_heads", default=32)
    if values % keys:
        fields.fail("linear_num_value_heads", f"is {values}, no multiple of the {keys} key heads", "a multiple")
    return LinearAttention(
        keys,
        values,
        key_dim=fields.size("linear_key_head_dim", default=128),
        value_dim=fields.size("linear_value_head_dim", default=128),
    )


def _sparse(fields: Fields, family: str, layers: int) -> list[bool]:
    if family != "qwen3_next":
        return [family == "qwen3_5_moe_text"] * layers
    step, dense = fields.size("decoder_sparse_step", default=1), fields.items("mlp_only_layers") or []
    some = fields.size("num_experts", default=512, least=0) > 0
    return [some and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def _experts(fields: Fields, family: str) -> Moe:
    """Qwen3.5's router divides always."""
    following = family == "qwen3_next"
    experts = fields.size("num_experts", default=512 if following else 256)
    return Moe(
        experts,
        read_top_k(fields, experts, default=10 if following else 8),
        fields.size("moe_intermediate_size", default=512),
        fields.flag("norm_topk_prob", default=True) if following else True,
        fields.size("shared_expert_intermediate_size", default=512),
    )
