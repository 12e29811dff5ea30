"""Fused attention: the FLOPs a good kernel really does, at the share of the peak its implementation reaches."""

from __future__ import annotations

from zsim.cluster.spec import Device
from zsim.cost.profile import AttentionCost
from zsim.model.kernels import Attention


def seconds(kernel: Attention, cost: AttentionCost, peak: float) -> float:
    """Time of the arithmetic alone, from the FLOPs of the square that are not masked away."""
    efficiency = cost.backward if kernel.backward else cost.forward
    if kernel.head_dim <= 64:
        efficiency *= cost.small_head
    share = visible_share(kernel, cost.causal_tile) + cost.depth / kernel.kv_len
    return kernel.flops * share / (peak * efficiency)


# Where torch's SDPA takes cuDNN's kernel first.
_CUDNN_FIRST = ("9.0", "10.0", "10.3")


def implementation(kernel: Attention, device: Device) -> str:
    """The kernel that `kernel.impl`, what was asked for, runs as on `device`.

    torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `check_prefer_cudnn_attention` (with cuDNN 9.15.1,
    which the wheels for CUDA 13 bring; the older ones for CUDA 12 stay with FlashAttention), `check_flash_attention_
    hardware_support`, after which SDPA takes its memory-efficient kernel; `check_cudnn_tensor_shapes` and `check_head_
    dim_size_flash` for heads of values that are not as wide as those of queries (DeepSeek).
    """
    asked, value_dim = kernel.impl, kernel.value_dim or kernel.head_dim
    if device.without_flash and asked in ("sdpa", "flash", "masked"):
        return "efficient"
    cudnn = device.compute_capability in _CUDNN_FIRST
    if asked == "masked":  # `can_use_cudnn_attention` asks for the shape of a mask alone
        return "cudnn" if cudnn and max(kernel.head_dim, value_dim) <= 128 else "efficient"
    if asked != "sdpa":
        return asked
    if value_dim == kernel.head_dim:
        return "cudnn" if cudnn else "flash"
    fits = max(kernel.head_dim, value_dim) <= 128 or (kernel.head_dim, value_dim) == (192, 128)
    return "cudnn" if cudnn and fits else "efficient"


def visible_share(kernel: Attention, tile: int) -> float:
    """Share of the q x k square in blocks that hold at least one unmasked score."""
    if not kernel.causal and kernel.window is None:
        return 1.0
    visible = kernel.kv_len / 2 if kernel.causal else float(kernel.kv_len)
    if kernel.window is not None and kernel.window < kernel.kv_len:
        window = float(kernel.window)
        # Rows before the window is full see a triangle, the rest a band.
        visible = window - window * window / (2 * kernel.kv_len) if kernel.causal else 2 * window
    return min(1.0, (visible + tile / 2) / kernel.kv_len)
