"""Adapters on a frozen, perhaps quantized base, as a scenario has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zsim.model.expert_modules import FIRST_PACKED
from zsim.model.lora import ALL_LINEAR, Lora, Tuning, tune
from zsim.model.spec import COPY, ModelSpec, Parameter
from zsim.plan.spec import TORCH_DTYPE
from zsim.scenario.releases import stated_release

PACKED = "bfloat16"  # elements of two bytes that hold 4-bit weights, whatever the products' dtype

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario


def tuned(scenario: Scenario, model: ModelSpec) -> ModelSpec:
    fields, quantize = scenario.fields, scenario.fields.quantize
    if quantize and quantize.type != "int8" and fields.precision == "fp32" and fields.framework.name != "ddp":
        raise scenario.error(("quantize",), "4-bit weights are stored in 16-bit elements", "precision: bf16 or fp16")
    if quantize and quantize.prepared and fields.framework.name != "ddp":
        raise scenario.error(("quantize", "prepared"), "float32 beside 4- and 8-bit weights is DDP's alone", "false")
    release = stated_release(scenario)
    model = tune(
        model,
        Tuning(
            _lora(scenario),
            quantize.type if quantize else None,
            double_quant=bool(quantize and quantize.double_quant),
            before_5=release is not None and release < FIRST_PACKED,
            experts=bool(quantize and quantize.experts),
        ),
    )
    return _loaded_for_ddp(scenario, model) if fields.framework.name == "ddp" else model


def _lora(scenario: Scenario) -> Lora | None:
    lora = scenario.fields.lora
    if lora is None:
        return None
    if lora.modules_dtype and scenario.fields.framework.name != "ddp":
        why = "the other frameworks have one dtype for all that is trained"
        raise scenario.error(("lora", "modules_dtype"), why, "framework: ddp")
    return Lora(
        lora.r,
        (ALL_LINEAR,) if isinstance(lora.targets, str) else tuple(lora.targets),
        lora.alpha,
        lora.dropout,
        tuple(lora.exclude),
        pattern=lora.targets if isinstance(lora.targets, str) and lora.targets != ALL_LINEAR else None,
        save=tuple(lora.modules_to_save),
        tie=lora.ensure_weight_tying,
        parameters=tuple(lora.target_parameters),
    )


def _loaded_for_ddp(scenario: Scenario, model: ModelSpec) -> ModelSpec:
    """In the compute dtype; peft keeps the adapters in float32, and what it copies as it is.

    Its prepare_model_for_kbit_training (peft 0.21 utils/other.py) widens all that is not quantized before. TRL's
    peft_module_casting_to_bf16 (0.7 to 0.25, trainer/utils.py) turns embeddings and head back, and leaves norms.
    """
    low, lora, quantize = TORCH_DTYPE[scenario.fields.precision], scenario.fields.lora, scenario.fields.quantize
    prepared = quantize.prepared if quantize else False
    copies = (lora.modules_dtype if lora else None) or low
    if lora and lora.modules_to_save and copies == "float16":
        why = "copies in float16, whose gradients torch's GradScaler refuses (Attempting to unscale FP16 gradients)"
        raise scenario.error(("lora", "modules_dtype"), why, "float32")

    def kept_in(parameter: Parameter) -> str | None:
        if parameter.trainable:
            return copies if COPY in parameter.name else None
        if parameter.dtype or parameter.packed > 1:
            return parameter.dtype or PACKED
        norms = prepared == "norms" and ("Norm" in parameter.module_class or "norm" in parameter.name)
        return "float32" if prepared is True or norms else low

    return replace(model, parameters=tuple(replace(p, dtype=kept_in(p)) for p in model.parameters))
