"""What config.json of vision-language models means: the text model's reader, and the tower beside it.

Fields that are left out take the defaults of the configuration classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.model.architecture import Architecture, LayerKind, Sound, Vision
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation, read_dropout, read_kv_heads, read_layers
from zsim.model.reader_vision_parts import LANGUAGE_MODELS, read_blocks, read_side, read_text, read_tower, text_family
from zsim.model.readers_gemma4_vision import gemma4
from zsim.model.readers_vision_further import FURTHER


def _llava(fields: Fields, family: str) -> Architecture:
    """LLaVA and LLaVA-NeXT; Pixtral 12B is the first with another tower."""
    if fields.section("vision_config").text("model_type", default="") == "pixtral" and family == "llava":
        return _pixtral(fields, family)
    text = read_text(fields, family, LANGUAGE_MODELS, "llama")
    vision = read_tower(fields, "clip_vision_model")
    if fields.text("spatial_pool_mode", default="average") == "conv":
        fields.refuse("spatial_pool_mode", "frames of videos pooled by a convolution", "average, max")
    layers = read_layers(vision, "num_hidden_layers") if "num_hidden_layers" in vision else 24
    read = _feature_layer(fields, layers, default=-2) % (layers + 1)
    side = vision.size("image_size", default=336)
    return replace(
        text,
        vision=Vision(
            read_blocks(vision, "clip_vision_model", _LIKE_CLIP, lambda layer: LayerKind(unread=layer >= read)),
            patch=vision.size("patch_size", default=14),
            text=text_family(fields, "llama"),
            channels=vision.size("num_channels", default=3),
            image_size=side,
            resolutions=() if family == "llava" else _resolutions(fields, side),
            keeps_class_token=_keeps_class_token(fields),
            projector_activation=read_activation(fields, "projector_hidden_act", default="gelu"),
            projector_bias=fields.flag("multimodal_projector_bias", default=True),
        ),
    )


_LIKE_CLIP = {
    "hidden": (("hidden_size",), 1024), "heads": (("num_attention_heads",), 16),
    "layers": (("num_hidden_layers",), 24), "intermediate": (("intermediate_size",), 4096), "activation": "quick_gelu",
}  # fmt: skip


def _feature_layer(fields: Fields, layers: int, default: int, only: int | None = None) -> int:
    """Whose output the projector reads, as an index of hidden_states."""
    layer = fields.raw("vision_feature_layer")
    layer = default if layer is None else layer
    whole = not isinstance(layer, bool) and isinstance(layer, int) and -layers - 1 <= layer <= layers
    if not whole or only not in (None, layer):
        accepted = f"one layer from {-layers - 1} to {layers}" if only is None else str(only)
        fields.refuse(
            "vision_feature_layer", f"features of layer {layer}" if whole else "features of several layers", accepted
        )
    return layer


def _keeps_class_token(fields: Fields) -> bool:
    select = fields.text("vision_feature_select_strategy", default="default")
    if select not in ("default", "full"):
        fields.fail("vision_feature_select_strategy", f"is {select!r}", "default, full")
    return select == "full"


def _resolutions(fields: Fields, side: int) -> tuple[tuple[int, int], ...]:
    found = fields.items("image_grid_pinpoints")
    if found is None and fields.text("model_type", default="") == "llava_onevision":
        found = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    elif found is None:
        found = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    for entry in found:
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(length, int) for length in entry)):
            fields.fail("image_grid_pinpoints", f"has {entry!r}", "[height, width] of each resolution")
        if any(length < side or length % side for length in entry):
            fields.fail("image_grid_pinpoints", f"has {entry}, which squares of {side} do not fill", "multiples of it")
    return tuple((entry[0], entry[1]) for entry in found)


def _pixtral(fields: Fields, family: str) -> Architecture:
    """Pixtral 12B, which is a LLaVA, Mistral 3 and LightOnOCR."""
    merges, light = family != "llava", family == "lighton_ocr"
    names = ("ministral3", "mistral4", *LANGUAGE_MODELS) if family == "mistral3" else LANGUAGE_MODELS
    default = "qwen3" if light else "mistral" if merges else "llama"
    text = read_text(fields, family, names, default, tied=merges)
    vision = read_tower(fields, "pixtral")
    blocks = read_blocks(vision, "pixtral", {**_LIKE_CLIP, "activation": "gelu"}, lambda layer: LayerKind())
    _feature_layer(fields, blocks.layers, default=-1 if merges else -2, only=-1)
    if not merges and not _keeps_class_token(fields):
        name, accepted = "vision_feature_select_strategy", "full: it has no token of a class"
        fields.refuse(name, "Pixtral without its first patch", accepted)
    return replace(
        text,
        vision=Vision(
            replace(blocks, mlp_bias=False),
            patch=vision.size("patch_size", default=14 if merges and "vision_config" not in fields else 16),
            text=text_family(fields, default),
            channels=vision.size("num_channels", default=3),
            merge=fields.size("spatial_merge_size", default=2) if merges else 1,
            projector_activation="nn.gelu"
            if light
            else read_activation(fields, "projector_hidden_act", default="gelu"),
            projector_bias=not light and fields.flag("multimodal_projector_bias", default=not merges),
        ),
    )


def _internvl(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, LANGUAGE_MODELS, "qwen2", tied=True)
    vision = read_tower(fields, "internvl_vision")
    blocks = read_blocks(vision, "internvl_vision", {**_LIKE_CLIP, "activation": "gelu"}, lambda layer: LayerKind())
    _feature_layer(fields, blocks.layers, default=-1, only=-1)
    for name, default in (("use_mask_token", False), ("use_absolute_position_embeddings", True)):
        if vision.flag(name, default=default) != default:
            vision.refuse(name, f"a tower with {name}: {str(not default).lower()}", str(default).lower())
    if read_dropout(vision, "projection_dropout"):
        vision.fail("projection_dropout", "is not modeled", "0")
    if _keeps_class_token(fields):
        fields.fail("vision_feature_select_strategy", "is 'full', and patches alone are a square", "default")
    norm = vision.text("norm_type", default="layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        vision.fail("norm_type", f"is {norm!r}", "layer_norm, rms_norm")
    side, patch = read_side(vision, "image_size", 448), read_side(vision, "patch_size", 14)
    merge = round(1 / fields.number("downsample_ratio", default=0.5, low=0.01, high=1))
    if side // patch % merge:
        fields.fail("downsample_ratio", f"does not divide the {side // patch} rows of patches", "1 / a divisor")
    return replace(
        text,
        vision=Vision(
            replace(
                blocks,
                attention_bias=vision.flag("attention_bias", default=False),
                qk_norm="width" if vision.flag("use_qk_norm", default=False) else "",
                dropout=read_dropout(vision, "hidden_dropout_prob"),
                final_norm=not vision.flag("use_mean_pooling", default=True),
            ),
            patch=patch,
            text=text_family(fields, "qwen2"),
            channels=vision.size("num_channels", default=3),
            image_size=side,
            merge=merge,
            projector_activation=read_activation(fields, "projector_hidden_act", default="gelu"),
            rms_norms=norm == "rms_norm",
        ),
    )


def _siglip(vision: Fields, fields: Fields) -> Architecture:
    if vision.flag("vision_use_head", default="vision_config" in fields):
        accepted = "false, as vision-language models have it"
        vision.refuse("vision_use_head", "the head of SigLIP that pools", accepted)
    return read_blocks(
        vision,
        "siglip_vision_model",
        {
            "hidden": (("hidden_size",), 768), "heads": (("num_attention_heads",), 12),
            "layers": (("num_hidden_layers",), 12), "intermediate": (("intermediate_size",), 3072),
            "activation": "gelu_pytorch_tanh",
        },
        lambda layer: LayerKind(),
    )  # fmt: skip


def _onevision(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, LANGUAGE_MODELS, "qwen2")
    vision = read_tower(fields, "siglip_vision_model")
    blocks = _siglip(vision, fields)
    _feature_layer(fields, blocks.layers, default=-1, only=-1)
    if fields.text("vision_feature_select_strategy", default="full") != "full":
        fields.fail("vision_feature_select_strategy", "leaves out a patch", "full: SigLIP has no token of a class")
    ratio = fields.text("vision_aspect_ratio", default="anyres_max_9")
    squares = ratio.removeprefix("anyres_max_")
    if not squares.isdecimal():
        fields.fail("vision_aspect_ratio", f"is {ratio!r}", "anyres_max_ and a number")
    side = vision.size("image_size", default=224)
    return replace(
        text,
        vision=Vision(
            blocks,
            patch=vision.size("patch_size", default=16),
            text=text_family(fields, "qwen2"),
            channels=vision.size("num_channels", default=3),
            image_size=side,
            resolutions=_resolutions(fields, side),
            most_squares=int(squares),
            projector_activation=read_activation(fields, "projector_hidden_act", default="gelu"),
            projector_bias=fields.flag("multimodal_projector_bias", default=True),
        ),
    )


def _aya(fields: Fields, family: str) -> Architecture:
    """Aya Vision and Command A Vision."""
    aya = family == "aya_vision"
    text = read_text(fields, family, ("cohere2",), "cohere2", tied=True)
    vision = read_tower(fields, "siglip_vision_model")
    blocks = _siglip(vision, fields)
    if aya:
        _feature_layer(fields, blocks.layers, default=-1, only=-1)
        if fields.text("vision_feature_select_strategy", default="full") != "full":
            fields.fail("vision_feature_select_strategy", "leaves out a patch", "full: SigLIP has no token of a class")
    side, patch = vision.size("image_size", default=224), vision.size("patch_size", default=16)
    merge = fields.size("downsample_factor", default=2)
    if side // patch % merge:
        fields.fail("downsample_factor", f"does not divide the {side // patch} rows of patches", "a divisor")
    return replace(
        text,
        vision=Vision(
            blocks,
            patch=patch,
            text="cohere2",
            channels=vision.size("num_channels", default=3),
            image_size=side,
            merge=merge,
            adapter=fields.size("alignment_intermediate_size", default=text.hidden if aya else 36_864),
        ),
    )


def _gemma3(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, ("gemma3_text",), "gemma3_text")
    vision = read_tower(fields, "siglip_vision_model")
    blocks = _siglip(vision, fields)
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


def _paligemma(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, ("gemma", "gemma2"), "gemma", tied=True)
    vision = read_tower(fields, "siglip_vision_model")
    if (width := fields.size("projection_dim", default=2048)) != text.hidden:
        fields.fail("projection_dim", f"is {width}, and the text model's width {text.hidden}", str(text.hidden))
    return replace(
        text,
        vision=Vision(
            _siglip(vision, fields),
            patch=vision.size("patch_size", default=16),
            text=text_family(fields, "gemma"),
            channels=vision.size("num_channels", default=3),
            image_size=vision.size("image_size", default=224),
        ),
    )


_TOWER_OF_2_5: dict[str, Any] = {"hidden": 3584, "depth": 32, "activation": "silu", "patch": 14, "intermediate": 3420}
_TOWER_OF_3: dict[str, Any] = {
    "hidden": 1152,
    "depth": 27,
    "activation": "gelu_pytorch_tanh",
    "patch": 16,
    "intermediate": 4304,
}
# Per family: names of text models, whose reader they have, the tower's own model_type, and defaults of its class.
_QWEN: dict[str, tuple[tuple[str, ...], str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        ("qwen2_vl_text", "qwen2_vl"), "qwen2", "qwen2_vl_vision",
        {"hidden": 1280, "depth": 32, "activation": "quick_gelu", "patch": 14},
    ),
    "qwen2_5_vl": (("qwen2_5_vl_text", "qwen2_5_vl"), "qwen2", "qwen2_5_vl_vision", _TOWER_OF_2_5),
    "qwen3_vl": (("qwen3_vl_text",), "qwen3", "qwen3_vl_vision", _TOWER_OF_3),
    "qwen3_vl_moe": (("qwen3_vl_moe_text",), "qwen3_moe", "qwen3_vl_moe_vision", _TOWER_OF_3),
    "qwen3_5": (("qwen3_5_text",), "qwen3_5_text", "qwen3_5_vision", _TOWER_OF_3),
    "qwen3_5_moe": (("qwen3_5_moe_text",), "qwen3_5_moe_text", "qwen3_5_moe_vision", _TOWER_OF_3),
    "exaone4_5": (("exaone4", "exaone4_5_text"), "exaone4", "exaone4_5_vision", _TOWER_OF_2_5),
    "qwen2_5_omni_thinker": (("qwen2_5_omni_text",), "qwen2", "qwen2_5_omni_vision_encoder", _TOWER_OF_2_5),
    "qwen3_omni_moe_thinker": (("qwen3_omni_moe_text",), "qwen3_moe", "qwen3_omni_moe_vision_encoder", _TOWER_OF_3),
}  # fmt: skip
_WINDOWED = ("qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5")


def _qwen(fields: Fields, family: str) -> Architecture:
    texts, reader, tower, default = _QWEN[family]
    text = read_text(fields, family, texts, texts[0], read_as=reader)
    if (
        text.moe and family == "qwen3_vl_moe"
    ):  # its router divides always, and another number of key heads is its class's
        text = replace(text, moe=replace(text.moe, norm_top_k=True))
        fields.section("text_config").size("num_key_value_heads")
    vision = read_tower(fields, tower, family)
    third, deep = family.startswith("qwen3"), family.startswith(("qwen3_vl", "qwen3_omni"))
    old = family == "qwen2_vl"  # whose `hidden_size` is the text model's
    width = vision.size("embed_dim" if old else "hidden_size", default=default["hidden"])
    whole = vision.items("fullatt_block_indexes") if family in _WINDOWED else None
    whole = [7, 15, 23, 31] if whole is None else whole
    read = (vision.items("deepstack_visual_indexes") or [8, 16, 24]) if deep else []

    def kind(layer: int) -> LayerKind:
        stretch = 2 * sum(other < layer for other in read) + (layer in read)
        return LayerKind(sliding=family in _WINDOWED and layer not in whole, stretch=stretch)

    ratio = int(vision.number("mlp_ratio", default=4, low=1, high=64))
    blocks = read_blocks(
        vision,
        tower,
        {
            "hidden": (("embed_dim" if old else "hidden_size",), default["hidden"]), "heads": (("num_heads",), 16),
            "layers": (("depth",), default["depth"]), "activation": default["activation"],
            "intermediate": (("intermediate_size",), default.get("intermediate", width * ratio)),
        },
        kind,
    )  # fmt: skip
    if family == "exaone4_5":
        kv_heads = read_kv_heads(vision.over({"num_key_value_heads": 8}), blocks.heads, "num_key_value_heads")
        blocks = replace(blocks, kv_heads=kv_heads)
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
            window=vision.size("window_size", default=112) if family in _WINDOWED else 0,
            read_layers=tuple(sorted(read)),
            positions=vision.size("num_position_embeddings", default=2304) if third else 0,
            input_embedding=not third,
        ),
        sound=_sound(fields.section("audio_config"), _HEARING[family], text.hidden) if family in _HEARING else None,
    )


_HEARING = {"qwen2_5_omni_thinker": 0, "qwen3_omni_moe_thinker": 480}  # channels of convolutions between


def _sound(audio: Fields, between: int, width: int) -> Sound:
    """Of Qwen's Omni; its tower is given nothing."""
    if (outputs := audio.size("output_dim", default=3584)) != width:
        audio.fail("output_dim", f"is {outputs}, and the text model's width {width}", str(width))
    return Sound(
        hidden=audio.size("d_model", "hidden_size", default=1280),
        layers=audio.size("encoder_layers", "num_hidden_layers", default=32, most=10_000),
        heads=audio.size("encoder_attention_heads", "num_attention_heads", default=20),
        outputs=outputs,
        intermediate=audio.size("encoder_ffn_dim", "intermediate_size", default=5120),
        inputs=audio.size("num_mel_bins", default=128),
        positions=audio.size("max_source_positions", default=1500),
        between=audio.size("downsample_hidden_size", default=between) if between else 0,
    )


VISION_READERS: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_next_video"), _llava),
    **dict.fromkeys(("aya_vision", "cohere2_vision"), _aya),
    "llava_onevision": _onevision,
    **dict.fromkeys(("mistral3", "lighton_ocr"), _pixtral),
    "internvl": _internvl,
    **FURTHER,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "paligemma": _paligemma,
    **dict.fromkeys(_QWEN, _qwen),
}
