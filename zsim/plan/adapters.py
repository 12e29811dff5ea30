"""LoRA and QLoRA in training recipes: the names that each tool gives to the same few settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import NotModeled
from zsim.plan.recipe import Recipe

_TOKENS = ("trainable_token_indices", "peft_trainable_token_indices")


def lora(recipe: Recipe, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
    """`names`: r, alpha, dropout, targets, save -> the recipe's key. `defaults`: the tool's, r among them."""
    rank = recipe.count(names["r"]) or defaults["r"]
    recipe.set("lora.r", rank, names["r"])
    alpha = recipe.get(names["alpha"], defaults.get("alpha", 2 * rank))
    recipe.set("lora.alpha", alpha, names["alpha"])
    dropout = recipe.get(names["dropout"], defaults.get("dropout", 0.0))
    recipe.set("lora.dropout", dropout, names["dropout"])
    if saved := _listed(recipe.get(names["save"], [])):
        recipe.set("lora.modules_to_save", saved, names["save"])
    if parameters := _listed(recipe.get(names["parameters"], []) if "parameters" in names else []):
        recipe.set("lora.target_parameters", parameters, names["parameters"])
    targets = recipe.get(names["targets"], defaults.get("targets"))
    if targets is None:
        recipe.reading.lacks("lora.targets", "(the tool chooses by model; peft's default for Llama is q_proj, v_proj)")
    elif targets in ("all", "all-linear") or targets == ["all"]:
        recipe.set("lora.targets", "all-linear", names["targets"])
    elif isinstance(targets, str) and re.search(r"[\\()\[\]|*+?^$]", targets):
        recipe.set("lora.targets", targets, names["targets"])  # peft takes text for a regular expression
    else:
        recipe.set("lora.targets", _listed(targets), names["targets"])


def _listed(names: Any) -> list[Any]:
    if isinstance(names, list):
        return names
    return [part for part in (part.strip() for part in str(names).split(",")) if part]


def refuse_variants(recipe: Recipe, names: tuple[str, ...]) -> None:
    """Kinds of adapters that compute something else than plain LoRA, by key."""
    for name in names:
        value = recipe.get(name)
        if value not in (None, False, "", "false", 0, [], {}):
            tokens = "rows of an embedding that train beside the adapters"
            why = tokens if name in _TOKENS else "another kind of adapter than plain LoRA"
            raise recipe.document.error((name,), f"{name}: {why}", "plain LoRA, without it", kind=NotModeled)


def quantized(recipe: Recipe, key: str, double_key: str | None = None) -> None:
    """Base weights in 4 bits, doubly quantized unless the recipe says otherwise."""
    recipe.set("quantize.type", "nf4", key)
    if double_key is not None and recipe.get(double_key) is not None:
        recipe.set("quantize.double_quant", recipe.flag(double_key), double_key)


def in_8_bits(recipe: Recipe, key: str) -> None:
    recipe.set("quantize.type", "int8", key)
