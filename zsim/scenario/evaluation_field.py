"""The scenario's field of evaluation between steps (see `fields`).

Annotations are no texts here (`from __future__ import annotations`): pydantic would compile each.
"""

from pydantic import Field

from zsim.scenario.kinds import Few, Loss, Section


class EvaluationField(Section):
    """Forwards without gradients between two steps, of sequences as long as training's; their memory is simulated."""

    shorthand = "micro_batch"
    micro_batch: Few = Field(description="sequences per GPU")
    loss: Loss | None = Field(
        None,
        description="where it is another than training's: hf, where a fused loss is one of training alone, which "
        "it is with a transformers before 5 unless given",
    )
