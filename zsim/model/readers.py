"""What the fields of each family's config.json mean: one reader per set of field names.

A field that is null or left out takes the default of the family's configuration class (transformers 5.24), except
sizes, which must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.model.architecture import Architecture, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    common,
    read_activation,
    read_dropout,
    read_kv_heads,
    read_layers,
    read_rotary_dim,
    read_sliding,
    read_top_k,
    refuse_jitter,
    shape,
)
from zsim.model.readers_gemma4 import gemma3n_text, gemma4_text
from zsim.model.readers_hybrid import HYBRIDS
from zsim.model.readers_relatives import RELATIVES


def _llama(fields: Fields, family: str) -> Architecture:
    values = common(fields, family)
    layers = len(values["kinds"])
    default = 4096 if fields.absent("sliding_window") and family.startswith(("mistral", "qwen")) else 0
    window = fields.size("sliding_window", default=default, least=0) or None
    if family.startswith(("qwen", "smollm")):  # the window is off unless use_sliding_window, and starts at a layer
        window = window if fields.flag("use_sliding_window", default=False) else None
        first = fields.size("max_window_layers", default=28, least=0)
        alternating = family == "qwen2_moe"  # every other one before that layer
        sliding = read_sliding(fields, layers, lambda i: (i % 2 == 0 and i < first) if alternating else i >= first)
    else:
        sliding = read_sliding(fields, layers, lambda layer: window is not None)
    kinds = tuple(LayerKind(sliding=is_sliding and window is not None) for is_sliding in sliding)
    bias = fields.flag("attention_bias", "qkv_bias", default=family in ("qwen2", "qwen2_moe"))
    values |= {
        "kinds": kinds,
        "tied": fields.flag("tie_word_embeddings", default=family == "smollm3"),
        "attention_bias": True if family == "qwen2" else bias and family != "mistral",
        "output_bias": bias and family not in ("qwen2", "qwen2_moe", "mistral"),
        "mlp_bias": fields.flag("mlp_bias", default=False) and family in ("llama", "smollm3"),
        "window": window,
    }
    if family == "smollm3":
        interval = fields.size("no_rope_layer_interval", default=4)
        ropes = fields.items("no_rope_layers", layers) or [int((i + 1) % interval != 0) for i in range(layers)]
        values["kinds"] = tuple(
            LayerKind(sliding=kind.sliding, rotary=bool(rope)) for kind, rope in zip(kinds, ropes, strict=True)
        )
    if family in ("qwen3", "qwen3_moe"):
        values["qk_norm"] = "head"
    if family in ("olmo2", "olmoe"):
        values["qk_norm"] = "width"
    if family == "olmoe":
        values["clip_qkv"] = fields.number("clip_qkv", default=0.0, low=0.0, high=1e9) > 0
    return _experts(fields, family, values)


def _experts(fields: Fields, family: str, values: dict[str, Any]) -> Architecture:
    layers, shared = len(values["kinds"]), 0
    if family == "mixtral":
        refuse_jitter(fields)
        experts = fields.size("num_local_experts", default=8)
        top_k = read_top_k(fields, experts, default=2)
        width, sparse, norm = values["intermediate"], [True] * layers, True
    elif family == "olmoe":
        experts = fields.size("num_experts", default=64)
        top_k = read_top_k(fields, experts, default=8)
        width, sparse = values["intermediate"], [True] * layers
        norm = fields.flag("norm_topk_prob", default=False)
    elif family in ("qwen2_moe", "qwen3_moe"):
        experts = fields.size("num_experts", "num_local_experts")
        top_k = read_top_k(fields, experts)
        width, norm = fields.size("moe_intermediate_size"), fields.flag("norm_topk_prob", default=False)
        shared = fields.size("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
        step, dense = fields.size("decoder_sparse_step", default=1), fields.items("mlp_only_layers") or []
        sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    else:
        return Architecture(**values)
    kinds = tuple(LayerKind(kind.sliding, is_sparse) for kind, is_sparse in zip(values["kinds"], sparse, strict=True))
    return Architecture(**values | {"kinds": kinds}, moe=Moe(experts, top_k, width, norm, shared))


def _gemma(fields: Fields, family: str) -> Architecture:
    hidden, layers = fields.size("hidden_size"), read_layers(fields, "num_hidden_layers")
    text = family == "gemma3_text"  # whose published files leave out what is the class's default
    heads = fields.size("num_attention_heads", default=8 if text else None)
    window = None if family == "gemma" else fields.size("sliding_window", default=4096)
    if family in ("gemma2", "vaultgemma"):
        sliding = read_sliding(fields, layers, lambda layer: layer % 2 == 0)
    elif text:
        period = fields.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
        sliding = read_sliding(fields, layers, lambda layer: (layer + 1) % period != 0)
    else:
        sliding = [False] * layers
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=read_kv_heads(fields, heads, "num_key_value_heads", family=family),
        head_dim=fields.size("head_dim", default=256),
        intermediate=fields.size("intermediate_size"),
        vocab=fields.size("vocab_size", default=262_208 if text else None),
        kinds=tuple(LayerKind(sliding=is_sliding) for is_sliding in sliding),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=read_activation(fields, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        attention_bias=fields.flag("attention_bias", default=False),
        output_bias=fields.flag("attention_bias", default=False),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        qk_norm="head" if text else "",
        window=window,
        softcap=family in ("gemma2", "vaultgemma") and fields.given("attn_logit_softcapping", default=True),
        final_softcap=family != "gemma"
        and fields.given("final_logit_softcapping", default=family in ("gemma2", "vaultgemma")),
    )


def _gpt2(fields: Fields, family: str) -> Architecture:
    """GPT-2, GPT-J and CodeGen."""
    values = shape(
        fields,
        family,
        hidden=("n_embd", "hidden_size", "hidden_dim"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers", "num_layers"),
    )
    p = 0.1 if family == "gpt2" else 0.0
    return Architecture(
        **values,
        intermediate=fields.size("n_inner", "intermediate_size", "ffn_embed_dim", default=4 * values["hidden"]),
        tied=fields.flag("tie_word_embeddings", default=family == "gpt2"),
        positions=fields.size(
            "n_positions", "max_position_embeddings", "max_seq_len", default=1024 if family == "gpt2" else 2048
        ),
        activation=read_activation(fields, "activation_function", default="gelu_new"),
        rotary_dim=0 if family == "gpt2" else fields.size("rotary_dim", default=64),
        dropout=read_dropout(fields, "resid_pdrop", default=p),
        attention_dropout=read_dropout(fields, "attn_pdrop", default=p),
        embedding_dropout=read_dropout(fields, "embd_pdrop", default=p),
    )


def _gpt_neox(fields: Fields, family: str) -> Architecture:
    values = shape(fields, family, layers=("num_hidden_layers", "num_layers"))
    return Architecture(
        **values,
        intermediate=fields.size("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", default=False),
        activation=read_activation(fields, "hidden_act", default="gelu"),
        attention_bias=fields.flag("attention_bias", default=True),
        parallel=fields.flag("use_parallel_residual", default=True),
        rotary_dim=read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", "rotary_pct", default=0.25),
        dropout=read_dropout(fields, "hidden_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
    )


def _opt(fields: Fields, family: str) -> Architecture:
    values = shape(
        fields,
        family,
        hidden=("hidden_size", "hidden_dim"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "num_layers"),
    )
    bias = fields.flag("enable_bias", default=True)
    pre_norm = fields.flag("do_layer_norm_before", default=True)
    if fields.number("layerdrop", default=0.0, low=0.0, high=1.0):
        fields.refuse("layerdrop", "layerdrop", "0")
    return Architecture(
        **values,
        intermediate=fields.size("ffn_dim", "ffn_embed_dim"),
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_position_embeddings", "max_seq_len", default=2048),
        activation=read_activation(fields, "activation_function", default="relu"),
        attention_bias=bias,
        mlp_bias=bias,
        embed_width=fields.size("word_embed_proj_dim", default=values["hidden"]),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", default=False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", default=True),
        dropout=read_dropout(fields, "dropout", default=0.1),
        attention_dropout=read_dropout(fields, "attention_dropout"),
    )


def _phi(fields: Fields, family: str) -> Architecture:
    """Phi and Phi-3."""
    values = shape(fields, family, layers=("num_hidden_layers", "num_layers"))
    values["kv_heads"] = read_kv_heads(fields, values["heads"], "num_key_value_heads", family=family)
    phi3 = family == "phi3"
    window = (fields.size("sliding_window", default=0) or None) if phi3 else None
    values["kinds"] = (LayerKind(sliding=window is not None),) * len(values["kinds"])
    return Architecture(
        **values,
        intermediate=fields.size("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", default=False),
        activation=read_activation(fields, "hidden_act", default="silu" if phi3 else "gelu_new"),
        qk_norm="head" if fields.flag("qk_layernorm", default=False) and not phi3 else "",
        rotary_dim=read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=1.0 if phi3 else 0.5),
        dropout=read_dropout(fields, "resid_pdrop"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        embedding_dropout=read_dropout(fields, "embd_pdrop"),
        window=window,
    )


def _falcon(fields: Fields, family: str) -> Architecture:
    values = shape(
        fields,
        family,
        hidden=("hidden_size", "n_embed"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
    )
    if fields.flag("alibi", default=False):
        fields.refuse("alibi", "Falcon with alibi", "false")
    grouped = fields.flag("new_decoder_architecture", default=False)
    parallel = fields.flag("parallel_attn", default=True)
    if grouped:
        values["kv_heads"] = read_kv_heads(fields, values["heads"], "num_kv_heads", "n_head_kv")
    elif fields.flag("multi_query", default=True):
        values["kv_heads"] = 1
    bias = fields.flag("bias", default=False)
    return Architecture(
        **values,
        intermediate=fields.size("ffn_hidden_size", default=4 * values["hidden"]),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=read_activation(fields, "activation", default="gelu"),
        attention_bias=bias,
        mlp_bias=bias,
        parallel=parallel or grouped,
        two_norms=grouped and parallel and fields.size("num_ln_in_parallel_attn", default=2) == 2,
        grouped=grouped,
        dropout=read_dropout(fields, "hidden_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
    )


def _mpt(fields: Fields, family: str) -> Architecture:
    values = shape(
        fields,
        family,
        hidden=("d_model", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
    )
    attention = fields.section("attn_config")
    p = read_dropout(attention, "attn_pdrop")
    return Architecture(
        **values,
        intermediate=4 * values["hidden"],
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=fields.size("max_seq_len", default=2048),
        clip_qkv=attention.raw("clip_qkv") is not None,
        dropout=p,
        attention_dropout=p,
    )


def _bloom(fields: Fields, family: str) -> Architecture:
    values = shape(
        fields,
        family,
        hidden=("hidden_size", "n_embed", "hidden_dim"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers", "num_layers"),
    )
    return Architecture(
        **values,
        intermediate=4 * values["hidden"],
        tied=fields.flag("tie_word_embeddings", default=True),
        dropout=read_dropout(fields, "hidden_dropout"),
        attention_dropout=read_dropout(fields, "attention_dropout"),
        residual_after_norm=fields.flag("apply_residual_connection_post_layernorm", default=False),
    )


def _qwen_next(fields: Fields, family: str) -> Architecture:
    from zsim.model.readers_qwen_next import read_qwen_next

    return read_qwen_next(fields, family)


READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2"), _llama),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), _llama),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma"), _gemma),
    **dict.fromkeys(("gpt2", "gptj", "codegen"), _gpt2),
    **dict.fromkeys(("phi", "phi3"), _phi),
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "falcon": _falcon,
    "mpt": _mpt,
    "bloom": _bloom,
    "gemma4_text": gemma4_text,
    "gemma3n_text": gemma3n_text,
    **RELATIVES,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen_next),
    **HYBRIDS,
}
