"""Liger's RMSNorm and SwiGLU: what they save less, by arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import NotModeled
from zsim.model.huggingface import from_config, read_config
from zsim.model.spec import Compute, Module, Workload
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


def test_refused_where_liger_would_change_other_modules() -> None:
    model = from_config({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64}, "gpt2")
    with pytest.raises(NotModeled, match="Liger"):
        trace(model, Workload(1, 16, kernels="liger"))
