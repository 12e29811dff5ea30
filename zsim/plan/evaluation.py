"""What a recipe says of evaluation between steps of training.

Its forward passes keep no activations, but logits of a batch of their own size, which is 8 sequences unless the Trainer
is told otherwise.
"""

from __future__ import annotations

from typing import Any

from zsim.plan.recipe import Recipe

_NEVER = (None, False, "", "no", "none", "false", "0")


def of_trainer(recipe: Recipe) -> None:
    """transformers 5.24 training_args.py. `do_eval` alone evaluates after training."""
    _set(recipe, ("eval_strategy", "evaluation_strategy", "eval_on_start"), "per_device_eval_batch_size", 8)


def of_axolotl(recipe: Recipe) -> None:
    """core/builders/base.py: where something is held back and it is said when; then before training, too."""
    if any(_said(recipe, name) for name in ("val_set_size", "test_datasets")):
        names = ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")
        _set(recipe, names, "eval_batch_size", recipe.count("micro_batch_size") or 1)


def with_all_logits(recipe: Recipe) -> None:
    """Of a tool that brings Liger's kernels itself: the fused loss is one of training alone (liger_kernel/transformers/
    model, `skip_logits = self.training`), but where the Trainer knows of it (transformers 5.24 trainer.py,
    prediction_step, `use_liger_kernel`)."""
    fields = recipe.reading.fields
    if ("evaluation", "micro_batch") in fields and fields.get(("loss",)) == "fused":
        fields["evaluation", "loss"] = "hf"


def _set(recipe: Recipe, names: tuple[str, ...], size: str, default: int) -> None:
    """Under the first of `names` that asks for it. A size that is not known is listed."""
    for name in [name for name in names if _said(recipe, name)][:1]:
        recipe.says(name)  # and is no key without effect
        if size in recipe.document.unknown:
            recipe.reading.not_modeled.append(f"{name}: evaluation between steps, as {size} is not known")
            return
        given = recipe.count(size)
        recipe.set("evaluation.micro_batch", given or default, size if given else name)
        if not given:
            recipe.reading.notes.append(f"{name}: evaluates {default} sequences at a time ({size} is not said)")


def _said(recipe: Recipe, name: str) -> bool:
    value = _value(recipe, name)
    return bool(value) and (value.lower() if isinstance(value, str) else value) not in _NEVER


def _value(recipe: Recipe, name: str) -> Any:
    """None also where a script's variable is not known: nothing else depends on it."""
    return None if name in recipe.document.unknown else recipe.document.data.get(name)
