"""What vision-language models do in one step, as families.py has it for text models: parameters, calls, gradient order,
live bytes, FLOPs. With all of it trained, with the tower frozen, and with all but the projector frozen.

    python -m validation.oracles.vision [NAME ...] --out FILE.json.gz

Under fake tensors no value can be asked for: sizes of images are given as NumPy arrays, and what the towers derive from
them (transformers 5.24 vision_utils.py) is computed before. That the number of image tokens is right is not checked.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"

import numpy as np
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor, initialization, masking_utils, vision_utils

from validation.oracles import models
from validation.oracles.families import Follow, begin, observe, write
from validation.oracles.memory import flash_attention
from validation.oracles.vision_models import CONFIGS

RUNS = ((1, 64, 1, "none"), (2, 96, 2, "none"), (2, 96, 2, "full"))  # micro-batch, sequence, images, checkpointing
FROZEN = {
    "": (), "tower": ("visual.", "vision_tower.", "vision_model.", "vision_encoder."), "all but projector": ("",),
}  # fmt: skip
PROJECTOR = ("merger", "projector", "connector", "embed_vision", "vision_projection")
IDEFICS = ("idefics3", "smolvlm")
GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")  # which takes the grid of packed patches for tensors
GRIDS = (
    *GLM,
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "exaone4_5",
    "paddleocr_vl",
)  # whose inputs are packed patches and their grid


def build(config: dict[str, Any], attention: str) -> Any:
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    for part in (made, made.text_config, made.vision_config):
        part._attn_implementation = attention
    made.text_config.use_cache = False
    if made.text_config.model_type == "mistral4" or made.model_type in (
        "qwen3_vl_moe",
        "qwen3_5_moe",
        "glm4v_moe",
        "qwen3_omni_moe_thinker",
    ):
        made.text_config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.AutoModelForImageTextToText.from_config(made).train()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():  # as in families.py
        parameter.data = parameter.data.bfloat16()
    return model


def freeze(model: Any, what: str) -> None:
    for name, parameter in model.named_parameters():
        projects = any(part in name for part in PROJECTOR)
        parameter.requires_grad_(projects or not any(part in name for part in FROZEN[what]))


def inputs(config: dict[str, Any], batch: int, seq: int, images: int, size: tuple[int, int]) -> dict[str, Any]:
    """Pixels, and for packed patches their grid and what is derived from it. To be called outside of fake tensors."""
    count, kind = batch * images, config["model_type"]
    if "image_grid_pinpoints" in config:
        side, squares = config["vision_config"]["image_size"], squares_of(config, size)
        if kind == "llava_onevision" and images > 1:  # as the processor says it
            values = torch.zeros(count, 1, 3, side, side)
            return {
                "pixel_values": values,
                "image_sizes": np.array([size] * count),
                "batch_num_images": [images] * batch,
            }
        return {"pixel_values": torch.zeros(count, squares, 3, side, side), "image_sizes": np.array([size] * count)}
    if kind == "mllama":
        side, ids = config["vision_config"]["image_size"], torch.ones(batch, images, dtype=torch.long)
        return {
            "pixel_values": torch.zeros(batch, images, 4, 3, side, side), "aspect_ratio_ids": ids,
            "aspect_ratio_mask": torch.ones(batch, images, 4, dtype=torch.long),
            "cross_attention_mask": torch.ones(batch, seq, images, 4, dtype=torch.long),
        }  # fmt: skip
    if kind == "llama4":
        side = config["vision_config"]["image_size"]
        count *= idefics_squares(config, size)  # cut alike
        return {"pixel_values": torch.zeros(count, 3, side, side, dtype=torch.bfloat16)}
    if kind in IDEFICS:
        side = config["vision_config"]["image_size"]
        shape = batch, images * idefics_squares(config, size), side, side
        mask = torch.ones(shape, dtype=torch.long)
        return {"pixel_values": torch.zeros(*shape[:2], 3, side, side), "pixel_attention_mask": mask}
    if kind == "gemma4":
        vision = config["vision_config"]
        patches = vision["default_output_length"] * vision["pooling_kernel_size"] ** 2
        return {
            "pixel_values": torch.zeros(count, patches, 3 * vision["patch_size"] ** 2),
            "image_position_ids": torch.zeros(count, patches, 2, dtype=torch.long),
            "mm_token_type_ids": torch.zeros(batch, seq, dtype=torch.long),
        }
    if config["vision_config"]["model_type"] == "pixtral":
        return {"pixel_values": torch.zeros(count, 3, *size), "image_sizes": np.array([size] * count).view(Sizes)}
    if kind not in GRIDS:
        return {"pixel_values": torch.zeros(count, 3, *size)}
    if kind == "paddleocr_vl":
        return paddleocr_inputs(config, count, size)
    made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    vision = made.vision_config
    rows, columns = (side // vision.patch_size for side in size)
    grid = torch.tensor([[1, rows, columns]] * count)
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    found: dict[str, Any] = {
        "pixel_values": torch.zeros(count * rows * columns, values),
        "image_grid_thw": grid.numpy(),
        "image_position_ids": vision_utils.get_vision_position_ids(grid, vision.spatial_merge_size),
        "image_cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).numpy(),
    }
    if kind in GLM:
        return found | {"image_grid_thw": grid, "image_cu_seqlens": vision_utils.get_vision_cu_seqlens(grid)}
    if kind.startswith("qwen3"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, int(vision.num_position_embeddings**0.5), mode="bilinear", align_corners=True,
            spatial_merge_size=vision.spatial_merge_size,
        )  # fmt: skip
        found |= {"image_interp_indices": indices, "image_interp_weights": weights}
    if kind in ("qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5"):
        order, ends = vision_utils.get_vision_window_index(
            grid, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        found |= {"image_window_index": order, "image_cu_window_seqlens": ends.numpy()}
    return found


def paddleocr_inputs(config: dict[str, Any], count: int, size: tuple[int, int]) -> dict[str, Any]:
    """Its model takes positions of patches and ends of images from nobody, but from here."""
    from transformers.models.paddleocr_vl import modeling_paddleocr_vl as code

    rows, columns = (side // 14 for side in size)
    patches = count * rows * columns
    places, ends = torch.zeros(patches, 2, dtype=torch.long), np.arange(count + 1) * rows * columns
    code.get_vision_position_ids = lambda *_, **__: places
    code.get_vision_attention_seqlens = lambda *_, **__: (ends, rows * columns)
    return {
        "pixel_values": torch.zeros(patches, 3, 14, 14),
        "image_grid_thw": np.array([[1, rows, columns]] * count).view(Sizes),
        "interp_indices": torch.zeros(patches, 4, dtype=torch.long),
        "interp_weights": torch.zeros(patches, 4),
    }


def known_numbers(config: dict[str, Any], images: int, size: tuple[int, int], counts: torch.Tensor) -> list[int]:
    """What a model asks for: squares in each sequence, patches of each image (int32) or the tokens they become."""
    if config["model_type"] not in GLM:
        return [images * idefics_squares(config, size)] * len(counts)
    patches = (size[0] // 14) * (size[1] // 14)
    return [patches if counts.dtype is torch.int32 else patches // 4] * len(counts)


def idefics_squares(config: dict[str, Any], size: tuple[int, int]) -> int:
    """As Idefics3ImageProcessor.split_images cuts an image."""
    rows, columns = (-(-length // config["vision_config"]["image_size"]) for length in size)
    return rows * columns + 1 if rows * columns > 1 else 1


def squares_of(config: dict[str, Any], size: tuple[int, int]) -> int:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return image_size_to_num_patches(size, config["image_grid_pinpoints"], config["vision_config"]["image_size"])


class Sizes(np.ndarray):
    """Sizes of images whose product models take as of a tensor."""

    def prod(self, dim: int) -> Any:
        return super().prod(axis=dim)


def as_tensor(value: Any, made: Any = torch.as_tensor, **settings: Any) -> Any:
    return value if isinstance(value, Sizes) else made(value, **settings)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **settings: Any) -> torch.Tensor:
    """What torch's scaled_dot_product_attention runs on a GPU: with a mask its memory-efficient kernel."""
    if attn_mask is None:
        return flash_attention(q, k, v, **settings)
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=q.dtype))
    mask = attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, settings["dropout_p"], False, scale=settings["scale"])[0]


