"""Kernels over lists of tensors (`torch._foreach_*`, fused optimizers): bytes moved and launches."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from zsim.model.kernels import Memory

# ATen/native/cuda/MultiTensorApply.cuh (torch 2.13): tensors per launch by number of lists, blocks per launch,
# elements per block.
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
BLOCKS_PER_LAUNCH, BLOCK = 320, 65536


def launches(numels: Sequence[int], lists: int) -> int:
    blocks = sum(ceil(numel / BLOCK) for numel in numels)
    return max(ceil(len(numels) / TENSORS_PER_LAUNCH[lists]), ceil(blocks / BLOCKS_PER_LAUNCH), 1)


def foreach(label: str, numels: Sequence[int], read: float, write: float, lists: int = 2) -> Memory:
    """One multi-tensor kernel that reads `read` and writes `write` bytes per element, over `lists` tensor lists."""
    total = sum(numels)
    return Memory(label, read * total, write * total, launches(numels, lists))
