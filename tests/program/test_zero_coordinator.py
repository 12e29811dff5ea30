"""What ZeRO-3 gathers, prefetches and releases, by hand on a model of four layers."""

from __future__ import annotations

from typing import Any

from zsim.program.zero3_coordinator import Coordinator, Params

NUMEL = (100, 50, 50, 10)
OWNED = {"root": (), "a": (0,), "b": (1,), "c": (2,), "d": (3,)}
CALLS = ("root", "a", "b", "c", "d")


def coordinator(**changes: Any) -> Coordinator:
    settings: dict[str, Any] = {
        "owned": OWNED, "inside": OWNED | {"root": (0, 1, 2, 3)}, "leaves": frozenset(), "numel": NUMEL,
        "persistent": frozenset(), "frozen": frozenset(), "prefetch_bucket_size": 60, "max_live_parameters": 1000,
        "max_reuse_distance": 0,
    }  # fmt: skip
    return Coordinator(**settings | changes)


def run(found: Coordinator) -> tuple[list[tuple[str, tuple[Params, Params]]], list[tuple[str, tuple[int, ...]]]]:
    """A forward and backward: what each call fetches and what each release lets go."""
    fetched, released = [], []
    for module in CALLS:
        fetched.append((module, found.fetch(module, "forward")))
        if module != "root":
            released.append((module, found.release(module)))
    released.append(("root", found.release("root")))
    for module in ("root", *CALLS[:0:-1]):
        fetched.append((module, found.fetch(module, "backward")))
        if module not in ("root", "a"):
            released.append((module, found.release(module, backward=True)))
    released.append(("left", found.release_leftovers()))
    return fetched, released


def test_the_first_iteration_records_and_prefetches_nothing():
    found = coordinator(persistent=frozenset({3}))
    assert found.reset_step() == (0,)
    fetched, released = run(found)
    assert [needed for _, (needed, _) in fetched] == [(), (0,), (1,), (2,), (3,), (), (3,), (2,), (1,), (0,)]
    assert all(prefetched == () for _, (_, prefetched) in fetched)
    # persistent parameters go too, as long as the trace is not complete
    assert dict(released[:4]) == {"a": (0,), "b": (1,), "c": (2,), "d": (3,)}


def test_the_trace_is_compared_once_it_is_complete():
    found = coordinator()
    assert found.reset_step() == (0,)
    run(found)
    assert found.reset_step() == (10, 8, 8)  # modules called; parameters used, and the steps they are used at
    run(found)
    assert found.reset_step() == ()


def test_prefetch_takes_from_the_trace_until_the_bucket_is_full():
    found = coordinator()
    found.reset_step()
    run(found)
    found.reset_step()
    fetched, _ = run(found)
    names = dict(fetched[:5])
    assert names["root"] == ((), (0,))  # 100 elements overshoot a bucket of 60
    assert names["a"] == ((), (1, 2))  # 50 are not enough
    assert names["b"] == ((), (0, 3))  # a is over and has let 0 go: gathered again for its backward
    assert names["d"][0] == ()


def test_max_live_parameters_holds_the_prefetch_back():
    found = coordinator(max_live_parameters=120)
    found.reset_step()
    run(found)
    found.reset_step()
    fetched, _ = run(found)
    assert fetched[0][1] == ((), (0,))
    assert fetched[1][1] == ((), (1,))  # 20 elements are left: one parameter may overshoot them


def test_reuse_within_the_distance_keeps_a_parameter():
    def released_after_forward(distance: int) -> set[int]:
        found = coordinator(max_reuse_distance=distance, prefetch_bucket_size=0)
        found.reset_step()
        run(found)
        found.reset_step()
        return {param for module, params in run(found)[1][:4] for param in params}

    assert released_after_forward(0) == {0, 1, 2, 3}
    assert released_after_forward(1) == {0, 1, 2}  # d is the next to be used again, right after its own release
    assert released_after_forward(20) == {0, 1, 2}  # between c and its backward, d is used twice
    assert released_after_forward(21) == {0, 1}
    assert released_after_forward(10**9) == set()


def test_a_release_is_decided_once_and_for_all():
    found = coordinator(max_reuse_distance=10**9)
    found.reset_step()
    run(found)
    found.reset_step()
    first = run(found)
    found.partition_all()
    found.max_reuse_distance = 0  # would release everything, were it asked again
    found.reset_step()
    assert run(found)[1] == first[1]


def test_persistent_parameters_stay_until_the_step():
    found = coordinator(persistent=frozenset({3}))
    found.reset_step()
    run(found)
    found.reset_step()
    _, released = run(found)
    assert all(3 not in params for _, params in released)
    assert found.partition_all() == (3,)
    assert found.gather_persistent() == (3,)
    assert found.live == {3}


def test_modules_ahead_are_looked_into_as_the_released_one_is():
    leaf = {"owned": {"root": (), "leaf": (), "d": (3,)}, "inside": {"root": (0, 3), "leaf": (0,), "d": (3,)}}

    def released(distance: int) -> tuple[int, ...]:
        found = coordinator(**leaf, leaves=frozenset({"leaf"}), max_reuse_distance=distance, prefetch_bucket_size=0)
        for _ in range(2):
            found.reset_step()
            for module in ("leaf", "root", "leaf"):
                found.fetch(module, "forward")
                let_go = found.release(module)
                if module == "leaf" and found.complete:
                    return let_go
        raise AssertionError

    assert released(0) == (0,)
    assert released(1) == ()  # root, with its children, uses parameter 0 at once


def test_a_frozen_parameter_stays_for_the_module_that_recomputes():
    found = coordinator(frozen=frozenset({1}))
    found.reset_step()
    found.fetch("c", "backward")  # c's backward recomputes b
    found.fetch("b", "recompute")
    assert found.release("b") == ()
    assert found.release("c", backward=True) == (1, 2)
