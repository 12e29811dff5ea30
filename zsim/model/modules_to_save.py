"""Modules that train whole beside adapters: peft's modules_to_save (0.21 utils/other.py, ModulesToSaveWrapper).

The module stays where it was, frozen and never called again. Beside it stands a copy in its dtype, which trains and is
what everybody calls and reads. Of tied embeddings each copy is one of its own, unless `ensure_weight_tying` makes the
output projection's copy share the weight of the embedding's.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from zsim.errors import InputError, NotModeled
from zsim.model.layers import Module, Net, Weight

FIELD, SOME = "lora.modules_to_save", "embed_tokens, lm_head, or other modules by the ends of their names"
EMBEDDINGS = ("embed_tokens", "lm_head")  # utils/constants.py EMBEDDING_LAYER_NAMES


class ModuleDict(Module):
    """Holds modules and is never called."""

    class_name = "ModuleDict"

    def add(self, module: Module) -> Module:
        self.default = module
        return module


class ModulesToSave(Module):
    """`tied`: the weight that the copy, a Linear without a bias, has instead of its own."""

    class_name = "ModulesToSaveWrapper"

    def __init__(self, net: Net, original: Module, tied: Weight | None = None) -> None:
        super().__init__(net)
        self.role = original.role
        self.original_module = original
        self.modules_to_save = ModuleDict(net)
        self.modules_to_save.add(_copy(net, original, tied))
        self.idle = tuple(original.weights.values())

    def __getattr__(self, name: str) -> Any:
        """What others read of it is the copy's."""
        if name in ("children", "modules_to_save"):  # not there yet
            raise AttributeError(name)
        return getattr(self.modules_to_save.default, name)

    def forward(self, *args: Any) -> Any:
        return self.modules_to_save.default(*args)


def _copy(net: Net, original: Module, tied: Weight | None) -> Module:
    twin = copy(original)
    twin.children, twin.weights = {}, {}
    for name, weight in original.weights.items():
        setattr(twin, name, Weight(net, *weight.shape) if tied is None else tied if name == "weight" else None)
    return twin


def save_modules(model: Module, net: Net, names: tuple[str, ...], tie: bool) -> list[str]:
    """Wrap all modules whose names end with one of `names`, as peft finds them (`_set_trainable`); `tie`:
    ensure_weight_tying. Returns the names that the model has not, which peft passes over."""
    if numbered := [name for name in names if any(part.isdecimal() for part in name.split("."))]:
        raise NotModeled(f"a copy in some layers only: {numbered[0]}", field=FIELD, accepted=SOME)
    model.set_paths("")
    tied = _tied_heads(model, net) if tie and any(name.split(".")[-1] in EMBEDDINGS for name in names) else []
    places = [(parent, name) for parent in list(model.all_modules()) for name in list(parent.children)]
    hit: set[str] = set()
    shared: Weight | None = None
    for parent, name in places:
        child = parent.children[name]
        meant = {each for each in names if child.path.endswith(each)}
        hit |= meant
        embeds = bool(tied) and child.role == "embedding"
        if (meant or embeds) and child not in tied:
            _check(child)
            setattr(parent, name, saved := ModulesToSave(net, child))
            shared = saved.weight if embeds else shared
    for parent, name in places:
        if (child := parent.children[name]) in tied:
            setattr(parent, name, ModulesToSave(net, child, shared))
    return sorted(set(names) - hit)


def _check(module: Module) -> None:
    """Raises NotModeled for what is more than weights and a forward, InputError for a part of an adapter."""
    if any(part in f".{module.path}." for part in (".base_layer.", ".lora_")) or "base_layer" in module.children:
        raise InputError(f"{module.path} has an adapter, or is a part of one", field=FIELD, accepted=SOME)
    if module.children or module.passive or not module.weights:
        what = f"a copy of {module.path}, which is no module that has weights of its own alone"
        raise NotModeled(what, field=FIELD, accepted=SOME)
    if module.class_name.startswith("Linear") and module.class_name != "Linear":
        raise InputError(f"{module.path} is quantized, and cannot be trained", field=FIELD, accepted=SOME)


def _tied_heads(model: Module, net: Net) -> list[Module]:
    """`_get_module_names_tied_with_embedding`: none of a model that does not tie them."""
    embeddings = [m for m in model.all_modules() if m.role == "embedding" and getattr(m, "takes_tokens", False)]
    if net.arch.seq2seq or len(embeddings) != 1:
        what = "copies that share a weight in a model with an encoder, or with several embeddings of tokens"
        raise NotModeled(what, field="lora.ensure_weight_tying", accepted="false")
    weight = embeddings[0].weights["weight"]
    return [m for m in model.all_modules() if m.role == "head" and m.weights.get("weight") is weight]
