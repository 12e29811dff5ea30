"""Holds the memory of saving and resuming against real runs (`validation.oracles.saving`), rank by rank.

Beside the bytes that training holds on the device, as recorded, which other oracles check. Of reading a checkpoint
the host's alone: the recorded runs read what they have just written, and have states already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.plan.spec import AnyPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Saving
from zsim.program.lower import lower
from zsim.program.ops import RANK_0, Alloc, Free, Program
from zsim.program.saving import RESUMING, STATES, WEIGHTS, Moment, moments
from zsim.validation.memory import MIB, Line, Outcome
from zsim.validation.recording import plan_of, setup
from zsim.validation.sequences import reason
from zsim.validation.storage import read

DEVICE, HOST = "device peak", "host peak"
# What the recorder calls the parts of a moment.
PARTS = {
    WEIGHTS: ("gather", "model"),
    STATES: ("save_checkpoint", "optimizer"),
    RESUMING: ("load_checkpoint", "load model", "load optimizer"),
}


def compare(path: Path) -> Outcome:
    """Raises InputError on a file that `validation.oracles.saving` has not written."""
    header, rows = read(path)
    try:
        plan = _plan(header)
        model, tree, workload = setup(header)
        program = lower(model, tree, plan, workload, steps=2)
    except InputError as error:
        return Outcome(path, header["name"], refused=reason(error))
    found = list(moments(model, tree, plan))
    held = _between_steps(program)
    lines = [line for rank in range(header["world"]) for line in _lines(plan, found, held, rows, rank)]
    return Outcome(path, header["name"], tuple(lines))


def _plan(header: Mapping[str, Any]) -> AnyPlan:
    config = header["config"]
    plan, saving = plan_of(header), Saving(resume=True)
    if isinstance(plan, DeepSpeedPlan):
        return replace(plan, saving=saving)
    kind = f"{config['kind']}_STATE_DICT"
    if isinstance(plan, Fsdp1Plan):
        on_gpu = config.get("on_gpu", False)
        return replace(plan, saving=saving, state_dict_type=kind, state_dict_offload_to_cpu=not on_gpu)
    assert isinstance(plan, Fsdp2Plan)
    return replace(plan, saving=saving, state_dict_type=kind)


def _between_steps(program: Program) -> dict[str, int]:
    """Bytes on the GPU by category, when the second step is over."""
    live: dict[str, Alloc] = {}
    for instructions in (program.init, *program.steps):
        for instruction in instructions:
            if isinstance(instruction, Alloc):
                live[instruction.key] = instruction
            elif isinstance(instruction, Free):
                del live[instruction.key]
    held: dict[str, int] = {}
    for alloc in live.values():
        if alloc.device == "gpu":
            held[alloc.category] = held.get(alloc.category, 0) + alloc.nbytes
    return held


def _lines(
    plan: AnyPlan, found: Sequence[Moment], held: Mapping[str, int], rows: Sequence[Mapping[str, Any]], rank: int
) -> Iterator[Line]:
    for moment in found:
        own = [row for row in rows if row["rank"] == rank and row["moment"] in PARTS[moment.name]]
        if not own:
            continue
        device, host = (_peak(moment, where, rank) for where in ("gpu", "host"))
        first = own[0]["before"][0]
        where = f"{moment.name}, rank {rank}"
        recorded = max(_host(plan, row) for row in own)
        # a few kilobytes of what ranks tell each other are no tensors of the model: against all that a rank holds
        beside = first if max(host, recorded) < MIB else 0
        yield Line(where, HOST, beside + host, beside + recorded)
        if moment.name != RESUMING:
            # what is dropped is gone when the first moment is over
            dropped = sum(held.get(category, 0) for category in moment.drops) if moment.name == WEIGHTS else 0
            yield Line(where, DEVICE, first + max(0, device - dropped), own[0]["peak"][0])


def _host(plan: AnyPlan, row: Mapping[str, Any]) -> int:
    """With what `torch.save` copies there. Of DeepSpeed's two files the weights', which not every rank writes, is the
    one beside which frozen weights are held; offloaded states, which are there already, are the device's to a CPU."""
    made, copied = row["peak"][1], [largest for largest, _ in row["saved"]]
    if not isinstance(plan, DeepSpeedPlan) or row["moment"] != "save_checkpoint" or not copied:
        return int(made)
    weights, states = copied if len(copied) > 1 else [0, *copied]
    return int(max(made + weights, 0 if plan.offload_optimizer else states))


def _peak(moment: Moment, device: str, rank: int) -> int:
    live: dict[str, int] = {}
    level = peak = 0
    for instruction in moment.instructions:
        if isinstance(instruction, Alloc):
            elsewhere = instruction.device != device or (instruction.category == RANK_0 and rank > 0)
            live[instruction.key] = 0 if elsewhere else instruction.nbytes
            level += live[instruction.key]
            peak = max(peak, level)
        elif isinstance(instruction, Free):
            level -= live.pop(instruction.key)
    return peak
