"""What config.json of further vision-language models means (see readers_vision)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.model.architecture import Architecture, LayerKind, Tiles, Vision
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_dropout, read_kv_heads, read_rotary_dim
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


def _mllama(fields: Fields, family: str) -> Architecture:
    """Its output projection is never tied: the embedding has eight rows more."""
    text = read_text(fields, family, ("mllama_text_model",), "mllama_text_model", read_as="llama")
    config = fields.section("text_config")
    crossed = _numbers(config, "cross_attention_layers", text.layers, [3, 8, 13, 18, 23, 28, 33, 38])
    kinds = tuple(
        replace(kind, crossed=layer in crossed, stretch=_stretch(layer, crossed))
        for layer, kind in enumerate(text.kinds)
    )
    vision = read_tower(fields, "mllama_vision_model")
    names = {
        "hidden": (("hidden_size",), 1280), "heads": (("attention_heads", "num_attention_heads"), 16),
        "layers": (("num_hidden_layers",), 32), "intermediate": (("intermediate_size",), 5120), "activation": "gelu",
    }  # fmt: skip
    blocks = read_blocks(vision, "mllama_vision", names, lambda layer: LayerKind(stretch=layer))
    read = _numbers(vision, "intermediate_layers_indices", blocks.layers, [3, 7, 15, 23, 30])
    width = blocks.hidden * (1 + len(read))
    if (out := vision.size("vision_output_dim", default=7680)) != width:
        vision.fail("vision_output_dim", f"is {out}, and {1 + len(read)} layers are read", str(width))
    behind = vision.size("num_global_layers", default=8, most=10_000)
    ratios = vision.items("supported_aspect_ratios")
    return replace(
        text,
        kinds=kinds,
        tied=False,
        attention_dropout=read_dropout(config, "dropout"),
        vision=Vision(
            blocks,
            patch=read_side(vision, "patch_size", 14),
            channels=vision.size("num_channels", default=3),
            image_size=read_side(vision, "image_size", 448),
            tiles=Tiles(
                vision.size("max_num_tiles", default=4),
                8 if ratios is None else len(ratios),
                tuple(LayerKind(stretch=layer) for layer in range(behind)),
                tuple(read),
            ),
            checkpointed=False,
        ),
    )


def _llama4(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, ("llama4_text",), "llama4_text")
    vision = read_tower(fields, "llama4_vision_model")
    names = {
        "hidden": (("hidden_size",), 768), "heads": (("num_attention_heads",), 16),
        "layers": (("num_hidden_layers",), 34), "intermediate": (("intermediate_size",), 5632), "activation": "gelu",
    }  # fmt: skip
    blocks = read_blocks(vision, "llama4_vision", names, lambda layer: LayerKind())
    merge = round(1 / vision.number("pixel_shuffle_ratio", default=0.5, low=0.01, high=1))
    side, patch = read_side(vision, "image_size", 448), read_side(vision, "patch_size", 14)
    if side // patch % merge:
        vision.fail("pixel_shuffle_ratio", f"does not divide the {side // patch} rows of patches", "1 / a divisor")
    if blocks.intermediate != blocks.hidden * merge**2:  # the adapter's input as well
        vision.fail("intermediate_size", f"is {blocks.intermediate}, and merged patches are {merge**2} x "
                    f"{blocks.hidden} wide", str(blocks.hidden * merge**2))  # fmt: skip
    if read_dropout(vision, "projector_dropout"):
        vision.fail("projector_dropout", "is not modeled", "0")
    adapter = vision.size("projector_output_dim", default=4096)
    for name, default in (("projector_input_dim", 4096), ("vision_output_dim", 7680)):
        if (width := vision.size(name, default=default)) != adapter:
            vision.fail(name, f"is {width}, and projector_output_dim {adapter}", str(adapter))
    return replace(
        text,
        vision=Vision(
            replace(blocks, activation="nn.gelu"),
            patch=patch,
            channels=vision.size("num_channels", default=3),
            image_size=side,
            splits=True,
            merge=merge,
            adapter=adapter,
        ),
    )


def _glm4v(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, ("glm4v_text",), "glm4v_text", read_as="glm4")
    width = text.hidden // text.heads
    rotary = read_rotary_dim(fields.section("text_config"), width, "partial_rotary_factor", default=1.0)
    return _with_glm_tower(replace(text, attention_bias=True, head_dim=width, rotary_dim=rotary), fields)


def _glm_ocr(fields: Fields, family: str) -> Architecture:
    text = read_text(fields, family, ("glm_ocr_text",), "glm_ocr_text", read_as="glm4")
    config = fields.section("text_config")
    heads = read_kv_heads(config.over({"num_key_value_heads": 8}), text.heads, "num_key_value_heads")
    width = text.head_dim if "head_dim" in config else text.hidden // text.heads
    rotary = read_rotary_dim(config, width, "partial_rotary_factor", default=1.0)
    return _with_glm_tower(
        replace(text, kv_heads=heads, attention_bias=False, head_dim=width, rotary_dim=rotary), fields
    )


def _glm4v_moe(fields: Fields, family: str) -> Architecture:
    """GLM-4.5V: the text model of GLM-4.5 without norms of queries and keys."""
    text = read_text(fields, family, ("glm4v_moe_text",), "glm4v_moe_text", read_as="glm4_moe")
    bias = fields.section("text_config").flag("attention_bias", default=True)
    return _with_glm_tower(replace(text, attention_bias=bias, qk_norm=""), fields)


def _with_glm_tower(text: Architecture, fields: Fields) -> Architecture:
    parts = "glm4v" if text.family == "glm46v" else text.family
    vision = read_tower(fields, f"{parts}_vision", parts)
    ocr = parts == "glm_ocr"
    names = {
        "hidden": (("hidden_size",), 1024 if ocr else 1536), "heads": (("num_heads",), 16 if ocr else 12),
        "layers": (("depth",), 24), "intermediate": (("intermediate_size",), 4096 if ocr else 13696),
        "activation": "silu",
    }  # fmt: skip
    blocks = read_blocks(vision, f"{parts}_vision", names, lambda layer: LayerKind())
    if (out := vision.size("out_hidden_size", default=1536 if ocr else 4096)) != text.hidden:
        vision.fail("out_hidden_size", f"is {out}, and the text model's width {text.hidden}", str(text.hidden))
    patch = read_side(vision, "patch_size", 14)
    return replace(
        text,
        vision=Vision(
            replace(blocks, attention_bias=vision.flag("attention_bias", default=ocr)),
            patch=patch,
            channels=vision.size("in_channels", default=3),
            frames=vision.size("temporal_patch_size", default=2),
            merge=vision.size("spatial_merge_size", default=2),
            positions=0 if ocr else read_side(vision, "image_size", 336) // patch,
            input_embedding=False,
        ),
    )


def _paddleocr(fields: Fields, family: str) -> Architecture:
    """PaddleOCR-VL; files of its own code have the text model's fields at the top. Its output projection is tied unless
    both parts say that it is not."""
    text = read_text(fields, family, ("paddleocr_vl_text",), "paddleocr_vl_text", read_as="llama", tied=True)
    config = fields.section("text_config") if "text_config" in fields else fields
    nested = "text_config" in fields
    tied = text.tied or not nested or config.flag("tie_word_embeddings", default=True)
    bias = config.flag("use_bias", default=False)
    vision = read_tower(fields, "paddleocr_vl_vision", "paddleocr_vl")
    names = {
        "hidden": (("hidden_size",), 1152), "heads": (("num_attention_heads",), 16),
        "layers": (("num_hidden_layers",), 27), "intermediate": (("intermediate_size",), 4304),
        "activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    patch = read_side(vision, "patch_size", 14)
    return replace(
        text,
        tied=tied,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        attention_dropout=0.0,
        vision=Vision(
            read_blocks(vision, "paddleocr_vl_vision", names, lambda layer: LayerKind(stretch=min(layer, 1))),
            patch=patch,
            channels=vision.size("num_channels", default=3),
            merge=vision.size("spatial_merge_size", default=2),
            positions=(read_side(vision, "image_size", 384) // patch) ** 2,
            input_embedding=False,
        ),
    )


def _stretch(layer: int, crossed: list[int]) -> int:
    """The first layer that reads the tower keeps what it reads, and to the last no gradient of that has come yet."""
    if not crossed or layer <= min(crossed):
        return 0
    last = max(crossed)
    return 1 if layer < last else 2 if layer == last else 3


def _numbers(fields: Fields, name: str, layers: int, default: list[int]) -> list[int]:
    """Of layers that there are."""
    found = fields.items(name)
    found = default if found is None else found
    for number in found:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < layers:
            fields.fail(name, f"has {number!r}", f"numbers of layers, 0 to {layers - 1}")
    return found


FURTHER: dict[str, Callable[[Fields, str], Architecture]] = {
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
    "mllama": _mllama,
    "llama4": _llama4,
    **dict.fromkeys(("glm4v", "glm46v"), _glm4v),
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
    "paddleocr_vl": _paddleocr,
}
