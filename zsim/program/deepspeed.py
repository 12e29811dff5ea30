"""What the ZeRO stages of DeepSpeed 0.19.8 share: data types, kernels over flat buffers, collectives, hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from zsim.errors import InputError, NotModeled
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module, Parameter
from zsim.plan.spec import DeepSpeedPlan
from zsim.program import ulysses
from zsim.program.builder import Builder
from zsim.program.muon import is_muon, matrices
from zsim.program.ops import COMPUTE, Collective, Compute
from zsim.program.versions import before, counts_in_every_hook, hook
from zsim.program.walk import modules_in_order

MIXED = ("bfloat16", "float16")  # parameters in these dtypes have a float32 master copy


def dtype_bytes(dtype: str) -> int:
    return int(DTYPE_BYTES[dtype])


def comm_dtype(plan: DeepSpeedPlan) -> str:
    """engine.py communication_data_type: the model's dtype unless configured.

    Where ranks share sequences, _configure_distributed_model puts seq_parallel_communication_data_type in its place,
    which stages 1 and 2 overrule (stage_1_and_2.py, allreduce_bucket).
    """
    if plan.sequence_parallel_size > 1:
        return "float32" if plan.stage in (1, 2) else plan.seq_parallel_communication_data_type
    return plan.communication_data_type or plan.dtype


def accum_dtype(plan: DeepSpeedPlan) -> str:
    """engine.py get_data_types: data_types.grad_accum_dtype, else the model's dtype."""
    return plan.grad_accum_dtype or plan.dtype


def overlaps(plan: DeepSpeedPlan) -> bool:
    """zero/config.py overlap_comm_valid: on by default in stage 3 only."""
    return plan.stage == 3 if plan.overlap_comm is None else plan.overlap_comm


def check(plan: DeepSpeedPlan) -> None:
    """Raises InputError for what DeepSpeed asserts against when it builds the optimizer, NotModeled for the rest."""
    if plan.stage == 0 and accum_dtype(plan) != plan.dtype:  # engine.py _do_optimizer_sanity_check
        raise InputError(
            f"stage 0 cannot accumulate {plan.dtype} gradients in {accum_dtype(plan)}",
            field="data_types.grad_accum_dtype",
            accepted=plan.dtype,
        )
    if plan.stage >= 2 and plan.reduce_scatter and plan.prescale_gradients:
        raise InputError("stages 2 and 3 reduce-scatter only post-scaled gradients", field="prescale_gradients")
    if plan.optimizer.name == "muon":
        _check_muon(plan)
    if plan.bf16_master_weights_and_grads or plan.bf16_optimizer_states:
        _check_master_weights(plan)
    if plan.stage == 0 and plan.offload_optimizer:
        raise InputError("offloading needs ZeRO", field="zero_optimization.offload_optimizer", accepted="stage 1 to 3")
    if "nvme" in (plan.offload_optimizer, plan.offload_param) and plan.stage != 3:
        raise InputError("offloading to NVMe needs stage 3", field="zero.offload_optimizer", accepted="cpu")
    if plan.offload_param == "nvme" and not plan.offload_optimizer:
        raise NotModeled("parameters on NVMe, and states on the GPU", field="zero.offload_optimizer", accepted="nvme")
    if plan.zero_hpz_partition_size > 1 and plan.offload_param == "nvme":
        # _partition_param_sec: torch.empty(device=remote_device), which knows no NVMe
        raise InputError("hpZ with parameters on NVMe fails", field="zero.zero_hpz_partition_size", accepted="1")
    if plan.stage == 3 and plan.zero_quantized_gradients and not plan.reduce_scatter:
        raise InputError("quantized gradients need it, as DeepSpeed says", field="reduce_scatter", accepted="true")
    if plan.zero_quantized_nontrainable_weights and plan.offload_param:  # the shards are quantized on the GPU and stay
        raise NotModeled("quantized frozen weights on the CPU", field="zero.zero_quantized_nontrainable_weights")
    if plan.offload_optimizer == "nvme" and plan.offload_optimizer_ratio < 1:
        raise NotModeled("partial offload to NVMe", field="zero.offload_optimizer.ratio", accepted="1")


def _check_master_weights(plan: DeepSpeedPlan) -> None:
    """config.py, _do_error_check, and base_optimizer.py, _configure_master_weights."""
    field = "zero.bf16_master_weights_and_grads"
    if plan.dtype != "bfloat16" or plan.stage == 0:
        raise InputError("needs bf16 and stage 1, 2 or 3", field=field, accepted="false")
    if not plan.bf16_master_weights_and_grads:
        why = "requires bf16_master_weights_and_grads to be enabled"
        raise InputError(why, field="zero.bf16_optimizer_states", accepted="false")
    if plan.optimizer.name == "muon":
        raise NotModeled("Muon beside master weights in bf16", field=field, accepted="false")
    if not plan.offload_optimizer and not plan.bf16_optimizer_states:
        why = "requires offloading with DeepSpeedCPUAdam, or bf16_optimizer_states"
        raise InputError(why, field=field, accepted="bf16_optimizer_states: true")
    if not plan.offload_optimizer:
        return
    if plan.optimizer.name not in ("adam", "adamw") or plan.optimizer.impl != "cpu":
        why = "requires DeepSpeedCPUAdam under offload_optimizer"
        raise InputError(why, field="optimizer.impl", accepted="adam or adamw, with impl: cpu")
    if plan.offload_optimizer == "nvme":
        # swap_tensor/utils.py, SwapBufferManager.allocate asserts one type, and what was written comes back as float32
        why = "DeepSpeed stops when it reads master weights in bf16 back from NVMe"
        raise InputError(why, field="zero.offload_optimizer", accepted="cpu")
    if plan.offload_optimizer_super_offload:  # superoffload_utils.py: float32 buffers between the processes
        raise NotModeled("SuperOffload with master weights in bf16", field=field, accepted="false")


