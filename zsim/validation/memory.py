"""Holds the allocator's ledger of FSDP2 Programs against torch's own FSDPMemTracker, category by category.

The oracles (`python -m validation.oracles.memory`) are snapshots of a tracked run: at the start, after forward, at
forward's peak, after backward, at the peak. The replay below labels bytes as the tracker does, so that a label moves
at the same call: a gradient is `Temp` until its unit's post-backward, a reduce-scatter input until the collective.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zsim.errors import InputError, NotModeled
from zsim.model.spec import Float8, Workload
from zsim.plan.spec import Fsdp2Plan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import ALL_REDUCE, COMPUTE, REDUCE_SCATTER, Alloc, Collective, Free, Instruction, Launch, Program
from zsim.validation import storage
from zsim.validation.sequences import files, reason

T = TypeVar("T")

# Models that oracles name.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 131072, "tie_word_embeddings": False}
CHECKPOINTING = {"none": "none", "full": "full", "op": "selective"}
IMPLEMENTATIONS = {"hf": "hf", "titan": "torchtitan"}

KNOWN = {"name", "model", "impl", "world", "batch", "seq", "ac", "raf", "layers", "shape", "float8", "gather"}

MOMENTS = ("start", "after_forward", "peak_forward", "after_backward", "peak")
# Categories that need not agree to the byte: activations and temporaries; in counts of all storages the totals too,
# where the batch, the loss and other scalars are not told apart.
# Resident bytes include what the allocator and the libraries keep.
TOLERANCE = {
    "Activation": 0.01,
    "Temp": 0.01,
    "alive": 0.001,
    "peak since": 0.01,
    "resident peak": 0.05,
    "host peak": 0.01,
    "device peak": 0.01,
}
MIB = 1 << 20
SMALLEST_BLOCK = 512  # bytes of the caching allocator; scalars like the loss are not told apart


class Tracker:
    """Replays instructions and labels bytes as `torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker` does."""

    LABELS = {
        "shard": "Sharded Param", "buffers": "Buffer", "unsharded": "Unsharded Param", "all-gather": "All Gather",
        "optimizer_states": "OptState", "optimizer_steps": "OptState",
    }  # fmt: skip

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}
        self._live: Counter[str] = Counter()
        self.temporary = ("Activation", 0)
        self._phase = "forward"

    def snapshot(self) -> dict[str, int]:
        found = Counter(self._live)
        found[self.temporary[0]] += self.temporary[1]
        return {label: nbytes for label, nbytes in found.items() if nbytes}

    def play(self, instructions: Sequence[Instruction]) -> Iterator[tuple[str, dict[str, int]]]:
        """(phase, bytes by label) inside and after each op."""
        for instruction in instructions:
            if isinstance(instruction, Alloc):
                self._put(instruction.key, self._label(instruction.key), instruction.nbytes)
            elif isinstance(instruction, Free):
                label, nbytes = self._held.pop(instruction.key)
                self._live[label] -= nbytes
            elif isinstance(instruction, Launch):
                op = instruction.op
                if op.lane not in (REDUCE_SCATTER, ALL_REDUCE):
                    self._relabel("sharded grad:", "Sharded Grad")  # the unit's post-backward is over
                if op.phase == "optimizer":
                    yield "after backward", self.snapshot()
                if self._phase == "forward" != op.phase:
                    yield "after forward", self.snapshot()
                self._phase = op.phase
                if op.label == "fsdp2 post-backward":
                    self._relabel(f"grad:{op.module}:", "Unsharded Grad")
                elif isinstance(op.work, Collective) and op.work.kind == "reduce_scatter":
                    self._relabel(f"reduce-scatter input:{op.module}", "Reduce Scatter")
                if op.lane == COMPUTE:
                    label = "Activation" if op.phase == "forward" else "Temp"
                    self.temporary = (label, op.temp_peak)
                    yield op.phase, self.snapshot()
                    self.temporary = (label, op.temp_live)
                yield op.phase, self.snapshot()

    def held_by(self, kinds: Sequence[str]) -> int:
        return sum(nbytes for key, (_, nbytes) in self._held.items() if key.split(":")[0] in kinds)

    def _label(self, key: str) -> str:
        kind = key.split(":")[0]
        if kind in self.LABELS:
            return self.LABELS[kind]
        # What recomputation makes counts as temporary: the tracker sees it only if it enters the FSDP module again.
        return "Activation" if self._phase == "forward" else "Temp"

    def _put(self, key: str, label: str, nbytes: int) -> None:
        self._held[key] = (label, nbytes)
        self._live[label] += nbytes

    def _relabel(self, prefix: str, label: str) -> None:
        for key in [key for key in self._held if key.startswith(prefix)]:
            old, nbytes = self._held.pop(key)
            self._live[old] -= nbytes
            self._put(key, label, nbytes)


def moments(program: Program) -> dict[str, dict[str, int]]:
    """The oracle's moments, taken in the second step: the optimizer's states exist from its start."""
    tracker = Tracker()
    for instructions in (program.init, program.steps[0]):
        for _ in tracker.play(instructions):
            pass
    found = {"start": tracker.snapshot()}
    peak = found["start"]
    for phase, held in tracker.play(program.steps[1]):
        if phase == "after forward":
            found |= {"peak_forward": peak, "after_forward": held}
        elif phase == "after backward":
            return found | {"peak": peak, "after_backward": held}
        elif sum(held.values()) > sum(peak.values()):
            peak = held
    raise AssertionError("a step without an optimizer")


def step_bytes(program: Program) -> int:
    """What the optimizer touches at its worst: parameters, gradients, states (no step counters), its temporaries."""
    tracker = Tracker()
    for instructions in (program.init, program.steps[0]):
        for _ in tracker.play(instructions):
            pass
    loss = peak = 0
    for phase, _ in tracker.play(program.steps[1]):
        if phase == "after backward":
            loss = tracker.temporary[1]  # the caller still holds it
        elif phase == "optimizer":
            kinds = ("shard", "sharded grad", "optimizer_states")
            peak = max(peak, tracker.held_by(kinds) + tracker.temporary[1] - loss)
    return peak


@dataclass(frozen=True, slots=True)
class Line:
    """One category at one moment, in bytes."""

    moment: str
    category: str
    predicted: int
    recorded: int

    @property
    def error(self) -> float:
        return (self.predicted - self.recorded) / self.recorded if self.recorded else float(bool(self.predicted))

    @property
    def exact(self) -> bool:
        return self.category not in TOLERANCE

    def __str__(self) -> str:
        sides = f"predicted {self.predicted:,}, recorded {self.recorded:,}"
        return f"{self.moment}, {self.category}: {sides} ({self.error:+.2%})"

    @property
    def matches(self) -> bool:
        difference = abs(self.predicted - self.recorded)
        return difference <= (0 if self.exact else max(TOLERANCE[self.category] * self.recorded, SMALLEST_BLOCK))


def _one_of(known: Mapping[str, T], config: Mapping[str, Any], field: str) -> T:
    if config.get(field) not in known:
        raise InputError(f"{config.get(field)!r}", field=field, accepted=", ".join(known))
    return known[config[field]]


def predict(oracle: Mapping[str, Any]) -> Program:
    from zsim.model.huggingface import from_config
    from zsim.model.trace import trace

    config = oracle["config"]
    if unknown := set(config) - KNOWN:
        raise NotModeled(", ".join(sorted(unknown)), field="config", accepted=", ".join(sorted(KNOWN)))
    shape = {**_one_of(SHAPES, config, "model"), **COMMON, **config.get("shape", {})}
    if "layers" in config:
        shape["num_hidden_layers"] = config["layers"]
    model = from_config(shape, config["model"])
    workload = Workload(
        config["batch"],
        config["seq"],
        checkpointing=_one_of(CHECKPOINTING, config, "ac"),
        implementation=_one_of(IMPLEMENTATIONS, config, "impl"),
        torchtitan=(2024, 12),  # validation/oracles/titan.py
        float8=Float8(config["float8"], ("lm_head", "output"), config.get("gather", False))
        if "float8" in config
        else None,
    )
    plan = Fsdp2Plan(
        world_size=config["world"],
        grad_clip=None,
        optimizer=Optimizer(impl="foreach"),
        reshard_after_forward=config.get("raf", True),
        root_reshard_after_forward=config.get("raf", True),
    )
    return lower(model, trace(model, workload), plan, workload, steps=2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one oracle."""

    path: Path
    name: str
    lines: tuple[Line, ...] = ()
    refused: str | None = None

    @property
    def matches(self) -> bool:
        return self.refused is None and not self.differing

    @property
    def differing(self) -> list[Line]:
        return [line for line in self.lines if not line.matches]

    @property
    def summary(self) -> str:
        exact = [line for line in self.lines if line.exact]
        worst = max((abs(line.error) for line in self.lines if not line.exact and line.recorded > MIB), default=0.0)
        equal = sum(line.predicted == line.recorded for line in exact)
        if not exact:
            return f"totals of every tensor within {worst:.2%}"
        resident = any(line.category.startswith("resident") for line in self.lines)
        others = "resident peaks" if resident else "activations and temporaries"
        return f"{equal} of {len(exact)} exact categories equal, {others} within {worst:.2%}"

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {"file": str(self.path), "name": self.name, "match": self.matches}
        if self.refused:
            return found | {"not_modeled": self.refused}
        lines = [
            {
                "moment": line.moment, "category": line.category, "predicted": line.predicted,
                "recorded": line.recorded, "error": line.error, "match": line.matches,
            }
            for line in self.lines
        ]  # fmt: skip
        return found | {"lines": lines}


