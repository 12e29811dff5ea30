"""What a planner asks of a setup: whether it fits, how much it leaves free, and how long its step takes.

Of many micro-steps only a few are simulated (`result.shortened`). The records that a report needs are not made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from zsim.cluster.classes import rank_classes
from zsim.engine.allocator import CachingAllocator, Replay
from zsim.engine.cycle import cycle
from zsim.engine.ledger import memory_events
from zsim.engine.repetition import run_through, stretches
from zsim.engine.simulator import Simulation, uncollected
from zsim.engine.steady import SAME
from zsim.program.lower import lower
from zsim.result.measure import throughput
from zsim.result.memory import framework_bytes, wanted_bytes
from zsim.result.need import need
from zsim.result.shortened import compared, shortened
from zsim.scenario import Setup
from zsim.sweep.evaluate import Outcome, Task, answered, setup_of
from zsim.sweep.probe import price_of, steady_alone, steady_lengths


def glance(task: Task) -> Outcome:
    """As `evaluate`, without the columns that say why the step takes so long."""
    with uncollected():
        return answered(task, _glance)


def whole_seconds(task: Task) -> float:
    """The time alone of a step, which `glance` must have been able to simulate with other bucket sizes."""
    with uncollected():
        setup = setup_of(task)
        for few, more in shortened(setup):
            program = lower(few.model, few.tree, few.plan, few.workload)
            simulation = Simulation(steady_alone(program), rank_classes(few.cluster), price_of(few))
            simulation.run()
            each = _each(simulation, few, more)
            if each is not None:
                return max(steady_lengths(simulation)) + more * each
    raise AssertionError("all micro-steps are a step")


def _glance(task: Task) -> Outcome:
    for few, more in shortened(setup_of(task)):
        found = _simulated(few, more)
        if found is not None:
            return found
    raise AssertionError("all micro-steps are a step")


def _simulated(setup: Setup, more: int) -> Outcome | None:
    """The outcome with `more` micro-steps in the middle than the setup says; None where these do not repeat."""
    accumulated = setup.plan.grad_accum + more
    tokens = setup.workload.tokens * accumulated * setup.plan.world_size
    program = lower(setup.model, setup.tree, setup.plan, setup.workload)
    least = need(program, setup.cluster)
    if least.excluded:
        return {
            "fits": False,
            "decided_by": "memory",
            "tokens_per_step": tokens,
            "needed_bytes": least.peak_allocated + least.framework,
            "headroom_bytes": -least.missing,
        }
    simulation = Simulation(program, rank_classes(setup.cluster), price_of(setup))
    simulation.run()
    each = _each(simulation, setup, more)
    if each is None:
        return None
    lengths = steady_lengths(simulation)
    step_s = max(lengths)
    slowest = next(r for r, each_s in zip(simulation.ranks, lengths, strict=True) if each_s >= (1 - SAME) * step_s)
    step_s += more * each
    whole = replace(setup, plan=replace(setup.plan, grad_accum=accumulated))
    speed = throughput(whole, setup.cluster.devices[slowest.number], step_s)
    memories = list(_memories(simulation, setup, more))
    simulation.dissolve()
    if not all(memories):
        return None
    return min(memories, key=lambda gpu: gpu["headroom_bytes"]) | {
        "decided_by": "clock",
        "tokens_per_step": tokens,
        "step_s": step_s,
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu,
    }


def _each(simulation: Simulation, setup: Setup, more: int) -> float | None:
    """Seconds that each of `more` micro-steps adds; None if that is not known."""
    return cycle(simulation, compared(setup)) if more else 0.0


def _memories(simulation: Simulation, setup: Setup, more: int) -> Iterator[Outcome]:
    """Of each rank, as `result.memory.measure_gpu` has it; empty where `more` micro-steps do not repeat memory."""
    for rank in simulation.ranks:
        device = setup.cluster.devices[rank.number]
        outside = framework_bytes(device, simulation.program, setup.cluster)
        allocator = CachingAllocator.on(device.usable_bytes, device.usable_bytes - outside, setup.plan.allocator)
        limit = allocator.limit
        assert limit is not None
        ledger = islice(memory_events(rank), simulation.reported + 1)
        steps = [[event for event in step if event.device == "gpu"] for step in ledger]
        parts = stretches(simulation.program, steps, compared(setup), more)
        if parts is None:
            yield {}
            continue
        run = run_through(Replay(allocator), chain.from_iterable(parts))
        wanted = wanted_bytes(run, list(chain.from_iterable(steps)))
        yield {
            "fits": run.out_of_memory is None and wanted <= limit,
            "needed_bytes": wanted + outside,
            "headroom_bytes": limit - wanted,
        }
