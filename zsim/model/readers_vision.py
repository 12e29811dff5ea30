"""What config.json of vision-language models means: the text model's reader, and the tower beside it.

Fields that are left out take the defaults of the configuration classes of transformers 5.24, except sizes of the text
model, which must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.errors import NotModeled
from zsim.model.architecture import Architecture, LayerKind, Vision
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout, read_layers
from zsim.model.readers import READERS


def _text(
    fields: Fields, family: str, names: tuple[str, ...], default: str, read_as: str | None = None
) -> Architecture:
    """The text model. Older files have its fields beside `vision_config`."""
    text = fields.section("text_config") if "text_config" in fields else fields
    kind = text.text("model_type", default=default) if text is not fields else default
    if kind not in names:
        raise NotModeled(
            f"{kind} as the text model of {family}", file=fields.path, line=text.line("model_type"),
            field="text_config.model_type", accepted=", ".join(names),
        )  # fmt: skip
    arch = READERS[read_as or kind](text, read_as or kind)
    tied = fields.flag("tie_word_embeddings", default=False) or text.flag("tie_word_embeddings", default=False)
    return replace(arch, family=family, tied=tied)


def _blocks(vision: Fields, family: str, names: dict[str, Any], kinds: Callable[[int], LayerKind]) -> Architecture:
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


def _tower(fields: Fields, accepted: str, *also: str) -> Fields:
    vision = fields.section("vision_config")
    kind = vision.text("model_type", default=accepted)
    if kind not in (accepted, *also):
        raise NotModeled(
            f"a vision tower {kind}", file=fields.path, line=vision.line("model_type"),
            field="vision_config.model_type", accepted=accepted,
        )  # fmt: skip
    return vision


def _llava(fields: Fields, family: str) -> Architecture:
    text = _text(fields, family, ("llama", "mistral", "qwen2"), "llama")
    vision = _tower(fields, "clip_vision_model")
    layer = fields.raw("vision_feature_layer")
    layer = -2 if layer is None else layer
    layers = read_layers(vision, "num_hidden_layers") if "num_hidden_layers" in vision else 24
    if isinstance(layer, bool) or not isinstance(layer, int) or not -layers - 1 <= layer <= layers:
        raise NotModeled(
            "features of several layers", file=fields.path, line=fields.line("vision_feature_layer"),
            field="vision_feature_layer", accepted=f"one layer from {-layers - 1} to {layers}",
        )  # fmt: skip
    read = layer % (layers + 1)
    blocks = _blocks(
        vision,
        "clip_vision_model",
        {
            "hidden": (("hidden_size",), 1024), "heads": (("num_attention_heads",), 16),
            "layers": (("num_hidden_layers",), 24), "intermediate": (("intermediate_size",), 4096),
            "activation": "quick_gelu",
        },
        lambda layer: LayerKind(unread=layer >= read),
    )  # fmt: skip
    select = fields.text("vision_feature_select_strategy", default="default")
    if select not in ("default", "full"):
        fields.fail("vision_feature_select_strategy", f"is {select!r}", "default, full")
    patch = vision.size("patch_size", default=14)
    return replace(
        text,
        vision=Vision(
            blocks,
            patch=patch,
            channels=vision.size("num_channels", default=3),
            image_size=vision.size("image_size", default=336),
            keeps_class_token=select == "full",
            projector_activation=read_activation(fields, "projector_hidden_act", default="gelu"),
            projector_bias=fields.flag("multimodal_projector_bias", default=True),
        ),
    )


def _gemma3(fields: Fields, family: str) -> Architecture:
    text = _text(fields, family, ("gemma3_text",), "gemma3_text")
    vision = _tower(fields, "siglip_vision_model")
    if vision.flag("vision_use_head", default=True):
        raise NotModeled(
            "the head of SigLIP that pools", file=fields.path, line=vision.line("vision_use_head"),
            field="vision_config.vision_use_head", accepted="false, as Gemma 3 has it",
        )  # fmt: skip
    blocks = _blocks(
        vision,
        "siglip_vision_model",
        {
            "hidden": (("hidden_size",), 768), "heads": (("num_attention_heads",), 12),
            "layers": (("num_hidden_layers",), 12), "intermediate": (("intermediate_size",), 3072),
            "activation": "gelu_pytorch_tanh",
        },
        lambda layer: LayerKind(),
    )  # fmt: skip
    patch, side = vision.size("patch_size", default=16), vision.size("image_size", default=224)
    tokens = int(fields.size("mm_tokens_per_image", default=256) ** 0.5)
    if side // patch % tokens:
        fields.fail("mm_tokens_per_image", f"is {tokens**2}, not a square in {side // patch} x {side // patch} patches",
                    "the square of a divisor")  # fmt: skip
    return replace(
        text,
        tied=fields.flag("tie_word_embeddings", default=True),
        vision=Vision(
            blocks,
            patch=patch,
            channels=vision.size("num_channels", default=3),
            image_size=side,
            pool=side // patch // tokens,
        ),
    )


# Per family: names of text models, whose reader they have, the tower's own model_type, and defaults of its class.
_QWEN: dict[str, tuple[tuple[str, ...], str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        ("qwen2_vl_text", "qwen2_vl"), "qwen2", "qwen2_vl_vision",
        {"hidden": 1280, "depth": 32, "activation": "quick_gelu", "patch": 14},
    ),
    "qwen2_5_vl": (
        ("qwen2_5_vl_text", "qwen2_5_vl"), "qwen2", "qwen2_5_vl_vision",
        {"hidden": 3584, "depth": 32, "activation": "silu", "patch": 14, "intermediate": 3420},
    ),
    "qwen3_vl": (
        ("qwen3_vl_text",), "qwen3", "qwen3_vl_vision",
        {"hidden": 1152, "depth": 27, "activation": "gelu_pytorch_tanh", "patch": 16, "intermediate": 4304},
    ),
}  # fmt: skip


def _qwen(fields: Fields, family: str) -> Architecture:
    texts, reader, tower, default = _QWEN[family]
    text = _text(fields, family, texts, texts[0], read_as=reader)
    vision = _tower(fields, tower, family)
    old = family == "qwen2_vl"  # whose `hidden_size` is the text model's
    width = vision.size("embed_dim" if old else "hidden_size", default=default["hidden"])
    whole = vision.items("fullatt_block_indexes") if family == "qwen2_5_vl" else None
    whole = [7, 15, 23, 31] if whole is None else whole
    read = (vision.items("deepstack_visual_indexes") or [8, 16, 24]) if family == "qwen3_vl" else []

    def kind(layer: int) -> LayerKind:
        stretch = 2 * sum(other < layer for other in read) + (layer in read)
        return LayerKind(sliding=family == "qwen2_5_vl" and layer not in whole, stretch=stretch)

    ratio = int(vision.number("mlp_ratio", default=4, low=1, high=64))
    blocks = _blocks(
        vision,
        tower,
        {
            "hidden": (("embed_dim" if old else "hidden_size",), default["hidden"]), "heads": (("num_heads",), 16),
            "layers": (("depth",), default["depth"]), "activation": default["activation"],
            "intermediate": (("intermediate_size",), default.get("intermediate", width * ratio)),
        },
        kind,
    )  # fmt: skip
    name = "hidden_size" if old else "out_hidden_size"
    if (out := vision.size(name, default=3584)) != text.hidden:
        vision.fail(name, f"is {out}, and the text model's width {text.hidden}", str(text.hidden))
    if read:  # the text model's first layers read the tower's
        kinds = (replace(kind, stretch=min(layer, len(read))) for layer, kind in enumerate(text.kinds))
        text = replace(text, kinds=tuple(kinds))
    return replace(
        text,
        vision=Vision(
            blocks,
            patch=vision.size("patch_size", "spatial_patch_size", default=default["patch"]),
            channels=vision.size("in_channels", "in_chans", default=3),
            frames=vision.size("temporal_patch_size", default=2),
            merge=vision.size("spatial_merge_size", default=2),
            window=vision.size("window_size", default=112) if family == "qwen2_5_vl" else 0,
            read_layers=tuple(sorted(read)),
            positions=vision.size("num_position_embeddings", default=2304) if family == "qwen3_vl" else 0,
            input_embedding=family != "qwen3_vl",
        ),
    )


VISION_READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    **dict.fromkeys(_QWEN, _qwen),
}
