"""ZeRO stages 0, 1 and 2 of DeepSpeed 0.19.8: full parameters, sharded optimizer states (1) and gradients (2)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import (
    MIXED,
    accum_dtype,
    broadcast_model,
    collective,
    comm_dtype,
    dtype_bytes,
    elementwise,
    overlaps,
    trainable,
)
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import COMPUTE, REDUCE_SCATTER, Program

DDP_BUCKET = 500_000_000  # engine.py MEMORY_OPT_ALLREDUCE_SIZE: elements per all-reduce without ZeRO


def lower_zero12(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, workload: Workload, steps: int) -> Program:
    """Step 1 differs from the later ones only in allocating the optimizer's states."""
    bf16_optimizer = plan.stage == 1 and plan.dtype == "bfloat16" and accum_dtype(plan) == "float32"
    rank = Replicated(model, plan) if plan.stage == 0 or bf16_optimizer else Zero12(model, plan)
    rank.allocate()
    init = rank.builder.instructions
    built = []
    for index in range(min(steps, 2)):
        rank.builder = Builder()
        rank.step(tree, first=index == 0)
        built.append(tuple(rank.builder.instructions))
    built += built[-1:] * (steps - len(built))
    groups = {"world": (tuple(range(plan.world_size)),)}
    return Program(plan.world_size, groups, tuple(init), tuple(built))


class Rank(Hooks):
    """Full bf16 parameters and gradients; what the stages have in common."""

    def __init__(self, model: ModelSpec, plan: DeepSpeedPlan) -> None:
        self.model, self.plan = model, plan
        self.builder = Builder()
        self.world = plan.world_size
        self.numel = [parameter.numel for parameter in model.parameters]
        self.trainable = trainable(model)
        self.size = dtype_bytes(plan.dtype)
        self.micro = 0
        self.held: set[int] = set()  # parameters whose .grad exists

    def micro_step(self, tree: Module, micro: int) -> None:
        self.micro = micro
        execution = Execution(self.builder, self, micro)
        execution.forward(tree)
        execution.backward(tree)

    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            if param not in self.held:
                self.held.add(param)
                self.builder.alloc(f"grad:{param}", "gradients", self.numel[param] * self.size)

    def free_grad(self, param: int) -> None:
        self.held.remove(param)
        self.builder.free(f"grad:{param}")


class Replicated(Rank):
    """Stage 0, and BF16_Optimizer (stage 1 with float32 accumulation): all-reduce after the last backward."""

    def allocate(self) -> None:
        builder = self.builder
        broadcast_model(builder, self.model, self.plan.dtype)
        total = sum(self.numel)
        builder.alloc("parameters", "parameters", total * self.size)
        if self.plan.dtype in MIXED:
            builder.alloc("master", "master_weights", 4 * total)

    def step(self, tree: Module, first: bool) -> None:
        for micro in range(self.plan.grad_accum):
            self.micro_step(tree, micro)
        builder, plan = self.builder, self.plan
        pending = 0
        for param in self.trainable:
            pending += self.numel[param]
            if pending > DDP_BUCKET:
                self._all_reduce(pending)
                pending = 0
        if pending:
            self._all_reduce(pending)
        owned = sum(self.numel[param] for param in self.trainable)
        if plan.stage == 1:
            owned = ceil(owned / (2 * self.world)) * 2
        if plan.dtype == "float32" and plan.grad_clip:
            collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm")
        if first:
            builder.alloc("adam", "optimizer_states", 8 * owned)
        elementwise(builder, COMPUTE, "optimizer", "optimizer", 16 * owned, 12 * owned)
        if plan.stage == 1:
            collective(
                builder, COMPUTE, "all_gather", plan.dtype, owned, owned * self.world, "optimizer", "gather parameters"
            )
        for param in self.trainable:
            self.free_grad(param)

    def _all_reduce(self, numel: int) -> None:
        collective(
            self.builder, COMPUTE, "all_reduce", comm_dtype(self.plan), numel, numel, "backward", "reduce gradients",
            micro=self.micro,
        )  # fmt: skip


