"""Matrix products: 2mnk FLOP at a share of the peak, less for shapes that leave tiles or SMs half empty."""

from __future__ import annotations

from math import ceil

from zsim.cost.profile import GemmCost
from zsim.model.kernels import Gemm


def seconds(gemm: Gemm, cost: GemmCost, peak: float, sm_count: int | None) -> float:
    """Time of the arithmetic alone. `peak` is the device's dense FLOP/s for the dtype.

    The output is cut into tiles of `tile_m` x `tile_n`, one SM each; a last wave that fills a few SMs costs as much
    as a full one, unless k is deep enough to be split between SMs.
    """
    rows, columns = ceil(gemm.m / cost.tile_m), ceil(gemm.n / cost.tile_n)
    tiles = rows * columns * gemm.batch
    per_tile = 2.0 * cost.tile_m * cost.tile_n * (gemm.k + cost.depth)
    work = tiles * per_tile
    if cost.waves and sm_count:
        work = waves(tiles, sm_count, gemm.k) * sm_count * per_tile
    return work / (peak * cost.efficiency)


def waves(tiles: int, sm_count: int, k: int) -> float:
    """Full waves of tiles, the last one split along k into up to k / 256 parts where that fills idle SMs."""
    full, rest = divmod(tiles, sm_count)
    if not rest:
        return float(full)
    split = max(1, min(sm_count // rest, k // 256))
    return full + 1.0 / split
