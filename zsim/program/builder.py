"""Writes the instructions of one step in the words of CUDA streams: launch, wait for an event, alloc, free."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from zsim.model.spec import Unsaved, numbered
from zsim.program.ops import (
    COMPUTE,
    HOST,
    LANES,
    Alloc,
    Collective,
    Free,
    HostWait,
    HostWork,
    Instruction,
    Launch,
    Op,
    Work,
)

# A named tuple's own constructor is a Python function, which takes twice as long; a step has tens of thousands.
_new = tuple.__new__


class Builder:
    """Collects instructions in issue order. Op ids count from 0 within a step.

    `rounds_pinned`: torch's allocator of pinned memory takes powers of two, as from torch 1.11 on.
    """

    def __init__(self, *, rounds_pinned: bool = True) -> None:
        self.rounds_pinned = rounds_pinned
        self.phases: dict[str, str] = {}  # what ops of a phase are counted to, where that is another one
        self._begin()

    def _begin(self, next_id: int = 0) -> None:
        self.instructions: list[Instruction] = []
        self._last: dict[str, int] = {}
        self._pending: dict[str, list[int]] = {}
        self._communicators: dict[str, int] = {}
        self._next_id = next_id
        # unsaved tensors alive after the last compute op: bytes, where they count, each of them
        self._live: tuple[int, str, Unsaved] = (0, "activations", ())

    def finish(self, *, counting_on: bool = False) -> tuple[Instruction, ...]:
        """Ends the step, or with `counting_on` a part of it that the rest does not refer to; returns it."""
        instructions = tuple(self.instructions)
        self._begin(self._next_id if counting_on else 0)
        return instructions

    def last(self, lane: str) -> int:
        """The event that `stream.record_event()` on `lane` would give now (an earlier step's last op if none)."""
        event = self._last.get(lane)
        return -1 - LANES.index(lane) if event is None else event

    def stream_wait(self, lane: str, event: int) -> None:
        """`lane.wait_event(event)`: its next op starts only after `event`."""
        self._pending.setdefault(lane, []).append(event)

    def wait_stream(self, lane: str, other: str) -> None:
        self.stream_wait(lane, self.last(other))

    def launch(
        self,
        lane: str,
        label: str,
        phase: str,
        work: Work,
        *,
        module: str = "",
        layer: int | None = None,
        micro: int = 0,
        temp_peak: int = 0,
        temp_live: int | None = None,
        temp_category: str = "activations",
        temp_tensors: Unsaved = (),
        temp_left: Unsaved = (),
    ) -> int:
        """Issue an op; returns its id, which is also its event.

        `temp_live` None: a framework's kernel, which leaves the model's unsaved tensors as they are and needs
        `temp_peak` bytes on top.

        NCCL runs the calls on one communicator in the order of issue, whatever their streams (torch 2.13
        FSDPModule.set_separate_reduce_scatter_group exists to lift that), so a collective waits for the one before.
        """
        op_id = self._next_id
        if self.phases:
            phase = self.phases.get(phase, phase)
        if isinstance(work, Collective):
            previous = self._communicators.get(work.group)
            if previous is not None and previous != self._last.get(lane):
                self.stream_wait(lane, previous)
            self._communicators[work.group] = op_id
        self._next_id += 1
        pending = self._pending.pop(lane, None)
        waits = () if not pending else tuple(pending) if len(pending) == 1 else tuple(dict.fromkeys(pending))
        if temp_live is None:
            temp_live = 0
            if self._live[0]:
                temp_live, temp_category, temp_left = self._live
                temp_tensors = (*temp_left, *(temp_tensors or numbered([temp_peak]))) if temp_peak else temp_left
                temp_peak += temp_live
        elif lane == COMPUTE:
            self._live = (temp_live, temp_category, temp_left)
        fields = (
            op_id, lane, label, phase, work, waits, module, layer, micro,
            temp_peak, temp_live, temp_category, temp_tensors, temp_left,
        )  # fmt: skip
        self.instructions.append(_new(Launch, (_new(Op, fields),)))
        if lane != HOST:
            self._last[lane] = op_id
        return op_id

    def host_work(self, label: str, phase: str, count: int = 1, module: str = "", micro: int = 0) -> None:
        self.launch(HOST, label, phase, _host_work(label, count), module=module, micro=micro)

    def alloc(
        self,
        key: str,
        category: str,
        nbytes: int,
        device: str = "gpu",
        lane: str = COMPUTE,
        tensors: tuple[int, ...] = (),
    ) -> None:
        self.instructions.append(_new(Alloc, (key, category, nbytes, device, lane, tensors)))

    def alloc_host(self, key: str, category: str, nbytes: int, pinned: bool) -> None:
        """A tensor of the host; a pinned one is a copy of the pageable one that was there first."""
        if pinned:
            self.alloc(f"{key}, pageable", category, nbytes, "host")
        self.alloc(key, category, self.pinned_bytes(nbytes) if pinned else nbytes, "host")
        if pinned:
            self.free(f"{key}, pageable")

    def pinned_bytes(self, nbytes: int) -> int:
        return pinned_bytes(nbytes) if self.rounds_pinned else nbytes

    def free(self, key: str, after: int | None = None) -> None:
        self.instructions.append(_new(Free, (key, after)))

    def host_wait(self, event: int | None = None) -> None:
        self.instructions.append(_new(HostWait, (event,)))


_host_work = lru_cache(maxsize=4096)(HostWork)


def pinned_bytes(nbytes: int) -> int:
    """What torch's pinned allocator takes: the next power of two (torch 2.13 ATen/core/CachingHostAllocator.h:305)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def repeated(
    builder: Builder, step: Callable[[bool], None], steps: int, differing: int = 2
) -> tuple[tuple[Instruction, ...], ...]:
    """`steps` step programs, from number `differing` on one object: `step(first)` issues one."""
    built = []
    for index in range(min(steps, differing)):
        step(index == 0)
        built.append(builder.finish())
    return tuple(built + built[-1:] * (steps - len(built)))
