"""Holds predicted collectives against recordings of real runs: op, dtype, elements, group, order, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.errors import InputError
from zsim.program.lower import lower
from zsim.program.ops import Collective, Instruction, Launch, Program
from zsim.validation.recording import PHASES, Call, Recording, differences, plan_of, read, setup


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call of a step where prediction and recording part; None: that side has no more calls."""

    step: int
    index: int
    predicted: Call | None
    recorded: Call | None

    def __str__(self) -> str:
        return (
            f"step {self.step}, call {self.index}: predicted {self.predicted or 'nothing more'}, "
            f"recorded {self.recorded or 'nothing more'}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one file: it matches, or differs, or could not be predicted (`refused`: the reason)."""

    path: Path
    name: str
    calls: int = 0
    difference: Difference | None = None
    refused: str | None = None

    @property
    def matches(self) -> bool:
        return self.difference is None and self.refused is None

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {"file": str(self.path), "name": self.name, "match": self.matches}
        if self.matches:
            found["calls"] = self.calls
        if self.refused:
            found["not_modeled"] = self.refused
        if self.difference:
            where = self.difference
            found["difference"] = {
                "step": where.step,
                "index": where.index,
                "predicted": where.predicted and where.predicted._asdict(),
                "recorded": where.recorded and where.recorded._asdict(),
            }
        return found


def collectives(program: Program, instructions: Iterable[Instruction], rank: int = 0) -> tuple[Call, ...]:
    """The calls of a step as a recording on `rank` would show them."""
    found = []
    for instruction in instructions:
        if isinstance(instruction, Launch) and isinstance(work := instruction.op.work, Collective):
            op = instruction.op
            group = next(ranks for ranks in program.groups[work.group] if rank in ranks)
            phase = PHASES[op.phase]
            micro = op.micro if phase in ("forward", "backward") else 0
            root = work.root if work.kind in ("broadcast", "reduce") else None
            found.append(
                Call(work.kind, work.dtype, work.in_numel, work.out_numel, group, phase, micro, root, work.reduce_op)
            )
    return tuple(found)


def predict(recording: Recording) -> Program:
    """The Program of the recorded run. Raises NotModeled or InputError where zsim or the framework refuses it."""
    model, tree, workload = setup(recording.header)
    return lower(model, tree, plan_of(recording.header), workload, steps=len(recording.steps) - 1)


def reason(error: InputError) -> str:
    """Why a configuration is refused, in one line."""
    return ": ".join(part for part in (error.field, error.message) if part)


def compare(recording: Recording) -> Outcome:
    try:
        program = predict(recording)
    except InputError as error:
        return Outcome(recording.path, recording.name, refused=reason(error))
    for step, (instructions, recorded) in enumerate(zip((program.init, *program.steps), recording.steps, strict=True)):
        predicted = collectives(program, instructions)
        index = differences(predicted, recorded)
        if index is not None:
            ours = predicted[index] if index < len(predicted) else None
            theirs = recorded[index] if index < len(recorded) else None
            return Outcome(recording.path, recording.name, difference=Difference(step, index, ours, theirs))
    return Outcome(recording.path, recording.name, calls=sum(map(len, recording.steps)))


def files(paths: Sequence[Path], patterns: Sequence[str] = ("*.jsonl", "*.jsonl.gz")) -> list[Path]:
    """The recordings named by files and directories. Raises InputError where there is none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for pattern in patterns for file in path.glob(pattern))
            if not inside:
                raise InputError("no recordings in this directory", file=path, accepted=", ".join(patterns))
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError("no such file or directory", file=path)
    return found


def validate(paths: Sequence[Path]) -> list[Outcome]:
    """Raises InputError on a file that is not a recording."""
    return [compare(read(path)) for path in files(paths)]
