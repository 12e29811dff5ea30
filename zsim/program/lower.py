"""The one door: a model, how it is sharded, and what a rank runs -> the Program."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture
from zsim.model.fused_attention import WIDEST_FLASH
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.plan.version import parse_version
from zsim.program.ops import Alloc, HostWait, Program
from zsim.program.startup import with_startup

# torch 2.13 torch/distributed/fsdp/sharded_grad_scaler.py
GRAD_SCALER = (
    "ShardedGradScaler of float16: a pass over the gradients that unscales them, an all-reduce of what it found, and a "
    "wait for it in every step"
)


def lower(model: ModelSpec, tree: Module, plan: AnyPlan, workload: Workload, steps: int | None = None) -> Program:
    """What one rank's host issues in its first `steps` training steps, or in all until they repeat the last.

    `tree` is the model as executed for one micro-batch of `workload`. Raises NotModeled for what the framework
    accepts and zsim does not simulate, InputError for what the framework refuses.
    """
    program = _lower(model, tree, plan, workload, steps or _differing(plan))
    program = with_startup(program, model, plan, workload.preference)
    # Between setting up and the first step lie seconds of a script: its host has no lead over the device.
    program = replace(program, init=(*program.init, *_workspaces(workload), HostWait(None)))
    return replace(program, not_modeled=(*program.not_modeled, GRAD_SCALER)) if _scales(plan) else program


def _workspaces(workload: Workload) -> tuple[Alloc, ...]:
    """What matrix products hold in PyTorch's allocator for good, since torch 2.0 (pytorch issue 95668).

    One per cuBLAS handle and stream: the thread that runs forward has a handle, autograd's that runs backward another,
    and all products are on one stream. 23 published runs on A100s (validation/published/fms_acceleration.csv) allocated
    13 to 18 MiB more than all tensors, which are these 16.25.
    """
    each = workload.workspace_bytes
    return (Alloc("cuBLAS workspaces", "workspace", 2 * each, tensors=(each,)),) if each else ()


# torch, whose SDPA puts cuDNN's kernel first from here on, and the first DeepSpeed of its year
CUDNN_MASKS = ((2, 11), (0, 19))


def under(plan: AnyPlan, workload: Workload, model: ModelSpec | None = None) -> Workload:
    """The workload as the plan runs it: under torch.autocast over weights of the plan's dtype, where it has that, with
    adapters in the dtype of their shards, or on views of flat parameters; SDPA as its release of torch has it
    (FlashAttention first until 2.10: sdp_utils.cpp; a vision tower calls it once per image or window all the same).

    Of xformers' SwiGLU (0.0.22 to 0.0.25, ops/swiglu_op.py `SwiGLUOpDispatch`), in bfloat16, only the kernel for packed
    weights is taken; without it torch's own ones run. The weights of gate and up are packed where they lie in one
    storage, as in the flat groups of ZeRO's stages 1 and 2. Raises NotModeled where shards are gathered, and for float8
    under DeepSpeed and FSDP1.
    """
    if workload.float8 is not None and not isinstance(plan, DdpPlan | Fsdp2Plan):
        raise NotModeled("float8 under DeepSpeed or FSDP1", field="float8", accepted="framework: fsdp2, ddp")
    autocast = plan.autocast if isinstance(plan, DdpPlan) else isinstance(plan, DeepSpeedPlan) and plan.torch_autocast
    weights = plan.dtype if isinstance(plan, DdpPlan | DeepSpeedPlan) and autocast else None
    apart = isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.adapter_units and plan.storage_dtype != plan.param_dtype
    adapters = plan.storage_dtype if apart else weights  # type: ignore[union-attr]
    flat = ""
    if isinstance(plan, Fsdp1Plan) and plan.use_orig_params:
        flat = "leaf" if plan.adapter_units else "whole" if plan.flat else "block"
    if (workload.weights, workload.adapters, workload.flat_units) != (weights, adapters, flat):
        workload = replace(workload, weights=weights, adapters=adapters, flat_units=flat)
    if workload.kernels.startswith("flash-attn"):
        packed = isinstance(plan, DeepSpeedPlan) and plan.stage in (1, 2)
        if not packed and not isinstance(plan, DdpPlan):
            why = "xformers' SwiGLU over gathered shards"
            raise NotModeled(why, field="kernels", accepted="torch, liger; flash-attn under DDP and ZeRO-1 and 2")
        workload = replace(workload, kernels="flash-attn packed" if packed else "flash-attn")
    of_torch = not isinstance(plan, DeepSpeedPlan) and workload.images is None
    if (
        of_torch
        and not _without_flash(model)
        and workload.attention == "sdpa"
        and parse_version(plan.version) < (2, 11)
    ):
        workload = replace(workload, attention="flash")
    if (
        workload.attention == "efficient"
        and parse_version(plan.version) >= CUDNN_MASKS[isinstance(plan, DeepSpeedPlan)]
    ):
        workload = replace(workload, cudnn_masks=True)
    return workload


def _without_flash(model: ModelSpec | None) -> bool:
    """Whether SDPA finds FlashAttention unfit: for heads of two widths (latent attention), wide ones, a bias (T5)."""
    if model is None:
        return False
    arch = cast(Architecture, model.arch)
    biased = arch.seq2seq is not None and arch.seq2seq.buckets > 0
    return biased or arch.latent is not None or arch.gemma4 is not None or arch.head_dim > WIDEST_FLASH


def _differing(plan: AnyPlan) -> int:
    """Steps until each repeats the last: DDP rebuilds its buckets in the second, of a static graph in the third."""
    return 4 if isinstance(plan, DdpPlan) and plan.static_graph else 3


def _scales(plan: AnyPlan) -> bool:
    """Does a scaler that is not simulated stand between gradients and optimizer, as trainers have it for float16?"""
    return isinstance(plan, (Fsdp1Plan, Fsdp2Plan)) and plan.param_dtype == "float16"


def _check_idle(model: ModelSpec, plan: AnyPlan) -> None:
    """A tower that is given nothing: DDP's reducer refuses the next step where it waits for gradients that do not come,
    and FSDP's optimizers have no states to save. Raises InputError or NotModeled."""
    if getattr(model.arch, "sound", None) is None:
        return
    if not any(parameter.trainable and ".audio_tower." in parameter.name for parameter in model.parameters):
        return
    accepted = "audio_tower and embed_audio frozen; audio_config: null in config.json, which leaves the tower out"
    if isinstance(plan, DdpPlan):
        why = "DDP waits for the gradients of an audio tower that is given nothing"
        raise InputError(why, field="freeze", accepted=f"framework: deepspeed; {accepted}")
    if plan.saving is not None:
        why = "checkpoints under FSDP of a trained audio tower that is given nothing, and so has no states"
        raise NotModeled(why, field="saving", accepted=f"null; {accepted}")


