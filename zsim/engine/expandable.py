"""Expandable segments of PyTorch's caching allocator: one per stream and kind, of which pages come and go.

c10/cuda/CUDACachingAllocator.cpp (torch 2.x; names as there): a segment is a range of addresses larger than the
device's memory. Pages of 20 MiB (2 MiB for small requests) are mapped at the lowest address where what is cached and
what is not mapped make room for a request, and unmapped, as far as they hold nothing, when the driver has no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from zsim.engine.blocks import Block, Cached, absorb, cache, split, uncache

PAGES = 1 << 20  # of a segment, so that its end is never reached


class Driver(Protocol):
    """Who has the memory behind the pages."""

    def take(self, address: int, size: int, small: bool) -> bool:
        """False: there is not so much."""

    def give_back(self, address: int, size: int) -> None: ...


def room(block: Block) -> int:
    """Bytes that `block` can grow to."""
    behind = block.behind
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


class Expandable:
    """All expandable segments of a device. `page` is the size of a large one's pages, a multiple of `small_page`."""

    def __init__(self, driver: Driver, page: int, small_page: int) -> None:
        self.driver, self.page, self.small_page = driver, page, small_page
        self.mapped_pages = 0
        self._next_address = 0
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}  # by id of the pool; by address

    def allocate(self, size: int, pool: Cached, small: bool) -> Block | None:
        """try_allocate_expandable_block: a block of `size` or more, or None; what was mapped for it stays cached."""
        block = self._find(size, pool, small)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.behind
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind  # and what was before it
        uncache(block)
        return block

    def release(self, pool: Cached) -> None:
        """release_blocks: unmap every page of which nothing is in use."""
        for entry in list(pool):
            self._unmap(entry[2])

    def _find(self, size: int, pool: Cached, small: bool) -> Block:
        """find_expandable_block"""
        unmapped = self._unmapped.setdefault(id(pool), [])
        for _, block in unmapped:
            start = block.before if block.before and not block.before.used else block
            if _reaches(start, size):
                return start
        length = self.page * max(PAGES, -(-size // self.page))
        block = Block(self._next_address, length, pool, small, used=True, mapped=False)
        self._next_address += length
        insort(unmapped, (block.address, block))
        return block

    def _map(self, block: Block, size: int) -> bool:
        """map_block: pages for the first `size` bytes of an unmapped block, joined with what is cached beside them."""
        page = self.small_page if block.small else self.page
        size = -(-size // page) * page
        if not self.driver.take(block.address, size, block.small):
            return False
        self.mapped_pages += size // page
        unmapped = self._unmapped[id(block.pool)]
        del unmapped[bisect_left(unmapped, (block.address,))]
        if size < block.size:
            rest = split(block, size)
            rest.used, rest.mapped = True, False
            insort(unmapped, (rest.address, rest))
        block.mapped = True
        cache(block)
        return True

    def _unmap(self, block: Block) -> None:
        """unmap_block"""
        page = self.small_page if block.small else self.page
        start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if start >= end:
            return
        uncache(block)
        if start > block.address:
            edge, block = block, split(block, start - block.address)
            insort(edge.pool, (edge.size, edge.address, edge))
        if end < block.address + block.size:
            edge = split(block, end - block.address)
            insort(edge.pool, (edge.size, edge.address, edge))
        self.driver.give_back(block.address, block.size)
        self.mapped_pages -= block.size // page
        block.used, block.mapped = True, False
        unmapped = self._unmapped[id(block.pool)]
        for other in (block.before, block.behind):
            if other is not None and not other.mapped:
                del unmapped[bisect_left(unmapped, (other.address,))]
                absorb(block, other)
        insort(unmapped, (block.address, block))


def _reaches(block: Block, size: int) -> bool:
    """has_available_address_space: whether what is free from `block` on, mapped or not, is enough."""
    at: Block | None = block
    while size > 0 and at is not None and (not at.used or not at.mapped):
        size -= at.size
        at = at.behind
    return size <= 0
