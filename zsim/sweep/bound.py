"""What a step takes at least, of which only one micro-step has been simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zsim.cost.price import Price
from zsim.engine.network import fair_rates
from zsim.model.kernels import kernels_of
from zsim.model.spec import Module
from zsim.plan.spec import DeepSpeedPlan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.program.ops import (
    Collective,
    Compute,
    Copy,
    CpuWork,
    HostWait,
    HostWork,
    Instruction,
    Launch,
    Op,
    Program,
    Work,
)
from zsim.scenario import Setup


def bound(setup: Setup, single: float, program: Program, price: Price, rank: int) -> float:
    """Seconds that a step of `setup` takes at least, if one of `program`, its single micro-step, takes `single`.

    Each further micro-step runs its kernels on the compute lane, whatever else it waits for. ZeRO-3 gathers and reduces
    in each of them, too: while these collectives run, kernels are slower, or there are none. Where the host waits in
    each micro-step for additions on the CPU, its way through the step may be longer than all that.
    """
    plan = setup.plan
    more = plan.grad_accum - 1
    each = _kernels(setup.tree, price, rank)
    if more and isinstance(plan, DeepSpeedPlan) and plan.stage == 3:
        each += _held_up(program, price, rank)
    least = single + more * each
    # torch 2.13 _fsdp_collectives.py foreach_reduce: a blocking copy, and an addition, to a gradient that is there
    if more and isinstance(plan, Fsdp2Plan) and plan.cpu_offload:
        least = max(least, _way_of_host(setup, price, rank))
    return least


def _kernels(module: Module, price: Price, rank: int) -> float:
    seconds = 0.0
    for item in module.body:
        if isinstance(item, Module):
            seconds += _kernels(item, price, rank)
        else:
            for work in (item.forward, item.backward, item.recompute):
                seconds += price.compute_seconds(rank, Compute(kernels_of(work)))
    return seconds


def _held_up(program: Program, price: Price, rank: int) -> float:
    """Seconds that the collectives of a micro-step cost the compute lane: each second of them, what the kernels under
    it are slowed down by, or all of it where there are none. Those of one group never run at the same time.
    """
    busy: dict[str, float] = defaultdict(float)
    alone: dict[int, float] = {}  # by id of the work, which equal calls share
    slowdown = 1.0
    for op in _ops(program.steps[-1]):
        work = op.work
        if isinstance(work, Collective) and op.phase != "optimizer":
            if id(work) not in alone:
                alone[id(work)] = _alone(work, program, price, rank)
                slowdown = price.compute_slowdown([work])
            busy[work.group] += alone[id(work)]
    return max(busy.values(), default=0.0) * (1 - 1 / slowdown)


def _way_of_host(setup: Setup, price: Price, rank: int) -> float:
    """Through a step with up to three micro-steps, and through the one in the middle as often as there are more."""
    accumulated = setup.plan.grad_accum
    shown = min(accumulated, 3)
    program = lower(setup.model, setup.tree, replace(setup.plan, grad_accum=shown), setup.workload)
    step = program.steps[-1]
    seconds = host_seconds(step, program, price, rank)
    if accumulated > shown:
        seconds += (accumulated - shown) * host_seconds(_micro_step(step, 1), program, price, rank)
    return seconds


def host_seconds(instructions: Sequence[Instruction], program: Program, price: Price, rank: int) -> float:
    """How long the host needs for `instructions`, a stretch of `program`, if nothing ever stands in anything's way.

    Every op takes the time that it takes alone, every transfer has the network to itself, other ranks are never late,
    and what was issued before is over. That leaves the order on each lane, the waits between lanes, and the host's.
    """
    clock = 0.0
    end: dict[int, float] = {}
    lanes: dict[str, float] = {}
    for instruction in instructions:
        if isinstance(instruction, Launch):
            op, work = instruction.op, instruction.op.work
            if isinstance(work, HostWork):
                clock += price.host_seconds(work)
                continue
            clock += price.issue_seconds(op)
            start = max([clock, lanes.get(op.lane, 0.0), *(end.get(event, 0.0) for event in op.waits)])
            end[op.id] = lanes[op.lane] = start + _alone(work, program, price, rank)
        elif isinstance(instruction, HostWait):
            awaited = lanes.values() if instruction.op is None else [end.get(instruction.op, 0.0)]
            clock = max([clock, *awaited])
    return clock


def _alone(work: Work, program: Program, price: Price, rank: int) -> float:
    if isinstance(work, Compute):
        return price.compute_seconds(rank, work)
    if isinstance(work, CpuWork):
        return price.cpu_seconds(rank, work)
    assert isinstance(work, Collective | Copy)
    groups = ((rank,),) if isinstance(work, Copy) else program.groups[work.group]
    transfer = price.transfer(work, tuple(group for group in groups if rank in group))
    (rate,) = fair_rates([transfer], price.link_capacity)
    return transfer.latency_s + transfer.payload_bytes / rate


def _micro_step(instructions: Sequence[Instruction], micro: int) -> Sequence[Instruction]:
    """What is issued from the first op of `micro` (from 0) to the first one of the micro-step behind it."""
    first = {one.op.micro: at for at, one in reversed(list(enumerate(instructions))) if isinstance(one, Launch)}
    return instructions[first[micro] : first[micro + 1]]


def _ops(instructions: Sequence[Instruction]) -> Iterator[Op]:
    return (one.op for one in instructions if isinstance(one, Launch))
