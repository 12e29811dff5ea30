"""What holds for the Program of every strategy, and the small model that such tests run."""

from __future__ import annotations

from zsim.program.ops import (
    DELAYED_FREES,
    HOST,
    LANES,
    RANK_0,
    Alloc,
    Collective,
    Free,
    HostWait,
    Instruction,
    Launch,
    Program,
)

LAYERS = 3
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 301, "tie_word_embeddings": False,
}  # fmt: skip

GPU_CATEGORIES = (
    "parameters", "gradients", "optimizer_states", "master_weights", "activations", "all_gather_buffers",
    "reduce_buffers", "logits", "workspace", DELAYED_FREES, "framework",
)  # fmt: skip
HOST_CATEGORIES = (
    "parameters", "gradients", "optimizer_states", "master_weights", "activations", "buffers", "checkpoint", RANK_0,
)  # fmt: skip


def sound(program: Program, *passing: str) -> None:
    """Tensors live once, and as long after each of the last steps; waits point back; categories and groups exist. Keys
    that begin as one of `passing` name what no step leaves behind."""
    held: dict[str, str] = {}
    after: list[set[str]] = []
    for number, instructions in enumerate((program.init, *program.steps)):
        issued: dict[int, str] = {}
        for instruction in instructions:
            _check(program, instruction, held, issued)
        after.append(set(held))
        if number:
            assert not [key for key in held if key.startswith(("saved:", "resaved:", *passing))]
    assert after[-3] == after[-2] == after[-1]


def _check(program: Program, instruction: Instruction, held: dict[str, str], issued: dict[int, str]) -> None:
    if isinstance(instruction, Alloc):
        assert instruction.key not in held
        assert instruction.nbytes > 0
        assert instruction.category in (GPU_CATEGORIES if instruction.device == "gpu" else HOST_CATEGORIES)
        held[instruction.key] = instruction.category
    elif isinstance(instruction, Free):
        del held[instruction.key]
        assert instruction.after is None or instruction.after in issued or instruction.after >= -len(LANES)
    elif isinstance(instruction, HostWait):
        assert instruction.op is None or instruction.op in issued or -len(LANES) <= instruction.op < 0
    elif isinstance(instruction, Launch):
        op = instruction.op
        assert op.id not in issued
        assert op.lane in (HOST, *LANES)
        assert all(wait in issued or -len(LANES) <= wait < 0 for wait in op.waits)
        assert op.temp_peak >= op.temp_live >= 0 or op.phase == "recompute"
        if isinstance(op.work, Collective):
            groups = program.groups[op.work.group]
            assert sorted(rank for group in groups for rank in group) == list(range(program.world_size))
        issued[op.id] = op.lane
