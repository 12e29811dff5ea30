"""What trl's SFTConfig takes where its defaults are not the Trainer's (trl 1.16, trainer/base_config.py)."""

from __future__ import annotations

from typing import Any

from zsim.plan.recipe import Recipe

# Of SFTConfig alone; max_seq_length is of before 0.20, when the loss was not yet taken in chunks.
_SFT = (
    "packing", "packing_strategy", "padding_free", "dataset_text_field", "assistant_only_loss", "completion_only_loss",
    "eval_packing", "chat_template_path",
)  # fmt: skip
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "bf16": (True, "0.19"), "max_length": (1024, "0.19"), "gradient_checkpointing": (True, "0.22"),
}  # fmt: skip


def is_newer_trl(recipe: Recipe) -> bool:
    """Whether a recipe is one of SFTConfig, as trl has it since 0.20."""
    said = [name for name in _SFT if recipe.get(name) is not None]
    named = bool(said) or recipe.document.program.startswith("trl")
    return named and recipe.document.data.get("max_seq_length") is None


def fill_in(recipe: Recipe) -> None:
    """Write trl's own defaults into a recipe of its trainer, with a note of each."""
    document = recipe.document
    for name, (value, since) in _DEFAULTS.items():
        if name in document.data or (name == "bf16" and recipe.flag("fp16")):
            continue
        document.data[name] = value
        recipe.reading.notes.append(f"{name}: {str(value).lower()}, trl's default from {since} on")
