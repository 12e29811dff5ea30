"""What the fields of Gemma 4's config.json mean, with the defaults of transformers 5.24 (configuration_gemma4.py)."""

from __future__ import annotations

from typing import Any

from zsim.model.architecture import Architecture, Gemma4, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout, read_kv_heads, read_layers, read_sliding

PATTERN = 6  # every so many layers one of full attention, where a file does not say


def gemma4_text(fields: Fields, family: str) -> Architecture:
    layers = read_layers(fields, "num_hidden_layers")
    heads = fields.size("num_attention_heads", default=8)
    sliding = read_sliding(fields, layers, lambda layer: (layer + 1) % PATTERN != 0)
    sliding[-1] = False  # transformers makes it so
    experts = _experts(fields)
    if (fields.raw("use_bidirectional_attention") or "vision") != "vision":
        fields.refuse("use_bidirectional_attention", "attention both ways", "null or vision")
    bias = fields.flag("attention_bias", default=False)
    return Architecture(
        family=family,
        hidden=fields.size("hidden_size", default=2304),
        heads=heads,
        kv_heads=read_kv_heads(fields, heads, "num_key_value_heads", family=family),
        head_dim=fields.size("head_dim", default=256),
        intermediate=fields.size("intermediate_size", default=9216),
        vocab=fields.size("vocab_size", default=262_144),
        kinds=tuple(LayerKind(sliding=is_sliding, sparse=experts is not None) for is_sliding in sliding),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=read_activation(fields, "hidden_activation", default="gelu_pytorch_tanh"),
        attention_bias=bias,
        output_bias=bias,
        attention_dropout=read_dropout(fields, "attention_dropout"),
        window=fields.size("sliding_window", default=512),
        moe=experts,
        final_softcap=fields.given("final_logit_softcapping", default=False),
        gemma4=_own(fields, heads, sliding),
    )


def _own(fields: Fields, heads: int, sliding: list[bool]) -> Gemma4:
    keys = fields.flag("attention_k_eq_v", default=False)
    kv_heads = read_kv_heads(fields, heads, "num_key_value_heads", family="gemma4_text")
    if keys and "num_global_key_value_heads" in fields:
        kv_heads = read_kv_heads(fields, heads, "num_global_key_value_heads")
    full = {"head_dim": fields.size("global_head_dim", default=512), "num_key_value_heads": kv_heads}
    full |= _per_layer(fields, [layer for layer, is_sliding in enumerate(sliding) if not is_sliding])
    shared = fields.size("num_kv_shared_layers", default=0, least=0, most=len(sliding))
    if set(sliding[: len(sliding) - shared]) != set(sliding):
        message = f"is {shared}: those before them must have a layer of each type in layer_types"
        fields.fail("num_kv_shared_layers", message, "fewer layers")
    width = fields.size("hidden_size_per_layer_input", default=256, least=0)
    if shared and not width:
        fields.refuse("num_kv_shared_layers", "shared keys and values without embeddings of each layer, on which "
                      "transformers 5.24 fails", "0, or a hidden_size_per_layer_input")  # fmt: skip
    return Gemma4(
        images_see_each_other=fields.raw("use_bidirectional_attention") is not None,
        full_head_dim=full["head_dim"],
        full_kv_heads=full["num_key_value_heads"],
        values_are_keys=keys,
        shared_layers=shared,
        double_wide=fields.flag("use_double_wide_mlp", default=False),
        layer_width=width,
        layer_vocab=fields.size("vocab_size_per_layer_input", default=262_144) if width else 0,
    )


def _per_layer(fields: Fields, full: list[int]) -> dict[str, int]:
    """`per_layer_config`, which transformers 5.24 writes in place of global_head_dim and num_global_key_value_heads."""
    stated = fields.raw("per_layer_config")
    if stated is None:
        return {}
    entries = fields.section("per_layer_config")
    names = {_layer(fields, name): name for name in stated}
    found: list[dict[str, Any]] = [stated[names[layer]] if layer in names else {} for layer in full]
    alike = all(entry == found[0] for entry in found) and names.keys() <= set(full) and len(names) == len(stated)
    if not alike or set(found[0]) - {"head_dim", "num_key_value_heads"}:
        fields.refuse("per_layer_config", "layers that differ otherwise than in their type", "head_dim and "
                      "num_key_value_heads, the same for all layers of full attention")  # fmt: skip
    section = entries.section(names.get(full[0], ""))
    return {name: section.size(name) for name in found[0]}


