"""The scenario's field of what is learned (see `fields`).

Annotations are no texts here (`from __future__ import annotations`): pydantic would compile each.
"""

from typing import Literal

from pydantic import Field

from zsim.scenario.kinds import Section


class ObjectiveField(Section):
    """What is learned, where it is not the next token: which of two answers is preferred."""

    shorthand = "kind"
    kind: Literal["dpo", "orpo", "cpo", "simpo"] = Field(
        description="dpo stands for all losses of DPOTrainer, IPO's among them"
    )
    reference: Literal["model", "adapters", "precomputed"] | None = Field(
        None,
        description="of dpo: a second model; the same one, its adapters switched off; log-probabilities computed "
        "before training. adapters with lora unless given, else model",
    )
    trainer: Literal["trl", "llama-factory"] = "trl"
    version: str | None = Field(None, description="of trl; that of the time of transformers unless given")
    likelihood: bool | None = Field(
        None,
        description="the chosen sequences' cross-entropy is a part of the loss: true for orpo, and for cpo and simpo "
        "(trl's cpo_alpha, rpo_alpha), but of LLaMA-Factory, unless given",
    )
