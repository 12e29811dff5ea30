"""What happened when: the engine's output, plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from zsim.cost.transfer import Transfer
from zsim.program.ops import COMPUTE, Op

TEMPORARY = "temporary"


class OpRecord(NamedTuple):
    """One op on one simulated rank. Times are absolute seconds; step 0 is the init program.

    `issued_s` when the host had launched it, `start_s` / `end_s` on its lane. `blocker` tells what decided its
    start: "host" (it was issued late), "lane" (the op before it on the lane), or the entry of `op.waits` it
    waited for (an op id; negative for an op of an earlier step). `stretch_s` is the part of its duration that
    contention, interference and waiting for peers added.
    """

    step: int
    rank: int
    op: Op
    issued_s: float
    start_s: float
    end_s: float
    blocker: int | str
    stretch_s: float = 0.0
    algorithm: str = ""


class MemoryEvent(NamedTuple):
    """At `time_s` of the host's clock, `category` on `device` (gpu, host, nvme) changed by `nbytes`.

    `key` names the tensor; for the unsaved tensors of an op, whose sum goes up and down, it is `TEMPORARY`.
    """

    step: int
    rank: int
    time_s: float
    device: str
    category: str
    nbytes: int
    key: str
    op: int | None  # last op issued before
    lane: str = COMPUTE  # as `Alloc.lane`
    # As `Alloc.tensors`; of temporaries those that are alive now, as `Op.temp_tensors` (None: the same as before, in
    # another category).
    tensors: tuple[Any, ...] | None = ()


class FlowRecord(NamedTuple):
    """One transfer over the network: op `op` of `step`, begun by the simulated `ranks` together.

    From `times[i]` to `times[i + 1]` it moved payload at `rates[i]` bytes/s, loading link l with
    `rates[i] * transfer.usage[l]`.
    """

    step: int
    ranks: tuple[int, ...]
    op: int
    transfer: Transfer
    times: list[float]
    rates: list[float]


@dataclass(slots=True)
class LinkUse:
    """Link `link` carried `rate` bytes/s from `start_s` to `end_s`, by the op ids in `ops`."""

    link: str
    start_s: float
    end_s: float
    rate: float
    ops: tuple[int, ...]


class StepSpan(NamedTuple):
    """Step `step` (from 1) of `rank`: from the end of the step before to the end of its last op and host work.

    Spans tile the time axis, so a span is the period at which steps follow each other.
    """

    step: int
    rank: int
    start_s: float
    end_s: float


class LeftOut(NamedTuple):
    """After micro-step `micro` (from 0) of each step come `micro_steps` more that are not simulated: each is the same,
    op by op, and takes `seconds`."""

    micro: int
    micro_steps: int
    seconds: float


@dataclass
class Timeline:
    """All records of the simulated ranks: one representative per class of equal ranks."""

    ops: list[OpRecord]  # step by step, rank by rank, in issue order
    memory: list[MemoryEvent]  # likewise, in host order
    flows: list[FlowRecord]  # in order of their ends
    steps: list[StepSpan]  # step by step, rank by rank
    link_capacity: Mapping[str, float]
    rank_classes: Sequence[tuple[int, ...]]  # first rank of each is the simulated one
    steady_step: int  # index into steps of the first step that repeats
    events: int  # discrete events processed
    notes: list[str] = field(default_factory=list)
    left_out: LeftOut | None = None

    def times_issued(self, op: Op) -> int:
        """How often `op` is, in a step."""
        left = self.left_out
        return 1 + left.micro_steps if left and op.micro == left.micro else 1

    def micro_step(self, op: Op) -> int:
        """Of `op`, from 0, among all of a step."""
        left = self.left_out
        return op.micro + left.micro_steps if left and op.micro > left.micro else op.micro

    @cached_property
    def links(self) -> list[LinkUse]:
        """Per link, intervals of constant load in time order. Expanded on demand: folded flows load many links."""
        pieces: dict[str, list[tuple[float, float, float, int]]] = {}
        for flow in self.flows:
            for start, end, rate in zip(flow.times, flow.times[1:], flow.rates, strict=False):
                if end > start and rate > 0:
                    for link, usage in flow.transfer.usage.items():
                        pieces.setdefault(link, []).append((start, end, rate * usage, flow.op))
        return [use for link in sorted(pieces) for use in _sum_up(link, pieces[link])]


def _sum_up(link: str, pieces: list[tuple[float, float, float, int]]) -> list[LinkUse]:
    uses: list[LinkUse] = []
    cuts = sorted({time for piece in pieces for time in piece[:2]})
    pieces.sort()
    live: list[tuple[float, float, float, int]] = []
    position = 0
    for start, end in pairwise(cuts):
        live = [piece for piece in live if piece[1] > start]
        while position < len(pieces) and pieces[position][0] <= start:
            live.append(pieces[position])
            position += 1
        if not live:
            continue
        rate, ops = sum(piece[2] for piece in live), tuple(sorted({piece[3] for piece in live}))
        before = uses[-1] if uses else None
        if before and before.end_s == start and before.rate == rate and before.ops == ops:
            before.end_s = end
        else:
            uses.append(LinkUse(link, start, end, rate, ops))
    return uses
