"""A collective alone on a machine, over sizes: what nccl-tests measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim import units
from zsim.cluster.spec import Cluster
from zsim.cost.collectives import KINDS, transfer
from zsim.cost.transfer import Transfer
from zsim.errors import InputError

# Bus bandwidth over algorithm bandwidth (nccl-tests doc/PERFORMANCE.md).
_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
MOST_SIZES = 200


@dataclass(frozen=True)
class Row:
    """Sizes in bytes of the full buffer, rates in bytes/s."""

    size_bytes: int
    time_s: float
    algbw: float
    busbw: float
    algorithm: str
    ranks: int


def seconds_alone(cluster: Cluster, one: Transfer) -> float:
    """The transfer with the links to itself."""
    links = cluster.links
    rate = min((links[link].bandwidth / times for link, times in one.usage.items() if times), default=float("inf"))
    return one.latency_s + one.payload_bytes / min(rate, one.max_rate)


def bench(
    cluster: Cluster, op: str, sizes: Sequence[int], ranks: int | None = None, algorithm: str | None = None
) -> list[Row]:
    """`op` among the first `ranks` ranks for each size. Raises InputError for what cannot run."""
    if op not in KINDS:
        raise InputError(f"unknown collective {op!r}", field="--op", accepted=", ".join(KINDS))
    if cluster.world_size < 2:
        raise InputError("one GPU has nobody to talk to", field="--topology", accepted="a machine of 2 GPUs or more")
    n = cluster.world_size if ranks is None else ranks
    if not 2 <= n <= cluster.world_size:
        raise InputError(f"{n} ranks", field="--ranks", accepted=f"2 to {cluster.world_size} on this machine")
    group = (tuple(range(n)),)
    rows = []
    for size in sizes:
        one = transfer(cluster, op, size, group, algorithm)
        time_s = seconds_alone(cluster, one)
        algbw = size / time_s
        rows.append(Row(size, time_s, algbw, algbw * bus_factor(op, n), one.algorithm, n))
    return rows


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth per algorithm bandwidth."""
    return _BUS[op] * (ranks - 1) / ranks if op in _BUS else 1.0


def parse_sizes(text: str) -> list[int]:
    """ "1KiB..8GiB" (doubling) or "1MiB,16MiB" as bytes. Raises InputError."""
    accepted = "1KiB..8GiB, or 1MiB,16MiB,1GiB"
    try:
        if ".." in text:
            first, last = (units.parse_size(part) for part in text.split("..", 1))
            if not 0 < first <= last:
                raise InputError(f"{text!r} is not a range", field="--sizes", accepted=accepted)
            sizes = [first]
            while sizes[-1] * 2 <= last and len(sizes) < MOST_SIZES:
                sizes.append(sizes[-1] * 2)
            return sizes
        sizes = [units.parse_size(part) for part in text.split(",")]
    except InputError as error:
        error.field, error.accepted = "--sizes", accepted
        raise
    if min(sizes) <= 0:
        raise InputError(f"{text!r} holds a size that is not positive", field="--sizes", accepted=accepted)
    return sizes
