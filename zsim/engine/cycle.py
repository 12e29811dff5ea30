"""Whether a micro-step of a step is the same as the one before it, so that more of them would only add its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zsim.engine.lanes import INFINITY, Rank
from zsim.engine.steady import SAME

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation

FIRST = 1  # step; 0 is what comes before training


def cycle(simulation: Simulation, micro: int) -> float | None:
    """Seconds by which micro-step `micro` (from 0) of the steady step comes after the one before it.

    None if the two are not the same, or differ in the first step, whose time is reported as well.
    """
    step = simulation.steady
    if step is None:
        return None
    lengths = [_shift(rank, step, micro) for rank in simulation.ranks]
    longest = max((length for length in lengths if length is not None), default=0.0)
    if any(length is None or longest - length > SAME * longest for length in lengths):
        return None
    return longest if all(_shifted(rank, FIRST, micro) is not None for rank in simulation.ranks) else None


def _shift(rank: Rank, step: int, micro: int) -> float | None:
    """How much later everything is, and would be in any further micro-step."""
    found = _shifted(rank, step, micro)
    if (
        found is None
        or _still_running(rank, step, found[1])
        or not _host_does_not_matter(rank, step, found[1], found[0])
    ):
        return None
    return found[0]


def _shifted(rank: Rank, step: int, micro: int) -> tuple[float, Sequence[tuple[int, int]]] | None:
    """How much later everything is, and the pairs of ops; None if it is not the same for all."""
    base, ops = rank.bases[step], rank.codes[step].ops
    before, after = ([base + place for place, op in enumerate(ops) if op.micro == m] for m in (micro - 1, micro))
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if rank.end[a] < INFINITY]  # not those of the host
    if len(before) != len(after) or not pairs:
        return None
    shift = rank.end[pairs[-1][1]] - rank.end[pairs[-1][0]]
    for column in (rank.start, rank.end):
        if any(abs(column[b] - column[a] - shift) > SAME * shift for a, b in pairs):
            return None
    return shift, pairs


def _still_running(rank: Rank, step: int, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether something from before both micro-steps outlasts them: what waits for it would wait less with more of
    them."""
    begun = rank.end[rank.bases[max(step - 1, 0)] : pairs[0][0]]
    return max((end for end in begun if end < INFINITY), default=0.0) > max(rank.end[after] for _, after in pairs)


def _host_does_not_matter(rank: Rank, step: int, pairs: Sequence[tuple[int, int]], shift: float) -> bool:
    """Whether with more micro-steps, too, the host issues in time what it issues in time here, and nothing earlier.

    If it needs longer for a micro-step than the device, it lives on a lead that will end. If it needs less, it is the
    further ahead the more micro-steps there are: then nothing behind them, and nothing at the start of the next step,
    may have begun as soon as it was issued, until the host next waits for the device.
    """
    gains = [shift - (rank.issued[after] - rank.issued[before]) for before, after in pairs]
    if min(gains) < -SAME * shift:
        return False
    if max(gains) <= SAME * shift:
        return True
    base, segments, clocks = rank.bases[step], rank.codes[step].segments, rank.clocks[step]
    behind = pairs[-1][1] + 1
    for first, stop in ((behind, base + len(rank.codes[step].ops)), (base, behind)):
        for number, segment in enumerate(segments):
            ops = range(max(first, base + segment.first), min(stop, base + segment.stop))
            if any(rank.start[op] <= rank.issued[op] for op in ops):
                return False
            ends = clocks[number] + segment.seconds
            if first <= base + segment.stop <= stop and number + 1 < len(clocks) and clocks[number + 1] > ends:
                return True
    return True