class Known(Follow):
    """Follows where the size of one result, of the places of image tokens, is known."""

    def __init__(self, ignored: set[int], tokens: int, width: int) -> None:
        super().__init__(ignored)
        self.tokens, self.selected = tokens, tokens * width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        new = torch.ops.aten.new_empty.default
        if func._opname == "masked_select":
            return super().__torch_dispatch__(new, types, (args[0], [self.selected]))
        if func._opname == "index" and args[1][0].dtype is torch.bool:
            if args[1][0].dim() == 1:  # of squares that are no padding
                return super().__torch_dispatch__(new, types, (args[0], args[0].shape))
            if args[1][0].dim() == args[0].dim():
                return super().__torch_dispatch__(new, types, (args[0], [self.selected]))
            return super().__torch_dispatch__(new, types, (args[0], [self.tokens, args[0].shape[-1]]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def tokens_of(config: dict[str, Any], images: int, size: tuple[int, int]) -> int:
    if config["model_type"] in (*IDEFICS, "llama4"):
        side = config["vision_config"]["image_size"] // 14 // config.get("scale_factor", 2)
        return idefics_squares(config, size) * side**2
    if config["model_type"] == "gemma4":
        return gemma4_tokens(config["vision_config"], size)
    if "mm_tokens_per_image" in config:
        return config["mm_tokens_per_image"]
    if "image_grid_pinpoints" in config:
        return processed_tokens(config, images, size)
    kind = config["model_type"]
    patch = 14 if not kind.startswith("qwen3") else 16
    merge = 2 if kind in (*GRIDS, "mistral3", "lighton_ocr", "internvl", "aya_vision", "cohere2_vision") else 1
    return (size[0] // patch) * (size[1] // patch) // merge**2


def gemma4_tokens(vision: dict[str, Any], size: tuple[int, int]) -> int:
    """As many squares as Gemma4ImageProcessor resizes an image to."""
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    factor = (vision["default_output_length"] * side**2 / (size[0] * size[1])) ** 0.5
    rows, columns = (int(factor * length // side) for length in size)
    return rows * columns


def processed_tokens(config: dict[str, Any], images: int, size: tuple[int, int]) -> int:
    """As the processors of LLaVA-NeXT and OneVision count them."""
    made = LlavaNextProcessor if config["model_type"].startswith("llava_next") else LlavaOnevisionProcessor
    side = config["vision_config"]["image_size"]
    if made is LlavaOnevisionProcessor and images > 1:
        return (side // 14) ** 2 + 1
    processor = made.__new__(made)
    processor.patch_size, processor.num_image_tokens = 14, (side // 14) ** 2
    processor.num_additional_image_tokens, processor.vision_feature_select_strategy = 1, "default"
    processor.vision_aspect_ratio = config.get("vision_aspect_ratio", "")
    processor.image_processor = type("Settings", (), {"image_grid_pinpoints": config["image_grid_pinpoints"]})()
    return processor._get_number_of_features(*size, side, side) - (made is LlavaNextProcessor)


def record(
    config: dict[str, Any], attention: str, frozen: str, size: tuple[int, int], run: tuple[int, int, int, str]
) -> dict[str, Any]:
    batch, seq, images, checkpointing = run
    given = inputs(config, batch, seq, images, size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                 for name, value in given.items()}  # fmt: skip
        model = build(config, attention)
        freeze(model, frozen)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
        tokens, width = batch * images * tokens_of(config, images, size), config["text_config"]["hidden_size"]
        given |= {"input_ids": ids, "labels": labels, "use_cache": False}
        if (
            config["model_type"] in GRIDS and config["model_type"] != "exaone4_5"
        ):  # as a collator computes them; the model itself would ask for values
            given["position_ids"] = torch.zeros(3, batch, seq, dtype=torch.long)
        if config["model_type"] == "gemma4":
            FakeTensor.tolist = lambda counts: [tokens // len(counts)] * len(counts)  # type: ignore
        else:
            FakeTensor.tolist = lambda counts: known_numbers(config, images, size, counts)  # type: ignore
        found = observe(model, given, lambda ignored: Known(ignored, tokens, width))
    about = {
        "attention": attention, "batch": batch, "seq": seq, "images": images, "checkpointing": checkpointing,
        "frozen": frozen, "size": size,
    }  # fmt: skip
    return about | found


def main(arguments: list[str]) -> None:
    options = begin(arguments, __doc__, CONFIGS)
    initialization.trunc_normal_ = lambda tensor, *_, **__: tensor  # asks for values
    torch.as_tensor = as_tensor
    models.mend_llama4()
    torch.nn.functional.scaled_dot_product_attention = attend
    found = {}
    no_mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    for name in options.names or CONFIGS:
        attentions, config, size = CONFIGS[name]
        masked = config["model_type"] == "gemma4"  # windows are in a mask, and patches may be padded
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", masking_utils.sdpa_mask if masked else no_mask)
        padded = masked and tokens_of(config, 1, size) < config["vision_config"]["default_output_length"]
        if masked:
            masking_utils.find_packed_sequence_indices = lambda *_: None  # asks for values
        masking_utils._ignore_bidirectional_mask_sdpa = lambda *_, padded=padded: not padded
        runs = [
            record(config, attention, frozen, size, run)
            for attention in attentions
            for frozen in FROZEN
            for run in RUNS
            if not (frozen and attention != attentions[0])
        ]
        parameters = runs[0]["parameters"]
        for run in runs:
            assert run.pop("parameters") == parameters, name
        found[name] = {"config": config, "parameters": parameters, "runs": runs}
    write(options.out, found, numpy=np.__version__)


if __name__ == "__main__":
    main(sys.argv[1:])
