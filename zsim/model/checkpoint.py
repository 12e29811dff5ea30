"""Activation checkpointing on a tape, after `torch/utils/checkpoint.py` (non-reentrant) of torch 2.13.

A checkpointed region keeps its arguments and nothing else. Before its backward the region runs again; what it saves
this time is handed to the nodes of the first run in the same order, and the run stops at the last of them
(`early_stop`, which torchtitan switches off).
Selective checkpointing (torchtitan's per-op policy) also keeps the results of attention and of every second matrix
product, and the second run takes them from there instead of computing them again. What autograd saves holds the region
with all of that: of one in which it saves nothing (frozen, of inputs without gradients) nothing outlives the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zsim.model.graph import Node, Segment, Tensor
from zsim.model.spec import Saved
from zsim.model.tape import Tape


class StopRecompute(Exception):
    """Everything that backward needs has been rebuilt."""


class Holder:
    """What one operation saved: empty until the region runs again, and given away once."""

    __slots__ = ("_keeps_alive", "tensors")

    def __init__(self, keeps_alive: object) -> None:
        self._keeps_alive = keeps_alive  # the region and its arguments live until its last node has run
        self.tensors: tuple[Tensor, ...] | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        tensors, self.tensors = self.tensors, None
        assert tensors is not None, "unpacked twice, or before the region ran again"
        return tensors


class Kept(NamedTuple):
    """Saved tensors that a segment counts for results that selective checkpointing keeps."""

    segment: Segment
    saved: list[Saved]


class Frame:
    """One checkpointed region: a call of `run` on tensors. `policy` is "full" or "selective". `eager`: under
    torch.compile, too. `early_stop`: as torch's."""

    def __init__(
        self, run: Callable[..., Any], tensors: Sequence[Tensor], policy: str, eager: bool, early_stop: bool
    ) -> None:
        self.eager, self._early_stop = eager, early_stop
        self.segments: list[Segment] = []
        self.recomputed = False
        self._run, self._policy = run, policy
        self._arguments = [tensor.detach() for tensor in tensors]
        self._differentiable = [tensor.needs_grad for tensor in tensors]
        self._cache: list[tuple[Tensor, ...]] = []  # results that selective checkpointing keeps, oldest first
        self._kept: list[Kept] = []  # of these
        self._holders: list[Holder] = []
        self._saving: set[int] = set()  # segments of these
        self._filled = self._next = self._products = 0

    def asked_by(self, segment: Segment) -> bool:
        """Whether the backward of `segment` makes the region run again: the first that wants what it saved. Under the
        selective policy the first of all, which is early where that saves nothing."""
        return not self.recomputed and (self._policy == "selective" or id(segment) in self._saving)

    def recompute(self, tape: Tape) -> None:
        """Run the region again, just before its backward."""
        self.recomputed, self._products = True, 0
        tape.frame = self
        tape.rerun(lambda: self._run(*self._leaves()), StopRecompute)
        tape.frame = None
        for segment in self.segments[self._next :]:
            segment.recompute_peak = segment.recompute_live = tape.live - tape.base
            segment.recompute_alive = (tape.unsaved(segment.recompute_live),) * 2
        for segment, saved in self._kept[len(self._kept) - len(self._cache) :]:
            segment.idle += saved
        self._holders, self._arguments, self._cache = [], [], []
        del self._run

    def end(self) -> None:
        """The first run is over: without holders the region is gone, and with it what it held."""
        if not self._holders:
            self._arguments, self._cache = [], []

    def next_segment(self) -> Segment:
        """The segment of the first run that the second one enters now."""
        segment = self.segments[self._next]
        self._next += 1
        return segment

    def pack(self, segment: Segment, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Called where autograd saves `tensors`. The second run's graph keeps them, too: its backward never runs, but
        what outlives the region (keys and values that other layers share) holds on to it."""
        if not self.recomputed:
            if not self._holders:
                tensors[0].tape.keep(segment, *self._arguments)
                for results in self._cache:
                    self._keep(segment, results)
            self._saving.add(id(segment))
            self._holders.append(Holder((self._run, self._arguments, self._cache)))
            return self._holders[-1]
        tensors[0].tape.keep(segment, *tensors)
        holder = self._holders[self._filled]
        holder.tensors = kept = tuple(tensor.detach() for tensor in tensors)
        self._filled += 1
        if self._early_stop and self._filled == len(self._holders):
            raise StopRecompute
        return lambda: kept

    def cached(self, kind: str, segment: Segment, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The results of an operation: computed, or under the selective policy perhaps kept from the first run.

        torchtitan `parallelize_llama.py`, `_save_list` and its custom policy: attention, and `mm` at odd counts.
        """
        if kind == "mm":
            self._products += 1
        if self._policy != "selective" or (kind == "mm" and self._products % 2 == 0):
            return make()
        if self.recomputed:
            return self._cache.pop(0)
        results = make()
        self._cache.append(tuple(tensor.detach() for tensor in results))
        if self._holders:  # before that they are alive, and not yet to outlive the region
            self._keep(segment, results)
        return results

    def _keep(self, segment: Segment, results: tuple[Tensor, ...]) -> None:
        before = len(segment.saved)
        results[0].tape.keep(segment, *results)
        self._kept.append(Kept(segment, segment.saved[before:]))

    def _leaves(self) -> list[Tensor]:
        """The arguments, cut from the graph that made them."""
        leaves = [tensor.detach() for tensor in self._arguments]
        for leaf, differentiable in zip(leaves, self._differentiable, strict=True):
            if differentiable:
                leaf.node = Node(0, self.segments[0], "", (), lambda: (), 1)
        return leaves


def checkpoint(
    run: Callable[..., Any], tensors: Sequence[Tensor], policy: str, eager: bool = False, early_stop: bool = True
) -> Any:
    """`torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)`."""
    tape = tensors[0].tape
    tape.frame = frame = Frame(run, tensors, policy, eager, early_stop)
    result = run(*tensors)
    tape.frame = None
    frame.end()
    return result
