"""A Program on a device without streams: on a CPU the issuing thread itself runs the kernels.

What a GPU would do on side streams happens in the order of issue, and the thread blocks in every collective but those
that the framework starts with `async_op=True` (gloo's worker threads then carry them, and `Work.wait` is where others
wait for them): DDP's buckets (torch 2.13 reducer.cpp, `run_allreduce_hook`) and the parameters that ZeRO-3 gathers
(DeepSpeed 0.19.8 partition_parameters.py, `_dist_allgather_fn`). FSDP's gathers and reductions are blocking calls that
only streams make overlap (torch 2.13 _fsdp_collectives.py), and so are ZeRO's reductions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan
from zsim.program.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    Collective,
    Compute,
    HostWait,
    Instruction,
    Launch,
    Program,
)


def serial(program: Program, plan: AnyPlan) -> Program:
    """What `program` is on CPUs. Op ids stay; a program that is serial already comes back equal."""
    background = _background(plan)
    made: dict[int, tuple[Instruction, ...]] = {}
    for step in program.steps:
        made.setdefault(id(step), tuple(_serial(step, background)))
    return replace(program, steps=tuple(made[id(step)] for step in program.steps))


def _background(plan: AnyPlan) -> Collection[str]:
    """Lanes whose collectives the framework starts and does not wait for."""
    if isinstance(plan, DdpPlan):
        return (ALL_REDUCE,)
    return (ALL_GATHER,) if isinstance(plan, DeepSpeedPlan) and plan.stage == 3 else ()


def _serial(step: Sequence[Instruction], background: Collection[str]) -> Iterator[Instruction]:
    for instruction, following in zip(step, [*step[1:], None], strict=True):
        op = instruction.op if isinstance(instruction, Launch) else None
        foreground = op is not None and (
            isinstance(op.work, Compute) or (isinstance(op.work, Collective) and op.lane not in background)
        )
        if op is None or not foreground:
            yield instruction
            continue
        yield Launch(op._replace(lane=COMPUTE))
        if following != HostWait(op.id):
            yield HostWait(op.id)
