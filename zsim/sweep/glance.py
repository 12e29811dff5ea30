"""What a planner asks of a setup: whether it fits, how much it leaves free, and how long its step takes.

Of many micro-steps only a few are simulated. Those in the middle of a step issue the same; once two in a row have run
the same, op by op, on every rank, each further one does, and only adds its own length. The records that a report needs
are not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from zsim.cluster.classes import rank_classes
from zsim.cluster.spec import Cluster
from zsim.engine.allocator import CachingAllocator, replay
from zsim.engine.lanes import INFINITY, Rank
from zsim.engine.ledger import memory_events
from zsim.engine.simulator import Simulation, uncollected
from zsim.engine.steady import SAME
from zsim.plan.spec import Allocator, AnyPlan, DeepSpeedPlan
from zsim.program.lower import lower
from zsim.result.measure import throughput
from zsim.result.memory import framework_bytes, wanted_bytes
from zsim.result.need import need
from zsim.scenario import Setup
from zsim.sweep.evaluate import Outcome, Task, answered, setup_of
from zsim.sweep.probe import price_of, steady_alone, steady_lengths

# Micro-steps simulated: the last two before the very last are compared. What the first one leaves behind may reach into
# the second: where `_reaches_over`, one more is simulated at once. If that was not enough, two more are.
SHOWN = 4


def glance(task: Task) -> Outcome:
    """As `evaluate`, without the columns that say why the step takes so long."""
    with uncollected():
        return answered(task, _glance)


def whole_seconds(task: Task) -> float:
    """The time alone of a step, which `glance` must have been able to simulate with other bucket sizes."""
    with uncollected():
        setup = setup_of(task)
        for few, more in _shortened(setup):
            program = lower(few.model, few.tree, few.plan, few.workload)
            simulation = Simulation(steady_alone(program), rank_classes(few.cluster), price_of(few))
            simulation.run()
            each = _each(simulation, few, more)
            if each is not None:
                return max(steady_lengths(simulation)) + more * each
    raise AssertionError("all micro-steps are a step")


def _glance(task: Task) -> Outcome:
    for few, more in _shortened(setup_of(task)):
        found = _simulated(few, more)
        if found is not None:
            return found
    raise AssertionError("all micro-steps are a step")


def _shortened(setup: Setup) -> Iterator[tuple[Setup, int]]:
    """The setup with few micro-steps, and how many more there are in the middle; at last with all."""
    accumulated, least = setup.plan.grad_accum, SHOWN + _reaches_over(setup.plan)
    if setup.workload.sequence_parallel_size > 1:  # samples are dealt out in some micro-steps only
        least = accumulated
    for shown in (*(shown for shown in (least, least + 2) if shown < accumulated), accumulated):
        yield replace(setup, plan=replace(setup.plan, grad_accum=shown)), accumulated - shown


def _reaches_over(plan: AnyPlan) -> bool:
    """Whether a micro-step ends amid ZeRO-2's reductions, or with parameters of ZeRO-3 on their way from the host."""
    return isinstance(plan, DeepSpeedPlan) and (plan.stage == 2 or plan.offload_param is not None)


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
    step_s, slowest = max(lengths), simulation.ranks[lengths.index(max(lengths))]
    step_s += more * each
    whole = replace(setup, plan=replace(setup.plan, grad_accum=accumulated))
    speed = throughput(whole, setup.cluster.devices[slowest.number], step_s)
    memory = min(_memories(simulation, setup.cluster, setup.plan.allocator), key=lambda gpu: gpu["headroom_bytes"])
    simulation.dissolve()
    return memory | {
        "decided_by": "clock",
        "tokens_per_step": tokens,
        "step_s": step_s,
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu,
    }


def _each(simulation: Simulation, setup: Setup, more: int) -> float | None:
    """Seconds that each of `more` micro-steps adds; None if that is not known."""
    return cycle(simulation, setup.plan.grad_accum - 2) if more else 0.0


def _memories(simulation: Simulation, cluster: Cluster, settings: Allocator) -> Iterator[Outcome]:
    """Of each rank, as `result.memory.measure_gpu` has it."""
    for rank in simulation.ranks:
        device = cluster.devices[rank.number]
        outside = framework_bytes(device, simulation.program, cluster)
        allocator = CachingAllocator.on(device.usable_bytes, device.usable_bytes - outside, settings)
        limit = allocator.limit
        assert limit is not None
        steps = islice(memory_events(rank), simulation.reported + 1)
        events = [event for step in steps for event in step if event.device == "gpu"]
        run = replay(events, allocator)
        wanted = wanted_bytes(run, events)
        yield {
            "fits": run.out_of_memory is None and wanted <= limit,
            "needed_bytes": wanted + outside,
            "headroom_bytes": limit - wanted,
        }


def cycle(simulation: Simulation, micro: int) -> float | None:
    """Seconds by which micro-step `micro` (from 0) of the steady step comes after the one before it.

    None if the two are not the same.
    """
    step = simulation.steady
    if step is None:
        return None
    lengths = [_shift(rank, step, micro) for rank in simulation.ranks]
    longest = max((length for length in lengths if length is not None), default=0.0)
    if any(length is None or longest - length > SAME * longest for length in lengths):
        return None
    return longest


def _shift(rank: Rank, step: int, micro: int) -> float | None:
    base, ops = rank.bases[step], rank.codes[step].ops
    before, after = ([base + place for place, op in enumerate(ops) if op.micro == m] for m in (micro - 1, micro))
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if rank.end[a] < INFINITY]  # not those of the host
    if len(before) != len(after) or not pairs:
        return None
    shift = rank.end[pairs[-1][1]] - rank.end[pairs[-1][0]]
    for column in (rank.start, rank.end):
        if any(abs(column[b] - column[a] - shift) > SAME * shift for a, b in pairs):
            return None
    if _still_running(rank, step, pairs):
        return None
    return shift if _host_does_not_matter(rank, step, pairs, shift) else None


def _still_running(rank: Rank, step: int, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether something from before both micro-steps outlasts them: what waits for it would wait less with more of
    them."""
    begun = rank.end[rank.bases[max(step - 1, 0)] : pairs[0][0]]
    return max((end for end in begun if end < INFINITY), default=0.0) > max(rank.end[after] for _, after in pairs)


def _host_does_not_matter(rank: Rank, step: int, pairs: Sequence[tuple[int, int]], shift: float) -> bool:
    """Whether with more micro-steps, too, the host issues in time what it issues in time here, and nothing earlier.

    If it needs longer for a micro-step than the device, it lives on a lead that will end. If it needs less, it is the
    further ahead the more micro-steps there are: then nothing behind them, and nothing at the start of the next step,
    may have begun as soon as it was issued, until the host next waits for the device.
    """
    gains = [shift - (rank.issued[after] - rank.issued[before]) for before, after in pairs]
    if min(gains) < -SAME * shift:
        return False
    if max(gains) <= SAME * shift:
        return True
    base, segments, clocks = rank.bases[step], rank.codes[step].segments, rank.clocks[step]
    behind = pairs[-1][1] + 1
    for first, stop in ((behind, base + len(rank.codes[step].ops)), (base, behind)):
        for number, segment in enumerate(segments):
            ops = range(max(first, base + segment.first), min(stop, base + segment.stop))
            if any(rank.start[op] <= rank.issued[op] for op in ops):
                return False
            ends = clocks[number] + segment.seconds
            if first <= base + segment.stop <= stop and number + 1 < len(clocks) and clocks[number + 1] > ends:
                return True
    return True