def master_dtype(plan: DeepSpeedPlan) -> str:
    """base_optimizer.py, _configure_master_weights: of the weights that the optimizer steps, and of their gradients."""
    return "bfloat16" if plan.bf16_master_weights_and_grads else "float32"


def state_dtype(plan: DeepSpeedPlan) -> str:
    """Of Adam's moments. DeepSpeedCPUAdam's are float32 unless told otherwise (engine.py, get_optimizer_configuration,
    since pull request 8010)."""
    low = plan.bf16_optimizer_states and not (plan.offload_optimizer and before(plan, 0, 19, 1))
    return "bfloat16" if low else "float32"


def _check_muon(plan: DeepSpeedPlan) -> None:
    if plan.stage == 3 and plan.reduce_scatter:  # stage3.py
        raise InputError(
            "Muon and reduce scatter cannot be used together", field="zero.reduce_scatter", accepted="false"
        )
    if plan.offload_optimizer or plan.offload_param:
        raise NotModeled("Muon with offloading", field="zero.offload_optimizer", accepted="none")
    if plan.stage == 0:
        raise NotModeled("Muon without ZeRO", field="zero.stage", accepted="1, 2 or 3")
    if accum_dtype(plan) != plan.dtype:
        raise NotModeled(f"Muon that accumulates in {accum_dtype(plan)}", field="zero.grad_accum_dtype")


