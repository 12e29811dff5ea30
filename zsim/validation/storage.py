"""Holds all bytes of a Program against a count of every tensor alive in a real run (`validation.oracles.storage`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zsim.program.ops import COMPUTE, Alloc, Free, Instruction, Launch, Program

PHASES = {"recompute": "backward", "optimizer": "step"}


class Level(NamedTuple):
    """Bytes when a phase begins, and the peak since the phase before began. `before`: forward, backward, step, end."""

    step: int
    micro: int
    before: str
    nbytes: int
    peak: int


@dataclass
class _Ledger:
    live: int = 0
    temporary: int = 0
    peak: int = 0

    def see(self, inside: int | None = None) -> None:
        self.peak = max(self.peak, self.live + (self.temporary if inside is None else inside))


def levels(program: Program) -> Iterator[Level]:
    """One per beginning of a phase, over the steps of `program`; host memory counts too, as it does on a CPU."""
    ledger, sizes = _Ledger(), dict[str, int]()
    yield from _play(program.init, 0, ledger, sizes)
    for number, instructions in enumerate(program.steps, 1):
        yield from _play(instructions, number, ledger, sizes)
    yield Level(len(program.steps), 0, "end", ledger.live + ledger.temporary, ledger.peak)


def _play(instructions: Sequence[Instruction], step: int, ledger: _Ledger, sizes: dict[str, int]) -> Iterator[Level]:
    phase = (0, "forward")
    if step:
        yield Level(step, *phase, ledger.live + ledger.temporary, ledger.peak)
        ledger.peak = ledger.live + ledger.temporary
    for instruction in instructions:
        if isinstance(instruction, Alloc):
            sizes[instruction.key] = instruction.nbytes
            ledger.live += instruction.nbytes
            ledger.see()
        elif isinstance(instruction, Free):
            ledger.live -= sizes.pop(instruction.key)
        elif isinstance(instruction, Launch):
            op = instruction.op
            now = (op.micro if op.phase != "optimizer" else 0, PHASES.get(op.phase, op.phase))
            if now != phase and op.phase != "init":
                yield Level(step, now[0], now[1], ledger.live + ledger.temporary, ledger.peak)
                phase, ledger.peak = now, ledger.live + ledger.temporary
            if op.lane == COMPUTE:
                ledger.see(op.temp_peak)
                ledger.temporary = op.temp_live
