"""The textbook's bytes per GPU: model states only, mixed precision, no activations, no buffers.

2 P parameters, 2 P gradients, 12 P optimizer (fp32 master weights, momentum, variance): 16 bytes per parameter
(ZeRO paper, Rajbhandari et al. 2020, section 3 and figure 1). Frameworks that keep fp32 parameters and gradients
without a separate master copy (FSDP2, DDP in fp32) come to the same 4 + 4 + 8. With another optimizer than Adam the 12
become the 4 of the master weights and what that optimizer keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer


@dataclass(frozen=True, slots=True)
class Textbook:
    """`formula` in the letters P (trained parameters), N (ranks that share the states) and F (bytes of frozen
    parameters). All bytes are per GPU."""

    stage: str
    per_gpu_bytes: float
    formula: str
    gpus: int
    host_bytes: float = 0.0
    host_formula: str = ""
    frozen_bytes: float = 0.0  # F


# stage -> of parameters and gradients, 2 bytes each, and of the optimizer (1: all of its bytes): what every rank holds,
# what N ranks share, and what they share in host memory. Offload (ZeRO-Offload, Ren et al. 2021): from stage 2 on
# gradients leave for the host as they are produced.
_STAGES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "ddp": ((4, 1), (0, 0), (0, 0)),
    "zero1": ((4, 0), (0, 1), (0, 0)),
    "zero2": ((2, 0), (2, 1), (0, 0)),
    "zero3": ((0, 0), (4, 1), (0, 0)),
    "zero1_offload": ((4, 0), (0, 0), (0, 1)),
    "zero2_offload": ((2, 0), (0, 0), (2, 1)),
    "zero3_offload": ((0, 0), (2, 0), (2, 1)),
    "zero3_offload_params": ((0, 0), (0, 0), (4, 1)),
}
STAGES = tuple(_STAGES)
ADAM = 12  # bytes per parameter: fp32 master weights, momentum, variance
# Beside the master weights; Adafactor's rows and columns are too few to count, Muon's embedding and head as matrices.
_KEPT = {"adamw": 8, "adam": 8, "adamw8bit": 2, "adamw4bit": 1, "lion": 4, "sgd": 4, "adafactor": 0, "muon": 4}


def states(stage: str, params: float, gpus: int, optimizer_bytes: int = ADAM) -> Textbook:
    """Bytes of model states per GPU, and per GPU in host memory, of `params` parameters on `gpus` ranks.

    `stage` is one of `STAGES`; `optimizer_bytes` per parameter include the master weights. With Adam, 8e9 parameters
    on 4 GPUs: 128, 56, 44, 32 GB for ddp, zero1, zero2, zero3.
    """
    whole, shared, host = (low + share * optimizer_bytes for low, share in _STAGES[stage])
    if whole and shared:
        formula = f"P ({whole} + {shared}/N)"
    else:
        formula = f"{whole} P" if whole else f"{shared} P / N" if shared else "0 (one layer at a time)"
    host_formula = f"{host} P / N" if host else ""
    return Textbook(stage, (whole + shared / gpus) * params, formula, gpus, host * params / gpus, host_formula)


def table(params: float, gpus: int) -> dict[str, Textbook]:
    """`states` of every stage, in the order of `STAGES`."""
    return {stage: states(stage, params, gpus) for stage in STAGES}


def of_plan(plan: AnyPlan, params: float, frozen_bytes: float = 0.0) -> Textbook:
    """The textbook's line for a plan that trains `params` parameters; the rest takes `frozen_bytes`, F, as stored.

    What is frozen has neither gradients nor states, and only full sharding splits it.
    """
    stage, gpus = _line(plan)
    line = replace(states(stage, params, gpus, optimizer_bytes(plan.optimizer)), frozen_bytes=frozen_bytes)
    if not frozen_bytes:
        return line
    if stage == "zero3_offload_params":
        host = line.host_bytes + frozen_bytes / gpus
        return replace(line, host_bytes=host, host_formula=f"{line.host_formula} + F / N")
    if stage.startswith("zero3"):
        return replace(line, per_gpu_bytes=line.per_gpu_bytes + frozen_bytes / gpus, formula=f"{line.formula} + F / N")
    return replace(line, per_gpu_bytes=line.per_gpu_bytes + frozen_bytes, formula=f"{line.formula} + F")


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Per parameter: the float32 master weights and what the optimizer keeps."""
    return 4 + (0 if optimizer.name == "sgd" and not optimizer.momentum else _KEPT[optimizer.name])


def _line(plan: AnyPlan) -> tuple[str, int]:
    if isinstance(plan, DdpPlan):
        return "ddp", plan.world_size
    if isinstance(plan, DeepSpeedPlan):
        ranks = plan.mics_shard_size if plan.stage == 3 and plan.mics_shard_size > 0 else plan.world_size
        if plan.offload_param:
            return "zero3_offload_params", ranks
        stage = ("ddp", "zero1", "zero2", "zero3")[plan.stage]
        return (f"{stage}_offload" if plan.offload_optimizer and plan.stage else stage), ranks
    shard = plan.mesh[1] if plan.mesh else plan.world_size
    if isinstance(plan, Fsdp1Plan) and plan.sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD"):
        return ("ddp" if plan.sharding_strategy == "NO_SHARD" else "zero2"), shard
    if plan.cpu_offload:
        return "zero3_offload_params", shard
    keeps_params = isinstance(plan, Fsdp2Plan) and plan.reshard_after_forward is False
    return ("zero2" if keeps_params else "zero3"), shard
