"""What is said of a step after a few of its micro-steps is what all of them come to, whatever they consist of."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worlds import DEVICE_LANES, World, kernels, works, worlds
from zsim.engine.cycle import cycle
from zsim.engine.simulator import Simulation
from zsim.program.builder import Builder
from zsim.program.ops import ALL_GATHER, COMPUTE, Work
from zsim.sweep.probe import steady_lengths

FEW, MANY = 5, 23


class Issued(NamedTuple):
    """An op for a lane: behind what some lanes have been given so far, after some Python, and the host may wait."""

    lane: str
    work: Work
    behind: frozenset[str]
    calls: int
    waits: bool


@st.composite
def pieces(draw: st.DrawFn) -> list[Issued]:
    found = []
    for lane in draw(st.lists(st.sampled_from(DEVICE_LANES), min_size=1, max_size=5)):
        behind = draw(st.frozensets(st.sampled_from(DEVICE_LANES), max_size=2))
        calls = draw(st.sampled_from([0, 0, 10, 60, 200]))
        found.append(Issued(lane, draw(works(lane)), behind, calls, draw(st.sampled_from([False, False, True]))))
    return found


def simulated(world: World, piece: list[Issued], tail: list[Issued], accumulated: int) -> Simulation:
    builder = Builder()
    for micro, issued in [(micro, one) for micro in range(accumulated) for one in piece] + [(0, one) for one in tail]:
        if issued.calls:
            builder.host_work("python", "forward", issued.calls, micro=micro)
        for lane in sorted(issued.behind):
            builder.wait_stream(issued.lane, lane)
        event = builder.launch(issued.lane, "op", "forward", issued.work, micro=micro)
        if issued.waits:
            builder.host_wait(event)
    simulation = Simulation(world.program(builder), world.classes, world)
    simulation.run()
    return simulation


@settings(max_examples=150, deadline=None)
@given(worlds(), pieces(), pieces())
def test_a_cycle_goes_on_for_ever(world: World, piece: list[Issued], tail: list[Issued]) -> None:
    few = simulated(world, piece, tail, FEW)
    each = cycle(few, FEW - 2)
    if each is not None:
        many = simulated(world, piece, tail, MANY)
        if many.steady is not None:
            whole = max(steady_lengths(few)) + (MANY - FEW) * each
            assert whole == pytest.approx(max(steady_lengths(many)), rel=1e-9)


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_that_gains_on_the_device(waits: bool) -> None:
    """Micro-steps of 2 ms that are issued in 1 ms, and then 10 ms of Python before a kernel: not what it is after more
    micro-steps, by whose end the host is those 10 ms ahead, unless it waits for the device first."""
    micro = [Issued(COMPUTE, kernels(2e-3), frozenset(), 50, False)]
    tail = [
        Issued(COMPUTE, kernels(1e-3), frozenset(), 0, waits),
        Issued(COMPUTE, kernels(1e-3), frozenset(), 500, True),
    ]
    world = World(issue=0.0)
    few = simulated(world, micro, tail, FEW)
    assert cycle(few, FEW - 2) == (pytest.approx(2e-3) if waits else None)
    many = simulated(world, micro, tail, MANY)
    more = (max(steady_lengths(many)) - max(steady_lengths(few))) / (MANY - FEW)
    assert (more == pytest.approx(2e-3)) == waits


@pytest.mark.parametrize(("left_s", "known"), [(1.4e-3, False), (0.4e-3, True)])
def test_what_the_step_before_left_running(left_s: float, known: bool) -> None:
    """Micro-steps of 0.2 ms of Python, whose step then waits for what the one before started at its very end."""
    micro = [Issued(COMPUTE, kernels(1e-6), frozenset(), 10, False)]
    tail = [
        Issued(ALL_GATHER, kernels(0.0), frozenset(), 0, True),
        Issued(ALL_GATHER, kernels(left_s), frozenset(), 0, False),
    ]
    few, many = (simulated(World(issue=0.0), micro, tail, count) for count in (FEW, MANY))
    assert cycle(few, FEW - 2) == (pytest.approx(2e-4) if known else None)
    more = (max(steady_lengths(many)) - max(steady_lengths(few))) / (MANY - FEW)
    assert (more == pytest.approx(2e-4)) == known
