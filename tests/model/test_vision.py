"""Vision-language models against the real ones, run under fake tensors (validation/oracles/vision.py)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, flops
from zsim.errors import InputError, NotModeled
from zsim.model import pixels
from zsim.model.families import VISION
from zsim.model.huggingface import from_config, read_config
from zsim.model.spec import Images, ModelSpec, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "vision.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


# What zsim knows to differ: tables and masks that only some layers use live until the first block's backward, as in
# test_families. Two of 2 x 96 x 96 and of 96 x 32, in bf16.
LATE = {"gemma3": 2 * (2 * 96 * 96 + 2 * 96 * 32), "paligemma2": 2 * 2 * 96 * 96}
CASES = [(name, index) for name, model in recorded().items() for index in range(len(model["runs"]))]


def frozen(spec: ModelSpec, what: str) -> ModelSpec:
    def trains(name: str) -> bool:
        if any(part in name for part in ("merger", "projector")):
            return True
        return not what or (what == "tower" and not any(part in name for part in ("visual.", "vision_tower.")))

    return replace(spec, parameters=tuple(replace(p, trainable=trains(p.name)) for p in spec.parameters), _cache={})


def test_every_family_has_a_recording():
    assert {model["config"]["model_type"] for model in recorded().values()} == set(VISION)


@pytest.mark.parametrize("name", recorded())
def test_parameters_are_those_of_named_parameters(name: str):
    model = recorded()[name]
    ours = [[p.name, list(p.shape), p.module_class] for p in from_config(model["config"], name).parameters]
    assert ours == model["parameters"]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = frozen(from_config(model["config"], name), run["frozen"])
    workload = Workload(
        run["batch"], run["seq"], attention=run["attention"], checkpointing=run["checkpointing"], device="cpu",
        images=Images(run["images"], *run["size"]),
    )  # fmt: skip
    ledger = Ledger(spec, trace(spec, workload))
    assert ledger.calls == [tuple(call) for call in run["calls"]]
    assert ledger.ready == run["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    assert ledger.peak_forward == run["peak"]["forward"]
    late = LATE.get(name, 0) if run["checkpointing"] == "full" else 0
    assert 0 <= ledger.peak_backward - run["peak"]["backward"] <= late


_SO400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
COUNTS = {  # of published models, as transformers 5.24 has them on the meta device
    "LLaVA-1.5-7B, its text model's sizes left out": (
        7_063_427_072,
        {
            "model_type": "llava", "vision_config": CLIP,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        },
    ),
    "LLaVA-1.6-Mistral-7B, its text model's sizes left out": (
        7_566_747_648,
        {
            "model_type": "llava_next", "vision_config": CLIP,
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
            "text_config": {"model_type": "mistral", "sliding_window": None, "vocab_size": 32064},
        },
    ),
    "Qwen2-VL-2B": (
        2_208_985_600,
        {
            "model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
        },
    ),
    "Qwen3-VL-8B": (
        8_767_123_696,
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
            },
            "vision_config": {"model_type": "qwen3_vl", "out_hidden_size": 4096},
        },
    ),
    "LLaVA-1.5-7B": (
        7_063_427_072,
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
                "num_hidden_layers": 32, "num_attention_heads": 32,
            },
        },
    ),
    "Gemma-3-4B": (
        4_300_079_472,
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
            },
        },
    ),
    "LLaVA-v1.6-Mistral-7B": (
        7_566_747_648,
        {
            "model_type": "llava_next",
            "text_config": {
                "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064, "sliding_window": None,
            },
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
            },
        },
    ),
    "LLaVA-OneVision-7B": (
        8_029_890_080,
        {
            "model_type": "llava_onevision",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152000,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_hidden_layers": 26, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "Pixtral-12B": (
        12_682_739_712,
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
                "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024,
            },
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
    ),
    "Mistral-Small-3.1-24B": (
        24_011_361_280,
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
                "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", "hidden_act": "silu", "image_size": 1540, "patch_size": 14,
            },
            "multimodal_projector_bias": False, "tie_word_embeddings": False,
        },
    ),
    "InternVL3-8B": (
        7_944_373_760,
        {
            "model_type": "internvl",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674,
            },
            "vision_config": {
                "model_type": "internvl_vision", "attention_bias": True,
            },
            "tie_word_embeddings": False,
        },
    ),
    "InternVL3-38B": (
        38_388_164_992,
        {
            "model_type": "internvl",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 151674,
            },
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 3200, "intermediate_size": 12800,
                "num_hidden_layers": 45, "num_attention_heads": 25, "norm_type": "rms_norm", "use_qk_norm": True,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-VL-30B-A3B": (
        31_070_754_032,
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48,
                "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
            },
            "vision_config": {
                "model_type": "qwen3_vl_moe", "out_hidden_size": 2048,
            },
        },
    ),
    "PaliGemma-3B": (
        2_923_466_480,
        {
            "model_type": "paligemma", "projection_dim": 2048,
            "text_config": {
                "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
                "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 257216,
            },
            "vision_config": _SO400M,
        },
    ),
    "PaliGemma-2-10B": (
        9_662_638_832,
        {
            "model_type": "paligemma", "projection_dim": 3584,
            "text_config": {
                "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
                "num_hidden_layers": 42, "num_key_value_heads": 8, "vocab_size": 257216,
            },
            "vision_config": _SO400M,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_models(name: str):
    count, config = COUNTS[name]
    assert from_config(config, name).numel == count


def test_the_shipped_model_has_the_published_count():
    shipped = Path(__file__).parents[2] / "scenarios" / "models" / "qwen2.5-vl-7b"
    assert read_config(shipped).numel == 8_292_166_656


@pytest.mark.parametrize(
    ("size", "tokens", "windows"),
    [
        # (height, width), tokens of the text model, windows by patches: as get_vision_window_index has them
        ((112, 112), 16, {64: 1}),
        ((168, 196), 42, {64: 1, 48: 1, 32: 1, 24: 1}),
        ((756, 756), 729, {64: 36, 48: 12, 36: 1}),
        ((1080, 1920), 39 * 69, {64: 9 * 17, 16: 9, 48: 17, 12: 1}),
    ],
)
def test_tokens_and_windows_of_an_image(size: tuple[int, int], tokens: int, windows: dict[int, int]):
    spec = read_config(Path(__file__).parents[2] / "scenarios" / "models" / "qwen2.5-vl-7b")
    vision, images = spec.arch.vision, Images(1, *size)
    assert pixels.image_tokens(vision, images) == tokens
    assert Counter(pixels.window_order(vision, images)) == windows
    assert sum(length * count for length, count in windows.items()) == 4 * tokens


def test_a_model_without_images_is_refused():
    config = recorded()["llava"]["config"]
    with pytest.raises(NotModeled, match="without images"):
        trace(from_config(config, "llava"), Workload(1, 64))


def test_paligemma_needs_a_mask():
    """Image and prompt see each other; Gemma 2 under it caps its scores, which SDPA does not."""
    for name, refused in (("paligemma", ("flash", "sdpa")), ("paligemma2", ("flash", "sdpa", "efficient"))):
        spec = from_config(recorded()[name]["config"], name)
        for attention in refused:
            with pytest.raises(NotModeled, match="under a mask"):
                trace(spec, Workload(1, 64, attention=attention, images=Images(1, 56, 56)))
    trace(from_config(recorded()["paligemma"]["config"], "p"), Workload(1, 64, attention="efficient",
          images=Images(1, 56, 56)))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_feature_layer"),  # its class's is the last but one
        ({"text_config": {"model_type": "gemma"}}, "text_config.model_type"),
        ({"vision_config": {"num_attention_heads": 7}}, "vision_config.num_attention_heads"),
    ],
)
def test_what_a_config_cannot_say(changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as refused:
        from_config(recorded()["llava"]["config"] | changes, "llava")
    assert refused.value.field == field
