"""Modules that ZeRO-3 of DeepSpeed 0.19.8 gathers whole: those asked for, and those small for their number of parts.

utils/z3_leaf_module.py (apply_zero_leaf_module_config) and runtime/zero/parameter_offload.py
(_set_z3_leaf_modules_by_threshold).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.errors import InputError
from zsim.model.spec import Module
from zsim.plan.spec import LEAF_CLASSES, DeepSpeedPlan
from zsim.plan.version import parse_version

MAX_LEAF = 10**9  # Z3_MAX_LEAF_SIZE, elements
FIRST_DEFAULTS = (0, 18)  # the first release with leaf classes of its own


def leaves(tree: Module, plan: DeepSpeedPlan, numel: Sequence[int]) -> frozenset[str]:
    """Names of the modules. Raises InputError for a container, whose children would have no hooks."""
    modules = dict(called(tree))
    classes = {_class(name) for name in _leaf_classes(plan)}
    asked = [name for name in _containers(modules) if name in plan.leaf_names or name.endswith(plan.leaf_name_suffixes)]
    for name in sorted([*asked, *classes & {"ModuleList", "ModuleDict"}]):
        raise InputError(
            f"{name} holds modules and is never called itself: as a leaf, it would have nothing in it gathered",
            field="zero.leaf_module",
        )
    chosen = {
        name
        for name, module in modules.items()
        if (plan.leaf_blocks and module.role == "block") or _named(name, module, plan, classes)
    }
    if plan.stage3_module_granularity_threshold:
        chosen.update(_coarse(tree, plan.stage3_module_granularity_threshold, numel))
    return frozenset(chosen)


def _leaf_classes(plan: DeepSpeedPlan) -> tuple[str, ...]:
    default = plan.leaf_classes == LEAF_CLASSES
    return () if default and parse_version(plan.version) < FIRST_DEFAULTS else plan.leaf_classes


def _containers(modules: Mapping[str, Module]) -> set[str]:
    """What holds modules and is none of those that are called."""
    found: set[str] = set()
    above = set(modules)
    while above := {name.rpartition(".")[0] for name in above}.difference(modules, found):
        found |= above
    return found


def unmatched(tree: Module, plan: DeepSpeedPlan) -> list[str]:
    """What apply_zero_leaf_module_config warns of, and goes on: entries of `leaf_module` that match no module."""
    if plan.leaf_classes == LEAF_CLASSES and not (plan.leaf_names or plan.leaf_name_suffixes):
        return []  # nobody has set any
    modules = dict(called(tree))
    found = []
    if names := [name for name in plan.leaf_names if name not in modules]:
        found.append(f"zero.leaf_module.names: no module is called {', '.join(names)}; DeepSpeed warns, and goes on")
    ends = [suffix for suffix in plan.leaf_name_suffixes if not any(name.endswith(suffix) for name in modules)]
    if ends:
        found.append(
            f"zero.leaf_module.name_suffixes: no module's name ends in {', '.join(ends)}; DeepSpeed warns, and goes on"
        )
    classes = {_class(name) for name in plan.leaf_classes}
    if not any(_named(name, module, plan, classes) for name, module in modules.items()):
        found.append("zero.leaf_module has no effect: it did not match any modules, of which DeepSpeed warns")
    return found


def _named(name: str, module: Module, plan: DeepSpeedPlan, classes: set[str]) -> bool:
    return module.module_class in classes or name in plan.leaf_names or name.endswith(plan.leaf_name_suffixes)


def called(module: Module) -> Iterator[tuple[str, Module]]:
    """Modules that are called, by name, in the order of their first call."""
    yield module.name, module
    for item in module.body:
        if isinstance(item, Module):
            yield from called(item)


def check_leaves(unnoticed: set[str], modules: Mapping[str, Module]) -> None:
    """`unnoticed`: trained leaves without a positional argument that requires a gradient. Raises InputError for one.

    What reduces a leaf's gradients is torch's full backward hook, which then fires before the leaf's backward rather
    than after: DeepSpeed 0.19.8 fails, or trains nothing where the leaf is all of the model.
    """
    for name in sorted(unnoticed):
        raise InputError(
            f"{name or 'the whole model'} ({modules[name].module_class}) cannot be a leaf module: none of its "
            "positional arguments requires a gradient, so DeepSpeed reduces its gradients before there are any",
            field="zero.leaf_module or zero.stage3_module_granularity_threshold",
        )


def by_keyword(module: Module) -> bool:
    """Attention of transformers 5: all decoder layers whose attention is called self_attn or linear_attn pass their
    input by name; so do LFM2, Nemotron-H and ModernBERT's decoder, which call theirs otherwise, and vision-language
    models with what they hand to the text model. The towers of Llama 3.2 and 4 do so with their layers, which do not
    with their attention."""
    if module.module_class.startswith(("MllamaVision", "Llama4Vision")):
        return module.module_class.endswith("VisionEncoderLayer")
    if module.module_class in ("BartAttention", "MarianAttention"):
        return False
    named = module.name.rpartition(".")[2] in (
        "self_attn", "linear_attn", "cross_attn", "mamba", "language_model", "text_model",
    )  # fmt: skip
    others = "Lfm2ShortConv", "Lfm2MoeShortConv", "NemotronHAttention", "ModernBertDecoderAttention"
    return named or module.module_class in others


def _class(name: str) -> str:
    """A class's own name, which is all that is known here of classes outside transformers."""
    package, _, own = name.rpartition(".")
    return own if not package or package.startswith("transformers.models.") else name


def _coarse(tree: Module, threshold: int, numel: Sequence[int]) -> Iterator[str]:
    """_set_leaf_by_threshold_preorder: from the root down, the first whose parameters by layers are few enough."""
    counts: dict[str, tuple[int, int]] = {}
    _count(tree, numel, counts)

    def visit(module: Module) -> Iterator[str]:
        layers, elements = counts[module.name]
        children = _children(module)
        if elements and children and elements <= MAX_LEAF and elements // layers <= threshold:
            yield module.name
            return
        for child in children:
            yield from visit(child)

    return visit(tree)


def _count(module: Module, numel: Sequence[int], counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """_get_granularity_recursively: (layers, elements). Modules without parameters, and lists of modules, are none."""
    layers, elements = 0, sum(numel[param] for param in module.params)
    for child in _children(module):
        inner, more = _count(child, numel, counts)
        layers, elements = layers + inner, elements + more
    counts[module.name] = (layers + 1, elements) if elements else (0, 0)
    return counts[module.name]


def _children(module: Module) -> list[Module]:
    return list({item.name: item for item in module.body if isinstance(item, Module)}.values())
