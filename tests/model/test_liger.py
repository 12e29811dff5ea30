"""Liger's RMSNorm and SwiGLU: what they save less, by arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zsim.errors import NotModeled
from zsim.model.huggingface import from_config, read_config
from zsim.model.spec import Compute, Images, Module, Workload
from zsim.model.trace import trace

LLAMA = Path(__file__).parents[2] / "scenarios" / "models" / "llama-3.1-8b"


def saved(module: Module) -> int:
    return sum(item.saved_bytes if isinstance(item, Compute) else saved(item) for item in module.body)


def test_bytes_saved_less_than_by_torch() -> None:
    """Per token a norm keeps its 16-bit input instead of a float32 copy and the normed one: 4 of 6 bytes per element
    less. SwiGLU keeps gate and up; torch keeps the activation besides. Both keep what the projections need."""
    model, tokens = read_config(LLAMA), 512
    torch, liger = (saved(trace(model, Workload(1, tokens, loss="fused", kernels=k))) for k in ("torch", "liger"))
    assert torch - liger == tokens * (32 * (2 * 4 * 4096 + 2 * 14336) + 4 * 4096)


def test_gemma_has_its_norm_and_its_mlp() -> None:
    """Per token a norm keeps its 16-bit input instead of it and the normed one in float32, and not 1 + weight in
    float32. GEGLU keeps gate and up; torch keeps the activation besides."""
    config = {
        "model_type": "gemma", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    }  # fmt: skip
    model, tokens = from_config(config, "gemma"), 512
    torch, liger = (saved(trace(model, Workload(1, tokens, loss="fused", kernels=k))) for k in ("torch", "liger"))
    assert torch - liger == tokens * (2 * 2 * 128 + 5 * (4 + 4 - 2) * 64) + 5 * 4 * 64


GLM4 = {
    "model_type": "glm4", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(("config", "norms"), [(GLM4, 4 * 2 + 1), (PHI3, 2 * 2 + 1)], ids=["glm4", "phi3"])
def test_halves_of_one_product_are_copied(config: dict[str, Any], norms: int) -> None:
    """Torch keeps the product that gate and up are views of, and the activation; Liger copies of both halves."""
    model, tokens = from_config(config, "small"), 512
    torch, liger = (saved(trace(model, Workload(1, tokens, loss="fused", kernels=k))) for k in ("torch", "liger"))
    assert torch - liger == tokens * (norms * 4 * 64 + 2 * 2 * 128)


TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TOWER = {"depth": 2, "intermediate_size": 96, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}


@pytest.mark.parametrize(
    ("config", "per_token", "per_patch"),
    [  # of the text model: norms, SwiGLU; of the tower of 2.5: two norms in each of its blocks
        (
            {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, **TEXT}
            | {"vision_config": TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3}},
            7 * 4 * 64 + 3 * 2 * 128,
            0,
        ),
        (
            {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, **TEXT}
            | {"vision_config": TOWER | {"hidden_size": 32, "out_hidden_size": 64, "fullatt_block_indexes": [1]}},
            7 * 4 * 64 + 3 * 2 * 128,
            2 * 2 * 4 * 32,
        ),
        (  # norms of queries and keys, too, and no SwiGLU
            {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **TEXT}}
            | {"vision_config": TOWER | {"hidden_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
            7 * 4 * 64 + 3 * 4 * (64 + 32),
            0,
        ),
    ],
    ids=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"],
)
def test_of_vision_language_models(config: dict[str, Any], per_token: int, per_patch: int) -> None:
    """liger-kernel 0.8.5 transformers/monkey_patch.py: the text model's norms and MLPs; what is left to torch (the
    tower's MLPs, the merger, SwiGLU of Qwen3-VL) saves what it did."""
    model, tokens, images = from_config(config, "small"), 256, Images(1, 112, 112)
    torch, liger = (
        saved(trace(model, Workload(1, tokens, loss="fused", kernels=k, images=images))) for k in ("torch", "liger")
    )
    assert torch - liger == tokens * per_token + 64 * per_patch


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_vl_moe"])
def test_refused_with_experts(model_type: str) -> None:
    """Liger has a kernel of its own for all experts of a layer with transformers 5."""
    experts = TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {"model_type": model_type} | experts
    if model_type == "qwen3_vl_moe":
        tower = TOWER | {"hidden_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
        config = {"model_type": model_type, "text_config": experts, "vision_config": tower}
    with pytest.raises(NotModeled, match="Liger"):
        trace(from_config(config, "small"), Workload(1, 256, kernels="liger"))


def test_refused_where_liger_would_change_other_modules() -> None:
    model = from_config({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64}, "gpt2")
    with pytest.raises(NotModeled, match="Liger"):
        trace(model, Workload(1, 16, kernels="liger"))
