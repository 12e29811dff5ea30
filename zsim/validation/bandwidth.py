"""Measured copy rates against the graph: p2pBandwidthLatencyTest, nvbandwidth and bandwidthTest.

Only what a link figure can be held against is compared: copies between two GPUs, and between pinned host memory and
a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from zsim.cluster.routes import gpu_to_gpu
from zsim.cluster.spec import Cluster
from zsim.cost import copies
from zsim.cost.bench import seconds_alone
from zsim.errors import InputError
from zsim.program.ops import Copy

ACCEPTED = "the output of p2pBandwidthLatencyTest, nvbandwidth or bandwidthTest"
_TITLE = re.compile(r"Matrix \((GB/s|us)\)|memcpy \w+ \w+\(row\).*?(bandwidth) \((GB/s)\)|memory latency")
_COLUMNS = re.compile(r"^\s*(?:D\\D|GPU|CPU)?\s*0(\s+\d+)*\s*$")
_SHMOO = re.compile(r"bandwidthTest-(D2H|H2D)-Pinned, Bandwidth = ([\d.]+) GB/s,.*Size = (\d+) bytes")
SIZE = 256 * 2**20  # what such tests copy, about


@dataclass
class Measured:
    """One matrix, GB/s or microseconds; `rows[i]` by row index. `what`: p2p | p2p both ways | h2d | d2h | other."""

    title: str
    what: str
    rows: dict[int, list[float]] = field(default_factory=dict)


def read(path: str | Path) -> list[Measured]:
    """All matrices of a file. Raises InputError where there is none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    found = parse(text)
    if not found:
        raise InputError("no matrix of copy rates in it", file=path, accepted=ACCEPTED)
    return found


def parse(text: str) -> list[Measured]:
    """Matrices in order; bandwidthTest's sweep is one of a single entry, its largest size."""
    sweep = _SHMOO.findall(text)
    if sweep:
        way, rate, _ = max(sweep, key=lambda found: int(found[2]))
        return [Measured(f"bandwidthTest {way}", way.lower(), {0: [float(rate)]})]
    found: list[Measured] = []
    test = ""
    for line in text.splitlines():
        if line.startswith("Running "):
            test = line.removeprefix("Running ").strip(" .")
        if _TITLE.search(line):
            found.append(Measured(f"{test} {line}".strip(), _what(test, line)))
        elif found and not _COLUMNS.match(line):
            row = re.match(r"^\s*(\d+)((?:\s+(?:\d+(?:\.\d+)?|N/A))+)\s*$", line)
            if row:
                values = [float(value) for value in row.group(2).split() if value != "N/A"]
                found[-1].rows[int(row.group(1))] = values
    return [one for one in found if one.rows]


def _what(test: str, title: str) -> str:
    if "atency" in title.split("Matrix")[0] or "(us)" in title or "latency" in title:
        return "other"
    if "P2P=Enabled" in title:
        return "p2p both ways" if "Bidirectional" in title else "p2p"
    if test.startswith("device_to_device") and "bidirectional" not in test:
        return "p2p"
    if "bidirectional" in test or test.startswith("all_"):
        return "other"
    return {"host_to_device": "h2d", "device_to_host": "d2h"}.get("_".join(test.split("_")[:3]), "other")


@dataclass(frozen=True)
class Line:
    """Rates in GB/s; `median_error` of the graph's figure relative to the measured ones."""

    title: str
    pairs: int
    measured: float
    predicted: float
    median_error: float


def compare(path: str | Path, cluster: Cluster) -> list[Line]:
    """Every comparable matrix against `cluster`. Raises InputError where there are more GPUs than it has."""
    lines = []
    for one in read(path):
        pairs = [(value, rate) for value, rate in _pairs(one, cluster) if value > 0]
        if pairs:
            errors = [rate / value - 1 for value, rate in pairs]
            middle = sorted(pairs)[len(pairs) // 2]
            lines.append(Line(one.title, len(pairs), middle[0], middle[1], median(errors)))
    return lines


def _pairs(one: Measured, cluster: Cluster) -> list[tuple[float, float]]:
    """(measured, predicted) GB/s of each entry."""
    node = cluster.templates[0]
    gpus = len(node.devices)
    if one.what != "other" and max(len(values) for values in one.rows.values()) > gpus:
        raise InputError(f"{one.title}: more GPUs than the {gpus} of the machine", field="--topology")
    if one.what in ("h2d", "d2h"):
        values = next(iter(one.rows.values()))
        copied = [copies.lay(cluster, Copy(one.what, SIZE), (gpu,)) for gpu in range(len(values))]
        return [(value, SIZE / seconds_alone(cluster, copy) / 1e9) for value, copy in zip(values, copied, strict=True)]
    if one.what not in ("p2p", "p2p both ways"):
        return []
    ways = 2 if one.what == "p2p both ways" else 1
    return [
        (value, ways * gpu_to_gpu(node, row, column).bandwidth / 1e9)
        for row, values in one.rows.items()
        for column, value in enumerate(values)
        if row != column and row < gpus
    ]
