"""DeepSpeed 0.19.8 without ZeRO: gradients are all-reduced as a whole after the last backward.

Stage 0 in bf16 or fp16 is FP16_Optimizer around fused optimizers (runtime/fp16/fused_optimizer.py: flat copies) and
FP16_UnfusedOptimizer around others; in float32 the optimizer itself. BF16_Optimizer (runtime/bf16_optimizer.py) is
what stage 1 becomes with bf16 and float32 accumulation: it shards the optimizer's states, but not the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from zsim.errors import NotModeled
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder, repeated
from zsim.program.deepspeed import (
    MIXED,
    Gradients,
    broadcast_model,
    collective,
    comm_dtype,
    dtype_bytes,
    elementwise,
    frozen_bytes,
    parameter_groups,
    stop_timer,
    trainable,
    whole_world,
)
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import COMPUTE, Program
from zsim.program.optimizer import update
from zsim.program.preference import Replica, Second, comparison

ELEMENTS_PER_CALL = 500_000_000  # engine.py MEMORY_OPT_ALLREDUCE_SIZE


def lower_zero0(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, workload: Workload, steps: int) -> Program:
    if plan.sequence_parallel_size > 1:  # its optimizers sum flags and norms over the ranks of a sequence as well
        what = "stage 0" if plan.stage == 0 else "stage 1 with float32 accumulation"
        accepted = "1, or stage 2 or 3, or stage 1 without data_types.grad_accum_dtype"
        raise NotModeled(f"sequence parallelism in {what}", field="sequence_parallel_size", accepted=accepted)
    builder = Builder()
    rank = (Bf16Optimizer if plan.stage == 1 else Stage0)(builder, model, plan)
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = builder.finish()
    built = repeated(builder, lambda first: rank.step(tree, first=first), steps)
    return Program(plan.world_size, whole_world(plan), init, built)


class EngineReplica(Replica):
    """A second model under stages 0, 1 and 2: an engine of stage 0 without an optimizer (trl's prepare_deepspeed)."""

    def allocate(self) -> None:
        broadcast_model(self.builder, self.model.parameters, self.plan)
        super().allocate()


class Unsharded(Hooks[DeepSpeedPlan]):
    """Full parameters, and full gradients from the first backward to the step."""

    def __init__(self, builder: Builder, model: ModelSpec, plan: DeepSpeedPlan) -> None:
        self.builder, self.model, self.plan = builder, model, plan
        self.trainable = trainable(model)
        self.groups = [[model.parameters[param].numel for param in group] for group in parameter_groups(model, plan)]
        self.numels = [model.parameters[param].numel for param in self.trainable]
        self.total = sum(self.numels)
        self.size = dtype_bytes(plan.dtype)
        self.gradients = Gradients(builder, model, plan.dtype)
        self.micro = 0

    def backward(self, tree: Module, micro: int) -> None:
        self.micro = micro
        execution = Execution(self.builder, self, micro)
        execution.forward(tree)
        self.compare(execution)
        execution.backward(tree)

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second:
        return EngineReplica(builder, model, self.plan, self.plan.dtype)

    def broadcast(self) -> None:
        """By the engines, that of a reference first."""
        if self.comparison:
            self.comparison.allocate()
        broadcast_model(self.builder, self.model.parameters, self.plan)

    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            self.gradients.alloc(param)

    def grad_ready(self, param: int) -> None:
        self.gradients.ready(param)

    def all_reduce(self, numels: Sequence[int], size: int) -> None:
        """engine.py allreduce_no_retain: a call as soon as the tensors exceed 5e8 elements together."""
        tensors: list[int] = []
        for elements in numels:
            tensors.append(elements)
            if sum(tensors) > ELEMENTS_PER_CALL:
                self._all_reduce(tensors, size)
                tensors = []
        if tensors:
            self._all_reduce(tensors, size)

    def _all_reduce(self, tensors: list[int], size: int) -> None:
        """allreduce_bucket: flattened (a copy, unless it is one tensor), cast, summed, scaled, copied back."""
        builder, elements = self.builder, sum(tensors)
        comm_size = dtype_bytes(comm_dtype(self.plan))
        temporaries = []
        if len(tensors) > 1:
            temporaries.append("flat gradients")
            builder.alloc("flat gradients", "reduce_buffers", elements * size)
            self._kernel("copy", elements * size, elements * size)
        if comm_size != size:
            temporaries.append("cast gradients")
            builder.alloc("cast gradients", "reduce_buffers", elements * comm_size)
            self._kernel("cast", elements * size, elements * comm_size)
        collective(
            builder, COMPUTE, "all_reduce", comm_dtype(self.plan), elements, elements, "backward", "reduce gradients",
            micro=self.micro,
        )  # fmt: skip
        self._kernel("scale", elements * comm_size, elements * comm_size)
        if comm_size != size:
            self._kernel("cast", elements * comm_size, elements * size)
        self._kernel("copy", elements * size, elements * size, launches=len(tensors))
        for key in temporaries:
            builder.free(key)

    def _kernel(self, label: str, read_bytes: float, write_bytes: float, launches: int = 1) -> None:
        elementwise(
            self.builder, COMPUTE, label, "backward", read_bytes, write_bytes, launches=launches, micro=self.micro
        )


class Stage0(Unsharded):
    def allocate(self) -> None:
        builder, plan = self.builder, self.plan
        self.broadcast()
        builder.alloc("parameters", "parameters", self.total * self.size + frozen_bytes(self.model, plan.dtype))
        if plan.dtype in MIXED:
            builder.alloc("master weights", "master_weights", 4 * self.total)
            self._update(first=True)  # initialize_optimizer_states steps with gradients of zero

    def _update(self, first: bool) -> None:
        for index, group in enumerate(self.groups):
            numels = [sum(group)] if self.flat else group
            update(self.builder, self.plan.optimizer, numels, "float32", first=first, key=f"optimizer:{index}")

    @property
    def flat(self) -> bool:
        """FP16_Optimizer or FP16_UnfusedOptimizer"""
        return self.plan.dtype in MIXED and self.plan.optimizer.impl == "fused"

    def step(self, tree: Module, first: bool) -> None:
        for micro in range(self.plan.grad_accum):
            if micro:
                stop_timer(self.builder, self.plan, first)
            self.backward(tree, micro)
        self.all_reduce(self.numels, self.size)
        if self.plan.dtype in MIXED:
            self._mixed_step()
        else:
            self._fp32_step(first)
        stop_timer(self.builder, self.plan, first)
        self.evaluate()

    def _mixed_step(self) -> None:
        builder, total, count = self.builder, self.total, len(self.trainable)
        # CheckOverflow.has_overflow_serial asks for the truth of one tensor after another
        elementwise(builder, COMPUTE, "grad_norm", "optimizer", 2 * total * self.size, 0, launches=4 * count)
        builder.host_wait(builder.last(COMPUTE))
        builder.alloc("fp32 gradients", "gradients", 4 * total)
        elementwise(builder, COMPUTE, "cast", "optimizer", total * self.size, 4 * total, launches=count)
        gradients = "fp32 gradients"
        if self.flat:  # FP16_Optimizer flattens the casts, then drops both them and the model's gradients
            gradients = "flat gradients"
            builder.alloc(gradients, "gradients", 4 * total)
            elementwise(builder, COMPUTE, "copy", "optimizer", 4 * total, 4 * total, launches=len(self.groups))
            builder.free("fp32 gradients")
            self.gradients.free_all()
        elementwise(builder, COMPUTE, "grad_norm", "optimizer", 4 * total, 0, launches=1 if self.flat else count)
        builder.host_wait(builder.last(COMPUTE))
        elementwise(builder, COMPUTE, "scale", "optimizer", 4 * total, 4 * total, launches=1 if self.flat else count)
        self._update(first=False)
        builder.free(gradients)
        elementwise(builder, COMPUTE, "cast", "optimizer", 4 * total, total * self.size, launches=count)
        self.gradients.free_all()

    def _fp32_step(self, first: bool) -> None:
        """The engine clips (runtime/utils.py clip_grad_norm_, which averages the norm over ranks), torch updates."""
        builder, plan, total = self.builder, self.plan, self.total
        if plan.grad_clip:
            count = len(self.trainable)
            elementwise(builder, COMPUTE, "grad_norm", "optimizer", 4 * total, 0, launches=count)
            collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm")
            elementwise(builder, COMPUTE, "scale", "optimizer", 4 * total, 4 * total, launches=count)
        self._update(first)
        self.gradients.free_all()


class Bf16Optimizer(Unsharded):
    """Flat bf16 parameters, flat float32 gradients of the whole model, float32 master weights of a partition."""

    def allocate(self) -> None:
        builder, plan = self.builder, self.plan
        self.partitions = [ceil(sum(group) / (2 * plan.world_size)) * 2 for group in self.groups]
        self.partition = sum(self.partitions)
        self.broadcast()
        flat = self.partition * plan.world_size
        builder.alloc("parameters", "parameters", flat * self.size + frozen_bytes(self.model, plan.dtype))
        builder.alloc("master weights", "master_weights", 4 * self.partition)
        builder.alloc("fp32 gradients", "gradients", 4 * flat)

    def step(self, tree: Module, first: bool) -> None:
        builder, plan = self.builder, self.plan
        for micro in range(plan.grad_accum):
            if micro:
                stop_timer(builder, plan, first)
                # backward_prologue zeroes the bf16 gradients
                elementwise(builder, COMPUTE, "fill", "backward", 0, self.total * self.size, micro=micro)
            self.backward(tree, micro)
            self._accumulate()
        self.all_reduce([part * plan.world_size for part in self.partitions], 4)
        self._update(first)
        stop_timer(builder, plan, first)
        self.evaluate()

    def _accumulate(self) -> None:
        """update_hp_grads: each bf16 gradient, cast to float32, is added to the flat buffer."""
        total = self.total
        elementwise(
            self.builder, COMPUTE, "accumulate", "backward", (self.size + 8) * total, 8 * total,
            launches=2 * len(self.trainable), micro=self.micro, temp_peak=4 * max(self.numels),
        )  # fmt: skip

    def _update(self, first: bool) -> None:
        builder, plan, total, part = self.builder, self.plan, self.total, self.partition
        count = len(self.trainable)
        elementwise(builder, COMPUTE, "grad_norm", "optimizer", 4 * total, 0, launches=count)
        builder.host_wait(builder.last(COMPUTE))
        if plan.grad_clip:
            elementwise(builder, COMPUTE, "scale", "optimizer", 4 * total, 4 * total, launches=count)
        for index, numel in enumerate(self.partitions):
            update(builder, plan.optimizer, [numel], "float32", first=first, key=f"optimizer:{index}")
        elementwise(builder, COMPUTE, "cast", "optimizer", 4 * part, self.size * part)
        for numel in self.partitions if plan.world_size > 1 else ():
            collective(
                builder, COMPUTE, "all_gather", plan.dtype, numel, numel * plan.world_size, "optimizer",
                "gather parameters",
            )  # fmt: skip
        elementwise(builder, COMPUTE, "fill", "optimizer", 0, 4 * part * plan.world_size)
        self.gradients.free_all()
