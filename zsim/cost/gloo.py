"""gloo on CPU hosts: ranks are processes, their links loopback sockets or Ethernet.

Times come from a measured table of two ranks rather than from a rate: each call copies its tensors several times and
wakes threads, so it is neither one bandwidth nor one latency. More ranks scale the bytes as a ring does and the start
as its steps.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from math import exp, log
from pathlib import Path

import yaml

from zsim.cost.transfer import Transfer
from zsim.errors import NotModeled

Groups = tuple[tuple[int, ...], ...]
_LIKE = {"reduce": "broadcast", "all_to_all": "all_gather", "send_recv": "broadcast"}


@cache
def _table() -> dict[str, list[tuple[float, float]]]:
    path = Path(__file__).with_name("gloo.yaml")
    data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return {
        kind: sorted((float(size), float(seconds)) for size, seconds in rows.items()) for kind, rows in data.items()
    }


def two_ranks(kind: str, nbytes: float) -> float:
    """Seconds of a call of two ranks: between measured sizes along a power law, beyond them in proportion.

    Raises NotModeled for a kind that was not measured.
    """
    rows = _table().get(_LIKE.get(kind, kind))
    if rows is None:
        raise NotModeled(f"{kind} on gloo", accepted=", ".join(_table()))
    if nbytes <= rows[0][0]:
        return rows[0][1]
    if nbytes >= rows[-1][0]:
        return rows[-1][1] * nbytes / rows[-1][0]
    above = bisect_right(rows, (nbytes, float("inf")))
    (x0, y0), (x1, y1) = rows[above - 1], rows[above]
    share = log(nbytes / x0) / log(x1 / x0)
    return exp((1 - share) * log(y0) + share * log(y1))


def transfer(kind: str, nbytes: float, ranks: int, edge: float, groups: int) -> Transfer:
    """`edge`: bytes over a ring edge per byte of payload. Groups of one machine share its cores, so they take turns."""
    start = two_ranks(kind, 0) * (ranks - 1)
    # What an edge carried in the measurement. An all_to_all of 2 or 4 ranks takes half the time of an all_gather of the
    # same payload (median of 6 sizes of 1 to 64 MiB): it keeps its own share in place.
    pair = 0.5 if kind in ("all_gather", "reduce_scatter") else 1.0
    moving = max(0.0, two_ranks(kind, nbytes) - two_ranks(kind, 0)) * edge / pair * groups
    rate = nbytes / moving if moving > 0 else float("inf")
    return Transfer(nbytes, {}, start, rate, "gloo")
