"""Collectives as they were measured on the machine itself: a latency and a bandwidth for each range of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zsim.cost import nccl
from zsim.cost.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Regime:
    """Up to `up_to` bytes of the full buffer, a call takes `latency` seconds plus bytes / `bandwidth`."""

    up_to: float
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of collective between `ranks` ranks of one machine."""

    ranks: int
    regimes: tuple[Regime, ...]

    def regime(self, nbytes: float) -> Regime:
        """The last one serves beyond what was measured."""
        return next((regime for regime in self.regimes if nbytes <= regime.up_to), self.regimes[-1])

    def transfer(self, kind: str, base: Transfer, ranks: int, groups: int, alone_rate: float) -> Transfer:
        """`base`, as topology and library have it, with the measured times. `alone_rate`: its payload bytes/s alone.

        Other numbers of ranks take steps and bytes in proportion, as a ring does. Links stay shared: their load is
        what makes the measured rate alone. Without links (gloo) groups share the machine's cores in turns.
        """
        regime = self.regime(base.payload_bytes)
        latency = regime.latency * (ranks - 1) / (self.ranks - 1)
        rate = regime.bandwidth * nccl.edge(kind, self.ranks) / nccl.edge(kind, ranks)
        if not base.usage:
            return replace(base, latency_s=latency, max_rate=rate / groups)
        usage = {link: load * min(1.0, alone_rate / rate) for link, load in base.usage.items()}
        return replace(base, usage=usage, latency_s=latency, max_rate=rate)


def read_measured(document: Mapping[str, Any]) -> dict[str, Measured]:
    """From a profile's `collectives`: kind -> ranks and regimes."""
    return {
        kind: Measured(entry["ranks"], tuple(_regime(**regime) for regime in entry["regimes"]))
        for kind, entry in document.items()
    }


def _regime(up_to: float, latency: float, bandwidth: float) -> Regime:
    return Regime(float(up_to), float(latency), float(bandwidth))  # YAML reads 1e9 as text
