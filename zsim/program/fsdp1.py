"""FSDP1: torch.distributed.fsdp.FullyShardedDataParallel.

The state machine of torch 2.13 `fsdp/_runtime_utils.py` and `_exec_order_utils.py`, driven by the module walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zsim.errors import InputError, NotModeled
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.plan.spec import Fsdp1Plan
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution, Hooks
from zsim.program.fsdp1_flat import FlatParameters, Handle
from zsim.program.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    D2H,
    RANK_0,
    REDUCE_SCATTER,
    Collective,
    Program,
)
from zsim.program.optimizer import GRADIENT_SHARE, WEIGHT_SHARE, clip, grad_norm, update, zero
from zsim.program.preference import Replica, Second, comparison
from zsim.program.units import consecutive, groups_by_size, groups_of, strided
from zsim.program.walk import gradients, modules_in_order

RESHARD_AFTER_FORWARD = ("FULL_SHARD", "HYBRID_SHARD")
GATHERS_IN_FLIGHT = 2  # _limiter_utils.py _max_num_inflight_all_gathers


class Fsdp1(Hooks[Fsdp1Plan]):
    def __init__(self, model: ModelSpec, tree: Module, plan: Fsdp1Plan, builder: Builder | None = None) -> None:
        self.model, self.tree, self.plan = model, tree, plan
        if any(module.module_class == "ParamWrapper" for module in modules_in_order(tree)):
            # "shape '[4, -1, 2048]' is invalid" with units of adapters, else "a view and its base ... modified inplace"
            why = "peft's adapters on parameters, on which FSDP1 fails (tried with peft 0.21 and torch 2.13)"
            raise InputError(why, field="framework", accepted="fsdp2, deepspeed, ddp")
        self.builder = builder or Builder()
        self.flat = FlatParameters(model, plan, self.builder)
        shards = self.flat.shards if self.flat.sharded else 1
        if plan.min_num_params is not None:
            groups = groups_by_size(model, tree, plan.min_num_params)
        else:
            grouping = "flat" if plan.flat else "hf"
            groups = groups_of(model, tree, grouping, adapter_units=plan.adapter_units, wrap=plan.wrap)
        self.handles = [Handle(group, model, plan, shards) for group in groups]
        self.by_module = {handle.module: handle for handle in self.handles}
        self.root = next((handle for handle in self.handles if handle.is_root), None)
        self.owner = {param: handle for handle in self.handles for param in handle.params}
        for param in gradients(tree):
            self.owner[param].differentiated.append(param)
        self.reshards = plan.sharding_strategy in RESHARD_AFTER_FORWARD
        self.micro, self.sync = 0, True
        self.free_events: deque[int | None] = deque()  # None: of an earlier step, over by now
        self.forward_order: list[Handle] = []
        self.post_forward_order: list[Handle] = []
        self.first_iteration = True

    def allocate(self) -> None:
        if self.comparison:
            self.comparison.allocate()
        # where one rank reads the checkpoint, others have no parameters before theirs of a unit are on the GPU
        category = "parameters" if self.plan.load == "every_rank" else RANK_0
        for handle in self.handles if self.plan.cpu_offload and self.plan.load != "meta" else ():
            whole = handle.stored_size * sum(handle.numels)
            self.builder.alloc(f"parameters of:{handle.name}", category, whole, "host")
        for handle in sorted(self.handles, key=lambda handle: handle.is_root):
            nbytes = handle.stored_size * handle.shard
            if self.plan.cpu_offload:
                self._wrap(handle, nbytes)
            else:
                self.builder.alloc(f"shard:{handle.name}", "parameters", nbytes)
        if self.model.buffers_bytes:
            self.builder.alloc("buffers", "parameters", self.model.buffers_bytes)

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second:
        """trl's prepare_fsdp wraps it as accelerate wraps the trained one."""
        stored = how.stored or self.plan.storage_dtype
        if not how.sharded:
            return Replica(builder, model, self.plan, stored)
        plan = replace(self.plan, storage_dtype=stored, frozen_dtype=stored, offload_activations=None)
        return Fsdp1Reference(model, tree, plan, builder)

    def step(self, *, first: bool) -> None:
        self.free_events = deque([None] * len(self.free_events))
        for micro in range(self.plan.grad_accum):
            self.micro, self.sync = micro, not self.plan.no_sync or micro == self.plan.grad_accum - 1
            execution = Execution(self.builder, self, micro)
            execution.forward(self.tree)
            self.compare(execution)
            execution.backward(self.tree)
            self._final_callback()
        self._optimizer(first)
        self.evaluate()

    def _wrap(self, handle: Handle, nbytes: int) -> None:
        """FlatParamHandle, unit by unit, the root last: its parameters in one tensor, and the shard of that cloned. To
        be sent to the other ranks (sync_module_states) it is on the GPU."""
        flat, load = handle.stored_size * handle.full, self.plan.load
        self.builder.alloc(f"flat:{handle.name}", "parameters", flat, "host" if load == "every_rank" else "gpu")
        self.builder.alloc(f"shard:{handle.name}, pageable", "parameters", nbytes, "host")
        self.builder.free(f"flat:{handle.name}")
        if load != "meta":
            self.builder.free(f"parameters of:{handle.name}")

    def _pin(self) -> None:
        """_flat_param.py, init_flat_param_attributes, in the first forward: shard and _cpu_grad, for good."""
        for handle in self.handles:
            nbytes = handle.stored_size * handle.shard
            self.builder.alloc(f"shard:{handle.name}", "parameters", pinned_bytes(nbytes), "host")
            self.builder.free(f"shard:{handle.name}, pageable")
            self.builder.alloc_host(f"gradient on host:{handle.name}", "gradients", nbytes, True)

    # Forward.

    def pre_forward(self, module: Module, phase: str) -> None:
        if phase == "recompute":
            self._enter_again(module)
            return
        if module.role == "root":
            if self.plan.cpu_offload and self.first_iteration:
                self._pin()
            self._drop_stale_gradients()
            if self.plan.forward_prefetch:
                for handle in self.handles:
                    handle.needs_forward, handle.prefetched = True, False
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
            self.builder.wait_stream(COPY_IN, COMPUTE)
        found = self.by_module.get(module.name)
        if found is None:
            return
        self.builder.host_work("fsdp1 pre-forward", "forward", module=module.name, micro=self.micro)
        if self.first_iteration and found.forward_index is None:
            found.forward_index = len(self.forward_order)
            self.forward_order.append(found)
        if not found.prefetched:
            self._unshard(found, "forward")
            found.prefetcher = None
        found.needs_forward = False
        self.builder.wait_stream(COMPUTE, ALL_GATHER)
        if self.plan.forward_prefetch:
            self._forward_prefetch(found)

    def _enter_again(self, module: Module) -> None:
        """A unit within a checkpointed block; one whose backward has begun stays as it is."""
        handle = self.by_module.get(module.name)
        if handle is None or handle.ran_pre_backward:
            return
        self.builder.host_work("fsdp1 pre-forward", "backward", module=module.name, micro=self.micro)
        if not handle.prefetched:
            self._unshard(handle, "backward")
        self.builder.wait_stream(COMPUTE, ALL_GATHER)

    def _forward_prefetch(self, handle: Handle) -> None:
        """The unit after this one in the order that the first iteration recorded."""
        if handle.forward_index is None or handle.forward_index + 1 >= len(self.forward_order):
            return
        target = self.forward_order[handle.forward_index + 1]
        if target.needs_forward and not target.prefetched:
            self._unshard(target, "forward")
            target.prefetched, target.prefetcher = True, handle

    def post_forward(self, module: Module, phase: str) -> None:
        handle = self.by_module.get(module.name)
        again = phase == "recompute"
        if handle is None or (again and handle.ran_pre_backward):
            return
        phase = "backward" if again else "forward"
        self.builder.host_work("fsdp1 post-forward", phase, module=module.name, micro=self.micro)
        if not handle.post_forward_index:  # torch's test, true for index 0 as well
            handle.post_forward_index = len(self.post_forward_order)
        self.post_forward_order.append(handle)
        self._reshard(handle, free=not handle.is_root and self.reshards)
        handle.needs_backward = handle.output_has_grad
        handle.ran_pre_backward = False
        handle.pending, handle.posted, handle.left = set(handle.differentiated), False, False

    # Backward.

    def pre_backward(self, module: Module) -> None:
        handle = self.by_module.get(module.name)
        if handle is None or not handle.in_backward or handle.ran_pre_backward:
            return
        self.builder.host_work("fsdp1 pre-backward", "backward", module=module.name, micro=self.micro)
        if handle.needs_backward:
            if not handle.prefetched:
                self._unshard(handle, "backward")
            self.builder.wait_stream(COMPUTE, ALL_GATHER)
        self.flat.drop_written_back(handle)
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
            nbytes = self.model.parameters[param].numel * self.flat.param_size
            self.builder.alloc(f"grad:{param}", "gradients", nbytes)

    def grad_ready(self, param: int) -> None:
        handle = self.owner[param]
        handle.pending.discard(param)
        if handle.left and not handle.pending:  # a gradient that comes after its module's own work
            self._gradients_are_there(handle)
        self._post_root()

    def post_backward(self, module: Module) -> None:
        """Autograd runs what was created last first. The views of a flat parameter are made in the pre-forward of its
        unit, and so their backward, and its AccumulateGrad hook, come after all that the unit does; where another one's
        pre-forward made them (a prefetch), after all that that one does. The root's come last of all.

        Without trainable parameters: _register_post_backward_reshard_only_hook, on the inputs of the module.
        """
        handle = self.by_module.get(module.name)
        if handle is None or handle.is_root:
            return
        handle.left = True
        if handle.differentiated and not handle.pending:
            self._gradients_are_there(handle)
        self._flush_delayed(handle)
        if not handle.trainable and handle.input_has_grad:
            self._reshard_after_backward(handle)
        self._post_root()

    def _gradients_are_there(self, handle: Handle) -> None:
        if handle.prefetcher is not None:
            handle.prefetcher.delayed.append(handle)
        else:
            self._flush_delayed(handle)
            self._post_backward(handle)

    def _post_root(self) -> None:
        """Not at the root's own end: what the training loop does after backward stands there (families.foundry)."""
        root = self.root
        if root is None or root.posted or root.pending or not root.differentiated:
            return
        if all(
            other.posted or other in root.delayed
            for other in self.handles
            if other.differentiated and not other.is_root
        ):
            self._flush_delayed(root)
            self._post_backward(root)

    def _flush_delayed(self, handle: Handle) -> None:
        while handle.delayed:
            self._post_backward(handle.delayed.pop(0))

    def _post_backward(self, handle: Handle) -> None:
        handle.posted = True
        self.flat.collect(handle, self.micro)
        self.builder.host_work("fsdp1 post-backward", "backward", module=handle.module, micro=self.micro)
        self._reshard_after_backward(handle)
        if self.sync:
            self.flat.reduce(handle, self.micro)

    def _reshard_after_backward(self, handle: Handle) -> None:
        """_post_backward_reshard"""
        self._reshard(handle, free=self._frees_in_backward())
        if self.plan.backward_prefetch == "BACKWARD_POST":
            self._backward_prefetch(handle)

    def _frees_in_backward(self) -> bool:
        return self.flat.sharded and (self.sync or self.reshards)

    def _final_callback(self) -> None:
        """_post_backward_final_callback"""
        builder = self.builder
        if self.sync:
            builder.wait_stream(COMPUTE, REDUCE_SCATTER)
            if self.flat.hybrid:
                builder.wait_stream(COMPUTE, ALL_REDUCE)
            if self.plan.cpu_offload:
                builder.wait_stream(COMPUTE, D2H)
                builder.host_wait(None)
                self._drop_gradients()  # prepare_gradient_for_optim: _cpu_grad takes the place of _saved_grad_shard
        self.first_iteration = False
        self.post_forward_order.clear()
        for handle in self.handles:
            if handle.unsharded:
                self._reshard(handle, free=self._frees_in_backward())
            handle.ran_pre_backward = handle.needs_backward = handle.prefetched = False
            handle.post_forward_index = None

    # Parameters.

    def _unshard(self, handle: Handle, phase: str) -> None:
        needed = not handle.unsharded
        if phase == "backward":
            self.flat.write_back(handle, self.micro)
        if needed:
            self.flat.pre_unshard(handle, phase, self.micro)
        if self.plan.limit_all_gathers and len(self.free_events) >= GATHERS_IN_FLIGHT:
            event = self.free_events.popleft()
            if event is not None:
                self.builder.host_wait(event)
        if needed:
            self.flat.unshard(handle, phase, self.micro)

    def _reshard(self, handle: Handle, *, free: bool) -> None:
        if handle.unsharded and (free or not self.flat.sharded):
            self.flat.free_unsharded(handle)
        if free and self.plan.limit_all_gathers:
            self.free_events.append(self.builder.last(COMPUTE))
        handle.prefetched = False

    # The optimizer.

    def _optimizer(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        owned = self.flat.owned(self.handles)
        if plan.grad_clip:
            grad_norm(builder, owned, plan.storage_dtype, self.flat.device, 1.0)
            if self.flat.sharded:
                work = Collective("all_reduce", "float32", 1, 1, self.flat.group, "SUM")
                builder.launch(COMPUTE, "grad norm", "optimizer", work)
            clip(builder, owned, plan.storage_dtype, self.flat.device, 1.0)
        update(
            builder, plan.optimizer, owned, plan.storage_dtype, first=first, device=self.flat.device,
            pinned=GRADIENT_SHARE + WEIGHT_SHARE,
        )  # fmt: skip
        if not plan.zero_grad_to_none:
            zero(builder, owned, plan.storage_dtype)
        if not plan.use_orig_params:  # zero_grad
            self._drop_gradients()

    def _drop_stale_gradients(self) -> None:
        """_reset_flat_param_grad_info_if_needed: zero_grad cleared the views; the flat gradient goes before forward."""
        if self.plan.use_orig_params and self.micro == 0:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for handle in self.handles:
            if handle.has_sharded_grad:
                self.builder.free(f"sharded grad:{handle.name}")
                handle.has_sharded_grad = False


class Fsdp1Reference(Fsdp1, Second):
    """A second model, sharded as well. Its root's parameters stay gathered, for a backward that does not come."""

    def begin(self, micro: int) -> None:
        super().begin(micro)
        if micro == 0:
            self.free_events = deque([None] * len(self.free_events))


def lower_fsdp1(model: ModelSpec, tree: Module, plan: Fsdp1Plan, workload: Workload, steps: int) -> Program:
    """The first iteration records the order of the units, which forward prefetching needs."""
    if plan.forward_prefetch and workload.preference is not None and workload.preference.reference == "adapters":
        # with units of adapters torch 2.13 fails in the first backward: "Invalid: _post_backward_hook_state"
        why = "forward_prefetch of FSDP1 where a forward without adapters precedes the backward"
        raise NotModeled(why, field="fsdp.forward_prefetch", accepted="false, or objective.reference: precomputed")
    rank = Fsdp1(model, tree, plan)
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = rank.builder.finish()
    built = []
    for index in range(min(steps, 3)):
        rank.step(first=index == 0)
        built.append(rank.builder.finish())
    if len(built) == 3 and built[2] == built[1]:
        built[2] = built[1]
    world = plan.world_size
    groups: dict[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(world)),)}
    if rank.flat.hybrid:
        groups |= {"shard": consecutive(world, rank.flat.shards), "replicate": strided(world, rank.flat.shards)}
    steps_built = tuple(built + built[-1:] * (steps - len(built)))
    return Program(world, groups, init, steps_built, assumptions=_notes(rank))


def _notes(rank: Fsdp1) -> tuple[str, ...]:
    least = rank.plan.min_num_params
    if least is None:
        return ()
    most = max(rank.handles, key=lambda handle: handle.full)
    where = most.module or "the root"
    return (
        f"fsdp.min_num_params: from {least:,} parameters on, modules are {len(rank.handles)} units; the largest, "
        f"{where}, holds {sum(most.numels):,} and stays gathered while everything within it runs",
    )
