"""What config.json means in mixtures of experts that differ from Mixtral and Qwen's (rules as in `readers`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.model.architecture import Architecture, Index, Latent, LayerKind, Moe
from zsim.model.fields import Fields
from zsim.model.reader_parts import (
    bias_of,
    common,
    read_layers,
    read_rotary_dim,
    read_sliding,
    read_top_k,
    read_types,
    refuse_jitter,
)
from zsim.model.readers_relatives import exaone_layers


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
        **bias_of(fields, default=True),
    )
    return Architecture(**values)


def deepseek(fields: Fields, family: str) -> Architecture:
    """transformers 5.24 reads neither moe_layer_freq nor scoring_func, and of topk_method only V2's."""
    dense = fields.size("first_k_dense_replace", default=0 if family == "deepseek_v2" else 3, least=0)
    values = latent(fields, family)
    kinds = tuple(LayerKind(sparse=layer >= dense) for layer in range(len(values["kinds"])))
    return Architecture(**values | {"kinds": kinds}, moe=_deepseek_experts(fields, family == "deepseek_v2"))


def _deepseek_v32(fields: Fields, family: str) -> Architecture:
    """DeepSeek-V3 with an indexer in every layer; queries always come out of a narrow projection."""
    arch = deepseek(fields, family)
    fields.size("q_lora_rank", default=1536)
    heads, width = fields.size("index_n_heads", default=64), fields.size("index_head_dim", default=128)
    if width < arch.mla.rope:
        fields.fail("index_head_dim", f"is {width}, less than qk_rope_head_dim", f"at least {arch.mla.rope}")
    index = Index(heads, width, fields.size("index_topk", default=2048))
    latent = replace(arch.mla, index=index, interleaved=True)
    return replace(arch, latent=latent, kinds=sparse(fields, arch.kinds, sum(not kind.sparse for kind in arch.kinds)))


def _glm_moe_dsa(fields: Fields, family: str) -> Architecture:
    """DeepSeek-V3.2 whose layers share what an indexer chose. rope_interleave is not read."""
    ours = {
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
        "index_n_heads": 32,
    }  # fmt: skip
    arch = _deepseek_v32(fields.over(ours), family)
    types = read_types(fields, arch.layers, "indexer_types", "full", "shared") or _indexer_types(fields, arch.layers)
    if types[0] == "shared":
        fields.fail("indexer_types", "shares the first layer's choice with none", "full, for the first layer")
    kinds = (
        replace(kind, shares_choice=entry == "shared", after_choice=before == "full", later=bool(before))
        for kind, entry, before in zip(arch.kinds, types, ["", *types], strict=False)
    )
    return replace(arch, kinds=tuple(kinds))


def _indexer_types(fields: Fields, layers: int) -> list[str]:
    pattern = fields.raw("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if pattern is not None:
        return (
            read_types(fields.over({"index_topk_types": pattern}), layers, "index_topk_types", "full", "shared") or []
        )
    freq = fields.size("index_topk_freq", default=1, least=0) or 1
    offset = fields.size("index_skip_topk_offset", default=2, least=0)
    return ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers)]


def _youtu(fields: Fields, family: str) -> Architecture:
    """Attention of DeepSeek-V3, MLPs of Llama."""
    return Architecture(**latent(fields, family) | {"tied": fields.flag("tie_word_embeddings", default=True)})


