"""A mixture-of-experts model as one of several ranks holds it that share its experts: DeepSpeed's AutoEP.

DeepSpeed 0.19.8 module_inject/auto_ep.py and moe/ep_repack.py: each block of experts becomes a layer of DeepSpeed's own
with `experts / size` of them; the rest of the model stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture
from zsim.model.families import build
from zsim.model.kernels import EXPERT_DATA_PARALLEL
from zsim.model.layers import Net
from zsim.model.spec import Compute, Conversion, ModelSpec, Module, Parameter
from zsim.model.trace import parameters

FIELD = "zero.autoep_size"
DATA_PARALLEL = "data_parallel"  # all ranks, as DeepSpeed's own group
# Whose conversions are recorded. DeepSpeed 0.19.8 (auto_ep_presets) has presets for deepseek_v2, deepseek_v3,
# minimax_m3_vl_text and qwen3_5_moe_text, too. To other types it applies all presets in turn: it raises where several
# match the same layer (auto_ep.py _raise_if_duplicate_moe_specs), and leaves layers as they are where none does.
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
ROUTER = ".router.gate.weight"
# name of a replacement -> the source's
_SOURCES = {
    ".experts.w1": ".experts.gate_up_proj",
    ".experts.w2": ".experts.down_proj",
    ".experts.w3": ".experts.gate_up_proj",
    ROUTER: ".gate.weight",
    ".shared_experts_gate.": ".shared_expert_gate.",
    ".shared_experts.": ".shared_expert.",
}


def converted(model: ModelSpec, size: int, *, renumbered: bool = False) -> ModelSpec:
    """The model of one rank among `size` that share the experts.

    `renumbered`: under zero.Init what AutoEP makes comes after all there was, layer by layer the experts, and last the
    routers. These are partitioned over all ranks, too, but as another group: what is done for groups one by one is done
    for them apart (engine.py _resolve_zero3_param_placement). Raises InputError where the experts cannot be shared so,
    NotModeled where zsim does not know how they are.
    """
    arch = cast(Architecture, model.arch)
    if arch.moe is None:
        raise InputError(f"{model.name} has no experts", field=FIELD, accepted="null")
    if arch.moe.modules:
        why = "expert parallelism (AutoEP) of experts that are modules"
        raise NotModeled(why, field=FIELD, accepted="null; or framework.transformers: 5.0 or later")
    if arch.family not in FAMILIES:
        accepted = f"one of {', '.join(FAMILIES)}, or no expert parallelism"
        raise NotModeled(f"expert parallelism (AutoEP) of {arch.family}", field=FIELD, accepted=accepted)
    if arch.activation not in ("silu", "swish"):
        raise NotModeled(f"experts with {arch.activation} under AutoEP", field=FIELD, accepted="silu")
    if arch.moe.experts % size:
        why = f"{size} does not divide the {arch.moe.experts} experts of {model.name}"
        raise InputError(why, field=FIELD, accepted="a number that does")
    if model.tuning:
        raise NotModeled("adapters or 4-bit weights with expert parallelism", field=FIELD, accepted="null")
    shared = replace(arch, moe=replace(arch.moe, autoep_size=size))
    source = {parameter.name: parameter for parameter in model.parameters}
    own = tuple(_with_flags(parameter, source, size) for parameter in parameters(build(Net(shared))))
    found = replace(model, arch=shared, parameters=own, conversion=Conversion(size, model))
    if not renumbered:
        return found
    late = sorted(own, key=lambda parameter: 2 * is_router(parameter) + parameter.expert)
    late = [replace(parameter, home=DATA_PARALLEL) if is_router(parameter) else parameter for parameter in late]
    return replace(found, parameters=tuple(late), conversion=Conversion(size, model, found))


def is_router(parameter: Parameter) -> bool:
    """A converted layer's gate, which is a parameter new to the optimizer as the experts are."""
    return parameter.name.endswith(ROUTER)


def source_name(name: str) -> str:
    """Of the parameter that one of a converted model was made from."""
    for part, former in _SOURCES.items():
        if part in name:
            return name.replace(part, former)
    return name


def _with_flags(parameter: Parameter, source: dict[str, Parameter], size: int) -> Parameter:
    before = source[source_name(parameter.name)]
    parameter = replace(parameter, trainable=before.trainable, dtype=before.dtype)
    return replace(parameter, parts=size, home=EXPERT_DATA_PARALLEL) if parameter.expert else parameter


def renumber(tree: Module, executed: ModelSpec, model: ModelSpec) -> Module:
    """`tree`, traced of `executed`, with the indices that its parameters have in `model`."""
    places = {parameter.name: index for index, parameter in enumerate(model.parameters)}
    new = [places[parameter.name] for parameter in executed.parameters]

    def visit(module: Module) -> Module:
        body = tuple(visit(item) if isinstance(item, Module) else _moved(item, new) for item in module.body)
        return replace(module, params=tuple(new[index] for index in module.params), body=body)

    return visit(tree)


def _moved(compute: Compute, new: list[int]) -> Compute:
    if not (compute.grads or compute.reads):
        return compute
    grads, reads = (tuple(new[index] for index in each) for each in (compute.grads, compute.reads))
    return replace(compute, grads=grads, reads=reads)
