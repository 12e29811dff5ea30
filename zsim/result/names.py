"""What `--set` calls the fields of a plan and of a workload."""

from __future__ import annotations

import dataclasses

from zsim.model.spec import Workload
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Plan

_SECTIONS = {DeepSpeedPlan: "zero", Fsdp2Plan: "fsdp", Fsdp1Plan: "fsdp", DdpPlan: "ddp"}
_COMMON = {field.name for field in dataclasses.fields(Plan)}
_WORKLOAD = {
    "dtype": "precision",
    "weights": "ddp.dtype",
    "adapters": "fsdp.adapter_units",
    "checkpointed": "checkpointing.blocks",
    "early_stop": "checkpointing.early_stop",
    "preference": "objective",
    "checkpoint_frozen_tower": "checkpointing.frozen_tower",
    "transformers": "framework.transformers",
}
_PLAN = {
    "dtype": "precision", "autocast": "precision", "version": "framework.version",
    "offload_activations": "checkpointing.offload", "world_size": "cluster.nodes", "gpus_per_node": "cluster",
    "use_all_reduce_for_fetch_params": "zero.stage3_use_all_reduce_for_fetch_params",
    "sequence_parallel_size": "sequence_parallel_size",
}  # fmt: skip
_NESTED = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_param", "aio": "aio",
           "leaf": "leaf_module"}  # fmt: skip


def setting(owner: type[AnyPlan] | type[Workload], field: str) -> str:
    """The dotted name of a scenario's field that decides about `field` of a plan or workload ("optimizer.impl" too)."""
    if owner is Workload:
        return _WORKLOAD.get(field, field)
    if field in _PLAN and not (owner is DdpPlan and field == "dtype"):
        return _PLAN[field]
    if field.partition(".")[0] in _COMMON:
        return field
    section = _SECTIONS[owner]
    for prefix, inner in _NESTED.items():
        if field.startswith(f"{prefix}_") and owner is DeepSpeedPlan and field != "leaf_blocks":
            return f"{section}.{inner}.{field.removeprefix(f'{prefix}_')}"
    return f"{section}.{field}"
