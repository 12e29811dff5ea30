"""Of many micro-steps only a few are simulated.

Those in the middle of a step issue the same; once two in a row have run the same, op by op, on every rank, each further
one does, and only adds its own length (`engine.cycle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zsim.engine.allocator import CachingAllocator, Replay
from zsim.plan.spec import AnyPlan, DeepSpeedPlan
from zsim.result.memory import served
from zsim.scenario import Setup

if TYPE_CHECKING:
    from zsim.result.spec import Result

# Micro-steps simulated: the last two before the very last are compared. What the first one leaves behind may reach into
# the second: where `_reaches_over`, one more is simulated at once. If that was not enough, two more are.
SHOWN = 4


def shortened(setup: Setup) -> Iterator[tuple[Setup, int]]:
    """The setup with few micro-steps, and how many more there are in the middle; at last with all."""
    accumulated, least = setup.plan.grad_accum, SHOWN + _reaches_over(setup.plan)
    if setup.workload.sequence_parallel_size > 1:  # samples are dealt out in some micro-steps only
        least = accumulated
    for shown in (*(shown for shown in (least, least + 2) if shown < accumulated), accumulated):
        yield replace(setup, plan=replace(setup.plan, grad_accum=shown)), accumulated - shown


def compared(few: Setup) -> int:
    """The micro-step, from 0, that is held against the one before it."""
    return few.plan.grad_accum - 2


def _reaches_over(plan: AnyPlan) -> bool:
    """Whether a micro-step ends amid ZeRO-2's reductions, or with parameters of ZeRO-3 on their way; the second one of
    its first step still compares the trace."""
    return isinstance(plan, DeepSpeedPlan) and plan.stage >= 2


def memory_repeats(result: Result, micro: int) -> bool:
    """Whether micro-step `micro` of every step leaves cached blocks of the sizes that it found, wherever they lie:
    equal segments take turns. Else they fall apart or come together further, and more may reserve more.
    """
    return all(_blocks_stay(result, ranks[0], micro) for ranks in result.timeline.rank_classes)


def _blocks_stay(result: Result, rank: int, micro: int) -> bool:
    timeline = result.timeline
    micro_of = {(record.step, record.op.id): record.op.micro for record in timeline.ops if record.rank == rank}
    events = [event for event in timeline.memory if event.rank == rank and event.device == "gpu"]
    begins: dict[tuple[int, int], int] = {}  # by step and micro-step: its first event
    for position, event in enumerate(events):
        if event.step > 0 and event.op is not None:
            begins.setdefault((event.step, micro_of[event.step, event.op]), position)
    allocator = served(result, CachingAllocator)
    replay, done = Replay(allocator), 0
    for step in sorted({step for step, _ in begins}):
        found = []
        for number in (micro, micro + 1):
            if (step, number) in begins:
                replay.run(events[done : begins[step, number]])
                found.append(allocator.cached())
                done = begins[step, number]
        if any(cached != found[0] for cached in found):
            return False
    return True
