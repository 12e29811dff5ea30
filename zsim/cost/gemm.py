"""Matrix products: 2mnk FLOP at a share of the peak, less for shapes that leave tiles half empty or are shallow.

Waves of tiles over the SMs are left out on purpose: on 120 measured products (A100, A40, H100, B200) and on the
training runs of validation/published they do not lower the error; libraries choose tiles and split k to avoid them.
"""

from __future__ import annotations

from math import ceil

from zsim.cost.profile import GemmCost
from zsim.model.kernels import Gemm


def seconds(gemm: Gemm, cost: GemmCost, peak: float) -> float:
    """Time of the arithmetic alone. `peak` is the device's dense FLOP/s for the dtype.

    The output is cut into square tiles, computed whole even where they stick out; each pays for filling its pipeline
    and writing its result as much as for `depth` elements of k.
    """
    if gemm.float8:
        cost = cost.of_float8(gemm.float8)
    tiles = ceil(gemm.m / cost.tile) * ceil(gemm.n / cost.tile) * gemm.batch
    work = tiles * 2.0 * cost.tile**2 * (gemm.k + cost.depth)
    return work / (peak * cost.efficiency * (cost.unaligned if gemm.unaligned else 1.0))
