"""What users reported, against what zsim says: fits, out of memory, host out of memory; which of two runs is faster.

`validation/cases/cases.yaml` holds each report's settings as scenarios. They run through the same files and readers as
a user's: a config.json, a topology and a scenario are written out, and read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from zsim.errors import InputError
from zsim.result.reported import RECORDS, record

FITS, GPU, HOST = "fits", "out of memory", "host out of memory"


@dataclass(frozen=True)
class Run:
    """One run of a report. `open`: what it leaves so open that the outcome is not counted; `why`: zsim differs."""

    case: str
    name: str
    source: str
    observed: str
    predicted: str
    detail: str
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tight: bool = False
    says: str = ""  # of GPU memory, as zsim.result.reported counts it; "" where another memory decides
    open: str = ""
    why: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)  # kind -> GiB that the report prints
    peaks: Mapping[str, float] = field(default_factory=dict)  # kind -> GiB that zsim says

    @property
    def agrees(self) -> bool:
        return self.observed == self.predicted

    @property
    def remark(self) -> str:
        return f"not counted: {self.open}" if self.open else "" if self.agrees else f"**differs**: {self.why}"


@dataclass(frozen=True)
class Order:
    """`fast` was faster than `slow`, in tokens/s of all GPUs (or of one): zsim says by which factor."""

    case: str
    fast: str
    slow: str
    factor: float
    why: str = ""

    @property
    def agrees(self) -> bool:
        return self.factor > 1

    @property
    def remark(self) -> str:
        return "" if self.agrees else f"**differs**: {self.why}"


@dataclass(frozen=True)
class Report:
    runs: tuple[Run, ...]
    orders: tuple[Order, ...]

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if not run.open]

    def agreement(self) -> Iterator[str]:
        counted, same = self.counted, [run for run in self.counted if run.agrees]
        yield f"Outcomes: {len(same)} of {len(counted)} with full settings agree ({len(same) / len(counted):.0%})."
        if self.orders:
            yield f"Order: {sum(order.agrees for order in self.orders)} of {len(self.orders)} agree."
        yield "\n| of GPU memory zsim says | runs | ran out |\n|---|--:|--:|"
        for kind in RECORDS:
            runs = [run for run in counted if run.says == kind.says and run.observed != HOST]
            yield f"| {kind.says} | {len(runs)} | {sum(run.observed == GPU for run in runs)} |"
        yield ""

    def markdown(self) -> Iterator[str]:
        """A table of outcomes and one of orders."""
        yield from self.agreement()
        yield "| report | run | observed | zsim | how much | |"
        yield "|---|---|---|---|---|---|"
        for run in self.runs:
            yield f"| {run.case} | {run.name} | {run.observed} | {run.predicted} | {run.detail} | {run.remark} |"
        yield ""
        yield "| report | faster | than | zsim: by | |"
        yield "|---|---|---|---|---|"
        for order in self.orders:
            yield f"| {order.case} | {order.fast} | {order.slow} | {order.factor:.2f} x | {order.remark} |"


def blind(path: Path, first: Path) -> Iterator[str]:
    """A section on reports that were predicted before anything was learned from them; `first` holds what was said."""
    import yaml

    found, then = report(path), yaml.load(first.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    said, factors = then["outcomes"], {(case, *pair): factor for case, *pair, factor in then["orders"]}
    agreed = sum(said[run.case][run.name] == run.observed for run in found.counted)
    ahead = sum(factors[order.case, order.fast, order.slow] > 1 for order in found.orders)
    yield (
        f"Reports that nothing here had been looked at with, predicted once on {then['date']} by the code of commit "
        f"{then['commit']}: {agreed} of {len(found.counted)} outcomes with full settings agreed "
        f"({agreed / len(found.counted):.0%})"
        + (f", {ahead} of {len(found.orders)} orders" if found.orders else "")
        + ". That stays. What the code says now, after the causes were looked for, and after settings were corrected "
        "where the report's own sources say otherwise:\n"
    )
    yield from found.agreement()
    yield "| report | run | observed | first | now | how much | |\n|---|---|---|---|---|---|---|"
    for run in found.runs:
        now = f"{run.predicted}, tight" if run.tight else run.predicted
        first_said = said[run.case][run.name]
        yield f"| {run.case} | {run.name} | {run.observed} | {first_said} | {now} | {run.detail} | {run.remark} |"
    if found.orders:
        yield "\n| report | faster | than | first: by | now: by | |\n|---|---|---|---|---|---|"
    for order in found.orders:
        factor = factors[order.case, order.fast, order.slow]
        line = f"| {order.case} | {order.fast} | {order.slow} | {factor:.2f} x | {order.factor:.2f} x |"
        yield f"{line} {order.remark} |"
    yield from printed(found.runs)


def printed(runs: Sequence[Run]) -> Iterator[str]:
    """What reports print of memory beside what zsim says. A run that ran out tells what lies outside the allocator; how
    much it had allocated when it failed is not its peak."""
    rows = [
        (run, kind.removesuffix("_gib"), gib, run.peaks[kind.removesuffix("_gib")])
        for run in runs
        for kind, gib in run.measured.items()
        if run.peaks and (run.observed == FITS or kind == "outside_gib")
    ]
    if not rows:
        return
    yield "\n| printed | runs | zsim, of what is printed: median | least | most |\n|---|--:|--:|--:|--:|"
    for kind in dict.fromkeys(kind for _, kind, *_ in rows):
        shares = [said / gib for _, of, gib, said in rows if of == kind]
        yield f"| {kind} | {len(shares)} | {median(shares):.0%} | {min(shares):.0%} | {max(shares):.0%} |"
    yield "\n| report | run | GiB | printed | zsim |\n|---|---|---|--:|--:|"
    for run, kind, gib, said in rows:
        yield f"| {run.case} | {run.name} | {kind} | {gib:.2f} | {said:.2f} |"


def read(path: Path) -> dict[str, Any]:
    """The document of cases, with the models and machines of its `base` (a file beside it)."""
    import yaml

    document: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    if "base" in document:
        base = read(path.parent / document["base"])
        for kind in ("models", "machines"):
            document[kind] = base[kind] | document[kind]
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
    known = case.get("order_why", {"pairs": [], "text": ""})
    for fast, slow, *of in case.get("faster", ()):
        each = "tokens_per_s_per_gpu" if of else "tokens_per_s"
        why = known["text"] if [fast, slow] in known["pairs"] else ""
        rate = getattr(runs[slow], each)
        factor = getattr(runs[fast], each) / rate if rate else 0.0  # a run that is refused has no rate
        yield Order(case["id"], fast, slow, factor, why)


def outcomes(document: dict[str, Any], case: dict[str, Any]) -> Iterator[Run]:
    """Simulates the runs of one case."""
    for name, own in case["runs"].items():
        settings = {**case.get("common", {}), **own}
        remarks = {key: settings.pop(key, "") for key in ("observed", "open", "why")}
        peak, measured = settings.pop("peak", ""), settings.pop("measured", {})
        said = _simulate(document, settings)
        said["detail"] += f"; reported: {peak}" if peak else ""
        yield Run(case["id"], name, case["source"], measured=measured, **said, **remarks)


def _simulate(document: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What zsim says of a run, by the fields of `Run`."""
    from zsim.api import simulate

    with TemporaryDirectory() as folder:
        try:
            result = simulate(_scenario(document, Path(folder), settings))
        except InputError as error:
            return {"predicted": "refused", "detail": error.message, "tokens_per_s": 0, "tokens_per_s_per_gpu": 0}
    gpu, host, gib = result.gpu, result.host, 2**30
    used = f"GPU {gpu.nvidia_smi_bytes / gib:.1f} of {gpu.capacity_bytes / gib:.1f} GiB"
    if host.peak_bytes:
        used += f", host {host.peak_bytes / gib:.0f} of {host.capacity_bytes / gib:.0f}"
    rates, known = result.throughput, record(result)
    peaks = {
        "allocated": gpu.peak_allocated_bytes,
        "reserved": gpu.peak_reserved_bytes,
        "outside": gpu.framework_bytes,
        "host": host.peak_bytes,
    }
    return {
        "predicted": FITS if result.fits else HOST if not result.host_fits else GPU,
        "detail": used,
        "tokens_per_s": rates.tokens_per_s,
        "tokens_per_s_per_gpu": rates.tokens_per_s_per_gpu,
        "tight": result.fits and result.tight,
        "says": known.says if known and result.host_fits and not result.moments else "",
        "peaks": {kind: nbytes / gib for kind, nbytes in peaks.items()},
    }


def _scenario(document: dict[str, Any], folder: Path, settings: dict[str, Any]) -> Path:
    """Writes the files of a scenario."""
    settings = dict(settings)
    (folder / "config.json").write_text(json.dumps(document["models"][settings.pop("model")]))
    model = {"config": "config.json"} | ({"freeze": settings.pop("freeze")} if "freeze" in settings else {})
    (folder / "topology.yaml").write_text(json.dumps(document["machines"][settings.pop("machine")]))
    cluster = {"topology": "topology.yaml"} | ({"nodes": settings.pop("nodes")} if "nodes" in settings else {})
    path = folder / "scenario.yaml"
    path.write_text(json.dumps({"model": model, "cluster": cluster} | settings))
    return path
