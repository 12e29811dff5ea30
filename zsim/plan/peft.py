"""peft's adapter_config.json: what a run trained, or is to train, beside its frozen base."""

from __future__ import annotations

from zsim.document import Document
from zsim.errors import NotModeled
from zsim.plan.adapters import lora, refuse_variants
from zsim.plan.own_options import HEAD, OTHER_HEADS
from zsim.plan.reading import Reading
from zsim.plan.recipe import Recipe

_NAMES = {
    "r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules", "save": "modules_to_save",
    "parameters": "target_parameters",
}  # fmt: skip
_VARIANTS = (
    "use_dora", "use_qalora", "use_bdlora", "use_monteclora", "rank_pattern", "layers_to_transform", "layers_pattern",
    "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "velora_config",
    "kasa_config", "arrow_config", "megatron_config", "lora_bias",
)  # fmt: skip
# How adapters start, how strong they are, and what peft writes down of itself.
_HARMLESS = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "peft_type",
    "fan_in_fan_out", "use_rslora", "init_lora_weights", "alpha_pattern", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "megatron_core", "qalora_group_size", "monteclora_config", "runtime_config",
)  # fmt: skip


def read_peft(document: Document, ranks: int | None = None) -> Reading:
    """Raises InputError, NotModeled."""
    reading = Reading("adapter of peft", document, ranks=ranks)
    recipe = Recipe(reading)
    kind = str(recipe.get("peft_type", "LORA"))
    if kind != "LORA":
        raise document.error(("peft_type",), f"peft_type {kind}", "LORA", kind=NotModeled)
    if recipe.get("task_type") in OTHER_HEADS:
        raise document.error(("task_type",), f"{recipe.get('task_type')}: {HEAD}", "CAUSAL_LM", kind=NotModeled)
    lora(recipe, _NAMES, {"r": 8, "alpha": 8})
    refuse_variants(recipe, _VARIANTS)
    recipe.refuse("bias", ("none",), "biases that train beside the adapters")
    excluded = recipe.get("exclude_modules")
    if isinstance(excluded, str):
        why = "modules that are left out by a regular expression"
        raise document.error(("exclude_modules",), why, "a list of names", kind=NotModeled)
    if excluded:
        recipe.set("lora.exclude", excluded, "exclude_modules")
    if recipe.flag("ensure_weight_tying"):
        recipe.set("lora.ensure_weight_tying", True, "ensure_weight_tying")
    base = recipe.get("base_model_name_or_path")
    reading.model_name = str(base or "")
    reading.lacks("model", f"(the config.json of {base})" if base else "")
    for field in ("cluster", "framework", "micro_batch", "seq_len", "precision", "grad_accum", "grad_clip"):
        reading.lacks(field)
    recipe.rest(_HARMLESS)
    return reading
