"""Evaluation between steps of training, which is not simulated: what a recipe says of it, for the list of that.

Its forward passes keep no activations, but logits of a batch of their own size: a fused loss is one of training alone
(liger_kernel/transformers/model, `skip_logits = self.training`), and 8 sequences are the Trainer's default.
"""

from __future__ import annotations

from typing import Any

from zsim.plan.recipe import Recipe

_NEVER = (None, False, "", "no", "none", "false", "0")


def of_trainer(recipe: Recipe) -> None:
    """transformers 5.24 training_args.py. `do_eval` alone evaluates after training."""
    _list(
        recipe,
        ("eval_strategy", "evaluation_strategy", "eval_on_start"),
        _size(recipe, "per_device_eval_batch_size", 8),
    )


def of_axolotl(recipe: Recipe) -> None:
    """core/builders/base.py: where something is held back and it is said when; then before training, too."""
    if any(_said(recipe, name) for name in ("val_set_size", "test_datasets")):
        names = ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")
        _list(recipe, names, _size(recipe, "eval_batch_size", _size(recipe, "micro_batch_size", 1)))


def _list(recipe: Recipe, names: tuple[str, ...], size: int) -> None:
    """Under the first of `names` that asks for it."""
    for name in [name for name in names if _said(recipe, name)][:1]:
        what = f"evaluation between steps, {size} sequences at a time, whose logits may take more memory than training"
        recipe.reading.not_modeled.append(f"{name}: {what}")


def _said(recipe: Recipe, name: str) -> bool:
    value = _value(recipe, name)
    return bool(value) and (value.lower() if isinstance(value, str) else value) not in _NEVER


def _size(recipe: Recipe, name: str, default: int) -> int:
    value = _value(recipe, name)
    return value if isinstance(value, int) and value > 0 else default


def _value(recipe: Recipe, name: str) -> Any:
    """None also where a script's variable is not known: nothing else depends on it."""
    return None if name in recipe.document.unknown else recipe.document.data.get(name)
