"""What each term of the cost model buys: the error without it, the other constants fitted anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.cost.price import Price
from zsim.cost.profile import Document
from zsim.cost.transfer import Transfer
from zsim.program.ops import Collective, Copy
from zsim.validation.calibrate import KNOBS, Knob, errors, fit, unfitted, with_values
from zsim.validation.fit_cases import Case, Reader


class Uncontended(Price):
    """Every transfer as fast as alone, whatever else is in flight."""

    def transfer(self, work: Collective | Copy, groups: tuple[tuple[int, ...], ...]) -> Transfer:
        shared = super().transfer(work, groups)
        per_byte = max((load / self.link_capacity[link] for link, load in shared.usage.items()), default=0.0)
        slowest = max(per_byte, 1 / shared.max_rate)
        return Transfer(
            shared.payload_bytes, {}, shared.latency_s, 1 / slowest if slowest else shared.max_rate, shared.algorithm
        )


@dataclass(frozen=True)
class Ablation:
    """A term that is switched off: by these values in documents, by dropping these knobs, or by another price."""

    name: str
    changes: Mapping[str, Mapping[str, Any]]
    dropped: tuple[str, ...] = ()
    price: type[Price] = Price

    def documents(self, name: str) -> Document | None:
        document = unfitted(name)
        return None if document is None else _over(document, self.changes.get(name, {}))


_NO_HOST = {"pace": 0.0}
_NO_TILES = {kernel: {"causal_tile": 0, "depth": 0} for kernel in ("flash", "flash1", "triton")}
ABLATIONS = (
    Ablation("nothing left out", {}),
    Ablation("interference", {"generic": {"collective_slowdown": 1.0 + 1e-9}}, ("collective_slowdown",)),
    Ablation("tiles and depth of kernels", {"generic": {"gemm": {"tile": 1, "depth": 0}, "attention": _NO_TILES}}),
    Ablation("host time and gaps between kernels", {"stacks": {"default": _NO_HOST}, "generic": {"launch_gap": 0.0}}),
    Ablation("spread of the speed of equal GPUs", {"generic": {"device_spread": 0.0}}),
    Ablation("contention of transfers", {}, price=Uncontended),
)


def ablate(train: Sequence[Case], test: Sequence[Case]) -> Iterator[tuple[str, float, float]]:
    """(term, MAPE of fit rows, MAPE of test rows) in percent, each refitted in two rounds."""
    for ablation in ABLATIONS:
        knobs: Sequence[Knob] = [knob for knob in KNOBS if knob.path not in ablation.dropped]
        base: Reader = ablation.documents
        read = with_values(base, fit(train, knobs, base, 2, ablation.price))
        fitted, held = (errors(rows, read, ablation.price) for rows in (train, test))
        yield ablation.name, _mape(fitted), _mape(held)


def _mape(found: Mapping[str, float]) -> float:
    return sum(map(abs, found.values())) / len(found)


def _over(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        known = merged.get(key)
        merged[key] = _over(known, value) if isinstance(value, Mapping) and isinstance(known, Mapping) else value
    return merged
