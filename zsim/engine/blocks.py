"""Blocks of the caching allocator: neighbours within a segment, and the lists of cached ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

# The cached blocks of one stream and kind, smallest first: (size, address, block). Shorter tuples find their place.
Cached = list[tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: in use, cached, or (of an expandable one) not mapped, which counts as used."""

    address: int
    size: int
    pool: Cached
    small: bool
    used: bool = False
    before: Block | None = None
    behind: Block | None = None
    mapped: bool = True
    cached_at: int = 0  # searches of the allocator until then, where it collects garbage


def split(block: Block, size: int) -> Block:
    """Cut `block` down to `size` bytes; returns the rest, its neighbour from now on."""
    # by position: by name, a tenth of all replays would go into it
    rest = Block(block.address + size, block.size - size, block.pool, block.small, False, block, block.behind)
    if rest.behind:
        rest.behind.before = rest
    block.size, block.behind = size, rest
    return rest


def absorb(block: Block, other: Block) -> None:
    """Join `block` with the neighbour `other`, which is no more."""
    if other is block.before:
        block.address, block.before = other.address, other.before
        if block.before:
            block.before.behind = block
    else:
        block.behind = other.behind
        if block.behind:
            block.behind.before = block
    block.size += other.size


def cache(block: Block) -> None:
    """Put `block` on its list, joined with the cached neighbours."""
    block.used = False
    pool, before, behind = block.pool, block.before, block.behind
    if before is not None and not before.used:
        uncache(before)
        absorb(block, before)
    if behind is not None and not behind.used:
        uncache(behind)
        absorb(block, behind)
    insort(pool, (block.size, block.address, block))


def uncache(block: Block) -> None:
    del block.pool[bisect_left(block.pool, (block.size, block.address))]
