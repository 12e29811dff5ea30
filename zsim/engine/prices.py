"""What the engine asks of a cost model: the only door between durations and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from zsim.cost.transfer import Transfer
from zsim.program.ops import Collective, Compute, Copy, CpuWork, HostWork, Op

Groups = tuple[tuple[int, ...], ...]


class Prices(Protocol):
    """How long things take alone, in seconds, and which links a transfer loads."""

    @property
    def link_capacity(self) -> Mapping[str, float]:
        """bytes/s of every link that a `Transfer.usage` may name."""

    def compute_seconds(self, rank: int, work: Compute) -> float:
        """Kernels alone on `rank`'s device."""

    def issue_seconds(self, op: Op) -> float:
        """Host time to launch `op`: the same for ops of the same work and phase."""

    def host_seconds(self, work: HostWork) -> float:
        """Host time that launches nothing."""

    def cpu_seconds(self, rank: int, work: CpuWork) -> float:
        """Optimizer arithmetic on the CPU lane of `rank`."""

    def transfer(self, work: Collective | Copy, groups: Groups) -> Transfer:
        """All `groups` making this call at once; for a `Copy` each group is one rank."""

    def compute_slowdown(self, active: Sequence[Collective | Copy]) -> float:
        """Factor >= 1 on kernels while `active` are in flight on the same rank."""
