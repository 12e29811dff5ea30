"""Programs of DeepSpeed for a small model, and what their tests count in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.program.sound import CONFIG
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.program.ops import (
    Alloc,
    Collective,
    Free,
    Instruction,
    Launch,
    Op,
    Program,
)

PASSING = ("flat:", "grad:", "bucket 0")  # keys of what no step leaves behind
SMALL = {
    "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 15_000, "stage3_param_persistence_threshold": 100,
}  # fmt: skip


@cache
def model_and_tree(checkpointing: str = "none") -> tuple[ModelSpec, Module, Workload]:
    model = from_config(CONFIG, "tiny")
    workload = Workload(1, 16, checkpointing=checkpointing)
    return model, trace(model, workload), workload


def program_of(stage: int, steps: int = 4, checkpointing: str = "none", **changes: Any) -> Program:
    model, tree, workload = model_and_tree(checkpointing)
    plan = DeepSpeedPlan(stage=stage, **{"world_size": 4} | SMALL | changes)
    return lower(model, tree, plan, workload, steps)


def ops(instructions: Sequence[Instruction], lane: str | None = None) -> list[Op]:
    found = [instruction.op for instruction in instructions if isinstance(instruction, Launch)]
    return [op for op in found if lane is None or op.lane == lane]


def calls(instructions: Sequence[Instruction], *phases: str) -> list[Collective]:
    return [op.work for op in ops(instructions) if isinstance(op.work, Collective) and op.phase in phases]


def modules(module: Module) -> list[tuple[str, Module]]:
    inner = [pair for item in module.body if isinstance(item, Module) for pair in modules(item)]
    return [(module.name, module), *inner]


def state_bytes(program: Program, device: str = "gpu") -> Counter[str]:
    """What stays allocated after the last step, by category."""
    held: dict[str, tuple[str, int]] = {}
    for instructions in (program.init, *program.steps):
        for instruction in instructions:
            if isinstance(instruction, Alloc) and instruction.device == device:
                held[instruction.key] = instruction.category, instruction.nbytes
            elif isinstance(instruction, Free):
                held.pop(instruction.key, None)
    found: Counter[str] = Counter()
    for category, nbytes in held.values():
        found[category] += nbytes
    return found
