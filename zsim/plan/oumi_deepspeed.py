"""The section `deepspeed` of an oumi recipe as DeepSpeed's configuration (0.9, deepspeed_params.py, to_deepspeed)."""

from __future__ import annotations

from typing import Any

from zsim.document import Document
from zsim.plan.oumi_keys import DEEPSPEED_012, DEEPSPEED_3, DEEPSPEED_TOP, OFFLOAD_NVME
from zsim.plan.recipe import Recipe

_STAGES = ("ZERO_0", "ZERO_1", "ZERO_2", "ZERO_3")


def deepspeed_config(document: Document, given: dict[str, Any]) -> dict[str, Any] | str:
    """DeepSpeed's dictionary, or the path of its file. Raises InputError."""
    if given.get("deepspeed_config_path"):
        document.places[("deepspeed",)] = document.place(("deepspeed", "deepspeed_config_path"))
        return str(given["deepspeed_config_path"])
    name = str(given.get("zero_stage", "ZERO_0")).upper()
    if name not in _STAGES:
        raise document.error(("deepspeed", "zero_stage"), f"{name} is not known", ", ".join(_STAGES))
    stage = _STAGES.index(name)
    zero: dict[str, Any] = {"stage": stage}
    zero |= {key: given.get(key, value) for key, value in (DEEPSPEED_3 if stage == 3 else DEEPSPEED_012).items()}
    for side in ("offload_optimizer", "offload_param"):
        if isinstance(offload := given.get(side), dict):
            zero[side] = _offload(offload)
    config: dict[str, Any] = {key: given.get(key, value) for key, value in DEEPSPEED_TOP.items()}
    config["zero_optimization"] = zero
    precision = str(given.get("precision", "none")).lower()
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": "auto"}
    if given.get("activation_checkpointing"):
        config["activation_checkpointing"] = given["activation_checkpointing"]
    for key in given:
        if key in zero:
            document.places[("deepspeed", "zero_optimization", key)] = document.place(("deepspeed", key))
    return config


def _offload(given: dict[str, Any]) -> dict[str, Any]:
    device = str(given.get("device", "CPU")).lower()
    nvme = device == "nvme"
    buffers = given.get("buffer_count_nvme", 2) if nvme else given.get("buffer_count", 4)
    found = {"device": device, "pin_memory": given.get("pin_memory", True), "buffer_count": buffers}
    return found | ({key: given.get(key, value) for key, value in OFFLOAD_NVME.items()} if nvme else {})


def without_bf16(recipe: Recipe, low: str) -> None:
    """A model in 16 bits under DeepSpeed with neither bf16 nor fp16, as `enabled: auto` is with the Trainer's own off.

    Sequences of collectives are those of `low` with these settings, call by call, in stages 1 to 3; bytes of stages 2
    and 3 within 3 % (DeepSpeed 0.19.8, gloo ranks, a model in bfloat16).
    """
    fields, reading = recipe.reading.fields, recipe.reading
    fields[("precision",)] = low
    fields[("zero", "communication_data_type")] = "float32"
    fields[("zero", "check_grad_overflow")] = False
    if fields.get(("zero", "stage"), 0) >= 2:
        fields[("zero", "grad_accum_dtype")] = "float32"
    name = "deepspeed.precision" if recipe.get("precision") else "mixed_precision_dtype"
    reading.notes.append(
        f"{name}: DeepSpeed's bf16 and fp16 are off, as the Trainer's own are (mixed_precision_dtype: NONE): it trains "
        f"the model in {low} as it would one in float32, and reduces gradients in float32"
    )
