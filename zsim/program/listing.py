"""A Program as rows for a reader: what is issued, on which lane, how large, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zsim.program.ops import (
    LANES,
    Alloc,
    Collective,
    Compute,
    Copy,
    CpuWork,
    Free,
    Instruction,
    Launch,
    Op,
    Program,
    Work,
)

COLUMNS = ("id", "phase", "micro", "layer", "lane", "op", "size", "waits")


def rows(program: Program, instructions: Sequence[Instruction]) -> Iterator[dict[str, Any]]:
    """One JSON-ready object per instruction."""
    for instruction in instructions:
        if isinstance(instruction, Launch):
            op = instruction.op
            found: dict[str, Any] = {
                "do": "launch", "id": op.id, "phase": op.phase, "micro": op.micro, "layer": op.layer, "lane": op.lane,
                "op": op.label, "module": op.module, "work": _work(program, op.work), "waits": [*op.waits],
            }  # fmt: skip
            if op.temp_peak or op.temp_live:
                found |= {"temp_peak": op.temp_peak, "temp_live": op.temp_live, "temp_category": op.temp_category}
            yield found
        elif isinstance(instruction, Alloc):
            yield {"do": "alloc"} | _fields(instruction)
        elif isinstance(instruction, Free):
            yield {"do": "free"} | _fields(instruction)
        else:
            yield {"do": "host wait", "op": instruction.op}


def _fields(instruction: Alloc | Free) -> dict[str, Any]:
    names = ("key", "category", "nbytes", "device", "stream") if isinstance(instruction, Alloc) else ("key", "after")
    return {name: getattr(instruction, name) for name in names if hasattr(instruction, name)}


def _work(program: Program, work: Work) -> dict[str, Any]:
    if isinstance(work, Compute):
        return {
            "kind": "compute",
            "flops": sum(kernel.flops for kernel in work.kernels),
            "bytes": sum(kernel.bytes for kernel in work.kernels),
            "launches": sum(kernel.launches for kernel in work.kernels),
        }
    found = asdict(work)
    if isinstance(work, Collective):
        return found | {"bytes": work.payload_bytes, "ranks": len(program.groups[work.group][0])}
    return {"kind": type(work).__name__} | found


def lines(program: Program, instructions: Sequence[Instruction]) -> Iterator[tuple[str, ...]]:
    """The columns of each instruction as text."""
    for instruction in instructions:
        if isinstance(instruction, Launch):
            op = instruction.op
            layer = "" if op.layer is None else str(op.layer)
            where = op.module if op.layer is None else op.module.split(f".{op.layer}.", 1)[-1]
            what = f"{op.label}  {where}" if where else op.label
            yield (
                str(op.id), op.phase, str(op.micro), layer, op.lane, what, _size(program, op.work), _waits(op),
            )  # fmt: skip
        elif isinstance(instruction, Alloc):
            where = "" if instruction.device == "gpu" else f" ({instruction.device})"
            size = f"+ {_bytes(instruction.nbytes)}"
            yield "", "", "", "", "", f"  alloc {instruction.key}{where}", size, ""
        elif isinstance(instruction, Free):
            after = "" if instruction.after is None else f"reusable after {instruction.after}"
            yield "", "", "", "", "", f"  free {instruction.key}", "", after
        else:
            target = "the device is idle" if instruction.op is None else _event(instruction.op)
            yield "", "", "", "", "host", "wait", "", f"until {target}"


def _size(program: Program, work: Work) -> str:
    if isinstance(work, Compute):
        flops = sum(kernel.flops for kernel in work.kernels)
        nbytes = _bytes(sum(kernel.bytes for kernel in work.kernels))
        return f"{_scaled(flops, 'FLOP')}, {nbytes}" if flops else nbytes
    if isinstance(work, Collective):
        sizes = f"{work.in_numel} -> {work.out_numel}" if work.in_numel != work.out_numel else str(work.in_numel)
        ranks = len(program.groups[work.group][0])
        return f"{work.dtype} {sizes}, {_bytes(work.payload_bytes)}, {ranks} ranks ({work.group})"
    if isinstance(work, Copy | CpuWork):
        return _bytes(work.nbytes)
    return f"x {work.count}" if work.count > 1 else ""


def _waits(op: Op) -> str:
    return ", ".join(map(_event, op.waits))


def _event(event: int) -> str:
    return str(event) if event >= 0 else f"{LANES[-1 - event]} of the step before"


def _bytes(value: float) -> str:
    return _scaled(value, "B")


def _scaled(value: float, unit: str) -> str:
    """Three significant digits: "1.45 MB", "22.5 GFLOP"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
