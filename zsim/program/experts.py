"""Who holds which experts under DeepSpeed's AutoEP, and over whom ZeRO partitions them.

DeepSpeed 0.19.8: utils/groups.py _create_expert_and_data_parallel makes the groups, moe/utils.py and stage3.py
_get_trainable_parameter_groups the parameter groups. The layer and its exchanges are the model's
(model/families/autoep.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zsim.errors import InputError, NotModeled
from zsim.model.expert_parallel import DATA_PARALLEL, is_router
from zsim.model.kernels import EXPERT_DATA_PARALLEL, EXPERT_PARALLEL
from zsim.model.spec import ModelSpec
from zsim.plan.spec import DeepSpeedPlan

MAX_GROUP_SIZE = 178_956_971  # moe/utils.py: elements of a parameter group of experts, unless one alone has more

Params = tuple[int, ...]
Groups = dict[str, tuple[tuple[int, ...], ...]]


def groups(plan: DeepSpeedPlan) -> Groups:
    """Neighbours share the experts, and every `autoep_size`-th rank holds the same; or the other way round."""
    size, world = plan.autoep_size, plan.world_size
    same = world // size
    apart = tuple(tuple(range(first, world, size)) for first in range(size))
    neighbours = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
    if plan.use_data_before_expert_parallelism:
        apart = tuple(tuple(range(first, first + same)) for first in range(0, world, same))
        neighbours = tuple(tuple(range(first, world, same)) for first in range(same))
    found = {EXPERT_PARALLEL: neighbours, EXPERT_DATA_PARALLEL: apart}
    return found | ({DATA_PARALLEL: (tuple(range(world)),)} if plan.stage == 3 and plan.zero_init else {})


class Places:
    """Where parameters stand in the model, which their numbers need not follow."""

    def __init__(self, model: ModelSpec) -> None:
        executed = (model.conversion and model.conversion.executed) or model
        places = {parameter.name: index for index, parameter in enumerate(executed.parameters)}
        self._places = [places[parameter.name] for parameter in model.parameters]

    def by_home(self, params: Iterable[int], homes: Sequence[str]) -> Params:
        """In the model's order, those of one home together (partition_parameters.py all_gather)."""
        ordered = sorted(params, key=self._places.__getitem__)
        met = list(dict.fromkeys(homes[param] for param in ordered))
        return tuple(sorted(ordered, key=lambda param: met.index(homes[param])))


def parameter_groups(found: list[list[int]], model: ModelSpec, plan: DeepSpeedPlan) -> list[list[int]]:
    """What becomes of the parameter groups: what AutoEP has made comes last in each, and experts go into their own.

    From an optimizer of DeepSpeed's own, experts go behind all others, a limited number together; from one that the
    training script made, each group is split.
    """
    split: list[list[int]] = []
    experts: list[int] = []
    for params in found:
        own = [param for param in params if model.parameters[param].expert]
        routers = [param for param in params if is_router(model.parameters[param])]
        made = {*own, *routers}
        dense = [param for param in params if param not in made]
        late = bool(routers) and model.parameters[routers[0]].home == DATA_PARALLEL
        split += [dense, routers] if late else [dense + routers]
        if plan.optimizer.decay_groups:
            split.append(own)
        else:
            experts += own
    return [group for group in (*split, *_limited(experts, model)) if group]


def _limited(params: list[int], model: ModelSpec) -> list[list[int]]:
    """split_params_into_different_moe_groups_for_optimizer"""
    limited: list[list[int]] = [[]]
    elements = 0
    for param in params:
        numel = model.parameters[param].numel
        if elements + numel > MAX_GROUP_SIZE:
            limited.append([])
            elements = 0
        limited[-1].append(param)
        elements += numel
    return [group for group in limited if group]


def check(plan: DeepSpeedPlan, model: ModelSpec) -> None:
    """Raises InputError for what DeepSpeed refuses, or fails with; NotModeled for what was not recorded."""
    size, field = plan.autoep_size, "zero.autoep_size"
    held = model.conversion.size if model.conversion else 0
    if held != size:
        found = f"{held} ranks share the experts in the model and {size} in the plan"
        raise InputError(found, field=field, accepted="the same number")
    if plan.world_size % size:
        raise InputError(
            f"{size} does not divide the {plan.world_size} ranks", field=field, accepted="a number that does"
        )
    if plan.stage in (1, 2):
        _check_flat(plan)
    if plan.stage == 3:
        _check_sharded(plan)
    if plan.stage == 0 or plan.sequence_parallel_size > 1:
        what = "without ZeRO" if plan.stage == 0 else "and shared sequences"
        raise NotModeled(f"expert parallelism {what}", field=field, accepted="null, or stage 1, 2 or 3")
    if plan.optimizer.name == "muon" or plan.bf16_master_weights_and_grads:
        what = "Muon" if plan.optimizer.name == "muon" else "master weights in bf16"
        raise NotModeled(f"{what} with expert parallelism", field=field, accepted="null")


def _check_flat(plan: DeepSpeedPlan) -> None:
    """stage_1_and_2.py, _configure_moe_settings"""
    if plan.optimizer.decay_groups:
        why = (
            "stages 1 and 2 need DeepSpeed's own optimizer with expert parallelism: of the Trainer's parameter groups "
            "none is marked as experts', which DeepSpeed asserts"
        )
        accepted = "false (an optimizer section in the DeepSpeed configuration), or zero.stage: 3"
        raise InputError(why, field="optimizer.decay_groups", accepted=accepted)
    if not plan.contiguous_gradients:  # stage 1 only warns, and was not recorded
        kind = InputError if plan.stage == 2 else NotModeled
        raise kind("DeepSpeed demands it with experts", field="zero.contiguous_gradients", accepted="true")
    if not plan.reduce_scatter:
        raise InputError("DeepSpeed demands it with experts", field="zero.reduce_scatter", accepted="true")
    if plan.stage == 1 and plan.grad_accum_dtype and plan.grad_accum_dtype != plan.dtype:
        why = f"accumulation in {plan.grad_accum_dtype} with expert parallelism"
        raise NotModeled(why, field="zero.grad_accum_dtype", accepted="null, or zero.stage: 2 or 3")


def _check_sharded(plan: DeepSpeedPlan) -> None:
    """engine.py, _validate_zero3_moe_compatibility, and what zsim has no recording of."""
    if plan.zero_hpz_partition_size > 1:
        why = "AutoEP with stage 3 has no secondary shards"
        raise InputError(why, field="zero.zero_hpz_partition_size", accepted="1")
    if plan.zero_quantized_gradients:
        why = "AutoEP with stage 3 does not quantize gradients"
        raise InputError(why, field="zero.zero_quantized_gradients", accepted="false")
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "use_all_reduce_for_fetch_params"):
        if getattr(plan, name):
            raise NotModeled("with expert parallelism", field=f"zero.{name}", accepted="false")
    if plan.mics_shard_size > 0:
        raise NotModeled("with expert parallelism", field="zero.mics_shard_size", accepted="-1")
    if plan.offload_param or plan.offload_optimizer == "nvme" or plan.offload_optimizer_super_offload:
        accepted = "no offload_param, and offload_optimizer: cpu without super_offload"
        raise NotModeled("this offloading with expert parallelism", field="zero.offload_param", accepted=accepted)
