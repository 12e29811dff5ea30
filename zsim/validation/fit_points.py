"""Measured points that constants are fitted to: from a capture's CSV files, traces and benchmark logs of anyone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from zsim.cluster.files import read_machine
from zsim.cluster.spec import Host
from zsim.cost.collectives import KINDS
from zsim.errors import InputError
from zsim.validation import nccl_log
from zsim.validation.capture_read import csv_rows
from zsim.validation.kineto import read
from zsim.validation.trace import Trace

Shape = tuple[int, int, int, int]


@dataclass
class Points:
    """Seconds by what was run: medians, on CPUs of core seconds."""

    device: str = ""
    backend: str = ""
    collectives: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=dict
    )  # kind, ranks -> bytes, s
    gemms: dict[str, list[tuple[Shape, float]]] = field(default_factory=dict)  # by dtype
    attention: dict[str, list[tuple[dict[str, int], float]]] = field(default_factory=dict)  # forward | backward
    memory: list[tuple[float, float]] = field(default_factory=list)  # bytes, s
    optimizer: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # implementation -> elements, s
    launch: list[float] = field(default_factory=list)
    overlap: dict[float, dict[str, float]] = field(default_factory=dict)  # bytes -> s of products, all_reduce, both
    copies: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # "h2d pinned alone" -> bytes, s
    cpu_optimizer: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # threads -> elements, s
    world: int = 1
    host: Host | None = None  # of the captured machine, as its topology file describes it
    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(paths: Iterable[Path], op: str | None = None, ranks: int | None = None) -> Points:
    """From capture directories, traces (*.json, *.gz), and logs of nccl-tests and DeepSpeed (anything else).

    `op`, `ranks`: of logs that do not say. Raises InputError.
    """
    points = Points()
    for path in paths:
        if path.is_dir():
            _capture(path, points)
        elif {".json", ".gz"} & set(path.suffixes):
            _trace(read(path), points)
        else:
            _log(path, points, op, ranks)
        points.sources.append(path.name)
    return points


def _capture(folder: Path, points: Points) -> None:
    machine_file, bench = folder / "machine.json", folder / "microbench.csv"
    for file in (machine_file, bench):
        if not file.exists():
            raise InputError("is no capture: it lacks " + file.name, folder, accepted="a directory that capture wrote")
    try:
        machine = json.loads(machine_file.read_text(encoding="utf-8"))
        points.device, points.backend, points.world = machine["device"], machine["backend"], int(machine["world"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"is damaged: {error!r}", machine_file) from None
    for name in ("topology.txt", "topology.yaml"):
        if (folder / name).exists():
            points.host = read_machine(folder / name)[0].host
    for number, row in enumerate(csv_rows(bench), start=2):
        try:
            _row(row, points)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"is no measurement: {error!r}", bench, number) from None


def _row(row: dict[str, str], points: Points) -> None:
    kind, name, nbytes = row["kind"], row["name"], float(row["bytes"])
    seconds = float(row["median_s"])
    if not (0 < seconds < inf and 0 <= nbytes < inf):
        raise ValueError(f"{nbytes} bytes in {seconds} seconds")
    if kind == "collective":
        points.collectives.setdefault((name, int(row["world"])), []).append((nbytes, seconds))
    elif kind == "gemm":
        m, n, k = map(int, row["shape"].split("x"))
        points.gemms.setdefault(row["dtype"], []).append(((1, m, n, k), seconds))
    elif kind == "attention":
        batch, heads, length, head_dim, causal = map(int, row["shape"].split("x"))
        about = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim, "causal": causal}
        points.attention.setdefault(name, []).append((about, seconds))
    elif kind == "memory":
        points.memory.append((nbytes, seconds))
    elif kind == "copy":
        points.copies.setdefault(name, []).append((nbytes, seconds))
    elif kind == "optimizer" and name == "cpu":
        points.cpu_optimizer.setdefault(int(row["shape"]), []).append((int(nbytes) // 28, seconds))
    elif kind == "optimizer":
        points.optimizer.setdefault(name, []).append((int(nbytes) // 28, seconds))
    elif kind == "launch":
        points.launch.append(seconds)
    elif kind == "overlap":
        points.overlap.setdefault(nbytes, {})[name] = seconds


def _trace(trace: Trace, points: Points) -> None:
    """Collectives whose size is known, products whose shape is: the shortest tenth of each, for a collective's kernel
    also waits for its peers."""
    points.device = points.device or trace.device
    points.backend = points.backend or trace.backend
    calls: dict[tuple[str, int, float], list[float]] = {}
    products: dict[tuple[str, Shape], list[float]] = {}
    for piece in trace.slices:
        if piece.call and piece.call.nbytes and piece.call.group_size and piece.call.group_size > 1 and piece.seconds:
            calls.setdefault((piece.call.kind, piece.call.group_size, piece.call.nbytes), []).append(piece.seconds)
        if piece.gemm and piece.seconds:
            products.setdefault((piece.gemm[4], piece.gemm[:4]), []).append(piece.seconds)
    for (kind, ranks, nbytes), seconds in calls.items():
        points.collectives.setdefault((kind, ranks), []).append((nbytes, _low(seconds)))
    for (dtype, shape), seconds in products.items():
        points.gemms.setdefault(dtype, []).append((shape, _low(seconds)))


def _log(path: Path, points: Points, op: str | None, ranks: int | None) -> None:
    """Times out of place, as frameworks call collectives."""
    for number, table in enumerate(nccl_log.read(path), 1):
        name = f"{path.name}, table {number}"
        points.notes += [f"{name}: {warning}" for warning in table.warnings]
        kind, group = table.op or op, table.ranks or ranks
        if kind is None or group is None:
            missing = "which collective it ran (--op)" if kind is None else "on how many ranks (--ranks)"
            raise InputError(f"table {number} does not say {missing}", path)
        points.device = points.device or next(iter(table.devices), "")
        points.backend = points.backend or "nccl"
        if len(table.hosts) > 1:
            points.notes.append(f"{name}: over {len(table.hosts)} machines, left out: profiles hold times within one")
            continue
        if group == 1 or kind not in KINDS:
            points.notes.append(f"{name}: {kind} of {group} ranks, left out")
            continue
        measured = points.collectives.setdefault((kind, group), [])
        measured += [(row.nbytes, row.seconds) for row in table.rows]


def _low(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 10]
