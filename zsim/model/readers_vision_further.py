"""What config.json of further vision-language models means (see readers_vision)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.model.architecture import Architecture, LayerKind, Vision
from zsim.model.fields import Fields
from zsim.model.reader_vision_parts import LANGUAGE_MODELS, read_blocks, read_side, read_text, read_tower, text_family


def _idefics(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, LANGUAGE_MODELS, "llama")
    vision = read_tower(fields, f"{family}_vision", family)
    names = {
        "hidden": (("hidden_size",), 1152), "heads": (("num_attention_heads",), 16),
        "layers": (("num_hidden_layers",), 12), "intermediate": (("intermediate_size",), 3072),
        "activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    side, patch = read_side(vision, "image_size", 224), read_side(vision, "patch_size", 32)
    merge = fields.size("scale_factor", default=2)
    if side // patch % merge:
        fields.fail(
            "scale_factor", f"is {merge}, which does not divide the {side // patch} rows of patches", "a divisor"
        )
    return replace(
        text,
        vision=Vision(
            read_blocks(vision, f"{family}_vision", names, lambda layer: LayerKind()),
            patch=patch,
            text=text_family(fields, "llama"),
            channels=vision.size("num_channels", default=3),
            image_size=side,
            splits=True,
            merge=merge,
        ),
    )


FURTHER: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
}
