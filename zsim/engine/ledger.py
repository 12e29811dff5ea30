"""Memory in the host's order: what each Alloc and Free, and the temporaries of each op, do to every device.

A tensor that another stream still reads (`Free.after`, record_stream) leaves its category when it is freed, as
it leaves `torch.cuda.memory_allocated`, but its bytes cannot be reused before that op is done, and the allocator
finds that out only when it is next asked for memory (c10/cuda/CUDACachingAllocator.cpp: free, process_events). Until
then they count as `DELAYED_FREES`. Memory does not act back on time, so this runs over the finished columns of a rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from zsim.engine.lanes import Rank
from zsim.engine.timeline import TEMPORARY, MemoryEvent
from zsim.program.ops import COMPUTE, DELAYED_FREES, DEVICES, Alloc, Compute, Free, Op

# Kernels that may be pending on a stream before a launch blocks: "about 1000" of 190 us each, and as many again on
# every further stream (stackoverflow.com/questions/53970187; forums.developer.nvidia.com/t/68937).
LAUNCH_QUEUE = 1024

_event = partial(tuple.__new__, MemoryEvent)  # MemoryEvent._make, without a Python function around it


@dataclass(slots=True)
class LaunchQueue:
    """How far a real host runs ahead of a stream: a launch returns once the kernel `LAUNCH_QUEUE` before it has begun.

    `pending`: launches that had not begun when the host made them, as numbers of kernels and when they begin.
    """

    pending: deque[tuple[int, float]] = field(default_factory=deque)
    kernels: int = 0  # in all of `pending`

    def clear(self) -> None:
        self.pending.clear()
        self.kernels = 0

    def launch(self, kernels: int, begin: float) -> float:
        """Kernels that begin later than now, at `begin`. Returns the time before which their launch does not."""
        pending = self.pending
        pending.append((kernels, begin))
        self.kernels += kernels
        while self.kernels - pending[0][0] > LAUNCH_QUEUE:
            self.kernels -= pending.popleft()[0]
        return pending[0][1] if self.kernels > LAUNCH_QUEUE else 0.0


def memory_events(rank: Rank) -> Iterator[list[MemoryEvent]]:
    """Events of each step in turn. Raises ValueError for a key freed or allocated twice (a bug of the strategy)."""
    live: dict[str, Alloc] = {}
    waiting: dict[str, list[tuple[float, str, int]]] = {device: [] for device in DEVICES}  # heaps: until, key, bytes
    level, level_category = 0, ""  # temporaries that the last op left
    left: tuple[Any, ...] = ()  # each of them, as in Op.temp_left
    tensors: tuple[Any, ...]
    number, start, end = rank.number, rank.start, rank.end
    queues: dict[str, LaunchQueue] = defaultdict(LaunchQueue)
    floor = 0.0  # before which the host cannot be where it is
    launches: dict[int, int] = {}  # by id of the work, which equal blocks share
    for step, code in enumerate(rank.codes):
        clocks, base = rank.clocks[step], rank.bases[step]
        events: list[MemoryEvent] = []
        append = events.append
        for segment, offset, op, item, after in code.memory:
            time = clocks[segment] + offset
            if isinstance(item, Op):
                assert after is not None
                begin, queue, work = start[base + after], queues[item.lane], item.work
                if begin > time:
                    kernels = launches.get(id(work))
                    if kernels is None:
                        assert isinstance(work, Compute)
                        kernels = launches[id(work)] = sum(kernel.launches for kernel in work.kernels)
                    floor = max(floor, queue.launch(kernels, begin))
                elif queue.kernels:
                    queue.clear()
            if time < floor:
                time = floor
            if isinstance(item, Free):
                tensor = live.pop(item.key, None)
                if tensor is None:
                    raise ValueError(f"step {step} frees {item.key}, which is not allocated")
                key, category, nbytes, device, lane, _ = tensor
                append(_event((step, number, time, device, category, -nbytes, key, op, lane, ())))
                until = None if after is None else rank.resolve(after, step)
                if until is not None:
                    append(_event((step, number, time, device, DELAYED_FREES, nbytes, key, op, lane, ())))
                    heappush(waiting[device], (end[until], key, nbytes))
                continue
            if isinstance(item, Alloc):
                key, category, nbytes, device, lane, tensors = item
            else:
                key, category, nbytes, device, lane = TEMPORARY, item.temp_category, item.temp_peak, "gpu", COMPUTE
                tensors = item.temp_tensors
            # The allocator polls when asked for memory: an Alloc, or an op with temporaries.
            while nbytes > 0 and waiting[device] and waiting[device][0][0] <= time:
                _, freed, size = heappop(waiting[device])
                append(_event((step, number, time, device, DELAYED_FREES, -size, freed, op, lane, ())))
            if isinstance(item, Alloc):
                if key in live:
                    raise ValueError(f"step {step} allocates {key}, which is allocated already")
                live[key] = item
                append(_event((step, number, time, device, category, nbytes, key, op, lane, tensors)))
                continue
            if level and category != level_category:
                append(_event((step, number, time, device, level_category, -level, key, op, lane, None)))
                level = 0
            if nbytes != level or tensors != left:
                append(_event((step, number, time, device, category, nbytes - level, key, op, lane, tensors)))
            # More after the op than within it: a saved tensor lives on as a gradient. Its Free follows this op, so its
            # bytes count as temporary from the next one on.
            level_category, level, left = category, item.temp_live, item.temp_left
            if level > nbytes:
                level, left = nbytes, tensors
            if level != nbytes or left != tensors:
                append(_event((step, number, time, device, category, level - nbytes, key, op, lane, left)))
        yield events
