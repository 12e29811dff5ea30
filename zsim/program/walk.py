"""Facts about a module tree that strategies ask for before they run it."""

from __future__ import annotations

from typing import NamedTuple

from zsim.model.spec import Module


class Flow(NamedTuple):
    """Whether the tensors that enter and leave a module require gradients."""

    before: bool
    after: bool


def modules_in_order(tree: Module) -> list[Module]:
    """Pre-order, as `named_modules()` and as execution enters them."""
    found = [tree]
    for item in tree.body:
        if isinstance(item, Module):
            found += modules_in_order(item)
    return found


def gradient_flow(tree: Module, *, from_embedding: bool = False) -> dict[str, Flow]:
    """By module name. Token ids have no gradient; whatever follows the first trainable parameter has.

    `from_embedding`: what the embedding returns requires a gradient even if its weight is frozen.
    """
    flows: dict[str, Flow] = {}

    def visit(module: Module, active: bool) -> bool:
        before = active
        for item in module.body:
            active = visit(item, active) if isinstance(item, Module) else active or bool(item.grads)
        active = active or (from_embedding and module.role == "embedding")
        flows[module.name] = Flow(before, active)
        return active

    visit(tree, False)
    return flows
