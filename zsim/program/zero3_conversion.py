"""AutoEP on a model that was built under zero.Init: each block of experts is gathered, cut, and sharded anew.

DeepSpeed 0.19.8 engine.py _configure_expert_parallel, moe/ep_repack.py _repack_fused_3d, and auto_ep_layer.py
AutoEPMoELayer.__init__.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import ceil

from zsim.model.expert_parallel import is_router, source_name
from zsim.model.spec import Conversion, ModelSpec, Parameter
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import broadcast_model, collective, dtype_bytes
from zsim.program.ops import COMPUTE


def convert(builder: Builder, model: ModelSpec, plan: DeepSpeedPlan, conversion: Conversion) -> None:
    """Block after block, and at last the routers, which are sharded with what else is not yet."""
    source = {parameter.name: parameter for parameter in conversion.source.parameters}
    routers = [parameter for parameter in model.parameters if is_router(parameter)]
    experts = [parameter for parameter in model.parameters if parameter.expert]
    layers = [list(own) for _, own in groupby(experts, lambda parameter: parameter.name.rpartition(".")[0])]
    for router, own in zip(routers, layers, strict=True):
        _gathered(builder, plan, [source[source_name(router.name)]])
        cut = 2 * sum(parameter.numel for parameter in own) * dtype_bytes(plan.dtype)  # cloned, then taken apart
        _gathered(builder, plan, [source[name] for name in dict.fromkeys(map(_source, own))], cut)
        broadcast_model(builder, own, plan)
    broadcast_model(builder, routers, plan)


def _source(parameter: Parameter) -> str:
    return source_name(parameter.name)


def _gathered(builder: Builder, plan: DeepSpeedPlan, parameters: Iterable[Parameter], beside: int = 0) -> None:
    """GatheredParameters: all at once, a call each; `beside`: bytes of what is made of them meanwhile."""
    size, keys = dtype_bytes(plan.dtype), []
    for parameter in parameters:
        shard = ceil(parameter.numel / plan.world_size)
        keys.append(f"gathered to convert:{parameter.name}")
        builder.alloc(keys[-1], "all_gather_buffers", shard * plan.world_size * size)
        full = shard * plan.world_size
        collective(builder, COMPUTE, "all_gather", plan.dtype, shard, full, "init", "gather to convert")
    builder.alloc("cut experts", "all_gather_buffers", beside)
    for key in (*keys, "cut experts"):
        builder.free(key)
