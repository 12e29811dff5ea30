"""Float8 by torchao in configurations: torchtitan's converter, accelerate's backend AO and axolotl's switch."""

from __future__ import annotations

from typing import Any

from zsim.document import Path_, subsection
from zsim.errors import NotModeled
from zsim.plan.reading import Reading
from zsim.plan.recipe import Recipe, as_flag
from zsim.plan.values import names_in

_CONVERTERS = ("float8", "quantize.linear.float8")  # the second since September 2025
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_WITHOUT_EFFECT = "force_recompute_fp8_weight_in_bwd"  # torchao 0.18: deprecated, does nothing
_KNOWN = {
    "enable_float8_linear", "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name",
    "filter_fqns", "emulate", "scaling_type_input", "scaling_type_weight", "scaling_type_grad_output",
    _WITHOUT_EFFECT,
}  # fmt: skip


def read_converters(reading: Reading, sections: dict[str, dict[str, Any]]) -> None:
    """torchtitan's `[model] converters` with their sections, and `enable_float8_linear` of before February 2025.

    Sections that this reads are taken out of `sections`. Raises InputError, NotModeled.
    """
    document, training = reading.document, sections.get("training", {})
    if training.get("fp8_linear"):  # spring of 2024
        raise document.error(("training", "fp8_linear"), "float8 of float8_experimental", '""', kind=NotModeled)
    given = sections.get("model", {}).get("converters", [])
    converters = names_in(document, ("model", "converters"), given)
    others = [name for name in converters if name not in _CONVERTERS]
    if others:
        accepted = ", ".join(_CONVERTERS)
        raise document.error(("model", "converters"), ", ".join(others), accepted, kind=NotModeled)
    path, section = _section(reading, sections)
    switch = section.get("enable_float8_linear")
    if not converters and not switch:
        return
    for name in ("emulate", "moe_fqns", "moe_fqns_prototype"):
        if section.get(name):
            raise document.error((*path, name), f"{name}: {section[name]}", "false", kind=NotModeled)
    for name in ("input", "weight", "grad_output"):
        if section.get(f"scaling_type_{name}", "dynamic") != "dynamic":
            raise document.error((*path, f"scaling_type_{name}"), "delayed scaling", "dynamic", kind=NotModeled)
    said = ("model", "converters") if converters else (*path, "enable_float8_linear")
    recipe = section.get("recipe_name") or "tensorwise"
    if recipe not in _RECIPES:
        raise document.error((*path, "recipe_name"), f"{recipe!r} is not known", ", ".join(_RECIPES))
    reading.set(("float8", "recipe"), recipe, (*path, "recipe_name") if section.get("recipe_name") else said)
    # In code until April 2025 (pull request 1063), in the files since: lists of converters are of after it
    old = isinstance(given, str) or not converters
    names = names_in(document, (*path, "filter_fqns"), section.get("filter_fqns", ["output"] if old else []))
    reading.set(("float8", "exclude"), names, (*path, "filter_fqns") if "filter_fqns" in section else said)
    sharded = reading.fields.get(("framework", "name")) == "fsdp2"  # parallel_dims.dp_shard_enabled
    if sharded and section.get("enable_fsdp_float8_all_gather"):
        reading.set(("float8", "all_gather"), True, (*path, "enable_fsdp_float8_all_gather"))
        if section.get(name := "precompute_float8_dynamic_scale_for_fsdp"):
            reading.set(("float8", "precompute"), True, (*path, name))
    if _WITHOUT_EFFECT in section:
        reading.without_effect.append(f"{'.'.join(map(str, path))}.{_WITHOUT_EFFECT} (torchao no longer reads it)")
    unread = [name for name in section if name not in _KNOWN]
    if unread:
        reading.not_read.append(", ".join(".".join(map(str, (*path, name))) for name in unread))


def _section(reading: Reading, sections: dict[str, dict[str, Any]]) -> tuple[Path_, dict[str, Any]]:
    """`[float8]` or `[quantize.linear.float8]`, whichever is there, and what it says."""
    document = reading.document
    if "quantize" in sections:
        quantize = sections.pop("quantize")
        linear = subsection(document, quantize, ("quantize",), "linear")
        sections.pop("float8", None)
        return ("quantize", "linear", "float8"), subsection(document, linear, ("quantize", "linear"), "float8")
    return ("float8",), sections.pop("float8", {})


def read_ao(recipe: Recipe) -> None:
    """accelerate's `mixed_precision: fp8` with its fp8_config (dataclasses.py AORecipeKwargs): tensorwise, gathered in
    float8 by FSDP2 unless told otherwise, with scales from after the optimizer's step (accelerator.py `_prepare_ao`).
    """
    document = recipe.document
    recipe.get("fp8_config")
    section = subsection(document, document.data, (), "fp8_config")
    backend = str(section.get("backend", "")).upper()
    if backend != "AO":
        said = {"TE": "fp8 by TransformerEngine", "MSAMP": "fp8 by MS-AMP"}
        why = said.get(backend, "fp8 by whichever library is installed")
        path = ("fp8_config", "backend") if backend else ("mixed_precision",)
        accepted = "bf16, fp16, no; fp8 with fp8_config.backend: AO"
        raise document.error(path, why, accepted, kind=NotModeled)

    def flag(name: str) -> bool:
        value = section.get(name)
        path = ("fp8_config", name)
        return True if value is None else as_flag(value, lambda text: document.error(path, text, "true or false"))

    recipe.set("precision", "bf16", "mixed_precision")
    switch_on(recipe.reading, ("mixed_precision",), flag("enable_fsdp_float8_all_gather"))
    if flag("pad_inner_dim"):
        recipe.reading.not_modeled.append("fp8_config.pad_inner_dim: copies of operands that need no padding")


def switch_on(reading: Reading, path: Path_, gathers: bool) -> None:
    """Tensorwise, but for the first and the last module, as accelerate's utils/ao.py has it."""
    reading.set(("float8", "recipe"), "tensorwise", path)
    if gathers and reading.fields.get(("framework", "name")) == "fsdp2":
        reading.set(("float8", "all_gather"), True, path)
        reading.set(("float8", "precompute"), True, path)
