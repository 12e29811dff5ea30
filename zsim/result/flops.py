"""Model and hardware FLOPs of one micro-batch, counted in the module tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zsim.model.kernels import Attention, Gemm, Kernel
from zsim.model.spec import Compute, Module

FORMULA = (
    "FLOPs of matrix products and attention as executed (2mnk; attention over the full square, its backward counted as "
    "2x forward for MFU, 2.5x for HFU); HFU adds recomputation; embedding look-ups are free"
)


def per_micro_batch(tree: Module) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs) of one micro-batch on one rank."""
    model = hardware = 0.0
    for compute in _computes(tree):
        forward, backward, recompute = (_flops(k) for k in (compute.forward, compute.backward, compute.recompute))
        # A fused attention backward recomputes the scores: 2.5 times forward, of which the model owes 2.
        rebuilt = 0.2 * sum(k.flops for k in compute.backward if isinstance(k, Attention))
        model += forward + backward - rebuilt
        hardware += forward + backward + recompute
    return model, hardware


def _flops(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.flops for kernel in kernels if isinstance(kernel, Gemm | Attention))


def _computes(module: Module) -> Iterator[Compute]:
    for item in module.body:
        if isinstance(item, Module):
            yield from _computes(item)
        else:
            yield item
