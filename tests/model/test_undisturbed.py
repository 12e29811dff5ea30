"""Tools that hold frames of the trace must not change what it counts."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.model import undisturbed
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.model.trace import _attempt, trace

SPEC = from_config({
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
}, "small")  # fmt: skip
WORKLOAD = Workload(2, 32, attention="eager", checkpointing="full")


def fresh(spec: ModelSpec = SPEC) -> Module:
    return trace(replace(spec), WORKLOAD)


@pytest.fixture(scope="module")
def clean() -> Module:
    return fresh()


@contextmanager
def sampler(visit: Callable[[Any], None]) -> Iterator[None]:
    """A thread that looks at every other thread's frames without pause."""
    over = threading.Event()
    here = threading.get_ident()

    def sample() -> None:
        while not over.is_set():
            frame = sys._current_frames().get(here)
            while frame is not None:
                visit(frame)
                frame = frame.f_back

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watchers() -> dict[str, Callable[[], Any]]:
    held: deque[Any] = deque(maxlen=500)
    return {
        "holds frames for a while": lambda: sampler(held.append),
        "copies locals": lambda: sampler(lambda frame: frame.f_locals),
        "looks only": lambda: sampler(lambda frame: None),
    }


@pytest.mark.parametrize("kind", watchers())
def test_a_sampling_thread(clean: Module, kind: str) -> None:
    with watchers()[kind]():
        assert all(fresh() == clean for _ in range(10))


def test_every_disturbance_by_a_sampler_is_seen(clean: Module) -> None:
    held: deque[Any] = deque(maxlen=50)
    with sampler(held.append):
        outcomes = [_attempt(replace(SPEC), WORKLOAD) for _ in range(60)]
    assert all(outcome.result == clean for outcome in outcomes if not outcome.disturbed)
    assert any(outcome.disturbed for outcome in outcomes)


@pytest.mark.parametrize("setter", [sys.settrace, sys.setprofile])
def test_a_trace_function_that_holds_frames(clean: Module, setter: Callable[[Any], None]) -> None:
    held = []

    def watch(frame: Any, event: str, argument: Any) -> Any:
        held.append(frame)
        return watch

    before = sys.gettrace(), sys.getprofile()
    setter(watch)
    try:
        watched = _attempt(replace(SPEC), WORKLOAD)
        result = fresh()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert result == clean
    assert watched.disturbed
    assert watched.result != clean  # it does disturb
    assert held


def test_frames_in_a_cycle_that_the_collector_frees(clean: Module) -> None:
    """As `sys._current_frames()` in a local variable makes them."""
    bin_of_cycles: list[Any] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code.co_name == "forward":
            cycle: list[Any] = [frame]
            cycle.append(cycle)
            bin_of_cycles.append(cycle)
        elif bin_of_cycles and event == "call" and frame.f_code.co_name == "backward":
            bin_of_cycles.clear()
            gc.collect()

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        outcome = _attempt(replace(SPEC), WORKLOAD)
    finally:
        sys.setprofile(before)
    assert outcome.disturbed


def test_a_process_of_its_own(clean: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undisturbed, "REPEATS", 0)
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert fresh() == clean


def test_errors_pass() -> None:
    frozen = tuple(replace(parameter, trainable=False) for parameter in SPEC.parameters)
    with pytest.raises(InputError, match="no parameter is trainable"):
        fresh(replace(SPEC, parameters=frozen))
