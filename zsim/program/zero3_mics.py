"""MiCS of DeepSpeed before 0.19.7: ZeRO-3 within groups of `mics_shard_size` neighbours, data parallel between them.

0.18.9 runtime/zero/mics.py and mics_utils.py. A parameter is gathered into its own buffer, whatever else is gathered in
the same call; the shards of gradients are summed over the groups with the last micro-step's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.errors import InputError, NotModeled
from zsim.plan.batch import divisors
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.deepspeed import collective, dtype_bytes, elementwise
from zsim.program.versions import before
from zsim.program.zero3_coordinator import Params
from zsim.program.zero3_gather import Gather

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients
    from zsim.program.zero3_parameters import Parameters

SHARDS, REPLICAS = "shards", "replicas"


def check_mics(plan: DeepSpeedPlan) -> None:
    """Raises InputError for what MiCS asserts against or fails with, NotModeled for the rest."""
    size, field = plan.mics_shard_size, "zero.mics_shard_size"
    if not before(plan, 0, 19, 7):
        raise InputError("DeepSpeed has removed MiCS in 0.19.7", field=field, accepted="framework.version 0.18.9")
    if plan.world_size % size:
        why = f"{size} does not divide the {plan.world_size} ranks"
        raise InputError(why, field=field, accepted=divisors(plan.world_size))
    if plan.offload_optimizer and plan.world_size > size:
        why = "several groups of shards cannot offload, as DeepSpeed says"
        raise InputError(why, field=field, accepted=f"{plan.world_size}, or no offload_optimizer")
    quantized = plan.zero_quantized_weights or plan.zero_quantized_gradients or plan.zero_quantized_nontrainable_weights
    if plan.offload_param or quantized or plan.zero_hpz_partition_size > 1:
        accepted = "null (no MiCS), or neither offload_param nor zero_quantized_* nor zero_hpz_partition_size"
        raise NotModeled("MiCS with parameters on the CPU, or with ZeRO++", field=field, accepted=accepted)
    if plan.mics_hierarchical_params_gather:  # all_gather_coalesced waits for what the coalescing manager returns
        why = "DeepSpeed 0.18.9 fails with torch 2.1 and later, which forbids to wait for a single coalesced call"
        raise NotModeled(why, field="zero.mics_hierarchical_params_gather", accepted="false")


def mics_groups(plan: DeepSpeedPlan) -> dict[str, tuple[tuple[int, ...], ...]]:
    size, world = plan.mics_shard_size, plan.world_size
    groups = {SHARDS: tuple(tuple(range(start, start + size)) for start in range(0, world, size))}
    if world > size:
        groups[REPLICAS] = tuple(tuple(range(first, world, size)) for first in range(size))
    return groups


def gather_mics(parameters: Parameters, params: Params, module: str, phase: str) -> Gather:
    """_flat_all_gather_with_coalescing_manager: one call, with stage3_allgather_sequential too."""
    part = sum(parameters.shard[param] for param in params)
    for param in params:
        nbytes = parameters.shard[param] * parameters.world * parameters.size
        parameters.builder.alloc(parameters.full(param), "all_gather_buffers", nbytes, lane=parameters.stream)
    event = parameters.call("all_gather", part, part * parameters.world, SHARDS, module, phase)
    return Gather(params, event, None, len(params))


def reduce_replicas(gradients: Gradients, bucket: list[int], dtype: str) -> None:
    """allreduce_mics_shard_grads: averages the accumulated shards of `bucket` over the groups."""
    replicas = gradients.plan.world_size // gradients.parameters.world
    if replicas == 1:
        return
    part = sum(gradients.shard[param] for param in bucket)
    nbytes = part * dtype_bytes(dtype)
    elementwise(
        gradients.builder, gradients.lane, "scale", "backward", nbytes, nbytes,
        launches=len(bucket), micro=gradients.micro,
    )  # fmt: skip
    collective(
        gradients.builder, gradients.lane, "all_reduce", dtype, part, part, "backward", "reduce gradients",
        group=REPLICAS, micro=gradients.micro,
    )  # fmt: skip
