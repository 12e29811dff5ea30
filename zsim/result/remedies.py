"""What would make a run fit: settings that need less memory, tried by simulating again, mildest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.result.sensitivity import Change, Variant, change, may_leave_the_host, named, sharing
from zsim.result.spec import Result

if TYPE_CHECKING:
    from zsim.scenario import Setup


def remedies(result: Result, number: int) -> list[Change]:
    """Up to `number` changes that make `result` fit, mildest first; pairs of them where no single one is enough."""
    gpu, candidates = result.gpu, _STEPS
    if not gpu.fits and gpu.peak_allocated_bytes + gpu.framework_bytes <= gpu.capacity_bytes:
        candidates = (_expandable_segments, *candidates)  # what is allocated would fit: fragments are in the way
    if not result.host.fits:
        candidates = (_load_on_rank_0, *candidates, _states_on_the_gpu)
    if result.trains:
        candidates = (_evaluate_fewer, _save_on_host, _save_shards, _save_in_turn, _save_weights_alone)
    steps = [step for step in candidates if step(result.setup) is not None]
    for size in (1, 2):
        found = []
        for chosen in combinations(steps, size):
            remedy = _try(result, chosen)
            if remedy is not None:
                found.append(remedy)
            if len(found) == number:
                break
        if found:
            return found
    return []


Step = Callable[["Setup"], "tuple[str, Setup] | None"]


def _try(result: Result, steps: tuple[Step, ...]) -> Change | None:
    setup, names = result.setup, []
    for step in steps:
        changed = step(setup)
        if changed is None:
            return None
        names.append(changed[0])
        setup = changed[1]
    found = change(result, Variant(", ".join(names), "setting", setup, result.profile), if_it_fits=True)
    return found if found and found.fits else None


def _workload(setup: Setup, **fields: Any) -> tuple[str, Setup]:
    workload = dataclasses.replace(setup.workload, **fields)
    return named(workload, **fields), dataclasses.replace(setup, workload=workload)


def _plan(setup: Setup, **fields: Any) -> tuple[str, Setup]:
    return named(setup.plan, **fields), dataclasses.replace(setup, plan=dataclasses.replace(setup.plan, **fields))


def _load_on_rank_0(setup: Setup) -> tuple[str, Setup] | None:
    """cpu_ram_efficient_loading, or a model built under zero.Init."""
    return _plan(setup, load="rank0") if setup.plan.load == "every_rank" else None


def _evaluate_fewer(setup: Setup) -> tuple[str, Setup] | None:
    """As many as training takes, or half of those."""
    evaluation = setup.evaluation
    if evaluation is None or evaluation.micro_batch == 1:
        return None
    few = min(setup.workload.micro_batch, evaluation.micro_batch // 2)
    return f"evaluation.micro_batch={few}", dataclasses.replace(
        setup, evaluation=dataclasses.replace(evaluation, micro_batch=few)
    )


def _save_shards(setup: Setup) -> tuple[str, Setup] | None:
    """Whole weights are made of the shards later: DeepSpeed's zero_to_fp32.py, accelerate merge-weights."""
    plan = setup.plan
    if isinstance(plan, DeepSpeedPlan) and plan.stage3_gather_16bit_weights_on_model_save:
        return _plan(setup, stage3_gather_16bit_weights_on_model_save=False)
    if isinstance(plan, (Fsdp1Plan, Fsdp2Plan)) and plan.state_dict_type == "FULL_STATE_DICT":
        return _plan(setup, state_dict_type="SHARDED_STATE_DICT")
    if isinstance(plan, DeepSpeedPlan) and 0 < plan.stage < 3 and plan.load != "gpu":
        return _plan(setup, stage=3)
    return None


def _save_in_turn(setup: Setup) -> tuple[str, Setup] | None:
    """Not beside the steps, for which all shards are copied first."""
    saving = setup.plan.saving
    if saving is None or saving.by != "async":
        return None
    plan = dataclasses.replace(setup.plan, saving=dataclasses.replace(saving, by="trainer"))
    return "saving.by=trainer", dataclasses.replace(setup, plan=plan)


def _save_weights_alone(setup: Setup) -> tuple[str, Setup] | None:
    saving = setup.plan.saving
    if saving is None or saving.by != "trainer" or saving.only_model:
        return None
    plan = dataclasses.replace(setup.plan, saving=dataclasses.replace(saving, only_model=True))
    return "saving.only_model=true", dataclasses.replace(setup, plan=plan)


