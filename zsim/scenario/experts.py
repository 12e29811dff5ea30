"""Ranks that share a model's experts (DeepSpeed's AutoEP): the model as one of them holds it, and what is assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from zsim.errors import InputError
from zsim.model.architecture import Architecture
from zsim.model.expert_parallel import FIELD, converted
from zsim.model.spec import ModelSpec
from zsim.plan.batch import divisors
from zsim.plan.spec import DeepSpeedPlan
from zsim.plan.version import parse_version

FIRST, FIRST_STAGE_3 = (0, 19, 2), (0, 19, 3)  # DeepSpeed pull request 7938, and the next release


def shared(model: ModelSpec, plan: DeepSpeedPlan) -> tuple[ModelSpec, DeepSpeedPlan, list[str]]:
    """The converted model, the plan, and what holds of them. Raises InputError, NotModeled as `converted` does."""
    size, moe = plan.autoep_size, cast(Architecture, model.arch).moe
    if parse_version(plan.version) < (FIRST_STAGE_3 if plan.stage == 3 else FIRST):
        why = f"DeepSpeed {plan.version} has no AutoEP" + (" with stage 3" if plan.stage == 3 else "")
        raise InputError(why, field=FIELD, accepted="version 0.19.3 or later")
    if moe is None:
        why = f"zero.autoep_size has no effect: AutoEP finds no experts in {model.name}, and says so"
        return model, replace(plan, autoep_size=0), [why]
    if plan.world_size % size:
        why = f"{size} does not divide the {plan.world_size} ranks"
        raise InputError(why, field=FIELD, accepted=divisors(plan.world_size))
    found = converted(model, size, renumbered=plan.stage == 3 and plan.zero_init)
    who = "GPUs" if plan.use_data_before_expert_parallelism else "neighbouring GPUs"
    held = moe.experts // size
    notes = [
        f"AutoEP: {size} {who} share the experts of each layer, {held} of {moe.experts} each"
        if size > 1
        else f"AutoEP: every GPU has all {moe.experts} experts of each layer, and no token travels",
        f"routing is even: each expert gets {moe.top_k} of {moe.experts} tokens; where some get more, their GPU needs "
        "more time and memory, and the others wait for it",
        "DeepSpeed 0.19.8's AutoEP fails with transformers 5.24 (_CanRecordRegistry.get takes no default)",
    ]
    return found, plan, notes
