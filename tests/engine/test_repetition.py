"""A micro-step that stands for more does to the allocator what all of them would do."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.engine.allocator import CachingAllocator, Replay, Reserved
from zsim.engine.repetition import run_through, stretches
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import COMPUTE, DELAYED_FREES, Launch, Op, Program

MIB = 1 << 20
LONG = 12  # micro-steps
SHORT, MICRO = 4, 2  # so that 1 and 2 are compared, and 3 is the last


def program(micro_steps: int) -> Program:
    """One op in each micro-step, whose id is its number; a step with others before and after."""
    ops = [Launch(Op(micro, COMPUTE, "", "forward", cast("Any", None), micro=micro)) for micro in range(micro_steps)]
    return Program(1, {"world": ((0,),)}, [], (ops,))


def change(micro: int, key: str, nbytes: int, category: str = "activations", lane: str = COMPUTE) -> MemoryEvent:
    return MemoryEvent(1, 0, 0.0, "gpu", category, nbytes, key, micro, lane)


def ledger(micro_steps: int, sizes: list[int], carried: int, read_elsewhere: bool) -> list[MemoryEvent]:
    """Each micro-step leaves one tensor, which the next one frees once it has made half of its own."""
    events = []
    for micro in range(micro_steps):
        own = [(f"saved:{micro}:{number}", size) for number, size in enumerate(sizes)]
        half = len(own) // 2
        events += [change(micro, key, size) for key, size in own[:half]]
        if micro:
            before = f"buffer:{micro - 1}"
            events.append(change(micro, before, -carried, lane="reduce"))
            if read_elsewhere:
                events.append(change(micro, before, carried, DELAYED_FREES, "reduce"))
        events += [change(micro, key, size) for key, size in own[half:]]
        if micro and read_elsewhere:
            events.append(change(micro, f"buffer:{micro - 1}", -carried, DELAYED_FREES, "reduce"))
        events.append(change(micro, f"buffer:{micro}", carried, lane="reduce"))
        events += [change(micro, key, -size) for key, size in own]
    return events


def outcome(run: Reserved) -> tuple[object, ...]:
    failed = run.out_of_memory
    number = failed.op + run.repetition if failed and failed.op is not None else None
    return run.peak_bytes, len(run.retries), failed and failed.nbytes, number


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6), st.integers(1, 60), st.booleans(), st.integers(80, 300)
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_allocator_ends_as_after_all_micro_steps(
    sizes: list[int], carried: int, read_elsewhere: bool, capacity: int
) -> None:
    sizes, carried = [size * MIB for size in sizes], carried * MIB
    few, many = (ledger(count, sizes, carried, read_elsewhere) for count in (SHORT, LONG))
    parts = stretches(program(SHORT), [[], few], MICRO, LONG - SHORT)
    assert parts is not None
    whole = Replay(CachingAllocator(capacity * MIB)).run(many)
    if whole.out_of_memory and whole.out_of_memory.op == LONG - 1:
        whole = whole._replace(repetition=SHORT - LONG)  # the last one has its own number in each
    assert outcome(run_through(Replay(CachingAllocator(capacity * MIB)), chain(*parts))) == outcome(whole)


def test_what_grows_from_one_micro_step_to_the_next_is_no_repetition() -> None:
    grows = [change(micro, f"kept:{micro}", MIB) for micro in range(SHORT)]
    assert stretches(program(SHORT), [[], grows], MICRO, 8) is None
    larger = [change(micro, "loss", sign * (micro + 1) * MIB) for micro in range(SHORT) for sign in (1, -1)]
    assert stretches(program(SHORT), [[], larger], MICRO, 8) is None
    same = [change(micro, "loss", sign * MIB) for micro in range(SHORT) for sign in (1, -1)]
    assert stretches(program(SHORT), [[], same], MICRO, 8) is not None


def test_it_stops_once_cached_blocks_lie_as_before() -> None:
    replay, runs = Replay(CachingAllocator()), []
    run, replay.run = replay.run, lambda events: (runs.append(len(events)), run(events))[1]  # type: ignore[assignment]
    parts = stretches(program(SHORT), [[], ledger(SHORT, [MIB, 2 * MIB], MIB, False)], MICRO, 10**6)
    assert parts is not None
    run_through(replay, chain(*parts))
    assert len(runs) < 6
