"""Which parameters are gathered and reduced together: a unit per block, the rest at the root."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zsim.errors import InputError, NotModeled
from zsim.model.layer_keys import WHOLE_TOWERS
from zsim.model.spec import COPY, ModelSpec, Module
from zsim.program.walk import modules_in_order

COPIED = f"{COPY}default"  # ends the name of such a module, whose wrapper is called itself
ADAPTED = ".base_layer"  # as a head's, whose adapters are in its unit


class Group(NamedTuple):
    """`modules` in execution order; a group is entered with its first and left with its last one.

    `input_has_grad`: gradients flow back out of the first module, so that a hook on its inputs fires.
    `output_has_grad`: what the last one returns requires one. `in_backward`: and one comes.
    """

    name: str
    modules: tuple[str, ...]
    params: tuple[int, ...]
    role: str  # of the first module
    input_has_grad: bool
    output_has_grad: bool
    in_backward: bool


Members = list[tuple[Sequence[Module], list[int]]]  # modules of a unit, and the parameters that it holds


def groups_of(
    model: ModelSpec, tree: Module, grouping: str = "hf", *, adapter_units: bool = False, wrap: Sequence[str] = ()
) -> list[Group]:
    """In execution order. `hf`, `titan2024`: blocks (transformers' _no_split_modules), or modules of the classes in
    `wrap`, and the root; `titan`: embedding, blocks, norm with head (torchtitan's parallelize_llama); `accelerate`
    (1.14 and later, fsdp2_prepare_model): as titan, a tied embedding with norm and head; `flat`: the root alone.
    `adapter_units`: besides, every module of its own with a trained weight, as peft's fsdp_auto_wrap_policy has it.
    Raises InputError for tied weights in two groups, as fully_shard does, and for a class that the model has not.
    """
    modules = modules_in_order(tree)
    if adapter_units and any(module.module_class == "ParamWrapper" for module in modules):
        what = "adapters on parameters as units: peft reads what no unit has gathered"
        raise NotModeled(what, field="fsdp.adapter_units", accepted="false")
    whole = [m for m in modules if not m.name.endswith((COPIED, ADAPTED))]
    of_role = {role: [m for m in whole if m.role == role] for role in ("embedding", "block", "unit", "norm", "head")}
    chosen = _trained_leaves(model, modules) if adapter_units else []
    if grouping != "flat":
        chosen += _of_classes(whole, wrap) if wrap else [*of_role["block"], *of_role["unit"]]
    names = {module.name for module in chosen}
    members: Members = []
    _find_units(tree, lambda module, rest: module.name in names, members)
    for part in _ends(model, grouping, of_role, whole):
        inside = {module.name for top in part for module in modules_in_order(top)}
        held = {param for (top, *_), params in members if top.name in inside for param in params}
        members.append((part, sorted({param for module in part for param in params_under(module)} - held)))
    owner = _owners(model, modules, members, _shared)
    idle = {} if grouping == "flat" or wrap else _idle(model, adapter_units)
    owner |= {param: len(members) + number for number, params in enumerate(idle.values()) for param in params}
    members.append(([tree], [param for param in range(len(model.parameters)) if param not in owner]))
    found = _in_order(modules, members)
    return found + [
        Group(name, (name,), tuple(params), "unit", False, False, False)  # gradients neither come nor go
        for name, params in idle.items()
    ]


def _ends(
    model: ModelSpec, grouping: str, of_role: Mapping[str, Sequence[Module]], modules: Sequence[Module]
) -> list[Sequence[Module]]:
    """Units beside the blocks: of embeddings, and of norm and head together."""
    if grouping not in ("titan", "accelerate"):
        return []
    words, heads = of_role["embedding"], of_role["head"]
    embeddings = [module.params for module in words]
    if len(set(embeddings)) < len(embeddings):
        raise InputError(
            "encoder and decoder share an embedding, and two groups would", field="fsdp.grouping", accepted="hf"
        )
    norms = [norm for norm in of_role["norm"] if grouping != "accelerate" or _found_by_accelerate(model, norm)]
    if len({norm.name for norm in norms}) < len(norms):
        what = "a unit of norm and head whose norm is called before the layers, too"
        raise NotModeled(what, field="fsdp.grouping", accepted="hf")
    if grouping == "accelerate":
        norms = [_last_norm(norm, modules) for norm in norms]
        # get_input_embeddings: not those of positions
        vocab = getattr(model.arch, "vocab", 0)
        words = [
            module
            for module in words
            if any(model.parameters[param].shape[0] == vocab for param in params_under(module))
        ]
    if grouping == "accelerate" and _tied(words, heads):
        return [[*words, *norms, *heads]]
    return [*([module] for module in words), [*norms, *heads]]


def groups_by_size(model: ModelSpec, tree: Module, least: int) -> list[Group]:
    """torch 2.13 fsdp/wrap.py, size_based_auto_wrap_policy: from the leaves up, each module with `least` parameters or
    more that no unit within it holds; the root holds the rest. In execution order. Raises InputError for tied weights
    in two units, NotModeled for a model with parts that no step enters.
    """
    members: Members = []
    everything, modules = params_under(tree), modules_in_order(tree)
    if len(everything) < len(model.parameters):
        raise NotModeled("units by size where no step enters parts of the model", field="fsdp.min_num_params")
    numels = [parameter.numel for parameter in model.parameters]
    _find_units(tree, lambda module, rest: sum(numels[param] for param in rest) >= least, members)
    owner = _owners(model, modules, members, _torn)
    members.append(([tree], sorted(everything - owner.keys())))
    return _in_order(modules, members)


def _find_units(module: Module, wraps: Callable[[Module, set[int]], bool], members: Members) -> set[int]:
    """torch 2.13 fsdp/wrap.py, _recursive_wrap: what is in a module first, then the module if the policy wraps it with
    the rest of its parameters. Adds the units in `module`, but for the root; what they hold."""
    held = set[int]()
    for child in module.body:
        if isinstance(child, Module):
            held |= _find_units(child, wraps, members)
    params = params_under(module)
    rest = params - held
    if module.role == "root" or not wraps(module, rest):
        return held
    members.append(([module], sorted(rest)))
    return params


def _owners(
    model: ModelSpec,
    modules: Sequence[Module],
    members: Members,
    refused: Callable[[ModelSpec, int], InputError],
) -> dict[int, int]:
    """The unit of each parameter that one holds. Raises what `refused` makes of a tied one that two would."""
    owner: dict[int, int] = {}
    for number, (_, params) in enumerate(members):
        for param in params:
            if owner.setdefault(param, number) != number:
                raise refused(model, param)
    inside = {module.name for part, _ in members for top in part for module in modules_in_order(top)}
    for module in modules:
        if module.name not in inside:
            for param in owner.keys() & set(module.params):
                raise refused(model, param)
    return owner


def _of_classes(modules: Sequence[Module], classes: Sequence[str]) -> list[Module]:
    known = {module.module_class for module in modules}
    for name in classes:
        if name not in known:
            blocks = {module.module_class for module in modules if module.role in ("block", "unit")}
            raise InputError(f"the model has no module of class {name}", field="fsdp.wrap", accepted=", ".join(blocks))
    return [module for module in modules if module.module_class in classes]


def _in_order(modules: Sequence[Module], members: Members) -> list[Group]:
    position = {module.name: index for index, module in enumerate(modules)}
    found = [
        Group(
            ", ".join(m.name for m in part), tuple(m.name for m in part), tuple(params), _role(part[0]),
            part[0].reached, part[-1].differentiable > 0, part[-1].in_backward > 0,
        )
        for part, params in members
        if params
    ]  # fmt: skip
    return sorted(found, key=lambda group: position[group.modules[0]])


def _idle(model: ModelSpec, adapter_units: bool) -> dict[str, list[int]]:
    """Units that no step enters, and so neither gathers nor reduces: layers of a tower of sounds, by name. Raises
    NotModeled for adapters in them that would be units."""
    found: dict[str, list[int]] = {}
    for index, parameter in enumerate(model.parameters if getattr(model.arch, "sound", None) else ()):
        tower, layers, rest = parameter.name.partition(".audio_tower.layers.")
        whole = model.family in WHOLE_TOWERS and ".audio_tower." in parameter.name
        if layers or whole:
            name = f"{tower}{layers}{rest.partition('.')[0]}" if layers else "audio_tower"
            found.setdefault(name, []).append(index)
            if adapter_units and parameter.trainable:
                what = "units of adapters in an audio tower that is given nothing"
                raise NotModeled(what, field="lora.exclude", accepted="[audio_tower, embed_audio]")
    return found


def _shared(model: ModelSpec, param: int) -> InputError:
    return InputError(
        f"parameter {model.parameters[param].name} is shared by two groups", field="fsdp.grouping",
        accepted="tied weights in one group, as in fsdp.grouping: hf",
    )  # fmt: skip


def _torn(model: ModelSpec, param: int) -> InputError:
    """torch 2.13: with use_orig_params the first forward fails on the size of the second one's weight, which is a shard
    then; without, the two are trained apart."""
    return InputError(
        f"parameter {model.parameters[param].name} is tied, and would be in two units", field="fsdp.min_num_params",
        accepted="a model that is not tied, or units of blocks (TRANSFORMER_BASED_WRAP)",
    )  # fmt: skip


def _trained_leaves(model: ModelSpec, modules: Sequence[Module]) -> list[Module]:
    return [
        module
        for module in modules
        if not any(isinstance(item, Module) for item in module.body)
        and any(model.parameters[param].trainable for param in module.params)
    ]


def _found_by_accelerate(model: ModelSpec, norm: Module) -> bool:
    """_find_final_norm: among children of the base model, of which a vision-language model has none, and a PeftModel
    no such base model (tried with accelerate 1.15 and peft 0.21)."""
    return norm.name.count(".") == 1 and model.tuning is None


def _last_norm(norm: Module, modules: Sequence[Module]) -> Module:
    """_find_final_norm takes the last one that is registered beside it (Gemma's per_layer_projection_norm)."""
    parent = norm.name.rpartition(".")[0]
    beside = [m for m in modules if m.name.rpartition(".")[0] == parent and "Norm" in m.module_class and m.params]
    return max(beside, key=lambda module: min(module.params), default=norm)


def _role(module: Module) -> str:
    return "" if module.name.endswith(COPIED) else module.role


def _tied(embeddings: Sequence[Module], heads: Sequence[Module]) -> bool:
    return bool({p for module in embeddings for p in _read(module)} & {p for module in heads for p in _read(module)})


def _read(module: Module) -> set[int]:
    """What `weight` and `bias` of it are."""
    return params_under(module) - set(module.idle)


def params_under(module: Module) -> set[int]:
    found = {*module.params, *module.idle}
    for item in module.body:
        if isinstance(item, Module):
            found |= params_under(item)
    return found


def consecutive(world: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring ranks: the shard dimension of a (replicate, shard) mesh."""
    return tuple(tuple(range(start, start + size)) for start in range(0, world, size))


def strided(world: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with equal places in their shard groups: the replicate dimension."""
    return tuple(tuple(range(start, world, stride)) for start in range(stride))


def mesh_of(mesh: tuple[int, int] | None, world: int) -> tuple[int, int]:
    """(replicas, shards). Raises InputError where the mesh does not cover the world."""
    replicas, shards = mesh or (1, world)
    if replicas * shards != world:
        raise InputError(f"{replicas} x {shards} is not {world} ranks", field="mesh", accepted="replicate x shard")
    return replicas, shards


def divide_factors(ranks: int) -> tuple[int, float]:
    """(before, after): a reduction that could overflow is divided by about the square root of `ranks` on each side.

    torch 2.13 _fsdp_collectives.py _get_gradient_divide_factors, default_hooks.py DefaultState.
    """
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return factor, ranks / factor
