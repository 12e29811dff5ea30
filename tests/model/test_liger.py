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


def test_refused_where_liger_would_change_other_modules() -> None:
    model = from_config({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64}, "gpt2")
    with pytest.raises(NotModeled, match="Liger"):
        trace(model, Workload(1, 16, kernels="liger"))
