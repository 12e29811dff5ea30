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
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor, initialization, vision_utils

from validation.oracles.families import Follow, begin, observe, write
from validation.oracles.memory import flash_attention

TEXT = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
ROPE3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": 56, "patch_size": 14,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": 112, "patch_size": 14, "hidden_act": "silu",
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl_vision", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": [56, 56], "patch_size": [14, 14],
}  # fmt: skip
DEEP = {
    "depth": 7, "hidden_size": 48, "intermediate_size": 100, "num_heads": 3, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 3, 5],
}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
FLASH, BOTH, EAGER = ("sdpa",), ("sdpa", "eager"), ("eager",)

# name -> (attention implementations, config.json, image height and width)
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, int]]] = {
    "qwen2_5_vl": (
        BOTH,
        {
            "model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, **ROPE},
            "vision_config": {
                "model_type": "qwen2_5_vl_vision", "depth": 4, "hidden_size": 48, "intermediate_size": 100,
                "num_heads": 3, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3],
            },
        },
        (168, 196),
    ),
    "qwen2_vl": (
        BOTH,
        {
            "model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", **TEXT, **ROPE},
            "vision_config": {
                "model_type": "qwen2_vl_vision", "depth": 4, "embed_dim": 48, "num_heads": 3, "hidden_size": 64,
            },
        },
        (168, 196),
    ),
    "qwen3_vl": (
        BOTH,
        {
            "model_type": "qwen3_vl",
            "text_config": {"model_type": "qwen3_vl_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, **ROPE3},
            "vision_config": {"model_type": "qwen3_vl_vision", **DEEP},
        },
        (160, 192),
    ),
    "qwen3_vl_moe": (
        BOTH,
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, **ROPE3,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [4],
            },
            "vision_config": {"model_type": "qwen3_vl_moe_vision", **DEEP},
        },
        (160, 192),
    ),
    "llava": (
        BOTH,
        {"model_type": "llava", "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP,
         "image_seq_length": 16},
        (56, 56),
    ),
    "llava_next": (
        BOTH,
        {"model_type": "llava_next", "text_config": {"model_type": "mistral", **TEXT}, "vision_config": CLIP,
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        (60, 100),
    ),
    "llava_onevision": (
        BOTH,
        {"model_type": "llava_onevision", "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SIGLIP,
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]], "vision_aspect_ratio": "anyres_max_2"},
        (110, 100),
    ),
    "llava-pixtral": (
        BOTH,
        {"model_type": "llava", "text_config": {"model_type": "mistral", **TEXT, "head_dim": 32},
         "vision_config": PIXTRAL, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        (56, 112),
    ),
    "mistral3": (
        BOTH,
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", **TEXT, "head_dim": 32},
         "vision_config": PIXTRAL, "tie_word_embeddings": False},
        (112, 56),
    ),
    "ministral3": (
        FLASH,
        {"model_type": "mistral3", "vision_config": PIXTRAL, "tie_word_embeddings": False, "text_config":
         {"model_type": "ministral3", **TEXT, "head_dim": 32, "pad_token_id": 0}},
        (112, 56),
    ),
    "internvl": (
        BOTH,
        {"model_type": "internvl", "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": INTERNVL |
         {"attention_bias": True}, "image_seq_length": 4},
        (56, 56),
    ),
    "internvl-rms": (
        FLASH,
        {"model_type": "internvl", "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 32}, "vision_config":
         INTERNVL | {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False,
         "hidden_dropout_prob": 0.1}, "image_seq_length": 4, "tie_word_embeddings": False},
        (56, 56),
    ),
    "paligemma": (
        EAGER,
        {
            "model_type": "paligemma", "text_config": {"model_type": "gemma", **TEXT, "head_dim": 32},
            "vision_config": SIGLIP, "projection_dim": 64, "image_token_index": 198,
        },
        (56, 56),
    ),
    "paligemma2": (
        EAGER,
        {
            "model_type": "paligemma", "text_config": {"model_type": "gemma2", **TEXT, "head_dim": 32,
            "sliding_window": 32}, "vision_config": SIGLIP, "projection_dim": 64, "image_token_index": 198,
        },
        (56, 56),
    ),
    "gemma3": (
        EAGER,
        {
            "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 32,
            "sliding_window": 32, "sliding_window_pattern": 2}, "vision_config": SIGLIP, "mm_tokens_per_image": 4,
            "image_token_index": 198,
        },
        (56, 56),
    ),
}  # fmt: skip
RUNS = ((1, 64, 1, "none"), (2, 96, 2, "none"), (2, 96, 2, "full"))  # micro-batch, sequence, images, checkpointing
FROZEN = {"": (), "tower": ("visual.", "vision_tower."), "all but projector": ("",)}
PROJECTOR = ("merger", "projector")
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # whose inputs are packed patches and their grid


