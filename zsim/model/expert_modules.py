"""Mixtures of experts as transformers had them before 5: a module for each expert (`families.moe_modules`)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from zsim.model.architecture import Architecture
from zsim.model.huggingface import from_architecture
from zsim.model.spec import ModelSpec

FIRST_PACKED = (5,)
# The release whose block looks first which experts have tokens at all, and calls these alone; None: none did.
_FIRST_HIT = {
    "mixtral": (4, 52), "qwen2_moe": (4, 52), "qwen3_moe": (4, 53),
    "olmoe": None, "deepseek_v2": None, "deepseek_v3": None, "glm4_moe": None, "glm4v_moe": None, "dots1": None,
    "hunyuan_v1_moe": (4, 56),
}  # fmt: skip
UNCHANGED = ("llama4_text", "llama4")  # whose experts are one product over all tokens in either


def had_modules(model: ModelSpec) -> bool:
    """Whether transformers before 5 is known to have had a module for each expert of it."""
    return cast(Architecture, model.arch).family in _FIRST_HIT


def with_modules(model: ModelSpec, release: tuple[int, ...] | None) -> ModelSpec:
    """`model`, which nothing has tuned yet, with the experts that transformers `release` gave it (None: 5.24)."""
    arch = cast(Architecture, model.arch)
    if release is None or release >= FIRST_PACKED or arch.family not in _FIRST_HIT:
        return model
    first = _FIRST_HIT[arch.family]
    modules = "hit" if first and release >= first else "all"
    return from_architecture(model.name, replace(arch, moe=replace(arch.experts, modules=modules)), model.notes)
