"""Host memory while a job starts: the checkpoint that each process reads before anything is sharded or moved.

"Killed at step 0" is the most common failure of large models, and nothing in the training step shows why.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.model.kernels import DTYPE_BYTES
from zsim.model.spec import ModelSpec, Preference
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan
from zsim.plan.version import parse_version
from zsim.program.deepspeed import parameter_groups
from zsim.program.ops import RANK_0, Alloc, Free, Instruction, Program
from zsim.program.partitions import partition
from zsim.program.versions import before

CHECKPOINT = "checkpoint"
FILE_BYTES = 10**10  # save_pretrained's max_shard_size, transformers 4.18 to 4.34


def with_startup(program: Program, model: ModelSpec, plan: AnyPlan, preference: Preference | None = None) -> Program:
    """`program` with what its ranks hold in host memory before its own first allocation there.

    A second model that `preference` needs is read as well before a trainer hands either to its framework (trl's
    DPOTrainer.__init__, LLaMA-Factory's create_ref_model); under zero.Init the first has been sharded by then.
    """
    nbytes, whole_files = model_bytes(model, plan), _reads_whole_files(plan)
    file = min(nbytes, FILE_BYTES)
    sharded = isinstance(plan, DeepSpeedPlan) and plan.stage == 3 and plan.zero_init
    second = 0
    if preference is not None and preference.reference == "model" and not sharded:
        second = round(model.numel * DTYPE_BYTES[preference.stored]) if preference.stored else nbytes
    flat = _flattened_on_host(model, plan)
    if flat:
        joined = Alloc("flattened", CHECKPOINT, flat, "host")
        program = replace(program, init=(joined, Free(joined.key), *program.init))
    if plan.load == "gpu":
        whole = Alloc("model as loaded", "parameters", _loaded_bytes(model, plan) + second, "gpu")
        return replace(program, init=(whole, Free(whole.key), *_scales(model, plan), *program.init))
    if plan.load == "meta":
        return program
    # transformers 5.24 _load_pretrained_model: under zero.Init rank 0 reads all of it, the others get their shards;
    # 4.34 and older: every rank reads one file after the other
    by_rank_0 = plan.load == "rank0" or (sharded and not whole_files)
    category = RANK_0 if by_rank_0 else CHECKPOINT
    start: list[Instruction] = [
        Alloc("checkpoint", category, file if sharded and whole_files else nbytes + second, "host")
    ]
    if whole_files and not sharded:
        start += [Alloc("checkpoint file", category, file, "host"), Free("checkpoint file")]
    init, freed = list(program.init), Free("checkpoint")
    first = 0
    if sharded:  # shards are pinned while the checkpoint is still there
        first = next((at + 1 for at, instruction in enumerate(init) if _on_host(instruction)), 0)
    start += _scales(model, plan)
    return replace(program, init=(*start, *init[:first], freed, *init[first:]))


def _scales(model: ModelSpec, plan: AnyPlan) -> list[Instruction]:
    """Of quantized weights, for good; FSDP and DDP count all buffers."""
    if model.tuning is None or not isinstance(plan, DeepSpeedPlan):
        return []
    from zsim.model.lora import quantization_bytes

    quantized = quantization_bytes(model.parameters, model.tuning)
    return [Alloc("scales of quantized weights", "parameters", quantized)] if quantized else []


def _loaded_bytes(model: ModelSpec, plan: AnyPlan) -> int:
    """What is trained perhaps in another type, before a framework converts or shards it."""
    wider = DTYPE_BYTES[plan.load_dtype] - DTYPE_BYTES[_dtype(plan)] if plan.load_dtype else 0
    return model_bytes(model, plan) + round(wider * sum(p.numel for p in model.parameters if p.trainable))


def _flattened_on_host(model: ModelSpec, plan: AnyPlan) -> int:
    """ZeRO-1 and 2 lay parameters out flat: until pull request 7828 (which 0.18.6 has not, and 0.18.9 has) each rank
    took all of a group's from its GPU to its host, and joined them there (stage_1_and_2.py, move_to_cpu, cpu_data).
    Since then on the GPU, if there is room."""
    if not isinstance(plan, DeepSpeedPlan) or plan.stage not in (1, 2) or not before(plan, 0, 18, 7):
        return 0
    groups = partition(model, parameter_groups(model, plan), plan).groups
    both = (sum(group.numel[param] for param in group.order) + group.size * group.world for group in groups)
    return int(max(both, default=0) * DTYPE_BYTES[plan.dtype])


def _reads_whole_files(plan: AnyPlan) -> bool:
    """Whether a process torch.loads a checkpoint's files, as until transformers 4.34 (September 2023); since then they
    are safetensors, or mapped."""
    return before(plan, 0, 11) if isinstance(plan, DeepSpeedPlan) else parse_version(plan.version) < (2, 1)


def model_bytes(model: ModelSpec, plan: AnyPlan) -> int:
    """In the dtype of the run, in which transformers 5 loads a checkpoint (dtype: auto); of the shards where nothing
    converted what FSDP1 wraps (accelerate 0.28 does, March 2024)."""
    size = DTYPE_BYTES[_dtype(plan)]
    return round(sum(p.numel * p.parts * (DTYPE_BYTES[p.dtype] if p.dtype else size) for p in model.parameters))


def _dtype(plan: AnyPlan) -> str:
    if isinstance(plan, Fsdp1Plan) and parse_version(plan.version) < (2, 2):
        return plan.storage_dtype
    return plan.dtype if isinstance(plan, (DdpPlan, DeepSpeedPlan)) else plan.param_dtype


def _on_host(instruction: Instruction) -> bool:
    return isinstance(instruction, Alloc) and instruction.device == "host"
