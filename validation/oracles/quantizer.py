"""DeepSpeed's quantizer module in plain torch, which it has for GPUs only: ZeRO++ then runs on gloo ranks.

Shapes, types and layout are those of the CUDA kernels (0.19.8, csrc/quantization: pt_binding.cpp, swizzled_quantize.cu,
quant_reduce.cu): int8, two values a byte in 4 bits, one float32 scale per group; float16 comes back. Only the scales
are [groups] rather than [groups, 1], which gloo would not gather into a flat buffer. Groups that do not divide the
tensor are read as the kernels do, which give each the same whole number of elements and forget the rest.
"""

from __future__ import annotations

from typing import Any

import torch


class Quantizer:
    """Stands where `QuantizerBuilder().load()` would."""

    Symmetric = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
        shape = list(values.shape)
        shape[-1] //= 8 // bits
        packed, scales = _quantize(values.flatten(), groups, bits)
        return [packed.reshape(shape), scales]

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        shape = list(packed.shape)
        shape[-1] *= 8 // bits
        return _dequantize(packed.flatten(), scales, bits).reshape(shape)

    def swizzle_quant(
        self, values: torch.Tensor, groups: int, bits: int, kind: int, pipelining: int, nodes: int, local: int
    ) -> list[torch.Tensor]:
        """Partitions in the order of their ranks within a node, then of nodes: what each neighbour is to get."""
        parts = values.reshape(nodes, local, -1).transpose(0, 1)
        return list(_quantize(parts.flatten(), groups, bits))

    def quantized_reduction(
        self, packed: torch.Tensor, scales: torch.Tensor, groups: int, out_groups: int, bits: int, kind: int, local: int
    ) -> list[torch.Tensor]:
        total = _dequantize(packed.flatten(), scales, bits).reshape(local, -1).float().sum(0)
        return list(_quantize(total, out_groups, bits))


def _quantize(values: torch.Tensor, groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = 2 ** (bits - 1) - 1
    size = values.numel() // groups
    # frozen weights are quantized before they are filled: what the memory holds need not be a number
    grouped = values[: size * groups].reshape(groups, size).float().nan_to_num(0.0, 0.0, 0.0)
    scales = grouped.abs().amax(1, keepdim=True).clamp_min(1e-12) / top
    whole = torch.zeros(values.numel(), dtype=torch.int8)
    whole[: size * groups] = (grouped / scales).round().clamp(-top - 1, top).to(torch.int8).flatten()
    if bits == 4:
        whole = (whole[0::2] & 15) | (whole[1::2] << 4)
    return whole, scales.flatten()


def _dequantize(packed: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        low, high = (packed << 4) >> 4, packed >> 4
        packed = torch.stack((low, high), 1).flatten()
    size = packed.numel() // scales.numel()
    values = torch.zeros(packed.numel(), dtype=torch.float16)
    used = size * scales.numel()
    values[:used] = (packed[:used].reshape(scales.numel(), size).float() * scales.reshape(-1, 1)).half().flatten()
    return values


class Empty(Quantizer):
    """Allocates what the kernels return and nothing else, as they do on a GPU: for counts of memory."""

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
        return [torch.zeros(values.numel() * bits // 8, dtype=torch.int8), torch.zeros(groups)]

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        shape = list(packed.shape)
        shape[-1] *= 8 // bits
        return torch.zeros(shape, dtype=torch.float16)

    def swizzle_quant(
        self, values: torch.Tensor, groups: int, bits: int, kind: int, pipelining: int, nodes: int, local: int
    ) -> list[torch.Tensor]:
        return self.quantize(values, groups, bits, kind)

    def quantized_reduction(
        self, packed: torch.Tensor, scales: torch.Tensor, groups: int, out_groups: int, bits: int, kind: int, local: int
    ) -> list[torch.Tensor]:
        return [torch.zeros(packed.numel() // local, dtype=torch.int8), torch.zeros(out_groups)]


def install(module: Any = None) -> None:
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    module = module or Quantizer()
    CUDAQuantizer.quantizer_cuda_module = module
    coalesced_collectives.quantizer_module = module
