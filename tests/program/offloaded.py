"""A small model with its states outside the GPU, and what a Program of it moves, holds and computes there."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from zsim.model.architecture import Architecture, LayerKind
from zsim.model.huggingface import from_architecture
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import CPU, Alloc, Copy, CpuWork, Free, Launch, Program

WORLD = 2
WORKLOAD = Workload(1, 16)
MODEL = from_architecture(
    "small",
    Architecture(
        family="llama", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
        kinds=(LayerKind(),) * 4, tied=False,
    ),
)  # fmt: skip
OWNED = sum(ceil(parameter.numel / WORLD) for parameter in MODEL.parameters)  # elements of one rank's shards


def program(model: ModelSpec = MODEL, workload: Workload = WORKLOAD, **options) -> Program:
    plan = DeepSpeedPlan(
        world_size=WORLD, stage=3, optimizer=Optimizer(impl="cpu"), sub_group_size=20_000, **options
    )  # fmt: skip
    return lower(model, trace(model, workload), plan, workload)


def moved(program: Program, step: int = -1) -> dict[tuple[str, str], float]:
    """Bytes by (direction, phase) in one step."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for instruction in program.steps[step]:
        if isinstance(instruction, Launch) and isinstance(instruction.op.work, Copy):
            total[instruction.op.work.direction, instruction.op.phase] += instruction.op.work.nbytes
    return total


def held(program: Program, device: str, until: int = 1) -> dict[str, int]:
    """Bytes by category after initialization and the first steps."""
    live: dict[str, Alloc] = {}
    for part in (program.init, *program.steps[:until]):
        for instruction in part:
            if isinstance(instruction, Alloc):
                live[instruction.key] = instruction
            elif isinstance(instruction, Free):
                live.pop(instruction.key)
    total: dict[str, int] = defaultdict(int)
    for alloc in live.values():
        if alloc.device == device:
            total[alloc.category] += alloc.nbytes
    return total


def adam(program: Program) -> int:
    """Parameters that the CPU's optimizer updates in a step."""
    works = [i.op.work for i in program.steps[-1] if isinstance(i, Launch) and i.op.lane == CPU]
    return sum(work.numel for work in works if isinstance(work, CpuWork) and work.label == "adamw")


def work(program: Program, label: str) -> float:
    """Bytes that the CPU moves in a step's ops of that name."""
    works = [i.op.work for i in program.steps[-1] if isinstance(i, Launch) and i.op.lane == CPU]
    return sum(work.nbytes for work in works if isinstance(work, CpuWork) and work.label == label)
