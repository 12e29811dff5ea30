"""What readers of config.json share: fields that families name alike, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zsim.model.activations import ACTIVATIONS
from zsim.model.architecture import LayerKind
from zsim.model.fields import Fields


def read_activation(fields: Fields, *names: str, default: str) -> str:
    name = fields.text(*names, default=default)
    if name not in ACTIVATIONS:
        fields.fail(next((n for n in names if n in fields), names[0]), f"is {name!r}", ", ".join(sorted(ACTIVATIONS)))
    return name


def read_dropout(fields: Fields, *names: str, default: float = 0.0) -> float:
    return fields.number(*names, default=default, low=0.0, high=1.0)


# num_key_value_heads of the configuration class, where a file leaves it out; None or a null: as many as heads.
KEY_VALUE_HEADS = {
    "mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4, "smollm3": 4, "gemma": 16,
    "gemma2": 4, "gemma3_text": 4, "glm": 2, "glm4": 2, "ernie4_5": 2, "seed_oss": 8, "starcoder2": 2, "stablelm": 32,
    "exaone4": 32, "gpt_oss": 8, "glm4_moe": 8, "llama4_text": 8, "ministral3": 8, "lfm2": 8, "lfm2_moe": 8,
    "minimax_m2": 8, "ernie4_5_moe": 4, "dots1": 32, "solar_open": 8, "exaone_moe": 32, "cwm": 8,
    "ministral": 8, "helium": 20, "vaultgemma": 4, "phimoe": 8, "gemma4_text": 4, "gemma3n_text": 2,
    "bitnet": 5, "hy_v3": 8, "mellum": 4, "kolibri1": 4, "dbrx": 1,
    "qwen3_next": 2, "qwen3_5_text": 4, "qwen3_5_moe_text": 2, "nemotron_h": 8, "bamba": 8, "falcon_h1": 8,
}  # fmt: skip


# head_dim of the configuration class likewise, whatever the hidden size.
HEAD_DIM = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 256),
    "llama4_text": 128,
    "nemotron_h": 128,
    "ministral3": 128,
    "minimax_m2": 128,
    "solar_open": 128,
    "cwm": 128,
    "helium": 128,
    "qwen3": 128,
    "gpt_oss": 64,
    "glm": 128,
    "glm4": 128,
    "ernie4_5": 128,
    "seed_oss": 128,
    **dict.fromkeys(("hy_v3", "mellum", "afmoe", "kolibri1", "cohere2_moe"), 128),
}


def read_top_k(fields: Fields, experts: int, *also: str, default: int | None = None) -> int:
    """Experts that a token goes to, of `experts`. Must be there where there is no `default`."""
    top_k = fields.size("num_experts_per_tok", *also, default=default)
    if top_k > experts:
        fields.fail("num_experts_per_tok", f"is {top_k}, more than the {experts} experts", f"1 to {experts}")
    return top_k


def refuse_jitter(fields: Fields) -> None:
    """Noise that what experts and their router read is multiplied with in training."""
    name = "router_jitter_noise"
    if fields.number(name, default=0.0, low=0.0, high=1.0):
        fields.refuse(name, "noise on what experts read", "0")


def read_heads(fields: Fields, hidden: int, *names: str, family: str = "") -> tuple[int, int]:
    """Number of heads and their width, which divides `hidden` unless head_dim says otherwise."""
    heads = fields.size(*names)
    if "head_dim" in fields:
        return heads, fields.size("head_dim")
    if family in HEAD_DIM and fields.absent("head_dim"):
        return heads, HEAD_DIM[family]
    if hidden % heads:
        name = next(n for n in names if n in fields)
        fields.fail(name, f"is {heads}, which does not divide the hidden size {hidden}", f"a divisor of {hidden}")
    return heads, hidden // heads


def read_layers(fields: Fields, *names: str) -> int:
    return fields.size(*names, most=10_000)


def read_kv_heads(fields: Fields, heads: int, *names: str, family: str = "") -> int:
    kv_heads = fields.size(*names, default=KEY_VALUE_HEADS.get(family, heads) if fields.absent(names[0]) else heads)
    if heads % kv_heads:
        name = next((n for n in names if n in fields), names[0])
        fields.fail(name, f"is {kv_heads}, which does not divide the {heads} heads", f"a divisor of {heads}")
    return kv_heads


def read_types(fields: Fields, layers: int, name: str, *accepted: str) -> list[str] | None:
    """What a file says of each layer, None if nothing."""
    types = fields.items(name, layers)
    for entry in types or ():
        if entry not in accepted:
            fields.fail(name, f"has {entry!r}", ", ".join(accepted))
    return types


def read_sliding(fields: Fields, layers: int, default: Callable[[int], bool]) -> list[bool]:
    types = read_types(fields, layers, "layer_types", "full_attention", "sliding_attention")
    if types is None:
        return [default(layer) for layer in range(layers)]
    return [entry == "sliding_attention" for entry in types]


def read_rotary_dim(fields: Fields, head_dim: int, *names: str, default: float) -> int:
    """The rotated part of a head: a fraction, since transformers 5 inside rope_parameters."""
    rope = fields.section("rope_parameters")
    part = fields.number(*names, default=default, low=0.0, high=1.0)
    return int(head_dim * rope.number("partial_rotary_factor", default=part, low=0.0, high=1.0))


def shape(
    fields: Fields,
    family: str,
    hidden: Sequence[str] = ("hidden_size",),
    heads: Sequence[str] = ("num_attention_heads",),
    layers: Sequence[str] = ("num_hidden_layers",),
) -> dict[str, Any]:
    """What every `Architecture` says, by the names of this family's fields: as many heads of keys and values as of
    queries, layers that are all alike."""
    width = fields.size(*hidden)
    number, head_dim = read_heads(fields, width, *heads, family=family)
    return {
        "family": family,
        "hidden": width,
        "heads": number,
        "kv_heads": number,
        "head_dim": head_dim,
        "vocab": fields.size("vocab_size"),
        "kinds": (LayerKind(),) * read_layers(fields, *layers),
    }


def common(fields: Fields, family: str, **families: Any) -> dict[str, Any]:
    """The fields that Llama and its relatives name alike; `families`: what this one sets otherwise."""
    values = shape(fields, family)
    return (
        values
        | {
            "kv_heads": read_kv_heads(fields, values["heads"], "num_key_value_heads", family=family),
            "intermediate": fields.size("intermediate_size"),
            "tied": fields.flag("tie_word_embeddings", default=False),
            "positions": fields.size("max_position_embeddings", default=2048),
            "activation": families.get("activation") or read_activation(fields, "hidden_act", default="silu"),
            "attention_dropout": read_dropout(fields, "attention_dropout"),
        }
        | families
    )


def bias_of(fields: Fields, name: str = "attention_bias", default: bool = False) -> dict[str, bool]:
    """Of all four projections of attention."""
    bias = fields.flag(name, default=default)
    return {"attention_bias": bias, "output_bias": bias}
