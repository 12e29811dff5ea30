"""When a run may stop: its step is one that would repeat for ever, or has just repeated the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.engine.simulator import Simulation

SAME = 1e-9  # relative difference below which two steps are the same


def repeats(simulation: Simulation, step: int) -> bool:
    """Will the next step be the same? Surely if this one began and ended with all devices idle."""
    if simulation.instructions(step) is not simulation.program.steps[-1]:
        return False
    spans = []
    for ends, hosts in zip(simulation.step_ends, simulation.host_ends, strict=True):
        if ends[step - 1] > hosts[step - 1] or ends[step] > hosts[step]:
            return False
        spans.append(hosts[step] - hosts[step - 1])
    return max(spans) - min(spans) <= SAME * max(spans)  # else the ranks' hosts drift apart


def repeated(simulation: Simulation, step: int) -> bool:
    """Was this step the same as the one before, on every rank, op by op?"""
    if simulation.instructions(step - 1) is not simulation.program.steps[-1]:
        return False
    for rank, ends, hosts in zip(simulation.ranks, simulation.step_ends, simulation.host_ends, strict=True):
        shift = ends[step - 1] - ends[step - 2]
        tolerance = SAME * shift
        if abs(ends[step] - ends[step - 1] - shift) > tolerance:
            return False
        if hosts[step] - hosts[step - 1] > shift + tolerance:
            return False  # a host slower than its device still lives on a lead
        first, second = rank.bases[step - 1 : step + 1]
        count = second - first
        for column in (rank.start, rank.end):
            earlier, later = column[first : first + count], column[second : second + count]
            # Host ops have no times in the columns: inf - inf is nan, which no comparison finds.
            if any(abs(b - a - shift) > tolerance for a, b in zip(earlier, later, strict=True)):
                return False
    return True
