"""ZeRO-3 of DeepSpeed 0.19.8: the parameters are sharded, gathered per module and released after it.

Streams: all-gathers run on `all_gather` (`__allgather_stream`), gradient reductions on `reduce_scatter`
(`reduce_and_partition_stream`) if `overlap_comm`, else on the compute stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    has_backward,
    overlaps,
    trainable,
)
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import ALL_GATHER, COMPUTE, REDUCE_SCATTER, Program
from zsim.program.zero3_coordinator import Coordinator

MAX_ONGOING_FETCH_EVENTS = 2  # PartitionedParameterCoordinator.__max_ongoing_fetch_events
MAX_REDUCE_EVENTS = 2  # DeepSpeedZeroOptimizer_Stage3.max_param_reduce_events


def lower_zero3(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, workload: Workload, steps: int) -> Program:
    """Step 1 records the trace, step 2 compares it between ranks, later steps repeat step 3."""
    rank = Zero3(model, tree, plan)
    rank.allocate()
    init = rank.builder.instructions
    built = []
    for index in range(min(steps, 3)):
        rank.builder = Builder()
        rank.step(tree, plan.grad_accum, first=index == 0)
        built.append(tuple(rank.builder.instructions))
    built += built[-1:] * (steps - len(built))
    return Program(plan.world_size, rank.groups, tuple(init), tuple(built))


@dataclass
class Gather:
    """A gather in flight: `params` wait for `event`; `flat` is the buffer that they are copied out of."""

    params: tuple[int, ...]
    event: int
    flat: str | None
    unfetched: int
    done: bool = False


class Zero3(Hooks):
    def __init__(self, model: ModelSpec, tree: Module, plan: DeepSpeedPlan) -> None:
        self.model, self.plan = model, plan
        self.builder = Builder()
        self.root = tree.name
        self.world = plan.world_size
        self.numel = [parameter.numel for parameter in model.parameters]
        self.shard = [ceil(n / self.world) for n in self.numel]
        self.trainable = trainable(model)
        self.sub_groups = _sub_groups(self.trainable, self.shard, plan.sub_group_size)
        self.persistent = _persistent(self.numel, plan)
        self.size = dtype_bytes(plan.dtype)
        self.reduce_lane = REDUCE_SCATTER if overlaps(plan) else COMPUTE
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(self.world)),)}
        hpz = plan.zero_hpz_partition_size
        if hpz > 1:
            self.groups["hpz"] = tuple(tuple(range(k, k + hpz)) for k in range(0, self.world, hpz))
        self.secondary: set[int] = set(range(len(self.numel))) if hpz > 1 else set()
        owned = _owned(tree, plan.leaf_blocks)
        self.differentiable = {name for name, module in _modules(tree) if has_backward(module)}
        self.coordinator = Coordinator(
            owned,
            self.numel,
            self.persistent,
            plan.stage3_prefetch_bucket_size,
            plan.stage3_max_live_parameters,
            plan.stage3_max_reuse_distance,
        )
        self.micro = 0
        self.inflight: dict[int, Gather] = {}
        self.fetch_events: deque[int] = deque()
        self.reduce_events: deque[int] = deque()
        self.backward_open: dict[str, None] = {}
        self.bucket: list[int] = []
        self.elements = 0
        self.flat_count = 0

    # ---- persistent state ----------------------------------------------------------------------------------------
    def allocate(self) -> None:
        builder, plan = self.builder, self.plan
        if not plan.zero_init:
            broadcast_model(builder, self.model, plan.dtype)
        broadcast_model(builder, self.model, plan.dtype)  # partition_parameters.py _zero_init_param
        for _ in range(3):  # stage3.py: before the flat partitions, and around the optimizer's states
            collective(builder, COMPUTE, "barrier", "uint8", 1, 1, "init", "barrier")
        builder.alloc("parameters", "parameters", sum(self.shard) * self.size)
        owned = sum(self.shard[param] for param in self.trainable)
        if plan.dtype in MIXED:
            builder.alloc("master", "master_weights", 4 * owned)
        builder.alloc("bucket", "reduce_buffers", plan.reduce_bucket_size * dtype_bytes(comm_dtype(plan)))
        builder.alloc("gradients", "gradients", owned * dtype_bytes(accum_dtype(plan)))
        for param in self.trainable:
            collective(
                builder, COMPUTE, "all_gather", plan.dtype, self.shard[param], self.shard[param] * self.world,
                "init", "gather for hooks",
            )  # fmt: skip

    # ---- one step --------------------------------------------------------------------------------------------------
    def step(self, tree: Module, grad_accum: int, first: bool) -> None:
        for micro in range(grad_accum):
            self.micro = micro
            execution = Execution(self.builder, self, micro)
            execution.forward(tree)
            execution.backward(tree)
            self._end_backward()
        self._optimizer_step(first)

    # ---- module hooks ----------------------------------------------------------------------------------------------
    def pre_forward(self, module: Module, phase: str) -> None:
        if module.name == self.root and phase == "forward":
            self._reset_step()
        self._fetch(module.name, phase)

    def post_forward(self, module: Module, phase: str) -> None:
        self._free(self.coordinator.release(module.name))

    def pre_backward(self, module: Module) -> None:
        if module.name in self.differentiable:
            self.backward_open[module.name] = None
            self._fetch(module.name, "backward")

    def post_backward(self, module: Module) -> None:
        if module.name in self.differentiable and module.role != "embedding":
            del self.backward_open[module.name]
            self._free(self.coordinator.release(module.name))

    def _reset_step(self) -> None:
        for length in self.coordinator.reset_step():
            for numel in (1, length):
                event = collective(
                    self.builder, COMPUTE, "broadcast", "int64", numel, numel, "forward", "compare trace",
                    micro=self.micro, root=0,
                )  # fmt: skip
                self.builder.host_wait(event)

    def _fetch(self, module: str, phase: str) -> None:
        fetch = self.coordinator.fetch(module)
        if fetch.needed:
            self._gather(fetch.needed, module, phase)
        self._wait(self.coordinator.owned.get(module, ()), module, phase)
        if fetch.prefetched:
            self._gather(fetch.prefetched, module, phase)

    # ---- gathers ---------------------------------------------------------------------------------------------------
    def _gather(self, params: tuple[int, ...], module: str, phase: str) -> None:
        near = tuple(param for param in params if param in self.secondary)
        far = tuple(param for param in params if param not in self.secondary)
        for group, members in (("hpz", near), ("world", far)):
            if len(members) == 1 or self.plan.stage3_allgather_sequential:
                for param in members:
                    self._gather_call((param,), group, module, phase)
            elif members:
                self._gather_call(members, group, module, phase)

    def _gather_call(self, params: tuple[int, ...], group: str, module: str, phase: str) -> None:
        builder, plan = self.builder, self.plan
        ranks = self.world if group == "world" else plan.zero_hpz_partition_size
        part = sum(self.shard[param] for param in params) * (self.world // ranks)
        full = part * ranks
        if len(params) == 1:
            flat = None
            self._alloc_param(params[0], full * self.size)
        else:
            flat = f"flat:{self.flat_count}"
            self.flat_count += 1
            builder.alloc(flat, "all_gather_buffers", full * self.size)
        kind, size = "all_gather", part
        if plan.use_all_reduce_for_fetch_params and len(params) > 1 and group == "world":
            kind, size = "all_reduce", full
        if not overlaps(plan):
            builder.wait_stream(ALL_GATHER, COMPUTE)
        event = collective(
            builder, ALL_GATHER, kind, plan.dtype, size, full, phase, "gather parameters",
            group=group, module=module, micro=self.micro,
        )  # fmt: skip
        gather = Gather(params, event, flat, len(params))
        for param in params:
            self.inflight[param] = gather

    def _alloc_param(self, param: int, nbytes: int) -> None:
        self.builder.alloc(f"full:{param}", "all_gather_buffers", nbytes)

    def _wait(self, params: tuple[int, ...], module: str, phase: str) -> None:
        builder = self.builder
        for param in params:
            gather = self.inflight.pop(param, None)
            if gather is None:
                continue
            if len(self.fetch_events) > MAX_ONGOING_FETCH_EVENTS:
                builder.host_wait(self.fetch_events.popleft())
            if not gather.done:
                self._complete(gather, module, phase)
            gather.unfetched -= 1
            if gather.flat and not gather.unfetched:
                builder.free(gather.flat)
            self.fetch_events.append(gather.event)
            builder.stream_wait(COMPUTE, gather.event)

    def _complete(self, gather: Gather, module: str, phase: str) -> None:
        gather.done = True
        if gather.flat is None:
            return
        nbytes = 0
        for param in gather.params:
            self._alloc_param(param, self.numel[param] * self.size)
            nbytes += self.numel[param] * self.size
        gather.event = elementwise(
            self.builder, ALL_GATHER, "copy", phase, nbytes, nbytes,
            launches=len(gather.params), module=module, micro=self.micro,
        )  # fmt: skip

    def _free(self, params: tuple[int, ...]) -> None:
        for param in params:
            self.builder.free(f"full:{param}")
            if self.plan.zero_hpz_partition_size > 1:
                self.secondary.add(param)

    # ---- gradients -------------------------------------------------------------------------------------------------
    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            self.builder.alloc(f"grad:{param}", "gradients", self.numel[param] * self.size)

    def grad_ready(self, param: int) -> None:
        if self.elements + self.numel[param] > self.plan.reduce_bucket_size and self.bucket:
            self._reduce()
        builder = self.builder
        nbytes = self.numel[param] * self.size
        if self.reduce_lane != COMPUTE:
            builder.wait_stream(self.reduce_lane, COMPUTE)
        event = elementwise(builder, self.reduce_lane, "copy", "backward", nbytes, nbytes, micro=self.micro)
        builder.free(f"grad:{param}", after=event)
        self.bucket.append(param)
        self.elements += self.numel[param]

    def _reduce(self) -> None:
        builder, plan = self.builder, self.plan
        if len(self.reduce_events) > MAX_REDUCE_EVENTS:
            builder.host_wait(self.reduce_events.popleft())
        part = sum(self.shard[param] for param in self.bucket)
        kind, numel, out = "reduce_scatter", part * self.world, part
        if not plan.reduce_scatter:
            numel = out = self.elements
            kind = "all_reduce"
        event = collective(
            builder, self.reduce_lane, kind, comm_dtype(plan), numel, out, "backward", "reduce gradients",
            micro=self.micro,
        )  # fmt: skip
        self.reduce_events.append(event)
        self.bucket, self.elements = [], 0

    def _end_backward(self) -> None:
        if self.bucket:
            self._reduce()
        self.builder.host_wait(self.builder.last(self.reduce_lane))
        while self.backward_open:
            module, _ = self.backward_open.popitem()
            self._free(self.coordinator.release_leftover(module))

    # ---- optimizer -------------------------------------------------------------------------------------------------
    def _optimizer_step(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        self._free(self.coordinator.partition_all())
        if plan.dtype == "float16":
            event = collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow")
            builder.host_wait(event)
        for sub_group in self.sub_groups:
            numel = sum(self.shard[param] for param in sub_group)
            elementwise(builder, COMPUTE, "grad_norm", "optimizer", numel * dtype_bytes(accum_dtype(plan)), 0)
            collective(builder, COMPUTE, "all_reduce", "float64", 1, 1, "optimizer", "grad norm")
        builder.host_wait(builder.last(COMPUTE))
        for index, sub_group in enumerate(self.sub_groups):
            self._update(index, sum(self.shard[param] for param in sub_group), first)
        for param in self.coordinator.gather_persistent():
            self._alloc_param(param, self.shard[param] * self.world * self.size)
            collective(
                builder, ALL_GATHER, "all_gather", plan.dtype, self.shard[param], self.shard[param] * self.world,
                "optimizer", "gather persistent parameter",
            )  # fmt: skip
        builder.host_wait(None)
        self.secondary.clear()
        self.fetch_events.clear()
        self.reduce_events.clear()

    def _update(self, index: int, numel: int, first: bool) -> None:
        builder = self.builder
        if first:
            builder.alloc(f"adam:{index}", "optimizer_states", 8 * numel)
        builder.alloc("fp32 gradients", "gradients", 4 * numel)
        elementwise(builder, COMPUTE, "cast", "optimizer", numel * dtype_bytes(accum_dtype(self.plan)), 4 * numel)
        elementwise(builder, COMPUTE, "optimizer", "optimizer", 16 * numel, 12 * numel)
        elementwise(builder, COMPUTE, "cast", "optimizer", 4 * numel, self.size * numel)
        builder.free("fp32 gradients")


def _persistent(numel: list[int], plan: DeepSpeedPlan) -> frozenset[int]:
    """parameter_offload.py mark_persistent_parameters: small ones, in order, up to a total."""
    limit = plan.stage3_model_persistence_threshold
    chosen, total = [], 0
    for param, n in enumerate(numel):
        if limit is not None and n + total > limit:
            continue
        if n <= plan.stage3_param_persistence_threshold:
            chosen.append(param)
            total += n
    return frozenset(chosen)


def _sub_groups(params: list[int], shard: list[int], size: int) -> list[list[int]]:
    """stage3.py _create_fp16_sub_groups: a sub-group closes once its shards reach `size` elements."""
    groups: list[list[int]] = []
    group: list[int] = []
    elements = 0
    for param in params:
        group.append(param)
        elements += shard[param]
        if elements >= size:
            groups.append(group)
            group, elements = [], 0
    return [*groups, group] if group else groups


def _modules(module: Module) -> Iterator[tuple[str, Module]]:
    yield module.name, module
    for item in module.body:
        if isinstance(item, Module):
            yield from _modules(item)


def _owned(tree: Module, leaf_blocks: bool) -> dict[str, tuple[int, ...]]:
    owned = {}
    for name, module in _modules(tree):
        params = set(module.params)
        if leaf_blocks and module.role == "block":
            params = {param for _, inner in _modules(module) for param in inner.params}
        owned[name] = tuple(sorted(params))
    return owned
