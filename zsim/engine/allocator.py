"""Reserved bytes: PyTorch's caching allocator, replayed over a ledger.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.x, default settings; names as there): sizes are
rounded to 512 bytes; requests up to 1 MiB live in 2 MiB segments, those under 10 MiB in segments of 20 MiB, larger
ones in segments of their own, rounded to 2 MiB; the smallest cached block of the same stream and pool that fits is
taken and split if what remains is worth it; freed neighbours merge; segments go back to the driver only when it has
no memory left. Not modeled: expandable segments, max_split_size, garbage collection thresholds, graph pools.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from zsim.engine.timeline import TEMPORARY, MemoryEvent
from zsim.program.ops import COMPUTE, DELAYED_FREES

MIB = 1 << 20
MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIN_LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB

# The cached blocks of one stream and kind, smallest first: (size, address, block). Shorter tuples find their place.
Cached = list[tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use or cached."""

    address: int
    size: int
    pool: Cached
    small: bool
    used: bool = False
    before: Block | None = None
    behind: Block | None = None


class OutOfMemory(Exception):
    """The device has no room for a new segment, not even after giving back all cached ones."""


@dataclass
class CachingAllocator:
    """One device. `capacity` is what its allocator can get from the driver; None: no limit."""

    capacity: int | None = None
    reserved: int = 0
    allocated: int = 0  # sizes of blocks in use
    retries: int = 0  # times it had to give cached segments back first (num_alloc_retries)
    event: MemoryEvent | None = None  # what `replay` is at, for subclasses that record
    delayed: dict[str, deque[list[Block]]] = field(default_factory=lambda: defaultdict(deque))
    _pools: dict[tuple[str, bool], Cached] = field(default_factory=lambda: defaultdict(list))
    _next_address: int = 0

    def malloc(self, nbytes: int, stream: str) -> Block:
        """`nbytes` > 0. Raises OutOfMemory."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL
        pool = self._pools[stream, small]
        place = bisect_left(pool, (size,))
        block = pool.pop(place)[2] if place < len(pool) else self._new_segment(size, pool, small)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > SMALL:
            rest = Block(block.address + size, left, pool, small, before=block, behind=block.behind)
            if rest.behind:
                rest.behind.before = rest
            block.size, block.behind = size, rest
            insort(pool, (rest.size, rest.address, rest))
        block.used = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        block.used = False
        self.allocated -= block.size
        pool, before, behind = block.pool, block.before, block.behind
        if before and not before.used:
            self._uncache(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
            if block.before:
                block.before.behind = block
        if behind and not behind.used:
            self._uncache(behind)
            block.size, block.behind = block.size + behind.size, behind.behind
            if block.behind:
                block.behind.before = block
        insort(pool, (block.size, block.address, block))

    def free_later(self, key: str, blocks: list[Block]) -> None:
        """Another stream still reads them: they cannot be reused before `free_delayed(key)`."""
        self.delayed[key].append(blocks)

    def free_delayed(self, key: str) -> None:
        for block in self.delayed[key].popleft():
            self.free(block)

    def _uncache(self, block: Block) -> None:
        del block.pool[bisect_left(block.pool, (block.size, block.address))]

    def _new_segment(self, size: int, pool: Cached, small: bool) -> Block:
        segment = (
            SMALL_SEGMENT if small else LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        )
        if self.capacity is not None and self.reserved + segment > self.capacity:
            self.retries += 1
            self._release_cached()
            if self.reserved + segment > self.capacity:
                raise OutOfMemory
        self.reserved += segment
        block = Block(self._next_address, segment, pool, small)
        self._next_address += segment
        return block

    def _release_cached(self) -> None:
        """Wait for the other streams, then give back every segment of which nothing is in use."""
        for queue in self.delayed.values():
            for blocks in queue:
                while blocks:
                    self.free(blocks.pop())
        for pool in self._pools.values():
            for entry in pool:
                if entry[2].before is None and entry[2].behind is None:
                    self._give_back(entry[2])
            pool[:] = [entry for entry in pool if entry[2].before or entry[2].behind]

    def _give_back(self, segment: Block) -> None:
        self.reserved -= segment.size


@dataclass(frozen=True, slots=True)
class Reserved:
    """What `torch.cuda.max_memory_reserved` would show, and the event at which memory ran out (None: it did not)."""

    peak_bytes: int
    peak_at: MemoryEvent | None
    retries: int
    out_of_memory: MemoryEvent | None


def replay(
    events: Iterable[MemoryEvent], capacity: int | None = None, allocator: CachingAllocator | None = None
) -> Reserved:
    """Run the ledger of one rank's GPU (its events of device "gpu", in order) through the allocator.

    `allocator`: one to use instead of a fresh one of `capacity`.

    The ledger joins tensors that live and die together, and knows of an op's temporaries only their sum and the
    largest, so this is an estimate of fragmentation, not a replay of the real calls.
    """
    events = list(events)
    allocator = allocator or CachingAllocator(capacity)
    blocks: dict[str, list[Block]] = {}
    temporaries = _Temporaries(allocator)
    peak, peak_at = 0, None
    for position, event in enumerate(events):
        allocator.event, key, nbytes = event, event.key, event.nbytes
        try:
            if event.category == DELAYED_FREES:
                if nbytes < 0:
                    allocator.free_delayed(key)
            elif key == TEMPORARY:
                behind = events[position + 1] if position + 1 < len(events) else None
                temporaries.change(event, behind)
            elif nbytes > 0:
                blocks[key] = [allocator.malloc(size, event.lane) for size in pieces(nbytes, event.tensors)]
            elif nbytes < 0:
                behind = events[position + 1] if position + 1 < len(events) else None
                if behind and behind.category == DELAYED_FREES and behind.key == key and behind.nbytes > 0:
                    allocator.free_later(key, blocks.pop(key))
                else:
                    for block in blocks.pop(key):
                        allocator.free(block)
        except OutOfMemory:
            return Reserved(allocator.reserved, event, allocator.retries, event)
        if allocator.reserved > peak:
            peak, peak_at = allocator.reserved, event
    return Reserved(peak, peak_at, allocator.retries, None)


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
    """The unsaved tensors of the ops, oldest first: blocks for their sum, as far as that is positive.

    The sum is negative where a recomputation has dropped what the ledger still counts as saved.
    """

    allocator: CachingAllocator
    level: int = 0
    held: deque[tuple[int, Block]] = field(default_factory=deque)

    def change(self, event: MemoryEvent, behind: MemoryEvent | None) -> None:
        """An op allocates what it returns beside what it was given, and then frees the latter: oldest first."""
        left = max(0, self.level)
        level = self.level = self.level + event.nbytes
        left -= max(0, level)
        if left < 0:
            leaves = level  # by the end of the op
            if behind and behind.key == TEMPORARY and behind.nbytes < 0 and behind.op == event.op:
                leaves += behind.nbytes
            stay = max(0, min(-left, leaves))
            for total in (-left - stay, stay):
                for nbytes in pieces(total, event.tensors) if total else ():
                    self.held.append((nbytes, self.allocator.malloc(nbytes, COMPUTE)))
        while left > 0:
            nbytes, block = self.held.popleft()
            self.allocator.free(block)
            if nbytes > left:  # only part of it: a smaller tensor took its place
                self.held.appendleft((nbytes - left, self.allocator.malloc(nbytes - left, COMPUTE)))
            left -= min(left, nbytes)
