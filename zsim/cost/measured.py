"""Transfers as measured on the machine itself: collectives by range of sizes, copies alone and all at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zsim.cost import nccl
from zsim.cost.transfer import Transfer

Loads = Mapping[str, float]
_LOCAL = re.compile(r"\bn\d+/")  # of the name of a link


def local_loads(transfer: Transfer, capacity: Mapping[str, float]) -> Loads:
    """Seconds per byte of payload on each link, by its name within the machine."""
    return {_LOCAL.sub("", link): load / capacity[link] for link, load in transfer.usage.items()}


class Regime(NamedTuple):
    """Up to `up_to` bytes of the full buffer, a call takes `latency` seconds plus bytes / `bandwidth`."""

    up_to: float
    latency: float
    bandwidth: float


class Measured(NamedTuple):
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


class MeasuredCopy(NamedTuple):
    """Copies of one direction and kind of memory: bytes/s of a rank `alone`, and of each of `ranks` `together`."""

    ranks: int
    latency: float
    alone: float
    together: float

    def transfer(self, base: Transfer, each: Sequence[Loads]) -> Transfer:
        """`base` with the measured rates. `each`: seconds per byte on the links of the machine, for each of its ranks.

        Links that only one rank uses get the rate alone, those that several share what was measured together, so that
        copies of any number of ranks, and whatever else crosses these links, share them.
        """
        everyone: Counter[str] = Counter()
        for loads in each:
            everyone.update(loads)
        shared = {link for link in everyone if sum(link in loads for loads in each) > 1}
        factors = dict.fromkeys(everyone, 1.0)
        for links, rate in (
            (everyone.keys() - shared, self.alone),
            (shared, self.together * self.ranks / len(each)),
        ):
            slowest = max((everyone[link] for link in links), default=0.0)
            factors |= dict.fromkeys(links, 1 / (rate * slowest))
        usage = {link: load * factors[_LOCAL.sub("", link)] for link, load in base.usage.items()}
        return replace(base, usage=usage, latency_s=self.latency)


def read_copies(document: Mapping[str, Any]) -> dict[str, MeasuredCopy]:
    """From a profile's `copies`: "h2d pinned" -> rates."""
    return {
        kind: MeasuredCopy(_ranks(entry, 1), float(entry["latency"]), _rate(entry["alone"]), _rate(entry["together"]))
        for kind, entry in document.items()
    }


def read_measured(document: Mapping[str, Any]) -> dict[str, Measured]:
    """From a profile's `collectives`: kind -> ranks and regimes."""
    return {
        kind: Measured(_ranks(entry), tuple(_regime(**regime) for regime in entry["regimes"]))
        for kind, entry in document.items()
    }


def _ranks(entry: Mapping[str, Any], least: int = 2) -> int:
    if not isinstance(entry["ranks"], int) or entry["ranks"] < least or ("regimes" in entry and not entry["regimes"]):
        raise ValueError("a measurement without ranks or sizes")
    return entry["ranks"]


def _regime(up_to: float, latency: float, bandwidth: float) -> Regime:
    return Regime(float(up_to), float(latency), _rate(bandwidth))  # YAML reads 1e9 as text


def _rate(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(f"a rate of {value}")
    return float(value)
