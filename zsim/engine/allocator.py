"""Reserved bytes: PyTorch's caching allocator, replayed over a ledger.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.x; names as there): sizes are
rounded to 512 bytes; requests up to 1 MiB live in 2 MiB segments, those under 10 MiB in segments of 20 MiB, larger
ones in segments of their own, rounded to 2 MiB; the smallest cached block of the same stream and pool that fits is
taken and split if what remains is worth it; freed neighbours merge; segments go back to the driver only when it has
no memory left. `expandable.py` has the segments that grow. Not modeled: graph pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple, Self

from zsim.engine.blocks import Block, Cached, cache, split
from zsim.engine.expandable import Expandable, room
from zsim.engine.timeline import TEMPORARY, MemoryEvent
from zsim.model.spec import UNKNOWN
from zsim.plan.spec import Allocator
from zsim.program.ops import COMPUTE, DELAYED_FREES

MIB = 1 << 20
MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIN_LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB
DEFAULTS = Allocator()


class Retry(NamedTuple):
    """In `step` the allocator gave cached memory back to get through (num_alloc_retries): segments, or `pages` of
    expandable ones."""

    step: int
    pages: int = 0


class OutOfMemory(Exception):
    """The device has no room for a new segment, not even after giving back all cached ones."""


@dataclass
class CachingAllocator:
    """One device. `capacity` is what its allocator can get from the driver; None: no limit.

    `allowed` is what `per_process_memory_fraction` lets it take of that.
    """

    capacity: int | None = None
    settings: Allocator = DEFAULTS
    allowed: int | None = None
    reserved: int = 0
    allocated: int = 0  # sizes of blocks in use
    retries: list[Retry] = field(default_factory=list)
    event: MemoryEvent | None = None  # what `replay` is at, for subclasses that record
    delayed: dict[str, deque[list[Block]]] = field(default_factory=lambda: defaultdict(deque))
    _pools: dict[tuple[str, bool], Cached] = field(default_factory=lambda: defaultdict(list))
    _next_address: int = 0
    _searches: int = 0  # among large blocks

    @classmethod
    def on(cls, device_bytes: int, capacity: int | None, settings: Allocator) -> Self:
        """Of a device of `device_bytes`, `capacity` of which the driver has to give."""
        fraction = settings.per_process_memory_fraction
        return cls(capacity, settings, int(fraction * device_bytes) if fraction < 1 else None)

    def __post_init__(self) -> None:
        self._default = self.settings == DEFAULTS
        split_mb = self.settings.max_split_size_mb
        self._max_split = split_mb * MIB if split_mb else float("inf")
        self._expandable = Expandable(self, LARGE_SEGMENT, SMALL_SEGMENT) if self.settings.expandable_segments else None

    @property
    def limit(self) -> int | None:
        """What it may reserve in all."""
        limits = [each for each in (self.capacity, self.allowed) if each is not None]
        return min(limits, default=None)

    def malloc(self, nbytes: int, stream: str) -> Block:
        """`nbytes` > 0. Raises OutOfMemory."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK if self._default else rounded(nbytes, self.settings)
        small = size <= SMALL
        pool = self._pools[stream, small]
        place = bisect_left(pool, (size,))
        if not self._default:
            place = self._best(pool, place, size, small)
        block = pool.pop(place)[2] if place < len(pool) else self._new_block(size, pool, small)
        left = block.size - size
        if left >= MIN_BLOCK if small or self._expandable else left > SMALL and size < self._max_split:
            rest = split(block, size)
            rest.cached_at = self._searches
            insort(pool, (rest.size, rest.address, rest))
        block.used = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.cached_at = self._searches
        cache(block)

    def free_later(self, key: str, blocks: list[Block]) -> None:
        """Another stream still reads them: they cannot be reused before `free_delayed(key)`."""
        self.delayed[key].append(blocks)

    def free_delayed(self, key: str) -> None:
        for block in self.delayed[key].popleft():
            self.free(block)

    def cached(self) -> tuple[tuple[int, ...], ...]:
        """Of every block that can be taken, in the order of addresses: its list, its size, and those of what is in use
        on both sides of it."""
        entries = [(entry[1], number, entry[2]) for number, pool in enumerate(self._pools.values()) for entry in pool]
        return tuple(
            (number, block.size, block.before.size if block.before else 0, block.behind.size if block.behind else 0)
            for _, number, block in sorted(entries, key=itemgetter(0))
        )

    def take(self, address: int, size: int, small: bool) -> bool:
        """Get memory from the driver, if it has that much."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def give_back(self, address: int, size: int) -> None:
        self.reserved -= size

    def _best(self, pool: Cached, place: int, size: int, small: bool) -> int:
        """get_free_block: where in `pool` to take a block of `size` from, of `place` or more; its end: none will do."""
        self._searches += not small
        if place == len(pool):
            return place
        if self._expandable:
            while place + 1 < len(pool) and room(pool[place + 1][2]) < room(pool[place][2]):
                place += 1
        found, limit = pool[place][2].size, self._max_split
        oversize = found >= limit if size < limit else found >= size + LARGE_SEGMENT
        return len(pool) if oversize else place

    def _new_block(self, size: int, pool: Cached, small: bool) -> Block:
        """Memory from the driver, or else after it got cached memory back."""
        if self.allowed is not None and self.settings.garbage_collection_threshold:
            self._collect_garbage(self.settings.garbage_collection_threshold * self.allowed)
        block = self._allocate(size, pool, small)
        if block is None and self._release_oversize(size, pool):
            block = self._allocate(size, pool, small)
        if block is None:
            self._retry()
            block = self._allocate(size, pool, small)
        if block is None:
            raise OutOfMemory
        return block

    def _retry(self) -> None:
        expandable = self._expandable
        before = expandable.mapped_pages if expandable else 0
        self._release_cached()
        pages = before - expandable.mapped_pages if expandable else 0
        self.retries.append(Retry(self.event.step if self.event else 0, pages))

    def _allocate(self, size: int, pool: Cached, small: bool) -> Block | None:
        """alloc_block"""
        segment = (
            SMALL_SEGMENT if small else LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        )
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self._expandable:
            return self._expandable.allocate(size, pool, small)
        if not self.take(self._next_address, segment, small):
            return None
        self._next_address += segment
        return Block(self._next_address - segment, segment, pool, small)

    def _release_oversize(self, size: int, pool: Cached) -> bool:
        """release_available_cached_blocks: enough of those that may not be split, the largest first."""
        if self._max_split == float("inf") or self._expandable:
            return False
        wanted = max(size, self._max_split)
        place = bisect_left(pool, (wanted,))
        if place < len(pool):
            self._release(pool, place)
            return True
        released = 0
        while released < wanted and pool and pool[-1][0] >= self._max_split:
            released += pool[-1][0]
            self._release(pool, len(pool) - 1)
        return released >= wanted

    def _collect_garbage(self, threshold: float) -> None:
        """garbage_collect_cached_blocks: whole large segments that were not needed for longest."""
        wanted, reclaimed = self.reserved - int(threshold), 0
        large = [pool for (_, small), pool in self._pools.items() if not small]
        ages = [self._searches - entry[2].cached_at for pool in large for entry in pool if _whole(entry[2])]
        total, count, freed = sum(ages), len(ages), True
        while wanted > 0 and reclaimed < wanted and count and freed and not self._expandable:
            oldest, freed = total / count, False
            for pool in large:
                for place in range(len(pool) - 1, -1, -1):
                    block = pool[place][2]
                    age = self._searches - block.cached_at
                    if _whole(block) and age >= oldest:
                        freed = True
                        reclaimed, total, count = reclaimed + block.size, total - age, count - 1
                        self._release(pool, place)

    def _release_cached(self) -> None:
        """Wait for the other streams, then give back every segment, or page, of which nothing is in use."""
        for queue in self.delayed.values():
            for blocks in queue:
                while blocks:
                    self.free(blocks.pop())
        for pool in self._pools.values():
            if self._expandable:
                self._expandable.release(pool)
                continue
            for entry in pool:
                if _whole(entry[2]):
                    self.give_back(entry[2].address, entry[2].size)
            pool[:] = [entry for entry in pool if not _whole(entry[2])]

    def _release(self, pool: Cached, place: int) -> None:
        block = pool.pop(place)[2]
        self.give_back(block.address, block.size)


def _whole(block: Block) -> bool:
    """Whether a block is its whole segment."""
    return block.before is None and block.behind is None


def rounded(nbytes: int, settings: Allocator) -> int:
    """round_size: up to a power of two divided by `roundup_power2_divisions`, or to 512 bytes."""
    divisions = 0
    if settings.roundup_power2_divisions:
        interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), len(settings.roundup_power2_divisions) - 1)
        divisions = settings.roundup_power2_divisions[interval]
    step = MIN_BLOCK
    if divisions > 1 and nbytes > MIN_BLOCK * divisions:
        step = (1 << (nbytes.bit_length() - 1)) // divisions
    return -(-nbytes // step) * step


class Reserved(NamedTuple):
    """What `torch.cuda.max_memory_reserved` would show, and the event at which memory ran out (None: it did not)."""

    peak_bytes: int
    peak_at: MemoryEvent | None
    retries: tuple[Retry, ...]
    out_of_memory: MemoryEvent | None
    repetition: int = 0  # of a micro-step that stands for more: how many of it came before memory ran out


class Replay:
    """The ledger of one rank's GPU, run through `allocator` part by part.

    The ledger joins tensors that live and die together, and knows of an op's temporaries those at its peak and those
    that are left, not in which order they came and went, so this is an estimate of fragmentation, not a replay of the
    real calls.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._blocks: dict[str, list[Block]] = {}
        self._temporaries = _Temporaries(allocator)
        self._peak = 0
        self._peak_at: MemoryEvent | None = None

    def run(self, events: Sequence[MemoryEvent]) -> Reserved:
        """The events of device "gpu" that follow those of before, whole steps in order; what is reserved up to here."""
        allocator, blocks, temporaries = self.allocator, self._blocks, self._temporaries
        peak, peak_at = self._peak, self._peak_at
        for position, event in enumerate(events):
            allocator.event, key, nbytes = event, event.key, event.nbytes
            try:
                if event.category == DELAYED_FREES:
                    if nbytes < 0:
                        allocator.free_delayed(key)
                elif key == TEMPORARY:
                    temporaries.change(event)
                elif nbytes > 0:
                    blocks[key] = [allocator.malloc(size, event.lane) for size in pieces(nbytes, event.tensors or ())]
                elif nbytes < 0:
                    behind = events[position + 1] if position + 1 < len(events) else None
                    if behind and behind.category == DELAYED_FREES and behind.key == key and behind.nbytes > 0:
                        allocator.free_later(key, blocks.pop(key))
                    else:
                        for block in blocks.pop(key):
                            allocator.free(block)
            except OutOfMemory:
                return Reserved(allocator.reserved, event, tuple(allocator.retries), event)
            if allocator.reserved > peak:
                peak, peak_at = allocator.reserved, event
        self._peak, self._peak_at = peak, peak_at
        return Reserved(peak, peak_at, tuple(allocator.retries), None)