def latent(fields: Fields, family: str) -> dict[str, Any]:
    second = family == "deepseek_v2"
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
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", default=heads) < heads:
        fields.fail("num_key_value_heads", "is less than the heads", f"{heads}: each has a key of its own")
    width = latent.nope + latent.rope
    return common(
        fields.over({"head_dim": width}),
        family,
        head_dim=width,  # whatever the file says
        kv_heads=heads,
        mlp_bias=second and fields.flag("mlp_bias", default=False),
        latent=latent,
        **bias_of(fields),
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


def grouped(fields: Fields, *names: str, shared: str = "n_shared_experts", top_k: int | None = 8) -> Moe:
    """Experts that DeepSeek-V3's router chooses from, as many as one of `names` says, and those beside them."""
    experts, groups = fields.size(*names), fields.size("n_group", default=1)
    if experts % groups:
        fields.fail("n_group", f"is {groups}, which does not divide the {experts} experts", "a divisor")
    width, top_k = fields.size("moe_intermediate_size"), read_top_k(fields, experts, default=top_k)
    norm = fields.flag("norm_topk_prob", default=True)
    return Moe(experts, top_k, width, norm, width * fields.size(shared, default=1), groups=groups)


def sparse(fields: Fields, kinds: tuple[LayerKind, ...], dense: int) -> tuple[LayerKind, ...]:
    """Layers that have experts as the file lists them, or all but the first `dense`."""
    types = read_types(fields, len(kinds), "mlp_layer_types", "dense", "sparse")
    types = types or ["dense"] * dense + ["sparse"] * (len(kinds) - dense)
    return tuple(replace(kind, sparse=entry == "sparse") for kind, entry in zip(kinds, types, strict=False))


def _glm4_moe(fields: Fields, family: str) -> Architecture:
    """GLM-4.5: the router of DeepSeek-V3, attention of GLM-4. Layers that predict further tokens are not built."""
    values = common(fields, family, attention_bias=fields.flag("attention_bias", default=False))
    values["rotary_dim"] = read_rotary_dim(fields, values["head_dim"], "partial_rotary_factor", default=0.5)
    values["qk_norm"] = "head" if fields.flag("use_qk_norm", default=False) else ""
    dense = fields.size("first_k_dense_replace", default=1, least=0)
    values["kinds"] = tuple(LayerKind(sparse=layer >= dense) for layer in range(len(values["kinds"])))
    return Architecture(**values, moe=grouped(fields, "n_routed_experts", "num_local_experts"))


def _glm4_moe_lite(fields: Fields, family: str) -> Architecture:
    """GLM-4.7-Flash: attention and experts of DeepSeek-V3. first_k_dense_replace is not read."""
    ours = {
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
    }  # fmt: skip
    arch = deepseek(fields.over(ours), family)
    return replace(arch, kinds=sparse(fields, arch.kinds, dense=1))


def _dots1(fields: Fields, family: str) -> Architecture:
    """The router of DeepSeek-V3, attention of Qwen3."""
    values = common(fields, family, qk_norm="head", **bias_of(fields))
    layers = len(values["kinds"])
    window = fields.size("sliding_window", default=4096) if fields.given("sliding_window", default=True) else None
    first, dense = (
        fields.size("max_window_layers", default=62),
        fields.size("first_k_dense_replace", default=0, least=0),
    )
    sliding = read_sliding(fields, layers, lambda layer: window is not None and layer >= first)
    kinds = tuple(LayerKind(sliding=is_sliding, sparse=i >= dense) for i, is_sliding in enumerate(sliding))
    experts = grouped(fields.over({"norm_topk_prob": False}), "n_routed_experts", "num_local_experts", top_k=None)
    return Architecture(**values | {"kinds": kinds, "window": window}, moe=experts)


def _solar_open(fields: Fields, family: str) -> Architecture:
    """Experts of GLM-4.5 in every layer, attention of Llama."""
    values = common(fields.over({"intermediate_size": 1}), family)  # of no layer
    values["attention_bias"] = fields.flag("attention_bias", default=False)
    values["kinds"] = (LayerKind(sparse=True),) * len(values["kinds"])
    return Architecture(**values, moe=grouped(fields, "n_routed_experts", "num_local_experts"))


def _exaone_moe(fields: Fields, family: str) -> Architecture:
    """Attention of EXAONE 4, experts of DeepSeek-V3."""
    kinds, window = exaone_layers(fields)
    kinds = sparse(fields, kinds, fields.size("first_k_dense_replace", default=1, least=0))
    values = common(fields, family, kinds=kinds, window=window, qk_norm="head")
    return Architecture(**values, moe=grouped(fields, "num_experts", shared="num_shared_experts"))


def _minimax_m2(fields: Fields, family: str) -> Architecture:
    refuse_jitter(fields)
    values = common(fields, family, qk_norm="width")
    head_dim, layers = values["head_dim"], len(values["kinds"])
    part = min(1.0, fields.size("rotary_dim", default=head_dim) / head_dim)
    values["rotary_dim"] = read_rotary_dim(fields, head_dim, "partial_rotary_factor", default=part)
    experts = fields.size("num_local_experts", "num_experts", default=256)
    top_k = read_top_k(fields, experts, default=8)
    kinds = (LayerKind(sparse=True),) * layers
    return Architecture(**values | {"kinds": kinds}, moe=Moe(experts, top_k, fields.size("intermediate_size")))


def _hunyuan(fields: Fields, family: str) -> Architecture:
    """Every layer has an expert for all tokens that is as wide as the others; moe_intermediate_size is not read."""
    values = common(fields, family, **bias_of(fields))
    experts, width = fields.size("num_experts", "num_local_experts", default=1), values["intermediate"]
    chosen = fields.raw("moe_topk", "num_experts_per_tok")
    if isinstance(chosen, list) and len(set(chosen)) == 1:  # of every layer
        fields = fields.over({"num_experts_per_tok": chosen[0]})
        top_k = read_top_k(fields, experts)
    else:
        top_k = read_top_k(fields, experts, "moe_topk", default=1)
    kinds = (LayerKind(sparse=True),) * len(values["kinds"])
    return Architecture(**values | {"kinds": kinds}, moe=Moe(experts, top_k, width, True, width))


def _ernie_moe(fields: Fields, family: str) -> Architecture:
    bias = fields.flag("use_bias", default=False)
    values = common(fields, family, mlp_bias=bias, attention_bias=bias, output_bias=bias, attention_dropout=0.0)
    layers = len(values["kinds"])
    first, step = fields.size("moe_layer_start_index", default=1, least=0), fields.size("moe_layer_interval", default=1)
    last = fields.size("moe_layer_end_index", default=-1, least=-1)
    last = layers - 1 if last == -1 else last
    kinds = tuple(LayerKind(sparse=first <= i <= last and (i + 1) % step == 0) for i in range(layers))
    experts = fields.size("moe_num_experts", "num_experts", default=64)
    top_k = fields.size("moe_k", "num_experts_per_tok", default=6)
    if top_k > experts:
        fields.fail("moe_k", f"is {top_k}, more than the {experts} experts", f"1 to {experts}")
    width = fields.size("moe_intermediate_size", default=1536)
    shared = width * fields.size("moe_num_shared_experts", default=2, least=0)
    tied = fields.flag("tie_word_embeddings", default=True)
    return Architecture(
        **values | {"kinds": kinds, "tied": tied, "head_bias": bias}, moe=Moe(experts, top_k, width, True, shared)
    )


def _llama4(fields: Fields, family: str) -> Architecture:
    values = common(fields, family, **bias_of(fields))
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
    values = common(fields, family, **bias_of(fields))
    experts = fields.size("num_local_experts", default=8)
    top_k = read_top_k(fields, experts, default=2)
    values["kinds"] = (LayerKind(sparse=True),) * len(values["kinds"])
    shared = fields.size("shared_intermediate_size", default=0, least=0) if family == "granitemoeshared" else 0
    return Architecture(**values, moe=Moe(experts, top_k, fields.size("intermediate_size"), shared=shared))


def _phimoe(fields: Fields, family: str) -> Architecture:
    """A token goes to two experts, whatever num_experts_per_tok says. Its class does not read router_jitter_noise as
    others do, and hands no window to attention."""
    values = common(fields, family, head_bias=fields.flag("lm_head_bias", default=False), **bias_of(fields))
    experts = fields.size("num_local_experts", default=16)
    if experts < 2:
        fields.fail("num_local_experts", f"is {experts}", "2 or more")
    noise = fields.number("input_jitter_noise", default=0.0, low=0.0, high=1.0) > 0
    kinds = (LayerKind(sparse=True),) * len(values["kinds"])
    return Architecture(**values | {"kinds": kinds}, moe=Moe(experts, 2, values["intermediate"], noise=noise))


READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), deepseek),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _granitemoe),
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "dots1": _dots1,
    "solar_open": _solar_open,
    "exaone_moe": _exaone_moe,
    "minimax_m2": _minimax_m2,
    "hunyuan_v1_moe": _hunyuan,
    "ernie4_5_moe": _ernie_moe,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "youtu": _youtu,
    "phimoe": _phimoe,
}
