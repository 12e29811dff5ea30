"""What config.json means in the families whose layers are not all attention (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable

from zsim.model.architecture import Architecture, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_layers, read_top_k, read_types
from zsim.model.readers_relatives import common


def _lfm2(fields: Fields, family: str) -> Architecture:
    layers, sparse = read_layers(fields, "num_hidden_layers"), family == "lfm2_moe"
    if "block_ff_dim" in fields:
        fields = fields.over({"intermediate_size": fields.size("block_ff_dim")})
    types = read_types(fields, layers, "layer_types", "full_attention", "conv")
    if types is None:
        if sparse:
            fields.fail("layer_types", "is missing", f"{layers} entries of full_attention, conv")
        attending = fields.items("full_attn_idxs")
        types = ["full_attention" if attending is None or i in attending else "conv" for i in range(layers)]
    dense = fields.size("num_dense_layers", default=2, least=0) if sparse else layers
    kinds = tuple(
        LayerKind(sparse=i >= dense, mixer="conv" if kind == "conv" else "attention") for i, kind in enumerate(types)
    )
    values = common(
        fields,
        family,
        kinds=kinds,
        activation="silu",
        attention_dropout=0.0,
        tied=fields.flag("tie_embedding", "tie_word_embeddings", default=True),
        conv_kernel=fields.size("conv_L_cache", default=3),
        conv_bias=fields.flag("conv_bias", default=False),
        intermediate=fields.size("intermediate_size") if sparse else _lfm2_width(fields),
    )
    if not sparse:
        return Architecture(**values)
    experts = fields.size("num_experts", default=32)
    width, norm = fields.size("moe_intermediate_size", default=1792), fields.flag("norm_topk_prob", default=True)
    bias = fields.flag("use_expert_bias", default=True)
    return Architecture(**values, moe=Moe(experts, read_top_k(fields, experts, default=4), width, norm, bias=bias))


def _lfm2_width(fields: Fields) -> int:
    """Lfm2MLP: of the width that is given two thirds, times a factor, up to a multiple."""
    width = fields.size("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if not fields.given("block_ffn_dim_multiplier", default=True):
        return width
    width = int(fields.number("block_ffn_dim_multiplier", default=1.0, low=0.01, high=100.0) * width)
    multiple = fields.size("block_multiple_of", default=256)
    return -(-width // multiple) * multiple


HYBRIDS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
}
