"""Of many micro-steps only a few are simulated.

Those in the middle of a step issue the same; once two in a row have run the same, op by op, on every rank, each further
one does, and only adds its own length (`engine.cycle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zsim.plan.spec import AnyPlan, DeepSpeedPlan
from zsim.scenario import Setup

# Micro-steps simulated: the last two before the very last are compared. What the first one leaves behind may reach into
# the second: where `_reaches_over`, one more is simulated at once. If that was not enough, two more
# are, or six: a host about as fast as its device takes some to fall into step with it.
SHOWN = 4


def shortened(setup: Setup) -> Iterator[tuple[Setup, int]]:
    """The setup with few micro-steps, and how many more there are in the middle; at last with all."""
    accumulated, least = setup.plan.grad_accum, SHOWN + _reaches_over(setup.plan)
    if setup.workload.sequence_parallel_size > 1:  # samples are dealt out in some micro-steps only
        least = accumulated
    for shown in (*(shown for shown in (least, least + 2, least + 6) if shown < accumulated), accumulated):
        yield replace(setup, plan=replace(setup.plan, grad_accum=shown)), accumulated - shown


def compared(few: Setup) -> int:
    """The micro-step, from 0, that is held against the one before it."""
    return few.plan.grad_accum - 2


def _reaches_over(plan: AnyPlan) -> bool:
    """Whether a micro-step ends amid ZeRO-2's reductions, or with parameters of ZeRO-3 on their way; the second one of
    its first step still compares the trace."""
    return isinstance(plan, DeepSpeedPlan) and plan.stage >= 2
