"""torch.autocast on a CPU with the operators that it runs in float32 on CUDA.

ATen/autocast_mode.h and .cpp of torch 2.13: both devices cast for the same matrix products and for attention. The CPU's
list of what runs in float32 has neither pow, rsqrt, softmax, log_softmax, sum, cumsum nor the norms; here their inputs
are cast as CUDA's list has it. A loss in float32 needs nothing: transformers casts the logits.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WIDE = {
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt, torch.exp, torch.Tensor.exp,
    torch.log, torch.Tensor.log, torch.softmax, torch.Tensor.softmax, functional.softmax, torch.log_softmax,
    functional.log_softmax, functional.layer_norm, torch.layer_norm, functional.rms_norm, torch.cumsum,
    torch.Tensor.cumsum, torch.sum, torch.Tensor.sum,
}  # fmt: skip


class Widened(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WIDE and torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(argument) for argument in args)
        return func(*args, **(kwargs or {}))


def _wide(argument: Any) -> Any:
    low = isinstance(argument, torch.Tensor) and argument.dtype in (torch.bfloat16, torch.float16)
    return argument.float() if low else argument


@contextlib.contextmanager
def _both(dtype: torch.dtype) -> Any:
    with torch.autocast("cpu", dtype), Widened():
        yield


def as_on_cuda(dtype: str | None) -> AbstractContextManager[Any]:
    """Around a forward; None: without autocast."""
    return _both(getattr(torch, dtype)) if dtype else contextlib.nullcontext()
