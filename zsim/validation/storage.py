"""Holds all bytes of a Program against a count of every tensor alive in a real run (`validation.oracles.storage`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zsim.errors import InputError
from zsim.model.spec import Workload
from zsim.program.lower import lower
from zsim.program.ops import COMPUTE, Alloc, Collective, Free, Instruction, Launch, Program
from zsim.validation.recording import PHASES, plan_of, read_rows, setup

STEPS = 3


class Level(NamedTuple):
    """Bytes alive when the phase `before` begins (forward, backward, step, end), and the peak since the one before.

    `host`: those in host memory, by category.
    """

    step: int
    before: str
    nbytes: int
    peak: int
    host: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class Ledger:
    """Bytes alive: allocations, and the unsaved tensors of the last compute op. `staged`: as gloo's collectives need.

    torch 2.13 ProcessGroupGloo.cpp: AsyncAllgatherWork gathers into a flat copy of its outputs, AsyncReduceScatterWork
    clones its input.
    """

    staged: bool = False
    allocated: int = 0
    temporary: int = 0
    peak: int = 0
    host: Counter[str] = field(default_factory=Counter)

    @property
    def alive(self) -> int:
        return self.allocated + self.temporary

    def count(self, alloc: Alloc, sign: int) -> None:
        if alloc.device == "nvme":
            return
        self.allocated += sign * alloc.nbytes
        if alloc.device == "host":
            self.host[alloc.category] += sign * alloc.nbytes

    def begin(self, step: int, before: str) -> Level:
        host = {category: nbytes for category, nbytes in self.host.items() if nbytes}
        level = Level(step, before, self.alive, max(self.peak, self.alive), host)
        self.peak = self.alive
        return level


def levels(program: Program, *, staged: bool = False) -> Iterator[Level]:
    """One per phase that begins in the steps of `program`. Host memory counts too, as it does in a run on CPUs."""
    ledger, held = Ledger(staged), dict[str, Alloc]()
    yield from _play(program.init, 0, ledger, held)
    for number, instructions in enumerate(program.steps, 1):
        yield from _play(instructions, number, ledger, held)
    yield ledger.begin(len(program.steps), "end")


def _play(instructions: Sequence[Instruction], step: int, ledger: Ledger, held: dict[str, Alloc]) -> Iterator[Level]:
    phase = "forward"
    if step:
        yield ledger.begin(step, phase)
    for instruction in instructions:
        if isinstance(instruction, Alloc):
            held[instruction.key] = instruction
            ledger.count(instruction, 1)
            ledger.peak = max(ledger.peak, ledger.alive)
        elif isinstance(instruction, Free):
            ledger.count(held.pop(instruction.key), -1)
        elif isinstance(instruction, Launch):
            op = instruction.op
            now = PHASES[op.phase]
            if step and now != phase:
                phase = now
                yield ledger.begin(step, phase)
            if ledger.staged and isinstance(op.work, Collective) and op.work.kind in ("all_gather", "reduce_scatter"):
                ledger.peak = max(ledger.peak, ledger.alive + int(op.work.payload_bytes))
            ledger.peak = max(ledger.peak, ledger.allocated + op.temp_peak)
            if op.lane == COMPUTE:
                ledger.temporary = op.temp_live


def recorded(rows: Sequence[Mapping[str, Any]]) -> list[Level]:
    """The same from a count's rows. DeepSpeed's `step` after a micro-step that is not the last one does nothing."""
    last_micro = max(row["micro"] for row in rows)
    found, skipped = [], 0
    for row in rows:
        if row["before"] == "step" and row["micro"] < last_micro:
            skipped = row["peak"]
            continue
        found.append(Level(row["step"], row["before"], row["bytes"], max(row["peak"], skipped)))
        skipped = 0
    return found


def predict(header: Mapping[str, Any], *, staged: bool = False) -> list[Level]:
    """What zsim says of the counted run. Raises InputError as `setup` and `lower` do."""
    from zsim.model.trace import trace

    model, _, workload = setup(header)
    on_cpu: Workload = replace(workload, device="cpu")
    program = lower(model, trace(model, on_cpu), plan_of(header), on_cpu, STEPS)
    return list(levels(program, staged=staged))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows. Raises InputError where the file is not a count."""
    header, *rows = read_rows(path)
    if not rows or not all("bytes" in row for row in rows):
        raise InputError("not a count of storages", file=path, accepted="what validation.oracles.storage writes")
    return header, rows
