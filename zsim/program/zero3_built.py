"""In which order zero.Init broadcasts parameters: as modules are built (DeepSpeed, partition_parameters.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.model.spec import COPY, ModelSpec, Module, Parameter
from zsim.program.walk import modules_in_order


def as_built(parameters: Sequence[Parameter]) -> list[Parameter]:
    """In the order in which modules are complete: one's own parameters come after those of its children, which
    `named_parameters()` has the other way round (partition_parameters.py, a module's __init__ wrapped)."""
    own: dict[str, list[Parameter]] = {}
    children: dict[str, list[str]] = {}
    for parameter in parameters:
        path = parameter.name.split(".")[:-1]
        for depth in range(len(path), 0, -1):
            inside, child = ".".join(path[: depth - 1]), ".".join(path[:depth])
            if child in children.setdefault(inside, []):
                break
            children[inside].append(child)
        own.setdefault(".".join(path), []).append(parameter)

    def visit(module: str) -> Iterator[Parameter]:
        for child in children.get(module, ()):
            yield from visit(child)
        yield from own.get(module, ())

    return list(visit(""))


def with_untied(built: list[Parameter], model: ModelSpec, tree: Module) -> list[Parameter]:
    """A head exists, and is broadcast and cut, before the model ties it to the embedding; so do the embeddings of an
    encoder and a decoder, each before the layers of its stack."""
    for module in modules_in_order(tree):
        for param in (*module.params, *module.idle) if module.role in ("embedding", "head") else ():
            parameter = model.parameters[param]
            if not parameter.name.startswith(f"{module.name}.") and COPY not in parameter.name:
                stack = module.name.rpartition(".")[0] + "." if module.role == "embedding" else None
                own = (place for place, other in enumerate(built) if stack and other.name.startswith(stack))
                built.insert(next(own, len(built)), parameter)
    return built