def _layer(fields: Fields, name: str) -> int:
    """Of a key, which transformers pads with zeros to the width of the last one ("05", "11")."""
    try:
        return int(name)
    except ValueError:
        fields.fail("per_layer_config", f"has a key {name!r}", "numbers of layers")


def _experts(fields: Fields) -> Moe | None:
    if not fields.flag("enable_moe_block", default=False):
        return None
    experts = fields.size("num_experts")
    top_k = fields.size("top_k_experts")
    if top_k > experts:
        fields.fail("top_k_experts", f"is {top_k}, more than the {experts} experts", f"1 to {experts}")
    return Moe(experts, top_k, fields.size("moe_intermediate_size"))


def gemma3n_text(fields: Fields, family: str) -> Architecture:
    """Gemma 3n, with the defaults of configuration_gemma3n.py."""
    layers, heads = read_layers(fields, "num_hidden_layers"), fields.size("num_attention_heads", default=8)
    sliding = read_sliding(fields, layers, lambda layer: (layer + 1) % 5 != 0)
    cuts = fields.items("activation_sparsity_pattern", layers)
    cuts = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)] if cuts is None else cuts
    widths = fields.raw("intermediate_size")
    if isinstance(widths, list):
        widths = fields.items("intermediate_size", layers) or []
        if len(set(widths)) > 1:
            fields.refuse("intermediate_size", "MLPs of several widths", "one width for all layers")
        fields = fields.replaced("intermediate_size", widths[0])
    if fields.size("altup_active_idx", default=0, least=0):
        fields.refuse("altup_active_idx", "a stream that is not the first", "0")
    if not fields.flag("altup_correct_scale", default=True) or not fields.given("altup_coef_clip", default=True):
        name = "altup_correct_scale" if not fields.flag("altup_correct_scale", default=True) else "altup_coef_clip"
        fields.refuse(name, "AltUp without it", "as published")
    shared = fields.size("num_kv_shared_layers", default=15, least=0)
    if shared >= layers:
        fields.fail("num_kv_shared_layers", f"is {shared}, of {layers} layers", f"0 to {layers - 1}")
    if set(sliding[: layers - shared]) != set(sliding):
        fields.fail("num_kv_shared_layers", f"is {shared}: no layer of a type makes keys and values", "fewer")
    bias, kv_heads = (
        fields.flag("attention_bias", default=False),
        read_kv_heads(fields, heads, "num_key_value_heads", family=family),
    )
    head_dim = fields.size("head_dim", default=256)
    return Architecture(
        family=family,
        hidden=fields.size("hidden_size", default=2048),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.size("intermediate_size", default=16_384),
        vocab=fields.size("vocab_size", default=262_400),
        kinds=tuple(LayerKind(sliding=on, cut=bool(cut)) for on, cut in zip(sliding, cuts, strict=True)),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=read_activation(fields, "hidden_activation", default="gelu_pytorch_tanh"),
        attention_bias=bias,
        output_bias=bias,
        attention_dropout=read_dropout(fields, "attention_dropout"),
        window=fields.size("sliding_window", default=512),
        final_softcap=fields.given("final_logit_softcapping", default=True),
        gemma4=Gemma4(
            head_dim,
            kv_heads,
            shared_layers=shared,
            layer_width=fields.size("hidden_size_per_layer_input", default=256),
            layer_vocab=fields.size("vocab_size_per_layer_input", default=262_144),
            streams=fields.size("altup_num_inputs", default=4, least=2),
            laurel_rank=fields.size("laurel_rank", default=64),
        ),
    )