def _save_on_host(setup: Setup) -> tuple[str, Setup] | None:
    plan = setup.plan
    if not isinstance(plan, (Fsdp1Plan, Fsdp2Plan)) or plan.state_dict_offload_to_cpu:
        return None
    return _plan(setup, state_dict_offload_to_cpu=True)


def _expandable_segments(setup: Setup) -> tuple[str, Setup] | None:
    settings = setup.plan.allocator
    if settings.expandable_segments or setup.cluster.devices[0].without_cuda:
        return None
    plan = dataclasses.replace(setup.plan, allocator=dataclasses.replace(settings, expandable_segments=True))
    return "allocator.expandable_segments=true", dataclasses.replace(setup, plan=plan)


def _checkpoint(setup: Setup) -> tuple[str, Setup] | None:
    workload = setup.workload
    if workload.checkpointing == "full" and workload.checkpointed is None:
        return None
    everywhere = dataclasses.replace(workload, checkpointing="full", checkpointed=None)
    return "checkpointing=full", dataclasses.replace(setup, workload=everywhere)


def _halve_micro_batch(setup: Setup) -> tuple[str, Setup] | None:
    size = setup.workload.micro_batch
    return None if size == 1 else _workload(setup, micro_batch=size // 2)


def _fuse_loss(setup: Setup) -> tuple[str, Setup] | None:
    return None if setup.workload.loss == "fused" else _workload(setup, loss="fused")


def _shard_more(setup: Setup) -> tuple[str, Setup] | None:
    plan = setup.plan
    if isinstance(plan, DeepSpeedPlan) and plan.stage < (2 if plan.load == "gpu" else 3):
        return _plan(setup, stage=plan.stage + 1)
    if isinstance(plan, Fsdp2Plan) and plan.reshard_after_forward is not True:
        return _plan(setup, reshard_after_forward=True)
    if isinstance(plan, Fsdp1Plan) and plan.sharding_strategy != "FULL_SHARD":
        return _plan(setup, sharding_strategy="FULL_SHARD")
    if isinstance(plan, DdpPlan) and plan.world_size > 1:
        compute = plan.autocast or plan.dtype
        sharded = Fsdp2Plan(
            world_size=plan.world_size,
            grad_accum=plan.grad_accum,
            grad_clip=plan.grad_clip,
            optimizer=plan.optimizer,
            param_dtype=compute,
            storage_dtype=plan.dtype,
        )
        return "framework=fsdp2", dataclasses.replace(setup, plan=sharded)
    return None


def _offload_optimizer(setup: Setup) -> tuple[str, Setup] | None:
    plan = setup.plan
    if not isinstance(plan, DeepSpeedPlan) or not plan.stage or plan.offload_optimizer is not None:
        return None
    offloaded = dataclasses.replace(
        plan, offload_optimizer="cpu", optimizer=dataclasses.replace(plan.optimizer, impl="cpu")
    )
    return named(plan, offload_optimizer="cpu"), dataclasses.replace(setup, plan=offloaded)


def _states_on_the_gpu(setup: Setup) -> tuple[str, Setup] | None:
    plan = setup.plan
    if isinstance(plan, (Fsdp1Plan, Fsdp2Plan)):
        return _plan(setup, cpu_offload=False) if may_leave_the_host(plan) else None
    if not isinstance(plan, DeepSpeedPlan) or plan.offload_optimizer is None or plan.offload_param is not None:
        return None
    kept = dataclasses.replace(
        plan, offload_optimizer=None, optimizer=dataclasses.replace(plan.optimizer, impl=Optimizer().impl)
    )
    return named(plan, offload_optimizer=None), dataclasses.replace(setup, plan=kept)


def _halve_sequence(setup: Setup) -> tuple[str, Setup] | None:
    half = setup.workload.seq_len // 2
    return None if half < 256 or half % setup.workload.sequence_parallel_size else _workload(setup, seq_len=half)


def _share_sequence(setup: Setup) -> tuple[str, Setup] | None:
    size = 2 * setup.workload.sequence_parallel_size
    shared = sharing(setup, size)
    return None if shared is None else (f"sequence_parallel_size={size}", shared)


_STEPS: tuple[Step, ...] = (
    _checkpoint, _halve_micro_batch, _fuse_loss, _shard_more, _share_sequence, _halve_sequence, _offload_optimizer,
)  # fmt: skip
