"""The scenario's fields of adapters and quantized weights.

Annotations are no texts here (`from __future__ import annotations`): pydantic would compile each.
"""

from typing import Annotated, Literal

from pydantic import Field

from zsim.scenario.kinds import Dtype, Few, PositiveFloat, Section


class LoraField(Section):
    """peft's LoraConfig. Everything but the adapters is frozen."""

    shorthand = "r"
    r: Few
    alpha: PositiveFloat = 16.0
    targets: list[str] | str = Field(
        "all-linear", description="names of Linear modules (q_proj), all-linear, or a regular expression of whole names"
    )
    target_parameters: list[str] = Field(
        [], description="parameters of experts by the ends of their names: experts.gate_up_proj, experts.down_proj"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    exclude: list[str] = Field(
        [], description="names of modules without adapters (peft's exclude_modules), or parts as in model.freeze"
    )
    modules_to_save: list[str] = Field(
        [],
        description="modules that train whole, by the ends of their names: embed_tokens, lm_head. peft trains a copy "
        "of each, and keeps the frozen one beside it",
    )
    ensure_weight_tying: bool = Field(
        False, description="with modules_to_save, of a model that ties its embeddings: one copy, and not two"
    )
    modules_dtype: Dtype | None = Field(
        None, description="ddp: of the copies; that of the base unless given, as peft does not widen them"
    )


class QuantizeField(Section):
    """bitsandbytes: frozen Linear weights in 4 bits (QLoRA) or 8 (LLM.int8())."""

    shorthand = "type"
    type: Literal["nf4", "fp4", "int8"]
    double_quant: bool = Field(True, description="of 4-bit weights")
    experts: bool = Field(
        False, description="tensors that stack experts in 4 bits, too, as axolotl's quantize_moe_experts has them"
    )
    prepared: bool | Literal["norms"] = Field(
        False,
        description="ddp: by peft's prepare_model_for_kbit_training, in a script that calls it: what is not quantized "
        "is float32 (axolotl turns it back); norms: they alone, as TRL before 0.26 leaves 4-bit models in bf16",
    )
