"""What the ZeRO stages of DeepSpeed 0.19.8 share: data types, kernels over flat buffers, collectives, hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, Collective, Compute

MIXED = ("bfloat16", "float16")  # parameters in these dtypes have a float32 master copy


def dtype_bytes(dtype: str) -> int:
    return int(DTYPE_BYTES[dtype])


def comm_dtype(plan: DeepSpeedPlan) -> str:
    """engine.py communication_data_type: the model's dtype unless configured."""
    return plan.communication_data_type or plan.dtype


def accum_dtype(plan: DeepSpeedPlan) -> str:
    """engine.py get_data_types: data_types.grad_accum_dtype, else the model's dtype."""
    return plan.grad_accum_dtype or plan.dtype


def overlaps(plan: DeepSpeedPlan) -> bool:
    """zero/config.py overlap_comm_valid: on by default in stage 3 only."""
    return plan.stage == 3 if plan.overlap_comm is None else plan.overlap_comm


def trainable(model: ModelSpec) -> list[int]:
    return [index for index, parameter in enumerate(model.parameters) if parameter.trainable]


def has_backward(module: Module) -> bool:
    """Whether autograd runs through the module at all (rotary tables, for one, have no gradient)."""
    return any(
        has_backward(item) if isinstance(item, Module) else bool(item.backward or item.grads) for item in module.body
    )


def broadcast_model(builder: Builder, model: ModelSpec, dtype: str) -> None:
    """engine.py _broadcast_model: every parameter from rank 0, viewed as bytes, when the engine is built."""
    for parameter in model.parameters:
        nbytes = parameter.numel * dtype_bytes(parameter.dtype or dtype)
        collective(builder, COMPUTE, "broadcast", "uint8", nbytes, nbytes, "init", "broadcast parameter", root=0)


def collective(
    builder: Builder,
    lane: str,
    kind: str,
    dtype: str,
    in_numel: int,
    out_numel: int,
    phase: str,
    label: str,
    *,
    group: str = "world",
    module: str = "",
    micro: int = 0,
    root: int | None = None,
) -> int:
    work = _call(kind, dtype, in_numel, out_numel, group, root)
    return builder.launch(lane, label, phase, work, module=module, micro=micro)


@lru_cache(maxsize=4096)
def _call(kind: str, dtype: str, in_numel: int, out_numel: int, group: str, root: int | None) -> Collective:
    reduce_op = ("MAX" if dtype == "uint8" else "SUM") if "reduce" in kind else None
    return Collective(kind, dtype, in_numel, out_numel, group, reduce_op, root)


def elementwise(
    builder: Builder,
    lane: str,
    label: str,
    phase: str,
    read_bytes: float,
    write_bytes: float,
    *,
    launches: int = 1,
    module: str = "",
    micro: int = 0,
    temp_peak: int = 0,
) -> int:
    """A memory-bound kernel on `lane`; `temp_peak` bytes of workspace live inside it."""
    work = _kernel(label, read_bytes, write_bytes, launches)
    return builder.launch(
        lane, label, phase, work, module=module, micro=micro, temp_peak=temp_peak, temp_category="workspace"
    )


@lru_cache(maxsize=4096)
def _kernel(label: str, read_bytes: float, write_bytes: float, launches: int) -> Compute:
    return Compute((Memory(label, read_bytes, write_bytes, launches),))


def fill_buckets(order: Iterable[int], numel: Sequence[int], size: int) -> list[list[int]]:
    """Splits parameters into reduce buckets: one is full when the next parameter would exceed `size` elements."""
    buckets: list[list[int]] = []
    bucket: list[int] = []
    elements = 0
    for param in order:
        if bucket and elements + numel[param] > size:
            buckets.append(bucket)
            bucket, elements = [], 0
        bucket.append(param)
        elements += numel[param]
    if bucket:
        buckets.append(bucket)
    return buckets
