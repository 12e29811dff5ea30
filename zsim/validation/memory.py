"""Holds the allocator's ledger of FSDP2 Programs against torch's own FSDPMemTracker, category by category.

The oracles (`python -m validation.oracles.memory`) are snapshots of a tracked run: at the start, after forward, at
forward's peak, after backward, at the peak. The replay below labels bytes as the tracker does, so that a label moves
at the same call: a gradient is `Temp` until its unit's post-backward, a reduce-scatter input until the collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.model.spec import Workload
from zsim.plan.spec import Fsdp2Plan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import ALL_REDUCE, COMPUTE, REDUCE_SCATTER, Alloc, Collective, Free, Instruction, Launch, Program

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

MOMENTS = ("start", "after_forward", "peak_forward", "after_backward", "peak")
EXACT = (
    "Sharded Param", "Unsharded Param", "Buffer", "Sharded Grad", "Unsharded Grad", "All Gather", "Reduce Scatter",
    "OptState",
)  # fmt: skip
NEAR = ("Activation", "Temp")
NEAR_TOLERANCE = 0.01
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
        self._temporary = ("Activation", 0)
        self._phase = "forward"

    def snapshot(self) -> dict[str, int]:
        found = Counter(self._live)
        found[self._temporary[0]] += self._temporary[1]
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
                    self._temporary = (label, op.temp_peak)
                    yield op.phase, self.snapshot()
                    self._temporary = (label, op.temp_live)
                yield op.phase, self.snapshot()

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


def step_peak(program: Program) -> int:
    """Bytes of parameters, gradients, states and temporaries at the optimizer's worst moment."""
    raise NotImplementedError


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
        return self.category in EXACT

    @property
    def matches(self) -> bool:
        difference = abs(self.predicted - self.recorded)
        return difference <= (0 if self.exact else max(NEAR_TOLERANCE * self.recorded, SMALLEST_BLOCK))


def predict(oracle: Mapping[str, Any]) -> Program:
    from zsim.model.huggingface import from_config
    from zsim.model.trace import trace

    config = oracle["config"]
    shape = SHAPES[config["model"]] | COMMON
    if "layers" in config:
        shape = shape | {"num_hidden_layers": config["layers"]}
    model = from_config(shape, config["model"])
    workload = Workload(
        config["batch"],
        config["seq"],
        checkpointing=CHECKPOINTING[config["ac"]],
        implementation=IMPLEMENTATIONS[config["impl"]],
    )
    plan = Fsdp2Plan(
        world_size=config["world"],
        grad_clip=None,
        optimizer=Optimizer(impl="foreach"),
        reshard_after_forward=config.get("raf", True),
        root_reshard_after_forward=config.get("raf", True),
    )
    return lower(model, trace(model, workload), plan, workload, steps=2)


def compare(oracle: Mapping[str, Any]) -> list[Line]:
    predicted = moments(predict(oracle))
    return [
        Line(moment, category, predicted[moment].get(category, 0), oracle[moment].get(category, 0))
        for moment in MOMENTS
        for category in sorted({*predicted[moment], *oracle[moment]} - {"Total", "Inputs"})
    ]
