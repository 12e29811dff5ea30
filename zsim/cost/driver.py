"""CUDA's driver, where PyTorch's allocator gives memory back and fetches it again.

The figures are medians of validation/measured/driver_memory.csv, of pages of expandable segments on one card of 80 GB.
PyTorch says the same of them: the cost is proportional to their number (pull request 96995). Plain segments are left
out: cudaFree and cudaMalloc take 0.3 ms per GiB by the same file, pages 7. What the driver
takes to zero the memory in between is left out for both: one wait was measured, 17 ms per GiB of the block that could
not be had before, but runs of llm-foundry that give segments back, by prediction, are as fast as if they did not.
"""

from __future__ import annotations

UNMAP_S = 62e-6  # a page: cuMemUnmap, cuMemRelease
MAP_S = 79e-6  # cuMemCreate, cuMemMap, cuMemSetAccess


def remap_seconds(pages: int) -> float:
    """Seconds to unmap `pages` and map as many later."""
    return pages * (UNMAP_S + MAP_S)
