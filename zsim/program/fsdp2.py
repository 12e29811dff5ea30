"""FSDP2: torch.distributed.fsdp.fully_shard on every block and the root.

The state machine of torch 2.13 `_fully_shard/_fsdp_param_group.py` and `_fsdp_state.py`, driven by the module walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.errors import NotModeled
from zsim.model.kernels import Memory
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.plan.spec import Fsdp2Plan
from zsim.program.builder import Builder, repeated
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution, Hooks
from zsim.program.fsdp2_collectives import Collectives, Training, Unit
from zsim.program.fsdp2_float8 import Float8Shards, gathered_in_float8
from zsim.program.ops import ALL_GATHER, COMPUTE, COPY_IN, D2H, Collective, Compute, Program
from zsim.program.optimizer import GRADIENT_SHARE, WEIGHT_SHARE, clip, grad_norm, update
from zsim.program.preference import Replica, Second, comparison
from zsim.program.units import consecutive, groups_of, strided
from zsim.program.walk import gradients


class Fsdp2(Hooks[Fsdp2Plan]):
    def __init__(
        self, model: ModelSpec, tree: Module, plan: Fsdp2Plan, workload: Workload, builder: Builder | None = None
    ) -> None:
        self.model, self.tree, self.plan, self.workload = model, tree, plan, workload
        # torchtitan's Llama computes its rotary table in every forward
        self.buffers_bytes = 0 if workload.implementation == "torchtitan" else model.buffers_bytes
        # The loop computes this loss, not the model as in transformers (and in the recordings of torchtitan's Llama).
        self.loss_outside = workload.loss in ("uncast", "uncast_held") or workload.preference is not None
        self.builder = builder or Builder()
        self.comm = Collectives(model, plan, self.builder)
        self.float8 = gathered_in_float8(tree, plan, workload, self.comm.shards)
        if self.float8 and workload.float8:
            group, precompute = self.comm.group(self.comm.shards), workload.float8.precompute
            self.comm.float8 = Float8Shards(self.builder, plan, self.comm.store_size, group, precompute=precompute)
        self.units = self._units()
        self.by_module = {name: unit for unit in self.units for name in unit.modules}
        self.owner = {param: unit for unit in self.units for param in unit.params}
        self.graded = gradients(tree)
        self.micro, self.last = 0, True
        self.post_forward_order: list[Unit] = []
        self.gather_kept: tuple[str, int] | None = None  # comm_ctx.all_gather_state: buffer and copy-out event
        self.scatter_input: tuple[str, int] | None = None  # comm_ctx.reduce_scatter_states

    def _units(self) -> list[Unit]:
        plan = self.plan
        units = []
        for group in groups_of(self.model, self.tree, plan.grouping, adapter_units=plan.adapter_units, wrap=plan.wrap):
            reshard = plan.reshard_after_forward
            if group.role == "root":
                # _lazy_init: left unset, the root keeps its parameters, which backward needs at once
                reshard = bool(plan.root_reshard_after_forward) and reshard
            elif len(group.modules) > 1 or group.role == "head":
                reshard = False  # torchtitan parallelize_llama: the last unit is needed again at once
            units.append(Unit(group, self.model, plan, self.comm.shards, reshard, self.float8))
        blocks = [unit for unit in units if unit.role == "block"]
        if plan.grouping == "titan2024":
            blocks[-1].reshard = False  # its backward comes first
        for index, unit in enumerate(blocks):
            unit.forward_prefetch = blocks[index + 1 : index + 1 + plan.prefetch]
            unit.backward_prefetch = blocks[max(0, index - plan.prefetch) : index][::-1]
        return units

    def allocate(self) -> None:
        """What lives as long as the run."""
        if self.comparison:
            self.comparison.allocate()
        for unit in self.units:
            sizes = tuple([self.comm.stored_bytes([size]) for size in unit.shard_sizes])
            self.builder.alloc(f"shard:{unit.name}", "parameters", sum(sizes), self.comm.device, tensors=sizes)
        if self.plan.storage_dtype != self.plan.param_dtype and self.plan.grouping == "hf":
            # accelerate's fsdp2_prepare_model upcasts the shards of what was loaded in the dtype of the run; the root
            # lets go of its old ones last
            loaded = sum(unit.shard for unit in self.units if unit.role == "root") * self.comm.compute_size
            self.builder.alloc("shards as loaded", "parameters", loaded, self.comm.device)
            self.builder.free("shards as loaded")
        if self.buffers_bytes:
            self.builder.alloc("buffers", "parameters", self.buffers_bytes)

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second:
        """trl's prepare_fsdp shards the model and none of its blocks: a unit."""
        stored = how.stored or self.plan.storage_dtype
        if not how.sharded:
            return Replica(builder, model, self.plan, stored)
        reshard = bool(self.plan.reshard_after_forward)
        plan = replace(
            self.plan, grouping="flat", wrap=(), adapter_units=False, frozen_dtype=stored, prefetch=0,
            root_reshard_after_forward=reshard, offload_activations=None,
        )  # fmt: skip
        return Fsdp2Reference(model, tree, plan, self.workload, builder)

    def step(self, *, first: bool) -> None:
        for micro in range(self.plan.grad_accum):
            self.micro, self.last = micro, micro == self.plan.grad_accum - 1
            execution = Execution(self.builder, self, micro)
            execution.forward(self.tree)
            self.compare(execution)
            execution.backward(self.tree)
            self._root_post_backward()
        self._optimizer(first)
        self.evaluate()

    # Forward.

    def pre_forward(self, module: Module, phase: str) -> None:
        if phase == "recompute":
            self._enter_again(module)
            return
        if module.role == "root":
            # _root_pre_forward: gathers read what the optimizer wrote
            self.builder.wait_stream(COPY_IN, COMPUTE)
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
        unit = self.by_module.get(module.name)
        if unit is None:
            return
        entering = unit.training is not Training.FORWARD
        unit.training = Training.FORWARD
        self.builder.host_work("fsdp2 pre-forward", "forward", module=module.name, micro=self.micro)
        self._unshard(unit, "forward")
        self._wait_for_unshard(unit, "forward")
        if entering:
            unit.running = set(unit.modules)
            for target in unit.forward_prefetch:
                self._unshard(target, "forward")

    def _enter_again(self, module: Module) -> None:
        """A unit within a checkpointed block; what it gathers here stays for its backward (post_forward, `is_bw`)."""
        unit = self.by_module.get(module.name)
        if unit is not None:
            if unit.training is not Training.PRE_BACKWARD:
                self.builder.host_work("fsdp2 pre-forward", "backward", module=module.name, micro=self.micro)
            self._unshard(unit, "backward")
            self._wait_for_unshard(unit, "backward")

    def post_forward(self, module: Module, phase: str) -> None:
        if phase == "recompute":
            return
        unit = self.by_module.get(module.name)
        if unit is not None:
            unit.running.discard(module.name)
            if not unit.running:
                self.builder.host_work("fsdp2 post-forward", "forward", module=module.name, micro=self.micro)
                self._reshard_after_forward(unit)
                unit.indices.append(len(self.post_forward_order))
                self.post_forward_order.append(unit)
                unit.training = Training.IDLE
        if module.role == "root":
            self._drop_kept_gather()

    def _reshard_after_forward(self, unit: Unit) -> None:
        if unit.reshard is False:
            return
        if unit.reshard is not True and unit.reshard != self.comm.shards:
            self.comm.reshard_to_fewer(unit, self.micro)
        self._reshard(unit)

    # Backward.

    def pre_backward(self, module: Module) -> None:
        """A hook on the output of the unit's last module; without gradient there it never fires."""
        if self.loss_outside:
            if module.role == "root":
                return  # its hook is on the logits, which are its output
            if module.role == "head" and module.name not in self.by_module:
                module = self.tree
        unit = self.by_module.get(module.name)
        if unit is None or module.name != unit.modules[-1] or not unit.in_backward:
            return
        unit.training = Training.PRE_BACKWARD
        self.builder.host_work("fsdp2 pre-backward", "backward", module=module.name, micro=self.micro)
        self._unshard(unit, "backward")
        self._wait_for_unshard(unit, "backward")
        if unit.backward_prefetch:
            for target in unit.backward_prefetch:
                self._unshard(target, "backward")
        elif unit.indices:
            index = unit.indices.pop()
            if index > 0:
                self._unshard(self.post_forward_order[index - 1], "backward")

    def alloc_grads(self, params: Sequence[int]) -> None:
        """AccumulateGrad keeps the first gradient and adds later ones to it."""
        for param in params:
            unit = self.owner[param]
            kind = "new grad" if param in unit.grads else "grad"
            nbytes = self.model.parameters[param].numel * self.comm.compute_size
            self.builder.alloc(f"{kind}:{unit.name}:{param}", "gradients", nbytes)

    def grad_ready(self, param: int) -> None:
        unit = self.owner[param]
        if param in unit.grads:
            self._add_gradient(unit, param, self.comm.compute_size)
            self.builder.free(f"new grad:{unit.name}:{param}")
        unit.grads.add(param)

    def _add_gradient(self, unit: Unit, param: int, size: int) -> None:
        numel = self.model.parameters[param].numel
        add = Compute((Memory("copy", numel * (size + self.comm.compute_size), numel * size),))
        self.builder.launch(COMPUTE, "accumulate gradient", "backward", add, module=unit.name, micro=self.micro)

    def post_backward(self, module: Module) -> None:
        """RegisterPostBackwardFunction sits on the inputs of the unit's first module, if they have gradients."""
        unit = self.by_module.get(module.name)
        if unit is not None and module.name == unit.modules[0] and unit.input_has_grad:
            self._post_backward(unit)

    def _post_backward(self, unit: Unit) -> None:
        plan = self.plan
        unit.training = Training.POST_BACKWARD
        self.builder.host_work("fsdp2 post-backward", "backward", module=unit.name, micro=self.micro)
        for param in sorted(unit.grads & unit.accumulated):  # accumulate_unsharded_grad_if_needed
            self._add_gradient(unit, param, self.comm.reduce_size)
            self.builder.free(f"grad:{unit.name}:{param}")
            unit.grads.discard(param)
        if self.last or not plan.reshard_backward_only_last:
            self._reshard(unit)
        if plan.sync_only_last and not self.last:
            if plan.reduce_dtype != plan.param_dtype:
                self._accumulate_in_reduce_dtype(unit)
            return
        self._recycle_scatter_input()
        if unit.grads or unit.accumulated:
            if unit.reduce_event is not None:  # _wait_for_post_backward
                self.builder.stream_wait(COMPUTE, unit.reduce_event)
            self.comm.drop_all_reduce_input(unit)
            all_reduce = self.last or not plan.all_reduce_only_last
            self.scatter_input = self.comm.reduce(unit, self.micro, all_reduce=all_reduce)

    def _accumulate_in_reduce_dtype(self, unit: Unit) -> None:
        """to_accumulated_grad_if_needed"""
        for param in sorted(unit.grads):
            numel = self.model.parameters[param].numel
            nbytes = numel * self.comm.reduce_size
            self.builder.alloc(f"accumulated grad:{unit.name}:{param}", "gradients", nbytes)
            cast = Compute((Memory("copy", numel * self.comm.compute_size, nbytes),))
            self.builder.launch(COMPUTE, "cast gradient", "backward", cast, module=unit.name, micro=self.micro)
            self.builder.free(f"grad:{unit.name}:{param}")
            unit.accumulated.add(param)
        unit.grads.clear()

    def _recycle_scatter_input(self) -> None:
        if self.scatter_input is not None:
            key, event = self.scatter_input
            self.builder.stream_wait(COMPUTE, event)
            self.builder.free(key)
            self.scatter_input = None

    def _root_post_backward(self) -> None:
        """_root_post_backward_final_callback: units whose inputs have no gradient reduce here, the root among them."""
        finalize = self.last or not self.plan.last_backward_only_last
        for unit in self.units:
            if unit.training is not Training.POST_BACKWARD:
                self._post_backward(unit)
            unit.training = Training.IDLE
            if finalize:
                self._finalize(unit)
        if finalize:
            if self.plan.cpu_offload:
                self.builder.host_wait(self.builder.last(D2H))  # grad_offload_event of every parameter
            self.post_forward_order.clear()
            self._recycle_scatter_input()

    def _finalize(self, unit: Unit) -> None:
        builder = self.builder
        if unit.reduce_event is not None:
            builder.stream_wait(COMPUTE, unit.reduce_event)
            unit.reduce_event = None
        self.comm.drop_all_reduce_input(unit)
        if unit.gathered is not None:  # a prefetch that nobody used
            builder.stream_wait(COMPUTE, unit.gathered)
            if self.comm.ranks(unit) > 1:
                builder.free(self.comm.gather_key(unit))
            unit.gathered = None
        unit.indices.clear()

    # Parameters.

    def _unshard(self, unit: Unit, phase: str) -> None:
        if unit.gathered is not None or unit.unsharded:
            return
        if unit.reshard_event is not None:
            self.comm.gather_streams_wait(unit.reshard_event)
            unit.reshard_event = None
        if self.comm.ranks(unit) > 1:
            unit.gathered = self.comm.all_gather(unit, phase, self.micro)
        else:
            unit.gathered = self.builder.last(COMPUTE)

    def _wait_for_unshard(self, unit: Unit, phase: str) -> None:
        if unit.gathered is None:
            return
        ranks, kept = self.comm.ranks(unit), None
        if phase == "forward" and self.gather_kept is not None:
            kept, event = self.gather_kept
            self.comm.gather_streams_wait(event)
            self.gather_kept = None
        copied = self.comm.copy_out(unit, phase, self.micro)
        unit.unsharded, unit.gathered = True, None
        if kept is not None:
            self.builder.free(kept)  # a local variable of wait_for_unshard holds it until here
        if phase == "forward" and ranks > 1:
            # The next gather's copy-in overlaps with this copy-out, so the next unit frees the buffer.
            self.gather_kept = (self.comm.gather_key(unit), copied)
            return
        self.comm.gather_streams_wait(copied)
        if ranks > 1:
            self.builder.free(self.comm.gather_key(unit))

    def _drop_kept_gather(self) -> None:
        if self.gather_kept is not None:
            key, event = self.gather_kept
            self.comm.gather_streams_wait(event)
            self.builder.free(key)
            self.gather_kept = None

    def _reshard(self, unit: Unit) -> None:
        if unit.unsharded:
            self.builder.free(self.comm.unsharded_key(unit))
            unit.unsharded = False

    # The optimizer.

    def _optimizer(self, first: bool) -> None:
        builder, plan, comm = self.builder, self.plan, self.comm
        owned = [
            numel
            for unit in self.units
            for param, numel in zip(unit.params, unit.shard_numels, strict=True)
            if param in self.graded
        ]
        if plan.grad_clip:
            grad_norm(builder, owned, plan.storage_dtype, comm.device, float(plan.offload_pin_memory))
            if comm.shards > 1:
                # the norms of all parameters, stacked; DTensor reduces them over the shards only
                work = Collective(
                    "all_reduce", plan.storage_dtype, len(owned), len(owned), comm.group(comm.shards), "SUM"
                )
                builder.launch(COMPUTE, "grad norm", "optimizer", work)
            clip(builder, owned, plan.storage_dtype, comm.device, float(plan.offload_pin_memory))
        update(
            builder, plan.optimizer, owned, plan.storage_dtype, first=first, device=comm.device,
            pinned=(GRADIENT_SHARE + WEIGHT_SHARE) * plan.offload_pin_memory,
        )  # fmt: skip
        if plan.optimizer.impl == "loop":
            builder.host_work("fsdp2 update", "optimizer", len(owned))
        if comm.float8:
            comm.float8.after_step([numel for unit in self.units for numel in unit.in_float8])
        for unit in self.units:  # zero_grad
            if unit.has_sharded_grad:
                builder.free(f"sharded grad:{unit.name}")
                unit.has_sharded_grad = False


class Fsdp2Reference(Fsdp2, Second):
    """A second model, sharded as well."""


def lower_fsdp2(model: ModelSpec, tree: Module, plan: Fsdp2Plan, workload: Workload, steps: int) -> Program:
    """Steps differ only in the optimizer's states, which the first one allocates."""
    if plan.optimizer.name == "adafactor":
        raise NotModeled("adafactor's row and column means of sharded matrices", field="optimizer")
    if plan.optimizer.name == "muon":
        why = "torch.optim.Muon on sharded matrices: DTensor picks the collectives of every product by costs of its own"
        raise NotModeled(why, field="optimizer", accepted="framework: deepspeed or ddp")
    rank = Fsdp2(model, tree, plan, workload)
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = rank.builder.finish()
    built = repeated(rank.builder, lambda first: rank.step(first=first), steps)
    world, shards = plan.world_size, rank.comm.shards
    groups: dict[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(world)),)}
    if rank.comm.hsdp:
        groups |= {"shard": consecutive(world, shards), "replicate": strided(world, shards)}
    if type(plan.reshard_after_forward) is int:
        groups["post_forward"] = consecutive(world, plan.reshard_after_forward)
    return Program(world, groups, init, built)
