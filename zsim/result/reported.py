"""How far to trust what zsim says.

The verdict on GPU memory: what became of the runs of which zsim says the same, as users reported them. Counted over
the reports of validation/cases whose settings are full; validation/REPORT.md has the same sums by set. Half of those
reports are there because something ran out, so that the shares are not those of all runs.

The step time: how far off it was of published runs that nothing of zsim had been looked at with.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.result.spec import Result

MARGIN = 0.05  # of a GPU's memory, to be left free: about what predictions of reserved memory are off by (REPORT.md)
FULL = 0.8  # of the capacity, allocated and outside the allocator: above it most of the tight runs ran out


@dataclass(frozen=True, slots=True)
class Record:
    """Of `runs` that users reported and of which zsim `says` so, `ran_out` ran out of GPU memory.

    "tight": the allocator had to give cached memory back. "allocated": with what lies outside the allocator.
    """

    says: str
    runs: int
    ran_out: int


FITS = Record("fits", 339, 17)
CLOSE = Record(f"fits, less than {MARGIN:.0%} free", 20, 4)
TIGHT = Record(f"fits, tight, less than {FULL:.0%} allocated", 34, 10)
BARELY = Record(f"fits, tight, {FULL:.0%} or more allocated", 44, 27)
OUT = Record("does not fit", 178, 161)
RECORDS = (FITS, CLOSE, TIGHT, BARELY, OUT)


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """Of `runs` predicted once, before anything was learned from them: errors of the step time in percent."""

    runs: int
    mape: float
    median: float


NEVER_SEEN = FirstSeen(396, 21.1, 14.1)  # the seven rounds of validation/published/*holdout, their blind.yaml


def record(result: Result) -> Record | None:
    """The runs that are like this one; None off a CUDA or ROCm device, of which nobody reported."""
    gpu = result.gpu
    if result.setup.cluster.devices[gpu.peak_rank].vendor.lower() not in ("nvidia", "amd"):
        return None
    if not gpu.fits:
        return OUT
    if not gpu.allocator_retries:
        return CLOSE if gpu.headroom_bytes < MARGIN * gpu.capacity_bytes else FITS
    return BARELY if gpu.without_cache_bytes >= FULL * gpu.capacity_bytes else TIGHT