class Zero12(Rank):
    def __init__(self, model: ModelSpec, plan: DeepSpeedPlan) -> None:
        super().__init__(model, plan)
        self.lane = REDUCE_SCATTER if overlaps(plan) else COMPUTE
        order = self.trainable
        if plan.round_robin_gradients:
            order = [param for start in range(self.world) for param in order[start :: self.world]]
        self.offset: dict[int, int] = {}
        total = 0
        for param in order:
            self.offset[param] = total
            total += self.numel[param]
        # stage_1_and_2.py nccl_start_alignment_factor: the flat buffer is padded to 2 x world
        self.partition = ceil(total / (2 * self.world)) * 2
        self.bucket: list[int] = []
        self.elements = 0

    def allocate(self) -> None:
        builder = self.builder
        broadcast_model(builder, self.model, self.plan.dtype)
        builder.alloc("parameters", "parameters", self.partition * self.world * self.size)
        builder.alloc("master", "master_weights", 4 * self.partition)

    def step(self, tree: Module, first: bool) -> None:
        plan = self.plan
        for micro in range(plan.grad_accum):
            self.boundary = micro == plan.grad_accum - 1
            self.micro_step(tree, micro)
            if plan.stage == 1 and self.boundary and not overlaps(plan):
                for param in self.trainable:
                    self._add(param)
            if plan.stage == 2 or self.boundary:
                self._flush()
                if overlaps(plan):
                    self.builder.host_wait(None)
        self._optimizer_step(first)

    def grad_ready(self, param: int) -> None:
        if self.plan.stage == 2 or (overlaps(self.plan) and self.boundary):
            self._add(param)

    def _add(self, param: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads"""
        if self.elements + self.numel[param] > self.plan.reduce_bucket_size:
            self._flush()
        self.bucket.append(param)
        self.elements += self.numel[param]

    def _flush(self) -> None:
        if not self.bucket:
            return
        builder, plan = self.builder, self.plan
        if self.lane != COMPUTE:
            # average_tensor: the reduction waits for the gradients, and compute for the reduction before
            before = builder.last(self.lane)
            builder.wait_stream(self.lane, COMPUTE)
            builder.stream_wait(COMPUTE, before)
        for root, numel in self._destinations():
            kind = "all_reduce" if root is None else "reduce"
            collective(
                builder, self.lane, kind, comm_dtype(plan), numel, numel, "backward", "reduce gradients",
                micro=self.micro, root=root,
            )  # fmt: skip
        for param in self.bucket:
            self.free_grad(param)
        self.bucket, self.elements = [], 0

    def _destinations(self) -> list[tuple[int | None, int]]:
        """average_tensor: one all-reduce, or one reduce per owning rank in order of appearance."""
        if self.plan.use_multi_rank_bucket_allreduce or not self.plan.reduce_scatter:
            return [(None, self.elements)]
        owners: dict[int | None, int] = {}
        for param in self.bucket:
            start, end = self.offset[param], self.offset[param] + self.numel[param]
            while start < end:
                owner = start // self.partition
                stop = min(end, (owner + 1) * self.partition)
                owners[owner] = owners.get(owner, 0) + stop - start
                start = stop
        return list(owners.items())

    def _optimizer_step(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        if plan.dtype == "float16" or (plan.dtype == "bfloat16" and plan.check_grad_overflow):
            builder.host_wait(collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow"))
        collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm")
        if first:
            builder.alloc("adam", "optimizer_states", 8 * self.partition)
        elementwise(builder, COMPUTE, "optimizer", "optimizer", 16 * self.partition, 12 * self.partition)
        collective(
            builder, COMPUTE, "all_gather", plan.dtype, self.partition, self.partition * self.world, "optimizer",
            "gather parameters",
        )  # fmt: skip
