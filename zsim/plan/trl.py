"""What trl's SFTConfig takes where its defaults are not the Trainer's (trl 1.16, trainer/base_config.py)."""

from __future__ import annotations

from typing import Any

from zsim.plan.recipe import Recipe

# Of SFTConfig alone.
_SFT = (
    "packing", "packing_strategy", "padding_free", "dataset_text_field", "assistant_only_loss", "completion_only_loss",
    "eval_packing", "chat_template_path",
)  # fmt: skip
# Of before 0.20, when the loss was not yet taken in chunks: SFTConfig's own, and one that transformers took up to 4.45.
_OLDER = ("max_seq_length", "evaluation_strategy")
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "bf16": (True, "0.19"), "max_length": (1024, "0.19"), "gradient_checkpointing": (True, "0.22"),
}  # fmt: skip

# Names of the length of a sequence, of which the last one counts: trl's, and those of scripts' own.
LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "block_size", "model_max_length")


def is_newer_trl(recipe: Recipe) -> bool:
    """Whether a recipe is one of SFTConfig, as trl has it since 0.20."""
    said = [name for name in _SFT if recipe.get(name) is not None]
    named = bool(said) or recipe.document.program.startswith("trl")
    return named and all(recipe.document.data.get(name) is None for name in _OLDER)


def fill_in(recipe: Recipe) -> None:
    """Write trl's own defaults into a recipe of its trainer, with a note of each."""
    document = recipe.document
    for name, (value, since) in _DEFAULTS.items():
        if name in document.data or (name == "bf16" and recipe.flag("fp16")):
            continue
        if name == "max_length" and any(document.data.get(length) is not None for length in LENGTHS):
            continue
        document.data[name] = value
        recipe.reading.notes.append(f"{name}: {str(value).lower()}, trl's default from {since} on")
