"""A small model on four ranks, and what one of them holds at most."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.program.ops import RANK_0, Alloc, Free, Instruction

SHAPE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4000,
}  # fmt: skip
MODEL = from_config(SHAPE, "tiny")
WORKLOAD = Workload(1, 32)
TREE = trace(MODEL, WORKLOAD)
P = MODEL.numel
RANKS = 4


def most(instructions: Sequence[Instruction], device: str, rank: int) -> int:
    """The most bytes that `rank` holds on `device` while `instructions` run."""
    live: dict[str, int] = {}
    levels = [0]
    for instruction in instructions:
        if isinstance(instruction, Alloc):
            here = instruction.device == device and (rank == 0 or instruction.category != RANK_0)
            live[instruction.key] = instruction.nbytes if here else 0
        elif isinstance(instruction, Free):
            del live[instruction.key]
        levels.append(sum(live.values()))
    return max(levels)
