"""Facts about a module tree that strategies ask for before they run it."""

from __future__ import annotations

from zsim.model.spec import Module


def modules_in_order(tree: Module) -> list[Module]:
    """Pre-order, as `named_modules()` and as execution enters them."""
    found = [tree]
    for item in tree.body:
        if isinstance(item, Module):
            found += modules_in_order(item)
    return found


def gradients(tree: Module) -> set[int]:
    """Parameters that have a gradient after a backward."""
    found: set[int] = set()
    for module in modules_in_order(tree):
        for item in module.body:
            if not isinstance(item, Module):
                found.update(item.grads)
    return found
