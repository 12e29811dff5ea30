"""Memory in the host's order: what each Alloc and Free, and the temporaries of each op, do to every device.

A tensor handed to another stream (`Free.after`) comes back only when that op is done, and the allocator finds
that out when it is next asked for memory on that device (CUDACachingAllocator::process_events). Memory does not
act back on time, so this runs over the finished columns of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.engine.lanes import Rank
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import Alloc, Free


def memory_events(rank: Rank) -> Iterator[list[MemoryEvent]]:
    """Events of each step in turn. Raises ValueError for a key freed or allocated twice (a bug of the strategy)."""
    live: dict[str, Alloc] = {}
    waiting: dict[str, list[tuple[int, Alloc]]] = {}  # device -> frees until op is done
    level, category = 0, ""  # temporaries between ops
    for step, (code, _) in enumerate(rank.steps):
        events: list[MemoryEvent] = []
        clocks = rank.bases[step]
        for entry in code.memory:
            item = entry.instruction
            time = clocks[entry.segment] + entry.offset

            def change(device: str, what: str, nbytes: int, key: str) -> None:
                events.append(MemoryEvent(step, rank.number, time, device, what, nbytes, key, entry.last_op))  # noqa: B023

            if isinstance(item, Free):
                tensor = live.pop(item.key, None)
                if tensor is None:
                    raise ValueError(f"step {step} frees {item.key}, which is not allocated")
                after = None if entry.after is None else rank.resolve(entry.after, step)
                if after is None:
                    change(tensor.device, tensor.category, -tensor.nbytes, tensor.key)
                else:
                    waiting.setdefault(tensor.device, []).append((after, tensor))
                continue
            device = item.device if isinstance(item, Alloc) else "gpu"
            if waiting.get(device) and (isinstance(item, Alloc) or item.temp_peak):
                still = []
                for after, tensor in waiting[device]:
                    if rank.end[after] <= time:
                        change(device, tensor.category, -tensor.nbytes, tensor.key)
                    else:
                        still.append((after, tensor))
                waiting[device] = still
            if isinstance(item, Alloc):
                if item.key in live:
                    raise ValueError(f"step {step} allocates {item.key}, which is allocated already")
                live[item.key] = item
                change(item.device, item.category, item.nbytes, item.key)
            elif item.temp_peak or level or item.temp_live:
                if category != item.temp_category:
                    if level:
                        change("gpu", category, -level, "temporary")
                    level, category = 0, item.temp_category
                if item.temp_peak != level:
                    change("gpu", category, item.temp_peak - level, "temporary")
                if item.temp_live != item.temp_peak:
                    change("gpu", category, item.temp_live - item.temp_peak, "temporary")
                level = item.temp_live
        yield events
