"""Host memory while a job starts: the checkpoint that each process reads before anything is sharded or moved.

"Killed at step 0" is the most common failure of large models, and nothing in the training step shows why.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.model.kernels import DTYPE_BYTES
from zsim.model.lora import quantization_bytes
from zsim.model.spec import ModelSpec
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan
from zsim.program.ops import RANK_0, Alloc, Free, Instruction, Program

CHECKPOINT = "checkpoint"


def with_startup(program: Program, model: ModelSpec, plan: AnyPlan) -> Program:
    """`program` with what its ranks hold in host memory before its own first allocation there."""
    nbytes = model_bytes(model, plan)
    sharded = isinstance(plan, DeepSpeedPlan) and plan.stage == 3 and plan.zero_init
    if plan.load == "meta":
        return program
    # transformers 5.24 _load_pretrained_model: under zero.Init rank 0 reads all of it, the others get their shards
    category = RANK_0 if sharded or plan.load == "rank0" else CHECKPOINT
    start: list[Instruction] = [Alloc("checkpoint", category, nbytes, "host")]
    init, freed = list(program.init), Free("checkpoint")
    first = 0
    if sharded:  # shards are pinned while the checkpoint is still there
        first = next((at + 1 for at, instruction in enumerate(init) if _on_host(instruction)), 0)
    quantized = quantization_bytes(model.parameters, model.tuning) if model.tuning else 0
    if quantized and isinstance(plan, DeepSpeedPlan):  # FSDP and DDP count all buffers
        start.append(Alloc("scales of 4-bit weights", "parameters", quantized))
    return replace(program, init=(*start, *init[:first], freed, *init[first:]))


def model_bytes(model: ModelSpec, plan: AnyPlan) -> int:
    """In the dtype of the run, in which transformers 5 loads a checkpoint (dtype: auto)."""
    dtype = plan.dtype if isinstance(plan, (DdpPlan, DeepSpeedPlan)) else plan.param_dtype
    size = DTYPE_BYTES[dtype]
    return round(sum(p.numel * p.parts * (DTYPE_BYTES[p.dtype] if p.dtype else size) for p in model.parameters))


def _on_host(instruction: Instruction) -> bool:
    return isinstance(instruction, Alloc) and instruction.device == "host"
