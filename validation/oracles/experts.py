"""Expert parallelism as DeepSpeed's AutoEP makes it of a Hugging Face model, for `engines.run_deepspeed`.

Two of its kernels are Triton's, for GPUs only: SwiGLU (0.19.8, ops/triton_ops/swiglu_triton.py) and the gather of rows
with padding (moe/ep_kernels.py). Here they are plain torch of the same shapes and types, inside the same autograd
functions. The router deals tokens out in turn instead of by score: what travels is then the same in every run, and as
much to each rank.
"""

from __future__ import annotations

from typing import Any

import torch


class SwiGlu(torch.autograd.Function):
    """_SwiGLUFn: saves both inputs, makes one tensor forward and two backward."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        return _untracked(lambda: torch.nn.functional.silu(gate) * up, out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        sigmoid = torch.sigmoid
        _untracked(lambda: gradient * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))), grad_gate)
        _untracked(lambda: gradient * torch.nn.functional.silu(gate), grad_up)
        return grad_gate, grad_up


def _untracked(compute: Any, out: torch.Tensor) -> torch.Tensor:
    """What a kernel holds in registers is no tensor to a watcher."""
    with torch.utils._python_dispatch._disable_current_modes():
        out.copy_(compute())
    return out


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """ep_kernels.gather_rows: zeros where the index is outside."""
    out = torch.empty((index.numel(), rows.shape[1]), dtype=rows.dtype)
    inside = (index >= 0) & (index < rows.shape[0])
    return _untracked(lambda: rows[index.clamp(0, rows.shape[0] - 1).long()] * inside[:, None], out)


class _Torch:
    """torch, but for the choice of experts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def topk(scores: torch.Tensor, k: int, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(scores, k, **arguments)
        chosen = torch.arange(indices.numel()).reshape(indices.shape) % scores.shape[1]
        return values, indices.copy_(chosen)


def install() -> None:
    from deepspeed.moe import ep_kernels, ep_router
    from deepspeed.ops.triton_ops import swiglu_triton
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
    from transformers.utils.output_capturing import _CanRecordRegistry

    # DeepSpeed 0.19.8 takes it for a plain dict, which it no longer is in transformers 5.24: AutoEP fails there
    _CanRecordRegistry.get = _registered  # type: ignore[method-assign]
    # It goes through a set, whose order is that of addresses; which group is gathered first follows from it
    gather = Coordinator._PartitionedParameterCoordinator__all_gather_params_  # type: ignore[attr-defined]
    Coordinator._PartitionedParameterCoordinator__all_gather_params_ = (  # type: ignore[attr-defined]
        lambda self, params, *arguments, **named: gather(self, sorted(params, key=_number), *arguments, **named)
    )
    swiglu_triton.swiglu = SwiGlu.apply
    ep_kernels.gather_rows = gather_rows
    ep_kernels.permute_rows_supported = lambda rows: rows.dim() == 2
    ep_router.torch = _Torch()


def _number(parameter: Any) -> int:
    return int(parameter.ds_id)


def _registered(registry: dict[str, Any], model: Any, default: Any = None) -> Any:
    return dict.get(registry, model if isinstance(model, str) else str(model.__class__)) or default or {}