def replay(events: Iterable[MemoryEvent], allocator: CachingAllocator | None = None) -> Reserved:
    """All of a ledger at once. `allocator`: a fresh one without limit unless given."""
    return Replay(allocator or CachingAllocator()).run(list(events))


def pieces(nbytes: int, tensors: tuple[int, ...]) -> list[int]:
    """The sizes of what makes up `nbytes`: `tensors`, the last of which repeats as often as it takes."""
    if not tensors or nbytes <= tensors[0]:
        return [nbytes]
    found: list[int] = []
    for size in chain(tensors, repeat(tensors[-1])):
        if nbytes <= size:
            return [*found, nbytes] if nbytes else found
        found.append(size)
        nbytes -= size
    return found


@dataclass(slots=True)
class _Temporaries:
    """The unsaved tensors of the ops, oldest first.

    Their sum is negative where a recomputation has dropped what the ledger still counts as saved; then there are none.
    """

    allocator: CachingAllocator
    level: int = 0
    held: dict[int, tuple[int, Block]] = field(default_factory=dict)  # by number

    def change(self, event: MemoryEvent) -> None:
        """From what was alive to what is. What is no more dies before others are made.

        A tensor of before that nobody knows by its number, since another layer's trace speaks for this one, is the
        oldest of its size.
        """
        self.level += event.nbytes
        if event.tensors is None:
            return
        held, stay = self.held, {}
        new: list[tuple[int, int]] = []
        for number, nbytes in event.tensors or (((UNKNOWN, self.level),) if self.level > 0 else ()):
            known = held.get(abs(number))
            if known and known[0] == nbytes:
                stay[abs(number)] = known
                del held[abs(number)]
            else:
                new.append((number, nbytes))
        for number, nbytes in new if held else ():
            if number < 0:
                for old, entry in held.items():
                    if entry[0] == nbytes:
                        stay[-number] = held.pop(old)
                        break
        for _, block in held.values():
            self.allocator.free(block)
        for number, nbytes in new:
            if abs(number) not in stay:
                stay[abs(number)] = nbytes, self.allocator.malloc(nbytes, COMPUTE)
        self.held = stay
