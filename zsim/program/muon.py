"""Muon: the momentum of a hidden matrix, orthogonalized by Newton-Schulz iterations, is its update; the rest is Adam's.

torch.optim.Muon (torch 2.13, optim/_muon.py) on whole matrices. DeepSpeed 0.19.8 (runtime/zero/muon/original_muon.py):
in stages 1 and 2 every rank that owns a part of a matrix keeps all of its gradient and orthogonalizes it; in stage 3
ranks take turns, a matrix each, and gather what the others found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from zsim.errors import NotModeled
from zsim.model.kernels import DTYPE_BYTES, Gemm, Kernel, Memory
from zsim.model.spec import ModelSpec, numbered
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, Compute

STEPS = 5  # of Newton-Schulz, the default of both
RESTART = 2  # DeepSpeed's gram iteration starts over there
LOW = "bfloat16"  # what torch iterates in; DeepSpeed's gram in float16


def matrices(model: ModelSpec) -> frozenset[int]:
    """What Muon updates: from two dimensions on, and no embedding or head by name.

    deepspeed/__init__.py, set_optimizer_flags; torch leaves the choice to the user and recommends the same.
    """
    return frozenset(
        index
        for index, parameter in enumerate(model.parameters)
        if len(parameter.shape) > 1 and not any(part in parameter.name.lower() for part in ("embed", "lm_head"))
    )


def is_muon(optimizer: Optimizer) -> bool:
    return optimizer.name == "muon"


def auxiliary(optimizer: Optimizer) -> Optimizer:
    """What updates all other parameters."""
    return replace(optimizer, name="adamw") if is_muon(optimizer) else optimizer


def newton_schulz(shape: Sequence[int], method: str) -> tuple[Kernel, ...]:
    """The kernels of one matrix, or of a stack of them. `method`: standard | gram."""
    batch, short, long = prod(shape[:-2]), min(shape[-2:]), max(shape[-2:])
    if method == "gram" and short < long:
        return _gram(batch, short, long)
    dtype = "float16" if method == "gram" else LOW
    return (
        *_normalized(batch, short, long, dtype),
        Gemm(short, short, long, dtype, batch * STEPS, launches=STEPS),
        Gemm(short, short, short, dtype, batch * STEPS, launches=STEPS),
        Gemm(short, long, short, dtype, batch * STEPS, launches=STEPS),
    )


def _gram(batch: int, short: int, long: int) -> tuple[Kernel, ...]:
    """zeropower_via_gram_newtonschulz: the iteration runs on X X^T, which is made anew once."""
    square = STEPS + 2 * (STEPS - 2) + (STEPS - RESTART)  # Z, R of all but the last and the one before, Q
    return (
        *_normalized(batch, short, long, "float16"),
        Gemm(short, short, long, "float16", 2 * batch, launches=2),
        Gemm(short, short, short, "float16", square * batch, launches=square),
        Gemm(short, long, short, "float16", 2 * batch, launches=2),
    )


def _normalized(batch: int, rows: int, columns: int, dtype: str) -> tuple[Kernel, ...]:
    """Cast, norm, and division by it."""
    elements, size = batch * rows * columns, DTYPE_BYTES[dtype]
    return (
        Memory("optimizer", 4 * elements, size * elements),
        Memory("optimizer", size * elements, 0, 2),
        Memory("optimizer", size * elements, size * elements),
    )


def momentum(elements: float, size: int) -> tuple[Kernel, ...]:
    """The momentum takes up the gradient, and the update is between them (Nesterov): two lerps."""
    nbytes = elements * size
    return Memory("optimizer", 2 * nbytes, nbytes), Memory("optimizer", 2 * nbytes, nbytes)


def applied(elements: float, size: int) -> tuple[Kernel, ...]:
    """Weight decay, then the update."""
    nbytes = elements * size
    return Memory("optimizer", nbytes, nbytes), Memory("optimizer", 2 * nbytes, nbytes)


def workspace(shape: Sequence[int], size: int) -> list[int]:
    """Bytes alive within the update of one matrix: the update, the iterate and its successor, two squares."""
    elements, short = prod(shape), min(shape[-2:])
    square = 2 * prod(shape[:-2]) * short * short
    return [size * elements, 2 * elements, 2 * elements, square, square]


def update_whole(builder: Builder, shapes: Sequence[tuple[int, ...]], dtype: str, *, first: bool) -> None:
    """torch.optim.Muon.step on whole matrices, one after the other."""
    size = int(DTYPE_BYTES[dtype])
    if any(len(shape) != 2 for shape in shapes):
        raise NotModeled("torch.optim.Muon takes matrices only, and this model has stacks of them", field="optimizer")
    if first and shapes:
        sizes = tuple(size * prod(shape) for shape in shapes)
        builder.alloc("momentum", "optimizer_states", sum(sizes), tensors=sizes)
    for shape in shapes:
        elements = prod(shape)
        kernels = (*momentum(elements, size), *newton_schulz(shape, "standard"), *applied(elements, size))
        tensors = workspace(shape, size)
        builder.launch(
            COMPUTE, "muon", "optimizer", Compute(kernels), temp_peak=sum(tensors),
            temp_category="workspace", temp_tensors=numbered(tensors),
        )  # fmt: skip


def orthogonalize(
    builder: Builder, shapes: Sequence[tuple[int, ...]], plan: DeepSpeedPlan, size: int, phase: str, micro: int = 0
) -> None:
    """DeepSpeed's muon_update of whole gradients of `size` bytes an element, one matrix after the other."""
    for shape in shapes:
        elements = prod(shape)
        finite = Memory("optimizer", elements * size, elements, 2)  # isfinite, all
        back = Memory("optimizer", 2 * elements * size, elements * size, 2)  # scaled, cast; where
        kernels = (
            finite, *momentum(elements, size), *newton_schulz(shape, plan.optimizer.ns_method), back,
        )  # fmt: skip
        tensors = workspace(shape, size)
        builder.launch(
            COMPUTE, "muon", phase, Compute(kernels), micro=micro, temp_peak=sum(tensors),
            temp_category="workspace", temp_tensors=numbered(tensors),
        )  # fmt: skip
