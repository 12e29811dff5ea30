"""What must hold of any run, on random programs through the real engine."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worlds import steps, worlds
from tests.result.made import DEVICE
from zsim.cost.profile import load_profile
from zsim.engine.simulator import run
from zsim.program.ops import DELAYED_FREES
from zsim.result.breakdown import measure_time, temporal
from zsim.result.critical_path import RankView
from zsim.result.memory import peak

PROFILE = load_profile(DEVICE.name)
WORLDS, PROGRAMS = st.booleans().flatmap(worlds), st.lists(steps(memory=True), min_size=1, max_size=2)


def views(program, timeline):
    return [RankView(program, timeline, ranks[0]) for ranks in timeline.rank_classes]


@settings(max_examples=80, deadline=None)
@given(WORLDS, PROGRAMS)
def test_causes_add_up_to_the_step(world, programs):
    program = world.program(*programs)
    timeline = run(program, world.classes, world)
    for view in views(program, timeline):
        time = measure_time(view, DEVICE, PROFILE)
        parts = time.compute_s + time.exposed_comm_s + time.host_s + time.idle_s
        assert parts == pytest.approx(time.step_s, abs=1e-12)
        assert sum(time.compute_by_family.values()) == pytest.approx(time.compute_s)
        assert 0 <= time.overlapped_comm_s <= time.comm_s + 1e-12
        said = temporal(view)
        assert said.compute_s + said.non_compute_s + said.idle_s == pytest.approx(said.kernel_s, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(WORLDS, PROGRAMS)
def test_critical_path_has_no_holes(world, programs):
    program = world.program(*programs)
    timeline = run(program, world.classes, world)
    for view in views(program, timeline):
        path = view.critical_path()
        if not path:
            assert view.steady.start_s == view.steady.end_s
            continue
        assert path[0].start_s == pytest.approx(view.steady.start_s, abs=1e-12)
        assert path[-1].end_s == pytest.approx(view.steady.end_s, abs=1e-12)
        for before, after in pairwise(path):
            assert after.start_s == pytest.approx(before.end_s, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(WORLDS, PROGRAMS)
def test_peak_is_the_largest_of_all_moments(world, programs):
    program = world.program(*programs)
    timeline = run(program, world.classes, world)
    for view in views(program, timeline):
        events = [event for event in view.ledgers["gpu"] if event.category != DELAYED_FREES]
        held = largest = 0
        for event in events:
            held += event.nbytes
            largest = max(largest, held)
        top = peak(view.ledgers["gpu"])
        assert top.total == largest
        assert all(nbytes > 0 for nbytes in top.by_category.values())


@settings(max_examples=30, deadline=None)
@given(worlds(), PROGRAMS)
def test_folded_and_unfolded_runs_measure_the_same(world, programs):
    program = world.program(*programs)
    folded = views(program, run(program, world.classes, world))
    unfolded = {view.rank: view for view in views(program, run(program, world.classes, world, fold=False))}
    for view in folded:
        once = dataclasses.asdict(measure_time(view, DEVICE, PROFILE))
        other = dataclasses.asdict(measure_time(unfolded[view.rank], DEVICE, PROFILE))
        for name in ("step_s", "compute_s", "exposed_comm_s", "host_s", "idle_s", "comm_s"):
            assert once[name] == pytest.approx(other[name], abs=1e-9)
