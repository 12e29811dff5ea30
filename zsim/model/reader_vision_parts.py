"""What readers of vision-language models share: the text model, the layers of a tower, their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.model.architecture import Architecture, LayerKind
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout
from zsim.model.readers import READERS

# Sizes that published files leave out (LLaVA 1.5 and 1.6, Pixtral).
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_SIZES: dict[str, dict[str, int]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _LLAMA | {"intermediate_size": 22016, "num_key_value_heads": 32},
    "paddleocr_vl_text": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "head_dim": 128,
                          "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 103_424},
    "qwen3_omni_moe_text": {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                            "moe_intermediate_size": 768, "norm_topk_prob": True},
    "mllama_text_model": _LLAMA
    | {
        "intermediate_size": 14336, "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131_072,
    },
}  # fmt: skip

_FLAT = ("llava", "llava_next", "llava_next_video", "qwen2_vl", "qwen2_5_vl")
# transformers 5.24: whose output projection is tied where either configuration says so. Llama 4 goes by its text
# model's, all others by that of the whole.
_TIED_BY_EITHER = ("llava", "llava_onevision", "glm4v", "glm46v", "glm_ocr", "qwen2_vl", "qwen2_5_vl")


def read_text(
    fields: Fields, family: str, names: tuple[str, ...], default: str, read_as: str | None = None, tied: bool = False
) -> Architecture:
    """The text model. Older files have its fields beside `vision_config`, LLaVA's own code without one."""
    if (
        family not in _FLAT
        and "text_config" not in fields
        and "vision_config" not in fields
        and "hidden_size" in fields
    ):
        why = "is missing, and so is vision_config: the text model's fields stand at the top"
        fields.fail(
            "text_config", why, f"both; model_type {' or '.join(names)}, where the file is of a text model alone"
        )
    text = fields.section("text_config") if "text_config" in fields else fields
    kind = text.text("model_type", default=default) if text is not fields else default
    if kind not in names:
        text.refuse("model_type", f"{kind} as the text model of {family}", ", ".join(names))
    if text is not fields:
        text = text.over(_SIZES.get(kind, {}))
    arch = READERS[read_as or kind](text, read_as or kind)
    own, whole = text.flag("tie_word_embeddings", default=False), fields.flag("tie_word_embeddings", default=tied)
    ties = own if family == "llama4" else (own or whole) if family in _TIED_BY_EITHER else whole
    return replace(arch, family=family, tied=ties)


def read_blocks(vision: Fields, family: str, names: dict[str, Any], kinds: Callable[[int], LayerKind]) -> Architecture:
    """The layers of a tower; `names` maps fields of an Architecture to (name, default)."""
    hidden = vision.size(*names["hidden"][0], default=names["hidden"][1])
    heads = vision.size(*names["heads"][0], default=names["heads"][1])
    if hidden % heads:
        name = next((n for n in names["heads"][0] if n in vision), names["heads"][0][0])
        vision.fail(name, f"is {heads}, which does not divide the width {hidden}", f"a divisor of {hidden}")
    layers = vision.size(*names["layers"][0], default=names["layers"][1], most=10_000)
    return Architecture(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=vision.size(*names["intermediate"][0], default=names["intermediate"][1]),
        vocab=1,
        kinds=tuple(kinds(layer) for layer in range(layers)),
        tied=False,
        activation=read_activation(vision, "hidden_act", default=names["activation"]),
        attention_dropout=read_dropout(vision, "attention_dropout"),
        mlp_bias=True,
    )


def read_tower(fields: Fields, accepted: str, *also: str) -> Fields:
    vision = fields.section("vision_config")
    kind = vision.text("model_type", default=accepted)
    if kind not in (accepted, *also):
        vision.refuse("model_type", f"a vision tower {kind}", accepted)
    return vision


def text_family(fields: Fields, default: str) -> str:
    return fields.section("text_config").text("model_type", default=default)


def read_side(vision: Fields, name: str, default: int) -> int:
    """Of a square, whose sides may both be said."""
    if not isinstance(vision.raw(name), list):
        return vision.size(name, default=default)
    sides = vision.items(name, 2) or []
    if sides[0] != sides[1] or not isinstance(sides[0], int) or sides[0] < 1:
        vision.fail(name, f"is {sides}", "a square")
    return sides[0]


LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen3")  # that a LLaVA may have
