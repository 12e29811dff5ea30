"""How a scenario's run writes its checkpoints, and what of that is not looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.plan.spec import AnyPlan, DeepSpeedPlan, Saving

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario


def saving_of(scenario: Scenario) -> Saving | None:
    """As the scenario says, or as the Trainer does where it is said how weights are gathered."""
    fields = scenario.fields
    if fields.saving:
        only = {"engine": "deepspeed", "async": "fsdp2"}.get(fields.saving.by, fields.framework.name)
        if fields.framework.name != only:
            why = f"{fields.saving.by} goes with framework: {only}"
            raise scenario.error(("saving", "by"), why, f"trainer, or framework: {only}")
        if fields.saving.only_model and fields.saving.by in ("engine", "async"):
            why = f"is the Trainer's; {fields.saving.by} writes the optimizer's states as well"
            raise scenario.error(("saving", "only_model"), why, "false, or by: trainer")
        if fields.saving.by == "async" and fields.fsdp and fields.fsdp.state_dict_type == "FULL_STATE_DICT":
            raise scenario.error(("fsdp", "state_dict_type"), "saving by async writes shards", "SHARDED_STATE_DICT")
        return Saving(**fields.saving.model_dump())
    zero, fsdp = fields.zero, fields.fsdp
    if zero and zero.stage == 3 and zero.stage3_gather_16bit_weights_on_model_save is not None:
        return Saving()
    return Saving() if fsdp and (fsdp.state_dict_type or fsdp.state_dict_offload_to_cpu is not None) else None


def unsaved(plan: AnyPlan) -> list[str]:
    """What of a run's checkpoints is not looked at."""
    if plan.saving is None:
        return []
    if not isinstance(plan, DeepSpeedPlan):
        return ["resuming from an asynchronous save"] if plan.saving.by == "async" and plan.saving.resume else []
    found = ["saving: experts that ranks share (AutoEP)"] if plan.autoep_size else []
    if plan.mics_shard_size > 0:
        found.append("saving: shards that groups of ranks have of their own (MiCS)")
    if "nvme" in (plan.offload_optimizer, plan.offload_param):
        found.append("saving: copies of what is on NVMe")
    return found
