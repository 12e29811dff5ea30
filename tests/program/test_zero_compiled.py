"""When ZeRO-1 and ZeRO-2 reduce the gradients of a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.program.sound import sound
from tests.program.zero_programs import PASSING, SMALL, calls, model_and_tree
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Collective, Free, Instruction, Launch, Program

WHOLE: dict[str, Any] = {"compile": True, "attention": "sdpa"}
BROKEN: dict[str, Any] = {"compile": True, "attention": "flash"}  # transformers' reads the positions of one sequence


def compiled(stage: int, **changes: Any) -> Program:
    model, _, workload = model_and_tree()
    workload = replace(workload, **changes)
    plan = DeepSpeedPlan(stage=stage, world_size=4, overlap_comm=True, **SMALL)
    return lower(model, trace(model, workload), plan, workload, 4)


def products_after_first_reduction(step: Sequence[Instruction]) -> int:
    """Kernels of layers that the backward still has to launch when gradients are reduced first."""
    backward = [i.op for i in step if isinstance(i, Launch) and i.op.phase == "backward"]
    first = next(at for at, op in enumerate(backward) if isinstance(op.work, Collective))
    return sum(op.module != "" and not isinstance(op.work, Collective) for op in backward[first:])


def gradients_held(step: Sequence[Instruction]) -> int:
    """The most parameters that have a gradient of their own at a time."""
    held: set[str] = set()
    most = 0
    for instruction in step:
        if isinstance(instruction, Alloc) and instruction.category == "gradients":
            held.add(instruction.key)
        elif isinstance(instruction, Free):
            held.discard(instruction.key)
        most = max(most, len(held))
    return most


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_compiled_whole_hands_over_its_gradients_after_its_backward(stage: int, checkpointing: str):
    """Seen with torch 2.13: one node of autograd, checkpointed or not, and the hooks of all parameters after it."""
    eager = compiled(stage, attention="sdpa", checkpointing=checkpointing)
    program = compiled(stage, **WHOLE, checkpointing=checkpointing)
    sound(program, *PASSING)
    assert products_after_first_reduction(eager.steps[2]) > 0
    assert products_after_first_reduction(program.steps[2]) == 0
    trained = sum(parameter.trainable for parameter in model_and_tree()[0].parameters)
    assert gradients_held(eager.steps[2]) < gradients_held(program.steps[2]) == trained
    assert sum(c.in_numel for c in calls(program.steps[2], "backward")) == sum(
        c.in_numel for c in calls(eager.steps[2], "backward")
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_a_break_in_each_block_hands_them_over_block_by_block(stage: int):
    assert products_after_first_reduction(compiled(stage, **BROKEN).steps[2]) > 0
