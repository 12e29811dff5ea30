"""PyTorch's caching allocator: the rules of CUDACachingAllocator.cpp, one by one, and what holds of any run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive_allocator import NaiveAllocator
from tests.engine.worlds import steps, worlds
from zsim.engine.allocator import MIB, CachingAllocator, OutOfMemory, Retry, pieces, replay, rounded
from zsim.engine.blocks import Block
from zsim.engine.simulator import run
from zsim.engine.timeline import MemoryEvent
from zsim.plan.spec import Allocator
from zsim.program.ops import ALL_GATHER, COMPUTE, DELAYED_FREES


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # kMinBlockSize, kSmallBuffer
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # kSmallSize is small still
        (MIB + 1, MIB + 512, 20 * MIB),  # kLargeBuffer
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # kMinLargeAlloc: a segment of its own, rounded to kRoundLarge
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB left is not worth a split
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # more than that is
        (1000 * MIB + 1, 1000 * MIB + 512, 1002 * MIB),
    ],
)
def test_sizes(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.malloc(nbytes, COMPUTE)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_cached_blocks_are_reused_on_their_stream_only():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(16 * MIB, COMPUTE))
    allocator.malloc(16 * MIB, COMPUTE)
    assert allocator.reserved == 16 * MIB
    allocator.free(allocator.malloc(16 * MIB, ALL_GATHER))
    assert allocator.reserved == 32 * MIB


def test_small_and_large_requests_do_not_share_segments():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, COMPUTE))
    allocator.malloc(512, COMPUTE)
    assert allocator.reserved == 22 * MIB


def test_the_smallest_block_that_fits_is_split_and_merges_again():
    allocator = CachingAllocator()
    big, fit = allocator.malloc(40 * MIB, COMPUTE), allocator.malloc(30 * MIB, COMPUTE)
    allocator.free(big)
    allocator.free(fit)
    one = allocator.malloc(25 * MIB, COMPUTE)
    assert one.address == fit.address
    two = allocator.malloc(5 * MIB, COMPUTE)  # what was left of it
    assert two.address == one.address + 25 * MIB
    allocator.free(one)
    allocator.free(two)
    assert allocator.malloc(30 * MIB, COMPUTE).address == fit.address
    assert allocator.reserved == 70 * MIB


def test_fragmentation_costs_a_new_segment():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB, COMPUTE) for _ in range(5)]  # one 20 MiB segment
    assert allocator.reserved == 20 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.malloc(6 * MIB, COMPUTE)  # 12 MiB are free, but not in one piece
    assert allocator.reserved == 40 * MIB


def test_whole_segments_are_given_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity=64 * MIB)
    half, kept = allocator.malloc(20 * MIB, COMPUTE), allocator.malloc(4 * MIB, COMPUTE)
    allocator.free(half)
    allocator.malloc(30 * MIB, ALL_GATHER)
    assert (allocator.reserved, len(allocator.retries)) == (50 * MIB, 1)
    with pytest.raises(OutOfMemory):  # `kept` holds its segment of 20 MiB
        allocator.malloc(16 * MIB, ALL_GATHER)
    allocator.free(kept)
    allocator.malloc(16 * MIB, ALL_GATHER)
    assert (allocator.reserved, len(allocator.retries)) == (46 * MIB, 3)


def test_running_out_waits_for_delayed_frees():
    allocator = CachingAllocator(capacity=20 * MIB)
    allocator.free_later("x", [allocator.malloc(16 * MIB, COMPUTE)])
    allocator.malloc(18 * MIB, COMPUTE)
    assert allocator.reserved == 18 * MIB
    allocator.free_delayed("x")
    assert allocator.allocated == 18 * MIB


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_blocks_tile_their_segments(data):
    allocator = CachingAllocator(data.draw(st.sampled_from([None, 200 * MIB])))
    live: list[Block] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            allocator.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
            continue
        nbytes = data.draw(st.sampled_from([1, 700, MIB - 3, MIB + 1, 7 * MIB, 10 * MIB, 33 * MIB + 5]))
        try:
            block = allocator.malloc(nbytes, data.draw(st.sampled_from([COMPUTE, ALL_GATHER])))
        except OutOfMemory:
            continue
        assert block.size >= nbytes
        assert all(
            other.address + other.size <= block.address or block.address + block.size <= other.address for other in live
        )
        live.append(block)
    assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    cached = [entry[2] for pool in allocator._pools.values() for entry in pool]
    assert all(block.before is None and block.behind is None for block in cached)  # all merged back
    assert sum(block.size for block in cached) == allocator.reserved


CONFIGURATIONS = [
    Allocator(),
    Allocator(expandable_segments=True),
    Allocator(max_split_size_mb=20),
    Allocator(max_split_size_mb=32, roundup_power2_divisions=(1, 2, 4, 4, *[8] * 12)),
    Allocator(garbage_collection_threshold=0.4, per_process_memory_fraction=0.9),
    Allocator(garbage_collection_threshold=0.2, per_process_memory_fraction=0.8, expandable_segments=True),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_agrees_with_a_plain_implementation(configuration, data):
    """The same addresses, segments, retries and failures, with frees that other streams hold up."""
    capacity = data.draw(st.sampled_from([100, 200, 10_000])) * MIB
    allocator = CachingAllocator.on(capacity + 10 * MIB, capacity, configuration)
    naive = NaiveAllocator(capacity, configuration, allocator.allowed)
    live, pending = [], []
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "free later", "delayed"]))
        if action == "malloc":
            size = data.draw(
                st.sampled_from([1, 700, MIB - 3, MIB, MIB + 1, 7 * MIB, 10 * MIB, 19 * MIB, 24 * MIB, 33 * MIB + 5])
            )
            stream = data.draw(st.sampled_from([COMPUTE, ALL_GATHER]))
            expected = naive.malloc(size, stream)
            if expected is None:
                with pytest.raises(OutOfMemory):
                    allocator.malloc(size, stream)
            else:
                block = allocator.malloc(size, stream)
                segment, piece = expected
                assert (block.address, block.size) == (segment.address_of(piece), piece.size)
                live.append((block, segment, piece))
        elif action == "delayed" and pending:
            key, segment, piece = pending.pop(0)
            allocator.free_delayed(key)
            if piece.state == key:  # else running out has freed it already, and it may live again
                naive.free(segment, piece)
        elif live and action != "delayed":
            block, segment, piece = live.pop(data.draw(st.integers(0, len(live) - 1)))
            if action == "free":
                allocator.free(block)
                naive.free(segment, piece)
            else:
                allocator.free_later(str(number), [block])
                piece.state = str(number)
                pending.append((piece.state, segment, piece))
        assert (allocator.reserved, len(allocator.retries)) == (naive.reserved, naive.retries)


def test_an_expandable_segment_grows_by_pages_and_gives_them_back():
    """Note [Expandable Segments]: pages of 20 MiB, of 2 MiB for small requests; one range per stream."""
    allocator = CachingAllocator(120 * MIB, Allocator(expandable_segments=True))
    first = allocator.malloc(33 * MIB, COMPUTE)
    assert allocator.reserved == 40 * MIB
    second = allocator.malloc(30 * MIB, COMPUTE)  # 7 cached, 23 more in two pages
    assert (second.address, allocator.reserved) == (first.address + 33 * MIB, 80 * MIB)
    allocator.malloc(1, COMPUTE)
    assert allocator.reserved == 82 * MIB
    allocator.free(first)
    allocator.malloc(38 * MIB, ALL_GATHER)  # needs 40; the first page goes back, what is free of others does not
    assert (allocator.reserved, allocator.retries) == (102 * MIB, [Retry(0, pages=1)])
    assert allocator.malloc(15 * MIB, COMPUTE).address == second.address + 30 * MIB
    assert allocator.reserved == 102 * MIB


def test_expandable_segments_have_no_slivers():
    """What fragments segments of their own: a little more each time."""
    sizes = [20 * MIB + 2 * MIB * step for step in range(20)]
    peaks = []
    for expandable in (False, True):
        allocator = CachingAllocator(None, Allocator(expandable_segments=expandable))
        for size in sizes:
            allocator.free(allocator.malloc(size, COMPUTE))
        peaks.append(allocator.reserved)
    assert peaks == [sum(sizes), 60 * MIB]


def test_oversize_blocks_are_not_split_and_go_back_first():
    allocator = CachingAllocator(128 * MIB, Allocator(max_split_size_mb=32))
    big = allocator.malloc(64 * MIB, COMPUTE)
    allocator.free(big)
    allocator.malloc(16 * MIB, COMPUTE)  # does not cut the big one
    assert allocator.reserved == 80 * MIB
    again = allocator.malloc(50 * MIB, COMPUTE)  # takes all of it: not 20 MiB too large
    assert (again.address, again.size) == (big.address, 64 * MIB)
    allocator.free(again)
    allocator.malloc(40 * MIB, COMPUTE)  # 24 MiB too large; a new one
    assert (allocator.reserved, len(allocator.retries)) == (120 * MIB, 0)
    allocator.malloc(30 * MIB, COMPUTE)  # 150 are too much: the cached 64 go back, and no stream is waited for
    assert (allocator.reserved, len(allocator.retries)) == (86 * MIB, 0)


@pytest.mark.parametrize(
    ("nbytes", "divisions", "expected"),
    [  # the comment above roundup_power2_next_division, in MiB: 1200 of 1024 to 2048 in four steps is 1280
        (1200 * MIB, 4, 1280 * MIB),
        (1024 * MIB, 4, 1024 * MIB),
        (1200 * MIB, 1, 1200 * MIB),
        (1200 * MIB + 1, 2, 1536 * MIB),
        (1000, 4, 1024),
        (3000, 4, 3072),  # 2048 to 4096 in steps of 512
        (1500, 4, 1536),  # not more than 512 x 4: to 512
    ],
)
def test_requests_rounded_to_divisions_of_powers_of_two(nbytes, divisions, expected):
    assert rounded(nbytes, Allocator(roundup_power2_divisions=(divisions,) * 16)) == expected


def test_garbage_is_collected_below_the_fraction():
    """Whole segments unused for longest go back before a new one is made, from 40 % of the allowed memory on."""
    settings_ = Allocator(garbage_collection_threshold=0.4, per_process_memory_fraction=0.5)
    allocator = CachingAllocator.on(400 * MIB, 400 * MIB, settings_)
    for size in (30 * MIB, 40 * MIB):
        allocator.free(allocator.malloc(size, COMPUTE))
    assert allocator.reserved == 70 * MIB  # 80 are 40 %
    allocator.free(allocator.malloc(50 * MIB, COMPUTE))
    allocator.malloc(60 * MIB, COMPUTE)  # 120 - 80 are too much: 30 and 40 are oldest
    assert (allocator.reserved, len(allocator.retries)) == (110 * MIB, 0)
    with pytest.raises(OutOfMemory):  # 200 MiB allowed
        allocator.malloc(150 * MIB, COMPUTE)


def event(key, nbytes, category="activations", op=None, lane=COMPUTE):
    return MemoryEvent(1, 0, 0.0, "gpu", category, nbytes, key, op, lane)


def test_replaying_a_ledger():
    events = [
        event("weights", 100 * MIB),
        event("shard", 30 * MIB, lane=ALL_GATHER),
        event("shard", -30 * MIB),
        event("shard", 30 * MIB, DELAYED_FREES),
        event("shard", 30 * MIB, lane=ALL_GATHER),  # the first one is not reusable yet
        event("shard", -30 * MIB, DELAYED_FREES),
        event("other", 30 * MIB, lane=ALL_GATHER),  # now it is
        event("temporary", 64 * MIB, op=3),
        event("temporary", -48 * MIB, op=3),
        event("temporary", 16 * MIB, op=4),  # reuses what op 3 dropped
        event("temporary", -16 * MIB, op=4),
    ]
    reserved = replay(events)
    assert reserved.peak_bytes == (100 + 30 + 30 + 48 + 16) * MIB
    assert reserved.peak_at is events[7]
    assert reserved.out_of_memory is None
    short = replay(events, CachingAllocator(200 * MIB))
    assert short.out_of_memory is events[7]


@pytest.mark.parametrize(
    ("nbytes", "tensors", "expected"),
    [
        (7, (), [7]),
        (7, (7,), [7]),
        (7, (9,), [7]),
        (7, (4, 2, 1), [4, 2, 1]),
        (9, (4, 2), [4, 2, 2, 1]),
        (9, (3,), [3, 3, 3]),
    ],
)
def test_tensors_behind_a_sum(nbytes, tensors, expected):
    assert pieces(nbytes, tensors) == expected


def test_tensors_of_one_key_need_not_lie_together():
    """The halves go where the small ones were; in one piece they would need a third segment."""
    events = [event(f"{i}", 20 * MIB) for i in range(2)] + [event(f"{i}", -20 * MIB) for i in range(2)]
    apart = MemoryEvent(1, 0, 0.0, "gpu", "activations", 40 * MIB, "both", None, COMPUTE, (20 * MIB,))
    assert replay([*events, apart, apart._replace(nbytes=-40 * MIB)]).peak_bytes == 40 * MIB
    assert replay([*events, apart._replace(tensors=())]).peak_bytes == 80 * MIB


def test_temporaries_are_the_tensors_that_the_op_had():
    """They stay where they are as long as they live; the others die first, so that new ones may lie in their place."""

    def temporary(nbytes, op, **tensors):
        known = tuple((int(name[1:]) * (-1 if name[0] == "o" else 1), size * MIB) for name, size in tensors.items())
        return event("temporary", nbytes * MIB, op=op)._replace(tensors=known)

    events = [
        temporary(60, 1, n1=40, n2=20),
        temporary(-20, 1, n1=40),
        temporary(20, 2, o1=40, n3=20),  # where the other 20 was
        temporary(-40, 2, n3=20),
        temporary(20, 3, o3=20, n4=20),  # beside it, in the 40
    ]
    allocator = CachingAllocator()
    assert replay(events, allocator).peak_bytes == 60 * MIB
    assert allocator.allocated == 40 * MIB
    switched = [*events, event("temporary", -40 * MIB, op=3)._replace(tensors=None), temporary(40, 4, o3=20, o4=20)]
    assert replay(switched).peak_bytes == 60 * MIB  # counted elsewhere, not moved
    # An op hands on what it made, not what it was given: the next of that size lies where the latter was.
    first = [temporary(40, 1, n1=20, n2=20), temporary(-20, 1, n2=20), temporary(20, 2, o2=20, n1=20)]
    moved = CachingAllocator()
    assert replay(first, moved).peak_bytes == 40 * MIB
    # The same layer once more, whose input has the number that the trace gave it.
    assert replay([*first, temporary(-20, 2, n1=20), temporary(20, 3, o9=20, n2=20)]).peak_bytes == 40 * MIB


def test_the_steps_in_which_cached_segments_go_back():
    """100 MiB that hold 60 or 80: once both sizes have been asked for, each request makes room for itself."""
    first = [event("a", 60 * MIB), event("a", -60 * MIB), event("b", 80 * MIB), event("b", -80 * MIB)]
    later = [one._replace(step=2) for one in first]
    assert replay(first, CachingAllocator(200 * MIB)).retries == ()
    assert replay([*first, *later], CachingAllocator(100 * MIB)).retries == (Retry(1),)
    apart = [one._replace(lane=ALL_GATHER) if one.key == "a" else one for one in (*first, *later)]
    assert replay(apart, CachingAllocator(100 * MIB)).retries == (Retry(1), Retry(2), Retry(2))


def test_temporaries_below_zero_leak_nothing():
    """A block's level goes to -5 and back up; however often, it needs the same memory."""
    up_and_down = [event("temporary", nbytes * 10 * MIB, op=op) for op, nbytes in ((1, -5), (2, 15), (2, -10))]
    once = replay(up_and_down).peak_bytes
    assert once == 100 * MIB  # 15 up from -5
    assert replay(up_and_down * 7).peak_bytes == once


@settings(max_examples=40, deadline=None)
@given(worlds(), st.lists(steps(memory=True), min_size=1, max_size=2))
def test_any_ledger_can_be_replayed(world, programs):
    timeline = run(world.program(*programs), world.classes, world)
    events = [event for event in timeline.memory if event.device == "gpu"]
    held = peak = 0
    for one in events:
        held += one.nbytes
        peak = max(peak, held)
    assert replay(events).peak_bytes >= peak