def _lower(model: ModelSpec, tree: Module, plan: AnyPlan, workload: Workload, steps: int) -> Program:
    sharing = plan.sequence_parallel_size if isinstance(plan, DeepSpeedPlan) else 1
    if workload.sequence_parallel_size != sharing:
        found = f"{workload.sequence_parallel_size} ranks share a sequence in the model and {sharing} in the plan"
        raise InputError(found, field="sequence_parallel_size", accepted="the same number; 1 without DeepSpeed")
    if not isinstance(plan, DeepSpeedPlan):
        _check_idle(model, plan)
    if isinstance(plan, DeepSpeedPlan):
        if model.conversion and model.conversion.executed and not (plan.stage == 3 and plan.zero_init):
            from zsim.model.trace import trace

            model = model.conversion.executed  # nothing has numbered its parameters anew
            tree = trace(model, workload)
        if plan.stage == 3:
            from zsim.program.zero3 import lower_zero3

            return lower_zero3(model, tree, plan, workload, steps)
        from zsim.program.zero12 import lower_zero12

        return lower_zero12(model, tree, plan, workload, steps)
    if isinstance(plan, Fsdp2Plan):
        from zsim.program.fsdp2 import lower_fsdp2

        return lower_fsdp2(model, tree, plan, workload, steps)
    if isinstance(plan, Fsdp1Plan):
        if plan.optimizer.name == "muon":
            why = "torch.optim.Muon takes matrices, and FSDP1 cuts flat vectors"
            raise InputError(why, field="optimizer", accepted="framework: deepspeed or ddp")
        from zsim.program.fsdp1 import lower_fsdp1

        return lower_fsdp1(model, tree, plan, workload, steps)
    if isinstance(plan, DdpPlan):
        from zsim.program.ddp import lower_ddp

        return lower_ddp(model, tree, plan, workload, steps)
    raise NotModeled(f"plan {type(plan).__name__}")