def build(config: dict[str, Any], attention: str) -> Any:
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    for part in (made, made.text_config, made.vision_config):
        part._attn_implementation = attention
    made.text_config.use_cache = False
    if made.model_type == "qwen3_vl_moe":
        made.text_config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.AutoModelForImageTextToText.from_config(made).train()
    torch.set_default_dtype(torch.float32)
    return model


def freeze(model: Any, what: str) -> None:
    for name, parameter in model.named_parameters():
        projects = any(part in name for part in PROJECTOR)
        parameter.requires_grad_(projects or not any(part in name for part in FROZEN[what]))


def inputs(config: dict[str, Any], batch: int, images: int, size: tuple[int, int]) -> dict[str, Any]:
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
    if config["vision_config"]["model_type"] == "pixtral":
        return {"pixel_values": torch.zeros(count, 3, *size), "image_sizes": np.array([size] * count).view(Sizes)}
    if kind not in GRIDS:
        return {"pixel_values": torch.zeros(count, 3, *size)}
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
    if kind.startswith("qwen3_vl"):
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, int(vision.num_position_embeddings**0.5), mode="bilinear", align_corners=True,
            spatial_merge_size=vision.spatial_merge_size,
        )  # fmt: skip
        found |= {"image_interp_indices": indices, "image_interp_weights": weights}
    if kind == "qwen2_5_vl":
        order, ends = vision_utils.get_vision_window_index(
            grid, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        found |= {"image_window_index": order, "image_cu_window_seqlens": ends.numpy()}
    return found


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
    mask = attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, settings["dropout_p"], False, scale=settings["scale"])[0]


class Known(Follow):
    """Follows where the size of one result, of the places of image tokens, is known."""

    def __init__(self, ignored: set[int], selected: int) -> None:
        super().__init__(ignored)
        self.selected = selected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        new = torch.ops.aten.new_empty.default
        if func._opname == "masked_select":
            return super().__torch_dispatch__(new, types, (args[0], [self.selected]))
        if func._opname == "index" and args[1][0].dtype is torch.bool:
            width = args[0].shape[-1]
            return super().__torch_dispatch__(new, types, (args[0], [self.selected // width, width]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def tokens_of(config: dict[str, Any], images: int, size: tuple[int, int]) -> int:
    if "mm_tokens_per_image" in config:
        return config["mm_tokens_per_image"]
    if "image_grid_pinpoints" in config:
        return processed_tokens(config, images, size)
    kind = config["model_type"]
    patch = 14 if not kind.startswith("qwen3_vl") else 16
    merge = 2 if kind in (*GRIDS, "mistral3", "internvl") else 1
    return (size[0] // patch) * (size[1] // patch) // merge**2


def processed_tokens(config: dict[str, Any], images: int, size: tuple[int, int]) -> int:
    """As the processors of LLaVA-NeXT and OneVision count them."""
    made = LlavaNextProcessor if config["model_type"] == "llava_next" else LlavaOnevisionProcessor
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
    given = inputs(config, batch, images, size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                 for name, value in given.items()}  # fmt: skip
        model = build(config, attention)
        freeze(model, frozen)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
        selected = batch * images * tokens_of(config, images, size) * config["text_config"]["hidden_size"]
        given |= {"input_ids": ids, "labels": labels, "use_cache": False}
        if config["model_type"] in GRIDS:  # as a collator computes them; the model itself would ask for values
            given["position_ids"] = torch.zeros(3, batch, seq, dtype=torch.long)
        found = observe(model, given, lambda ignored: Known(ignored, selected))
    about = {
        "attention": attention, "batch": batch, "seq": seq, "images": images, "checkpointing": checkpointing,
        "frozen": frozen, "size": size,
    }  # fmt: skip
    return about | found


def main(arguments: list[str]) -> None:
    options = begin(arguments, __doc__, CONFIGS)
    initialization.trunc_normal_ = lambda tensor, *_, **__: tensor  # asks for values
    torch.as_tensor = as_tensor
    torch.nn.functional.scaled_dot_product_attention = attend
    models = {}
    for name in options.names or CONFIGS:
        attentions, config, size = CONFIGS[name]
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
        models[name] = {"config": config, "parameters": parameters, "runs": runs}
    write(options.out, models, numpy=np.__version__)


if __name__ == "__main__":
    main(sys.argv[1:])
