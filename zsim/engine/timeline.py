"""What happened when: the engine's output, plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zsim.program.ops import Op


@dataclass(slots=True)
class OpRecord:
    """One op on one simulated rank. Times are absolute seconds.

    `issued_s` when the host had launched it, `start_s` / `end_s` on its lane. `blocker` tells what decided its
    start: "host" (it was issued late), "lane" (the op before it on the lane), or the id of the op it waited
    for. `stretch_s` is the part of its duration that contention and interference added.
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


@dataclass(slots=True)
class MemoryEvent:
    """At `time_s` of the host's clock, `category` on `device` (gpu, host, nvme) changed by `nbytes`."""

    step: int
    rank: int
    time_s: float
    device: str
    category: str
    nbytes: int
    key: str
    op: int | None  # last op issued before


@dataclass(slots=True)
class LinkUse:
    """Link `link` carried `rate` bytes/s from `start_s` to `end_s`, by the op ids in `ops`."""

    link: str
    start_s: float
    end_s: float
    rate: float
    ops: tuple[int, ...]


@dataclass(slots=True)
class StepSpan:
    step: int
    rank: int
    start_s: float
    end_s: float
    host_busy_s: float
    host_wait_s: float


@dataclass
class Timeline:
    """All records of the simulated ranks: one representative per class of equal ranks."""

    ops: list[OpRecord]
    memory: list[MemoryEvent]
    links: list[LinkUse]
    steps: list[StepSpan]
    link_capacity: Mapping[str, float]
    rank_classes: Sequence[tuple[int, ...]]  # first rank of each is the simulated one
    steady_step: int  # index into steps of the first step that repeats
    events: int  # discrete events processed
    notes: list[str] = field(default_factory=list)
