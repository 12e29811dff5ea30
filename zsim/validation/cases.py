"""What users reported, against what zsim says: fits, out of memory, host out of memory; which of two runs is faster.

`validation/cases/cases.yaml` holds each report's settings as scenarios. They run through the same files and readers as
a user's: a config.json, a topology and a scenario are written out, and read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zsim.errors import InputError

FITS, GPU, HOST = "fits", "out of memory", "host out of memory"


@dataclass(frozen=True)
class Run:
    """One run of a report. `open`: what the report leaves so open that the outcome is not counted."""

    case: str
    name: str
    source: str
    observed: str
    predicted: str
    detail: str
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    open: str = ""

    @property
    def agrees(self) -> bool:
        return self.observed == self.predicted


@dataclass(frozen=True)
class Order:
    """`fast` was faster than `slow`, in tokens/s of all GPUs (or of one): zsim says by which factor."""

    case: str
    fast: str
    slow: str
    factor: float

    @property
    def agrees(self) -> bool:
        return self.factor > 1


@dataclass(frozen=True)
class Report:
    runs: tuple[Run, ...]
    orders: tuple[Order, ...]

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if not run.open]

    def markdown(self) -> Iterator[str]:
        """A table of outcomes and one of orders."""
        counted, same = self.counted, [run for run in self.counted if run.agrees]
        yield f"Outcomes: {len(same)} of {len(counted)} with full settings agree ({len(same) / len(counted):.0%})."
        yield f"Order: {sum(order.agrees for order in self.orders)} of {len(self.orders)} agree."
        yield ""
        yield "| report | run | observed | zsim | how much | |"
        yield "|---|---|---|---|---|---|"
        for run in self.runs:
            remark = f"not counted: {run.open}" if run.open else "" if run.agrees else "**differs**"
            yield f"| {run.case} | {run.name} | {run.observed} | {run.predicted} | {run.detail} | {remark} |"
        yield ""
        yield "| report | faster | than | zsim: by | |"
        yield "|---|---|---|---|---|"
        for order in self.orders:
            remark = "" if order.agrees else "**differs**"
            yield f"| {order.case} | {order.fast} | {order.slow} | {order.factor:.2f} x | {remark} |"


def read(path: Path) -> dict[str, Any]:
    """The document of cases."""
    import yaml

    document: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return document


def report(path: Path) -> Report:
    """All cases of a document."""
    document = read(path)
    runs: list[Run] = []
    orders: list[Order] = []
    for case in document["cases"]:
        found = {run.name: run for run in outcomes(document, case)}
        runs += found.values()
        orders += order(case, found)
    return Report(tuple(runs), tuple(orders))


def order(case: dict[str, Any], runs: dict[str, Run]) -> Iterator[Order]:
    for fast, slow, *of in case.get("faster", ()):
        each = "tokens_per_s_per_gpu" if of else "tokens_per_s"
        yield Order(case["id"], fast, slow, getattr(runs[fast], each) / getattr(runs[slow], each))


def outcomes(document: dict[str, Any], case: dict[str, Any]) -> Iterator[Run]:
    """Simulates the runs of one case."""
    for name, own in case["runs"].items():
        settings = {**case.get("common", {}), **own}
        observed, left_open = settings.pop("observed"), settings.pop("open", "")
        yield _simulate(document, case, name, settings, observed, left_open)


def _simulate(
    document: dict[str, Any], case: dict[str, Any], name: str, settings: dict[str, Any], observed: str, left_open: str
) -> Run:
    from zsim.api import simulate

    with TemporaryDirectory() as folder:
        try:
            result = simulate(_scenario(document, Path(folder), settings))
        except InputError as error:
            return Run(case["id"], name, case["source"], observed, "refused", error.message, 0, 0, left_open)
    gpu, host = result.gpu, result.host
    gib = 2**30
    used = f"GPU {gpu.nvidia_smi_bytes / gib:.1f} of {gpu.capacity_bytes / gib:.1f} GiB"
    if host.peak_bytes:
        used += f", host {host.peak_bytes / gib:.0f} of {host.capacity_bytes / gib:.0f}"
    predicted = FITS if result.fits else HOST if not host.fits else GPU
    speed = result.throughput
    return Run(
        case["id"], name, case["source"], observed, predicted, used, speed.tokens_per_s, speed.tokens_per_s_per_gpu,
        left_open,
    )  # fmt: skip


def _scenario(document: dict[str, Any], folder: Path, settings: dict[str, Any]) -> Path:
    """Writes the files of a scenario."""
    settings = dict(settings)
    (folder / "config.json").write_text(json.dumps(document["models"][settings.pop("model")]))
    (folder / "topology.yaml").write_text(json.dumps(document["machines"][settings.pop("machine")]))
    cluster = {"topology": "topology.yaml"} | ({"nodes": settings.pop("nodes")} if "nodes" in settings else {})
    path = folder / "scenario.yaml"
    path.write_text(json.dumps({"model": "config.json", "cluster": cluster} | settings))
    return path
