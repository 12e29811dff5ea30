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
from zsim.engine.timeline import TEMPORARY, MemoryEvent
from zsim.program.ops import COMPUTE, DELAYED_FREES, Alloc, Free


def memory_events(rank: Rank) -> Iterator[list[MemoryEvent]]:
    """Events of each step in turn. Raises ValueError for a key freed or allocated twice (a bug of the strategy)."""
    live: dict[str, Alloc] = {}
    waiting: dict[str, list[tuple[float, str, int]]] = {"gpu": [], "host": [], "nvme": []}  # heaps: until, key, bytes
    level, level_category = 0, ""  # temporaries that the last op left
    number, end = rank.number, rank.end
    for step, code in enumerate(rank.codes):
        clocks = rank.clocks[step]
        rows: list[tuple[object, ...]] = []
        append = rows.append
        for segment, offset, op, item, after in code.memory:
            time = clocks[segment] + offset
            if isinstance(item, Free):
                tensor = live.pop(item.key, None)
                if tensor is None:
                    raise ValueError(f"step {step} frees {item.key}, which is not allocated")
                key, category, nbytes, device, lane = tensor
                append((step, number, time, device, category, -nbytes, key, op, lane))
                until = None if after is None else rank.resolve(after, step)
                if until is not None:
                    append((step, number, time, device, DELAYED_FREES, nbytes, key, op, lane))
                    heappush(waiting[device], (end[until], key, nbytes))
                continue
            if isinstance(item, Alloc):
                key, category, nbytes, device, lane = item
            else:
                key, category, nbytes, device, lane = TEMPORARY, item.temp_category, item.temp_peak, "gpu", COMPUTE
            # The allocator polls when asked for memory: an Alloc, or an op with temporaries.
            while nbytes > 0 and waiting[device] and waiting[device][0][0] <= time:
                _, freed, size = heappop(waiting[device])
                append((step, number, time, device, DELAYED_FREES, -size, freed, op, lane))
            if isinstance(item, Alloc):
                if key in live:
                    raise ValueError(f"step {step} allocates {key}, which is allocated already")
                live[key] = item
                append((step, number, time, device, category, nbytes, key, op, lane))
                continue
            if level and category != level_category:
                append((step, number, time, device, level_category, -level, key, op, lane))
                level = 0
            if nbytes != level:
                append((step, number, time, device, category, nbytes - level, key, op, lane))
            level, level_category = item.temp_live, category
            if level != nbytes:
                append((step, number, time, device, category, level - nbytes, key, op, lane))
        yield list(map(MemoryEvent._make, rows))
