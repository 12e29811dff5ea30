"""Cheap questions about a candidate: what it needs at least, in bytes and in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cluster.classes import rank_classes
from zsim.cost.price import Price
from zsim.engine.simulator import Simulation, uncollected
from zsim.errors import InputError
from zsim.program.lower import lower
from zsim.program.ops import Program
from zsim.result.measure import own_profile
from zsim.result.need import Need, need
from zsim.scenario import Setup
from zsim.sweep.bound import bound
from zsim.sweep.evaluate import Task, setup_of


@dataclass(frozen=True, slots=True)
class Probe:
    """`need` is None where the candidate is refused, and `refusal` says why."""

    need: Need | None
    refusal: str = ""

    @property
    def excluded(self) -> str | None:
        return "refused" if self.need is None else self.need.excluded


def probe_memory(task: Task) -> Probe:
    """What two steps with a single micro-step need: a lower bound for more of either.

    Two, because optimizers make their states at the end of the first.
    """
    try:
        setup = setup_of(task)
        program = lower(setup.model, setup.tree, replace(setup.plan, grad_accum=1), setup.workload, steps=2)
    except InputError as error:
        return Probe(None, error.message)
    return Probe(need(program, setup.cluster))


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds of a step with a `single` micro-step, and a lower bound of the `step`: see `bound`."""

    single: float
    step: float


def least_seconds(task: Task) -> Least:
    """Both are 0 where the task is refused."""
    with uncollected():
        return _least_seconds(task)


def _least_seconds(task: Task) -> Least:
    try:
        setup = setup_of(task)
        program = lower(setup.model, setup.tree, replace(setup.plan, grad_accum=1), setup.workload)
    except InputError:
        return Least(0.0, 0.0)
    price = price_of(setup)
    simulation = Simulation(steady_alone(program), rank_classes(setup.cluster), price)
    simulation.run()
    single = max(steady_lengths(simulation))
    simulation.dissolve()
    one_of_each = {device.name: rank for rank, device in enumerate(setup.cluster.devices)}.values()
    return Least(single, min(bound(setup, single, program, price, rank) for rank in one_of_each))


def steady_alone(program: Program) -> Program:
    """Its steady step without what precedes it: that is over by then, or fades away as the step repeats."""
    return replace(program, init=(), steps=program.steps[-1:])


def steady_lengths(simulation: Simulation) -> list[float]:
    """Seconds of the steady step on each simulated rank."""
    steady = simulation.reported
    return [ends[steady] - ends[steady - 1] for ends in simulation.step_ends]


def price_of(setup: Setup) -> Price:
    return Price(setup.cluster, own_profile(setup), setup.plan.omp_num_threads)