def compare(path: Path) -> Outcome:
    """Raises InputError on a file that is none of a tracker's oracle, a count of storages and one with host memory."""
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        header, rows = storage.read(path)
        if "moment" in rows[-1]:
            from zsim.validation.saving import compare as compare_saving

            return compare_saving(path)
        if "rss_peak" in rows[-1]:
            from zsim.validation.host_memory import compare as compare_host

            return compare_host(path)
        return _compare_count(path, header, rows)
    oracle = read(path)
    name = oracle["config"].get("name", path.stem)
    try:
        program = predict(oracle)
    except InputError as error:
        return Outcome(path, name, refused=reason(error))
    predicted = moments(program)
    lines = [
        Line(moment, category, predicted[moment].get(category, 0), oracle[moment].get(category, 0))
        for moment in MOMENTS
        for category in sorted({*predicted[moment], *oracle[moment]} - {"Total", "Inputs"})
    ]
    if "step_peak_formula_bytes" in oracle:
        lines.append(Line("step", "Optimizer", step_bytes(program), oracle["step_peak_formula_bytes"]))
    return Outcome(path, name, tuple(lines))


def _compare_count(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Totals of the last step of a run of any engine, as they stand when a phase begins, and the peaks between."""
    try:
        predicted = storage.predict(header)
    except InputError as error:
        return Outcome(path, header["name"], refused=reason(error))
    recorded, lines = storage.recorded(rows), []
    if [level.before for level in predicted] != [level.before for level in recorded]:
        return Outcome(path, header["name"], refused="the run has other phases than the Program")
    for ours, theirs in zip(predicted, recorded, strict=True):
        # FSDP2's optimizer works on DTensors, whose bookkeeping makes tensors of the global size when it first runs.
        if theirs.step < storage.STEPS or (header["engine"] == "fsdp2" and theirs.before in ("forward", "end")):
            continue
        if header["engine"] == "fsdp1" and theirs.before == "evaluation":
            continue  # it begins with its first op, and gradients go before that
        lines.append(Line(f"before {theirs.before}", "alive", ours.nbytes, theirs.nbytes))
        lines.append(Line(f"before {theirs.before}", "peak since", ours.peak, theirs.peak))
    return Outcome(path, header["name"], tuple(lines))


def read(path: Path) -> dict[str, Any]:
    """Raises InputError where the file is not a memory oracle."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            oracle = json.load(file)
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot be read ({error})", file=path) from None
    if not isinstance(oracle, dict):
        raise InputError("not a JSON object", file=path)
    for field in ("config", *MOMENTS):
        if not isinstance(oracle.get(field), dict):
            raise InputError("missing", file=path, field=field)
    return oracle


def validate(paths: Sequence[Path]) -> list[Outcome]:
    """Raises InputError on a file that is not a memory oracle."""
    found = files(paths, ("*.json", "*.json.gz", "*.jsonl", "*.jsonl.gz"))
    return [compare(path) for path in found if path.name.split(".")[0] != "summary"]
