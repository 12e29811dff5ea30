"""Memory in the host's order: what each Alloc and Free, and the temporaries of each op, do to every device.

A tensor that another stream still reads (`Free.after`, record_stream) leaves its category when it is freed, as
it leaves `torch.cuda.memory_allocated`, but its bytes cannot be reused before that op is done, and the allocator
finds that out only when it is next asked for memory (c10/cuda/CUDACachingAllocator.cpp: free, process_events). Until
then they count as `DELAYED_FREES`. Memory does not act back on time, so this runs over the finished columns of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from zsim.engine.lanes import Rank
from zsim.engine.stepcode import ALLOC, FREE
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import DELAYED_FREES

TEMPORARY = "temporary"  # key of the level of unsaved tensors inside and after an op


def memory_events(rank: Rank) -> Iterator[list[MemoryEvent]]:
    """Events of each step in turn. Raises ValueError for a key freed or allocated twice (a bug of the strategy)."""
    live: dict[str, tuple[str, str, int]] = {}  # key -> device, category, bytes
    waiting: dict[str, list[tuple[float, str, int]]] = {"gpu": [], "host": [], "nvme": []}  # heaps: until, key, bytes
    level, level_category = 0, ""
    number, end = rank.number, rank.end
    for step, code in enumerate(rank.codes):
        clocks = rank.clocks[step]
        events: list[MemoryEvent] = []
        for what, segment, offset, op, key, category, nbytes, device, after, after_it, lane in code.memory:
            time = clocks[segment] + offset
            if what == FREE:
                if key not in live:
                    raise ValueError(f"step {step} frees {key}, which is not allocated")
                device, category, nbytes = live.pop(key)
                events.append(MemoryEvent(step, number, time, device, category, -nbytes, key, op))
                until = None if after is None else rank.resolve(after, step)
                if until is not None:
                    events.append(MemoryEvent(step, number, time, device, DELAYED_FREES, nbytes, key, op))
                    heappush(waiting[device], (end[until], key, nbytes))
                continue
            # The allocator polls when asked for memory: an Alloc, or an op with temporaries.
            while nbytes and waiting[device] and waiting[device][0][0] <= time:
                _, freed, size = heappop(waiting[device])
                events.append(MemoryEvent(step, number, time, device, DELAYED_FREES, -size, freed, op))
            if what == ALLOC:
                if key in live:
                    raise ValueError(f"step {step} allocates {key}, which is allocated already")
                live[key] = device, category, nbytes
                events.append(MemoryEvent(step, number, time, device, category, nbytes, key, op, lane))
                continue
            if level and category != level_category:
                events.append(MemoryEvent(step, number, time, device, level_category, -level, TEMPORARY, op))
                level = 0
            if nbytes != level:
                events.append(MemoryEvent(step, number, time, device, category, nbytes - level, TEMPORARY, op))
            if after_it != nbytes:
                events.append(MemoryEvent(step, number, time, device, category, after_it - nbytes, TEMPORARY, op))
            level, level_category = after_it, category
        yield events
