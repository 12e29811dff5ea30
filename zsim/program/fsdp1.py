"""FSDP1: torch.distributed.fsdp.FullyShardedDataParallel, wrapped per block.

The state machine of torch 2.13 `fsdp/_runtime_utils.py`, `_flat_param.py` and `_exec_order_utils.py`, driven by the
module walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from zsim.errors import InputError
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.spec import Fsdp1Plan
from zsim.program.builder import Builder
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    D2H,
    H2D,
    REDUCE_SCATTER,
    Collective,
    Compute,
    Copy,
    Program,
)
from zsim.program.optimizer import clip, grad_norm, update
from zsim.program.units import Group, consecutive, divide_factors, groups_of, mesh_of, strided

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
RESHARD_AFTER_FORWARD = ("FULL_SHARD", "HYBRID_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
ALIGNMENT = 16  # bytes, _flat_param.py _get_aligned_numel
GATHERS_IN_FLIGHT = 2  # _limiter_utils.py _max_num_inflight_all_gathers


class Handle:
    """FlatParamHandle: the parameters of one wrapped module in one padded flat tensor."""

    def __init__(self, group: Group, model: ModelSpec, plan: Fsdp1Plan, shards: int) -> None:
        self.name, self.module, self.params = group.name, group.modules[0], group.params
        self.is_root = group.role == "root"
        self.numels = [model.parameters[param].numel for param in self.params]
        self.trainable = [param for param in self.params if model.parameters[param].trainable]
        self.output_has_grad = group.output_has_grad
        self.input_has_grad = group.input_has_grad
        align = int(ALIGNMENT // DTYPE_BYTES[plan.param_dtype]) if plan.use_orig_params else 1
        total = 0
        for numel in self.numels:
            total = ceil(total / align) * align + numel
        self.shard = ceil(total / shards)
        self.full = self.shard * shards
        self.unsharded = False
        self.prefetched = False
        self.needs_forward = False  # _needs_pre_forward_unshard
        self.needs_backward = False
        self.ran_pre_backward = False
        self.in_backward = False  # BACKWARD_PRE: recomputation and recording skip it
        self.forward_index: int | None = None  # place in the order of the first iteration
        self.post_forward_index: int | None = None
        self.pending: set[int] = set()  # parameters whose gradient is still to come
        self.prefetcher: Handle | None = None  # in whose pre-forward this forward's views were made
        self.delayed: list[Handle] = []  # units whose gradients wait for this module's backward
        self.flat_grad: str | None = None  # unsharded gradient kept under no_sync, its key
        self.sharded_grad = False


class Fsdp1(Hooks):
    def __init__(self, model: ModelSpec, tree: Module, plan: Fsdp1Plan) -> None:
        if plan.sharding_strategy not in STRATEGIES:
            raise InputError(plan.sharding_strategy, field="sharding_strategy", accepted=", ".join(STRATEGIES))
        self.model, self.tree, self.plan = model, tree, plan
        self.sharded = plan.sharding_strategy != "NO_SHARD"
        self.hybrid = plan.sharding_strategy in HYBRID
        self.replicas, self.shards = mesh_of(plan.mesh if self.hybrid else None, plan.world_size)
        shards = self.shards if self.sharded else 1
        groups = groups_of(model, tree, "flat" if plan.flat else "hf")
        self.handles = [Handle(group, model, plan, shards) for group in groups]
        self.by_module = {handle.module: handle for handle in self.handles}
        self.owner = {param: handle for handle in self.handles for param in handle.params}
        self.param_size = int(DTYPE_BYTES[plan.param_dtype])
        self.reduce_size = int(DTYPE_BYTES[plan.reduce_dtype])
        self.mixed = plan.param_dtype != "float32"
        self.device = "host" if plan.cpu_offload else "gpu"
        self.group = "shard" if self.hybrid else "world"
        self.builder = Builder()
        self.free_events: deque[int | None] = deque()  # None: of an earlier step, over by now
        self.forward_order: list[Handle] = []
        self.post_forward_order: list[Handle] = []
        self.first_iteration = True

    def allocate(self) -> None:
        for handle in self.handles:
            self.builder.alloc(f"shard:{handle.name}", "parameters", 4 * handle.shard, self.device)
        if self.model.buffers_bytes:
            self.builder.alloc("buffers", "parameters", self.model.buffers_bytes)

    def step(self, first: bool) -> None:
        self.free_events = deque([None] * len(self.free_events))
        accum = self.plan.grad_accum
        for self.micro in range(accum):
            self.sync = not self.plan.no_sync or self.micro == accum - 1
            execution = Execution(self.builder, self, self.micro)
            execution.forward(self.tree)
            execution.backward(self.tree)
            self._final_callback()
        self._optimizer(first)

    # Forward.

    def pre_forward(self, module: Module, phase: str) -> None:
        if phase == "recompute":
            return
        if module.role == "root":
            if self.plan.forward_prefetch:
                for handle in self.handles:
                    handle.needs_forward, handle.prefetched = True, False
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
            self.builder.wait_stream(COPY_IN, COMPUTE)
        handle = self.by_module.get(module.name)
        if handle is None:
            return
        self.builder.host_work("fsdp1 pre-forward", "forward", module=module.name)
        if self.first_iteration and handle.forward_index is None:
            handle.forward_index = len(self.forward_order)
            self.forward_order.append(handle)
        if not handle.prefetched:
            self._unshard(handle, "forward")
            handle.prefetcher = None
        handle.needs_forward = False
        self.builder.wait_stream(COMPUTE, ALL_GATHER)
        if self.plan.forward_prefetch and handle.forward_index is not None:
            following = handle.forward_index + 1
            if following < len(self.forward_order):
                target = self.forward_order[following]
                if target.needs_forward and not target.prefetched:
                    self._unshard(target, "forward")
                    target.prefetched = True
                    target.prefetcher = handle

    def post_forward(self, module: Module, phase: str) -> None:
        handle = self.by_module.get(module.name)
        if handle is None or phase == "recompute":
            return
        self.builder.host_work("fsdp1 post-forward", "forward", module=module.name)
        if not handle.post_forward_index:  # torch's test, true for index 0 as well
            handle.post_forward_index = len(self.post_forward_order)
        self.post_forward_order.append(handle)
        self._reshard(handle, not handle.is_root and self.plan.sharding_strategy in RESHARD_AFTER_FORWARD)
        handle.needs_backward = handle.output_has_grad
        handle.ran_pre_backward = False
        handle.pending = set(handle.trainable)

    # Backward.

    def pre_backward(self, module: Module) -> None:
        handle = self.by_module.get(module.name)
        if handle is None or not handle.output_has_grad or handle.ran_pre_backward:
            return
        self.builder.host_work("fsdp1 pre-backward", "backward", module=module.name)
        if handle.needs_backward:
            if not handle.prefetched:
                self._unshard(handle, "backward")
            self.builder.wait_stream(COMPUTE, ALL_GATHER)
        handle.needs_backward = False
        if self.plan.backward_prefetch == "BACKWARD_PRE":
            self._backward_prefetch(handle)
        handle.ran_pre_backward = True

    def _backward_prefetch(self, handle: Handle) -> None:
        if handle.post_forward_index:
            target = self.post_forward_order[handle.post_forward_index - 1]
            if target.needs_backward and not target.prefetched:
                self._unshard(target, "backward")
                target.prefetched = True

    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            numel = self.model.parameters[param].numel
            self.builder.alloc(f"grad:{param}", "gradients", numel * self.param_size)

    def grad_ready(self, param: int) -> None:
        """The AccumulateGrad hook of the flat parameter fires when the last of its views has its gradient.

        Autograd runs what was created last first. Views made in another unit's pre-forward (a prefetch) are older
        than that unit's own work, so their backward comes after it.
        """
        handle = self.owner[param]
        handle.pending.discard(param)
        if not handle.pending:
            if handle.prefetcher is not None:
                handle.prefetcher.delayed.append(handle)
            else:
                self._flush_delayed(handle)
                self._post_backward(handle)

    def post_backward(self, module: Module) -> None:
        """_register_post_backward_reshard_only_hook: on the inputs of a module without trainable parameters."""
        handle = self.by_module.get(module.name)
        if handle is None:
            return
        self._flush_delayed(handle)
        if not handle.trainable and handle.input_has_grad:
            self._reshard_after_backward(handle)

    def _flush_delayed(self, handle: Handle) -> None:
        while handle.delayed:
            self._post_backward(handle.delayed.pop(0))

    def _collect_flat_grad(self, handle: Handle) -> None:
        """The views' gradients are concatenated (SplitWithSizesBackward), then added to what no_sync left."""
        builder, nbytes = self.builder, handle.full * self.param_size
        builder.alloc(f"flat grad:{handle.name}", "gradients", nbytes)
        cat = Memory("copy", nbytes, nbytes, 1)
        builder.launch(COMPUTE, "flatten gradients", "backward", Compute((cat,)), micro=self.micro, module=handle.name)
        for param in handle.trainable:
            builder.free(f"grad:{param}")
        if handle.flat_grad is None:
            handle.flat_grad = f"flat grad:{handle.name}"
            return
        add = Memory("copy", 2 * nbytes, nbytes)
        builder.launch(COMPUTE, "accumulate gradient", "backward", Compute((add,)), micro=self.micro)
        builder.free(f"flat grad:{handle.name}")

    def _post_backward(self, handle: Handle) -> None:
        self._collect_flat_grad(handle)
        self.builder.host_work("fsdp1 post-backward", "backward", module=handle.module)
        self._reshard_after_backward(handle)
        if not self.sync:
            # kept until the synchronizing backward; renamed so that the next one has a place of its own
            if handle.flat_grad == f"flat grad:{handle.name}":
                handle.flat_grad = self._keep(handle)
            return
        self._reduce(handle)

    def _keep(self, handle: Handle) -> str:
        """A Free and an Alloc of the same bytes: the tensor stays, under a key that outlives the micro-step."""
        self.builder.free(f"flat grad:{handle.name}")
        self.builder.alloc(f"kept grad:{handle.name}", "gradients", handle.full * self.param_size)
        return f"kept grad:{handle.name}"

    def _reshard_after_backward(self, handle: Handle) -> None:
        """_post_backward_reshard"""
        free = self.sharded and (self.sync or self.plan.sharding_strategy in RESHARD_AFTER_FORWARD)
        self._reshard(handle, free)
        if self.plan.backward_prefetch == "BACKWARD_POST":
            self._backward_prefetch(handle)

    def _reduce(self, handle: Handle) -> None:
        """_reduce_grad, _reduce_grad_no_shard"""
        builder, plan = self.builder, self.plan
        arguments = {"module": handle.name, "micro": self.micro}
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)
        source, handle.flat_grad = handle.flat_grad, None
        assert source is not None
        kernels = []
        unsharded = source
        if self.reduce_size != self.param_size:
            unsharded = f"reduce input:{handle.name}"
            builder.alloc(unsharded, "reduce_buffers", handle.full * self.reduce_size)
            kernels.append(Memory("cast", handle.full * self.param_size, handle.full * self.reduce_size))
        pre, post = divide_factors(plan.world_size)
        if pre > 1:
            kernels.append(Memory("copy", handle.full * self.reduce_size, handle.full * self.reduce_size))
        if kernels:
            builder.launch(REDUCE_SCATTER, "prepare gradient", "backward", Compute(tuple(kernels)), **arguments)
        reduced = f"reduce output:{handle.name}"
        lane = REDUCE_SCATTER
        if self.sharded:
            builder.alloc(reduced, "reduce_buffers", handle.shard * self.reduce_size)
            work = Collective("reduce_scatter", plan.reduce_dtype, handle.full, handle.shard, self.group, "SUM")
            event = builder.launch(REDUCE_SCATTER, "reduce-scatter", "backward", work, **arguments)
            # the unsharded gradient came from the compute stream: reusable when the reduction is done
            if unsharded != source:
                builder.free(source, event)
            builder.free(unsharded, event)
            if self.hybrid:
                lane = ALL_REDUCE
                builder.wait_stream(ALL_REDUCE, REDUCE_SCATTER)
                work = Collective("all_reduce", plan.reduce_dtype, handle.shard, handle.shard, "replicate", "SUM")
                builder.launch(ALL_REDUCE, "all-reduce", "backward", work, **arguments)
        else:
            work = Collective("all_reduce", plan.reduce_dtype, handle.full, handle.full, self.group, "SUM")
            event = builder.launch(REDUCE_SCATTER, "all-reduce", "backward", work, **arguments)
            if unsharded != source:
                builder.free(source, event)
            reduced = unsharded
        size = handle.shard * self.reduce_size
        after = [Memory("copy", size, size)] if post > 1 else []
        if self.reduce_size != 4:
            after.append(Memory("cast", size, 4 * handle.shard))
        if handle.sharded_grad:
            after.append(Memory("copy", 8 * handle.shard, 4 * handle.shard))
        else:
            builder.alloc(f"sharded grad:{handle.name}", "gradients", 4 * handle.shard, self.device)
        if after:
            builder.launch(lane, "finish gradient", "backward", Compute(tuple(after)), **arguments)
        if plan.cpu_offload:
            builder.stream_wait(D2H, builder.last(lane))
            builder.launch(D2H, "gradient to host", "backward", Copy("d2h", 4 * handle.shard), **arguments)
            builder.wait_stream(lane, D2H)
        builder.free(reduced)
        handle.sharded_grad = True

    def _final_callback(self) -> None:
        """_post_backward_final_callback"""
        builder = self.builder
        if self.sync:
            builder.wait_stream(COMPUTE, REDUCE_SCATTER)
            if self.hybrid:
                builder.wait_stream(COMPUTE, ALL_REDUCE)
            if self.plan.cpu_offload:
                builder.wait_stream(COMPUTE, D2H)
                builder.host_wait(None)
        self.first_iteration = False
        self.post_forward_order.clear()
        for handle in self.handles:
            if handle.unsharded and (self.sync or self.plan.sharding_strategy in RESHARD_AFTER_FORWARD):
                self._reshard(handle, self.sharded)
            handle.ran_pre_backward = handle.needs_backward = handle.prefetched = False
            handle.post_forward_index = None

    # Parameters.

    def _unshard(self, handle: Handle, phase: str) -> None:
        builder = self.builder
        arguments = {"module": handle.name, "micro": self.micro}
        needed = not handle.unsharded
        low = f"low-precision shard:{handle.name}"
        if needed and self.plan.cpu_offload:
            builder.alloc(f"on GPU:{handle.name}", "all_gather_buffers", 4 * handle.shard)
            builder.launch(H2D, "shard to GPU", phase, Copy("h2d", 4 * handle.shard), **arguments)
            builder.wait_stream(COPY_IN, H2D)
        if needed and self.mixed:
            builder.alloc(low, "all_gather_buffers", handle.shard * self.param_size)
            kernel = Memory("cast", 4 * handle.shard, self.param_size * handle.shard)
            builder.launch(COPY_IN, "cast shard", phase, Compute((kernel,)), **arguments)
            if self.plan.cpu_offload:
                builder.free(f"on GPU:{handle.name}")
            builder.wait_stream(ALL_GATHER, COPY_IN)
        if self.sharded and self.plan.limit_all_gathers and len(self.free_events) >= GATHERS_IN_FLIGHT:
            event = self.free_events.popleft()
            if event is not None:
                builder.host_wait(event)
        if not needed:
            return
        handle.unsharded = True
        if not self.sharded:
            return  # the low-precision copy is the parameter
        builder.alloc(f"unsharded:{handle.name}", "all_gather_buffers", handle.full * self.param_size)
        work = Collective("all_gather", self.plan.param_dtype, handle.shard, handle.full, self.group)
        gathered = builder.launch(ALL_GATHER, "all-gather", phase, work, **arguments)
        if self.mixed:
            builder.free(low, gathered)
        elif self.plan.cpu_offload:
            builder.free(f"on GPU:{handle.name}", gathered)

    def _reshard(self, handle: Handle, free: bool) -> None:
        if free and self.sharded and handle.unsharded:
            # record_stream on the compute stream: the bytes are free when what was issued there is done
            self.builder.free(f"unsharded:{handle.name}", self.builder.last(COMPUTE))
            handle.unsharded = False
        if free and self.plan.limit_all_gathers:
            self.free_events.append(self.builder.last(COMPUTE))
        if not self.sharded and handle.unsharded:
            if self.mixed:
                self.builder.free(f"low-precision shard:{handle.name}")
            handle.unsharded = False
        handle.prefetched = False

    # The optimizer.

    def _optimizer(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        owned = self._owned()
        if plan.grad_clip:
            grad_norm(builder, owned, "float32")
            if self.sharded:
                work = Collective("all_reduce", "float32", 1, 1, self.group, "SUM")
                builder.launch(COMPUTE, "grad norm", "optimizer", work)
            clip(builder, owned, "float32")
        update(builder, plan.optimizer, owned, "float32", first=first, device=self.device)
        for handle in self.handles:
            if handle.sharded_grad:
                builder.free(f"sharded grad:{handle.name}")
                handle.sharded_grad = False

    def _owned(self) -> list[int]:
        """Elements of the tensors that this rank updates: its parts of the original parameters, or the flat shards."""
        if not self.plan.use_orig_params:
            return [handle.shard for handle in self.handles if handle.trainable]
        found = []
        for handle in self.handles:
            start = 0
            for param, numel in zip(handle.params, handle.numels, strict=True):
                part = min(numel, handle.shard - start)
                if part > 0 and param in handle.trainable:
                    found.append(part)
                start += numel
        return found


def lower_fsdp1(model: ModelSpec, tree: Module, plan: Fsdp1Plan, workload: Workload, steps: int) -> Program:
    """The first iteration records the order of the units, which forward prefetching needs."""
    rank = Fsdp1(model, tree, plan)
    rank.allocate()
    init = tuple(rank.builder.instructions)
    built = []
    for index in range(min(steps, 2)):
        rank.builder = Builder()
        rank.step(first=index == 0)
        built.append(tuple(rank.builder.instructions))
    world = plan.world_size
    groups = {"world": (tuple(range(world)),)}
    if rank.hybrid:
        groups |= {"shard": consecutive(world, rank.shards), "replicate": strided(world, rank.shards)}
    return Program(world, groups, init, tuple(built + built[-1:] * (steps - len(built))))
