"""Model and hardware FLOPs of one micro-batch, counted in the module tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zsim.model.kernels import Attention, Gemm, Work
from zsim.model.spec import Compute, Module

FORMULA = (
    "FLOPs of matrix products and attention as executed (2mnk; attention over the full square, its backward counted as "
    "2x forward for MFU, 2.5x for HFU); HFU adds recomputation; the forward of a reference counts; embedding "
    "look-ups are free"
)


def per_micro_batch(tree: Module) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs) of one micro-batch on one rank."""
    model = hardware = 0.0
    known: dict[int, tuple[float, float]] = {}  # equal blocks share their computes
    for compute in _computes(tree):
        both = known.get(id(compute))
        if both is None:
            both = known[id(compute)] = _one(compute)
        model += both[0]
        hardware += both[1]
    return model, hardware


def _one(compute: Compute) -> tuple[float, float]:
    passes = _flops(compute.forward) + _flops(compute.backward)
    # A fused attention backward recomputes the scores: 2.5 times forward, of which the model owes 2.
    rebuilt = 0.2 * sum(kernel.flops for kernel in compute.backward if isinstance(kernel, Attention))
    return passes - rebuilt, passes + _flops(compute.recompute)


def _flops(kernels: Iterable[Work]) -> float:
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Gemm | Attention))


def _computes(module: Module) -> Iterator[Compute]:
    for item in module.body:
        if isinstance(item, Module):
            yield from _computes(item)
        else:
            yield item