def whole_world(plan: DeepSpeedPlan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Two communicators of all ranks: what the engine reduces runs in a clone (utils/groups.py, _clone_world_group),
    the gathers of zero.Init, stage 3's barriers and the losses that the Trainer gathers run in the default one."""
    everyone = (tuple(range(plan.world_size)),)
    groups = {"world": everyone, "world's clone": everyone, **ulysses.groups(plan)}
    if plan.autoep_size:
        from zsim.program import experts

        groups |= experts.groups(plan)
    return groups


def check_experts(plan: DeepSpeedPlan, model: ModelSpec) -> None:
    """Raises InputError, NotModeled as `zsim.program.experts.check`."""
    if plan.autoep_size or model.conversion:
        from zsim.program import experts

        experts.check(plan, model)


def frozen_bytes(model: ModelSpec, dtype: str) -> int:
    """Parameters that no optimizer holds keep their own storage."""
    return sum(
        round(parameter.numel * DTYPE_BYTES[parameter.dtype or dtype])
        for parameter in model.parameters
        if not parameter.trainable
    )


def trainable(model: ModelSpec) -> list[int]:
    return [index for index, parameter in enumerate(model.parameters) if parameter.trainable]


def parameter_groups(model: ModelSpec, plan: DeepSpeedPlan) -> list[list[int]]:
    """The optimizer's parameter groups, each in the order of parameters.

    Without `decay_groups` one; with it two as the Trainer makes them (transformers 5.24 trainer.py,
    get_decay_parameter_names): biases and the weights of norms, which do not decay, are the second. Muon makes two of
    each: its own and Adam's (engine.py, _muon_param_groups). Experts that ranks share are in groups of their own.
    """
    params = trainable(model)
    groups = [params]
    if plan.optimizer.decay_groups:
        plain = {p for p in params if _NO_DECAY.search(model.parameters[p].name.lower()) or _is_layer_norm(model, p)}
        groups = [[p for p in params if p not in plain], [p for p in params if p in plain]]
    if is_muon(plan.optimizer):
        hidden = matrices(model)
        groups = [[p for p in group if (p in hidden) is own] for group in groups for own in (True, False)]
        if not plan.zero_init:  # original_muon.py sorts its own by shape, which zero.Init hides
            shapes = [parameter.shape for parameter in model.parameters]
            groups = [sorted(g, key=shapes.__getitem__, reverse=True) if hidden.issuperset(g) else g for g in groups]
    groups = [group for group in groups if group]
    if plan.autoep_size:
        from zsim.program import experts

        return experts.parameter_groups(groups, model, plan)
    return groups


def sub_groups(model: ModelSpec, plan: DeepSpeedPlan, shard: list[int]) -> list[list[int]]:
    """stage3.py _create_fp16_sub_groups: one closes once its shards reach `sub_group_size` elements."""
    groups: list[list[int]] = []
    for params in parameter_groups(model, plan):
        group: list[int] = []
        elements = 0
        for param in params:
            group.append(param)
            elements += shard[param]
            if elements >= plan.sub_group_size:
                groups.append(group)
                group, elements = [], 0
        if group:
            groups.append(group)
    return groups


_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def _is_layer_norm(model: ModelSpec, param: int) -> bool:
    return model.parameters[param].module_class == "LayerNorm"


def in_backward(tree: Module) -> set[str]:
    """Modules that gradients flow through: not rotary tables, token masks, or what no loss depends on."""
    return {module.name for module in modules_in_order(tree) if module.in_backward}


class Gradients:
    """The `.grad` tensors. AccumulateGrad takes over a parameter's first gradient and adds later ones to it."""

    def __init__(self, builder: Builder, model: ModelSpec, dtype: str) -> None:
        self.builder = builder
        self.nbytes = [parameter.numel * dtype_bytes(dtype) for parameter in model.parameters]
        self.held: set[int] = set()
        self._added: set[int] = set()

    def alloc(self, param: int) -> None:
        if param in self.held:
            self._added.add(param)
            self.builder.alloc(f"added grad:{param}", "gradients", self.nbytes[param])
        else:
            self.held.add(param)
            self.builder.alloc(f"grad:{param}", "gradients", self.nbytes[param])

    def ready(self, param: int) -> None:
        if param in self._added:
            self._added.remove(param)
            self.builder.free(f"added grad:{param}")

    def free(self, param: int) -> None:
        self.held.remove(param)
        self.builder.free(f"grad:{param}")

    def free_all(self) -> None:
        for param in sorted(self.held):
            self.free(param)


def broadcast_model(builder: Builder, parameters: Iterable[Parameter], plan: DeepSpeedPlan) -> None:
    """engine.py _broadcast_model: every parameter from rank 0, since 0.19.8 viewed as bytes, for a new engine."""
    as_they_are = before(plan, 0, 19, 8)
    for parameter in parameters:
        dtype = parameter.dtype or plan.dtype
        numel = parameter.numel if as_they_are else parameter.numel * dtype_bytes(dtype)
        kind = dtype if as_they_are else "uint8"
        collective(
            builder, COMPUTE, "broadcast", kind, numel, numel, "init", "broadcast parameter", group=parameter.home,
            root=0,
        )  # fmt: skip


def stop_timer(builder: Builder, plan: DeepSpeedPlan, first: bool) -> None:
    """End of the engine's step, which follows every backward. utils/timer.py, ThroughputTimer: the host waits for the
    whole device here and once more before the next forward, from the third step on, to report samples per second."""
    if plan.throughput_timer and not first:
        builder.host_wait(None)


def charge_gradient(builder: Builder, plan: DeepSpeedPlan, trained: int) -> None:
    """Python of the hook on a gradient, of which there are `trained`."""
    builder.host_work(hook(plan.version, f"{'zero3' if plan.stage == 3 else 'zero12'} gradient hook"), "backward")
    if counts_in_every_hook(plan):
        builder.host_work("zero counted parameter", "backward", trained)


def charge_step(builder: Builder, model: ModelSpec, plan: DeepSpeedPlan) -> None:
    """Python of the engine's step: over its groups, and over each trained parameter."""
    stage = "zero3" if plan.stage == 3 else "zero12"
    builder.host_work(f"{stage} step", "optimizer")
    builder.host_work(f"{stage} step parameter", "optimizer", len(trainable(model)))


def collective(
    builder: Builder,
    lane: str,
    kind: str,
    dtype: str,
    in_numel: int,
    out_numel: int,
    phase: str,
    label: str,
    *,
    group: str = "world",
    module: str = "",
    micro: int = 0,
    root: int | None = None,
) -> int:
    work = _call(kind, dtype, in_numel, out_numel, group, root)
    return builder.launch(lane, label, phase, work, module=module, micro=micro)


@lru_cache(maxsize=4096)
def _call(kind: str, dtype: str, in_numel: int, out_numel: int, group: str, root: int | None) -> Collective:
    reduce_op = ("MAX" if dtype == "uint8" else "SUM") if "reduce" in kind else None
    return Collective(kind, dtype, in_numel, out_numel, group, reduce_op, root)


def elementwise(
    builder: Builder,
    lane: str,
    label: str,
    phase: str,
    read_bytes: float,
    write_bytes: float,
    *,
    launches: int = 1,
    module: str = "",
    micro: int = 0,
    temp_peak: int = 0,
) -> int:
    """A memory-bound kernel on `lane`; `temp_peak` bytes of workspace live inside it."""
    work = _kernel(label, read_bytes, write_bytes, launches)
    return builder.launch(
        lane, label, phase, work, module=module, micro=micro, temp_peak=temp_peak, temp_category="workspace"
    )


@lru_cache(maxsize=4096)
def _kernel(label: str, read_bytes: float, write_bytes: float, launches: int) -> Compute:
    return Compute((Memory(label, read_bytes, write_bytes, launches),))
