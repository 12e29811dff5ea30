"""Memory of the moments at which a run writes or reads its checkpoints, beside what it holds between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from zsim.engine.allocator import CachingAllocator, Replay
from zsim.engine.repetition import Stretch, run_through
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import DELAYED_FREES, RANK_0, Alloc
from zsim.program.saving import RESUMING, Moment, moments
from zsim.result.critical_path import RankView
from zsim.result.memory import PROCESSES, events_until, wanted_bytes, whole_steps
from zsim.result.spec import HOST_TIGHT, GpuMemory, HostMemory, MomentMemory

if TYPE_CHECKING:
    from zsim.scenario import Setup


ALWAYS = (PROCESSES, "gpu")  # of the host's memory, whatever the moment: the latter where GPUs have no other


def measure(setup: Setup, views: Sequence[RankView], gpu: GpuMemory, host: HostMemory) -> Iterator[MomentMemory]:
    """The moments that need more than `gpu` and `host`, which training does."""
    view = next(view for view in views if view.rank == gpu.peak_rank)
    for moment in moments(setup.model, setup.tree, setup.plan):
        taken, fits, retried = _gpu(moment, view, setup, gpu)
        held = _host(moment, view, setup, gpu) | {name: n for name, n in host.by_category.items() if name in ALWAYS}
        total = sum(held.values())
        if taken or total > host.peak_bytes:
            yield MomentMemory(
                moment=moment.name,
                cause=moment.cause,
                gpu_bytes=taken,
                gpu_fits=fits,
                gpu_tight=retried,
                host_bytes=total,
                host_by_category=held,
                host_fits=not host.capacity_bytes or total <= host.capacity_bytes,
                host_tight=total > HOST_TIGHT * host.capacity_bytes > 0,
            )


def _gpu(moment: Moment, view: RankView, setup: Setup, training: GpuMemory) -> tuple[int, bool, bool]:
    """What the process holds at the moment's peak, at least, in the allocator that training has left (0: no more than
    before); whether there is that much; and whether the allocator had to give cached memory back for it."""
    before = _before(moment, view, "gpu")
    events = [*before, *_events(moment, view, "gpu", before)]
    levels = list(accumulate(0 if event.category == DELAYED_FREES else event.nbytes for event in events))
    if not training.fits or max(levels[len(before) :], default=0) <= training.peak_allocated_bytes:
        return 0, True, False
    room = training.capacity_bytes - training.framework_bytes
    allocator = CachingAllocator.on(training.capacity_bytes, room, setup.plan.allocator)
    steps = whole_steps(view)[: 1 if moment.name == RESUMING else None]
    run = run_through(Replay(allocator), chain(*steps, [Stretch(events[len(before) :])]))
    reserved, fits = wanted_bytes(run, events), run.out_of_memory is None
    if not fits:
        reserved = max(reserved, room + 1)  # what is free lies in pieces
    retried = any(retry.step > view.steady.step for retry in run.retries)
    more = not fits or reserved > training.peak_reserved_bytes
    return reserved + training.framework_bytes if more else 0, fits, retried


def _host(moment: Moment, view: RankView, setup: Setup, gpu: GpuMemory) -> dict[str, int]:
    """By category at the moment's peak, on the node of the job's first rank."""
    ranks = min(setup.cluster.gpus_per_node, setup.cluster.world_size)
    held: Counter[str] = Counter()

    def change(event: MemoryEvent) -> None:
        held[event.category] += event.nbytes * (1 if event.category == RANK_0 else ranks)

    before = _before(moment, view, "host")
    for event in before:
        change(event)
    if moment.name != RESUMING:
        held["optimizer_states"] += gpu.evicted_bytes * ranks
    most = held.copy()
    for event in _events(moment, view, "host", before):
        change(event)
        if held.total() > most.total():
            most = held.copy()
    return {category: nbytes for category, nbytes in most.items() if nbytes}


def _before(moment: Moment, view: RankView, device: str) -> list[MemoryEvent]:
    return events_until(view, device, 0 if moment.name == RESUMING else view.steady.step)


def _events(moment: Moment, view: RankView, device: str, before: Sequence[MemoryEvent]) -> Iterator[MemoryEvent]:
    """What the moment does to the ledger of a device, in which `before` stands."""
    live = {event.key: event for event in before}
    own = [event for event in live.values() if event.category in moment.drops and event.nbytes > 0]
    made: dict[str, Alloc] = {}
    changes: list[tuple[str, int, str, tuple[int, ...]]] = [(e.category, -e.nbytes, e.key, ()) for e in own]
    for instruction in moment.instructions:
        if isinstance(instruction, Alloc):
            made[instruction.key] = instruction
            nbytes, alloc = instruction.nbytes, instruction
        else:
            alloc = made[instruction.key]  # type: ignore[union-attr]
            nbytes = -alloc.nbytes
        if alloc.device == device and nbytes:
            changes.append((alloc.category, nbytes, alloc.key, alloc.tensors))
    span = view.steady
    for category, nbytes, key, tensors in changes:
        yield MemoryEvent(span.step + 1, view.rank, span.end_s, device, category, nbytes, key, None, tensors=tensors)
