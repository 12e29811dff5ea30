"""FSDP2: torch.distributed.fsdp.fully_shard on every block and the root.

The state machine of torch 2.13 `_fully_shard/_fsdp_param_group.py` and `_fsdp_state.py`, driven by the module walk.
Every launch stands on the stream, and every buffer is allocated and freed at the call, where the framework does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import ceil

from zsim.errors import NotModeled
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.spec import Fsdp2Plan
from zsim.program.builder import Builder
from zsim.program.execute import Execution, Hooks
from zsim.program.foreach import foreach
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


class Training(Enum):
    IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = auto(), auto(), auto(), auto()


class Unit:
    """FSDPParamGroup: parameters that travel together. Element counts include the padding of dim 0 to the shards."""

    def __init__(self, group: Group, model: ModelSpec, shards: int) -> None:
        self.name, self.modules, self.params, self.role = group.name, group.modules, group.params, group.role
        self.input_has_grad, self.output_has_grad = group.input_has_grad, group.output_has_grad
        shapes = [model.parameters[index].shape for index in self.params]
        # _fsdp_param.py _init_sharded_param: torch.chunk along dim 0, every chunk padded to the first
        self.shard_numels = [ceil(shape[0] / shards) * _rest(shape) if shape else 1 for shape in shapes]
        self.shard = sum(self.shard_numels)
        self.full = self.shard * shards
        self.reshard: bool | int = True
        self.training = Training.IDLE
        self.unsharded = False
        self.post_forward_shard = False  # resharded to fewer ranks after forward
        self.gathered: int | None = None  # event of an all-gather not yet waited for
        self.kept: set[str] = set()  # modules of the unit still to run in this forward
        self.indices: list[int] = []  # places in the post-forward order
        self.prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.reshard_event: int | None = None
        self.reduce_event: int | None = None
        self.sharded_grads = False
        self.grads: dict[int, str] = {}  # unsharded gradients: parameter -> dtype
        self.partial_reduce = False


def _rest(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape[1:]:
        numel *= size
    return numel


class Fsdp2(Hooks):
    def __init__(self, model: ModelSpec, tree: Module, plan: Fsdp2Plan) -> None:
        self.model, self.tree, self.plan = model, tree, plan
        self.replicas, self.shards = mesh_of(plan.mesh, plan.world_size)
        self.hsdp = plan.mesh is not None
        self.units = self._units()
        self.by_module = {name: unit for unit in self.units for name in unit.modules}
        self.owner = {param: unit for unit in self.units for param in unit.params}
        self.compute_size = int(DTYPE_BYTES[plan.param_dtype])
        self.store_size = int(DTYPE_BYTES[plan.storage_dtype])
        self.reduce_size = int(DTYPE_BYTES[plan.reduce_dtype])
        self.cast = plan.param_dtype != plan.storage_dtype
        self.device = "host" if plan.cpu_offload else "gpu"
        self.builder = Builder()
        self.post_forward_order: list[Unit] = []
        self.gather_kept: tuple[str, int] | None = None  # comm_ctx.all_gather_state: buffer and copy-out event
        self.scatter_input: tuple[str, int] | None = None  # comm_ctx.reduce_scatter_states
        self.post_reduce: dict[str, int] = {}
        self.trainable = [index for index, p in enumerate(model.parameters) if p.trainable]

    # Which parameters form a unit.

    def _units(self) -> list[Unit]:
        plan = self.plan
        root = plan.root_reshard_after_forward
        units = []
        for group in groups_of(self.model, self.tree, plan.grouping):
            unit = Unit(group, self.model, self.shards)
            unit.reshard = plan.reshard_after_forward
            if group.role == "root":
                # _lazy_init: left unset, the root keeps its parameters, which backward needs at once
                unit.reshard = bool(root) and plan.reshard_after_forward
            elif len(group.modules) > 1:
                unit.reshard = False  # torchtitan parallelize_llama: the last unit is needed again at once
            units.append(unit)
        self._link_prefetches([unit for unit in units if unit.role == "block"])
        return units

    def _link_prefetches(self, blocks: Sequence[Unit]) -> None:
        depth = self.plan.prefetch
        for index, unit in enumerate(blocks):
            unit.prefetch = blocks[index + 1 : index + 1 + depth]
            unit.backward_prefetch = blocks[max(0, index - depth) : index][::-1]

    # State that lives as long as the run.

    def allocate(self) -> None:
        for unit in self.units:
            self.builder.alloc(f"shard:{unit.name}", "parameters", unit.shard * self.store_size, self.device)
        if self.model.buffers_bytes:
            self.builder.alloc("buffers", "parameters", self.model.buffers_bytes)

    # One step.

    def step(self, first: bool) -> None:
        accum = self.plan.grad_accum
        for micro in range(accum):
            self.micro, self.last = micro, micro == accum - 1
            execution = Execution(self.builder, self, micro)
            execution.forward(self.tree)
            execution.backward(self.tree)
            self._finish_backward()
        self._optimizer(first)

    def pre_forward(self, module: Module, phase: str) -> None:
        if module.role == "root":
            # _root_pre_forward: gathers read what the optimizer wrote
            self.builder.wait_stream(COPY_IN, COMPUTE)
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
        unit = self.by_module.get(module.name)
        if unit is None or phase == "recompute":
            return  # recomputation finds the parameters gathered by pre-backward
        entering = unit.training is not Training.FORWARD
        unit.training = Training.FORWARD
        self.builder.host_work("fsdp2 pre-forward", "forward", module=module.name)
        self._unshard(unit, "forward")
        self._wait_for_unshard(unit, "forward")
        if entering:
            unit.kept = set(unit.modules)
            for target in unit.prefetch:
                self._unshard(target, "forward")

    def post_forward(self, module: Module, phase: str) -> None:
        unit = self.by_module.get(module.name)
        if unit is not None and phase != "recompute":
            unit.kept.discard(module.name)
            if not unit.kept:
                self.builder.host_work("fsdp2 post-forward", "forward", module=module.name)
                self._reshard_after_forward(unit)
                unit.indices.append(len(self.post_forward_order))
                self.post_forward_order.append(unit)
                unit.training = Training.IDLE
        if module.role == "root" and phase != "recompute":
            self._drop_kept_gather()

    def pre_backward(self, module: Module) -> None:
        """A hook on the output of the unit's last module; without gradient there it never fires."""
        unit = self.by_module.get(module.name)
        if unit is None or module.name != unit.modules[-1] or not unit.output_has_grad:
            return
        if unit.training is Training.PRE_BACKWARD:
            return
        unit.training = Training.PRE_BACKWARD
        self.builder.host_work("fsdp2 pre-backward", "backward", module=module.name)
        self._unshard(unit, "backward")
        self._wait_for_unshard(unit, "backward")
        if unit.backward_prefetch:
            for target in unit.backward_prefetch:
                self._unshard(target, "backward")
        elif unit.indices:
            index = unit.indices.pop()
            if index > 0:
                self._unshard(self.post_forward_order[index - 1], "backward")

    def post_backward(self, module: Module) -> None:
        """RegisterPostBackwardFunction sits on the inputs of the unit's first module, if they have gradients."""
        unit = self.by_module.get(module.name)
        if unit is not None and module.name == unit.modules[0] and unit.input_has_grad:
            self._post_backward(unit)

    # Gathering parameters.

    def _unshard(self, unit: Unit, phase: str) -> None:
        if unit.gathered is not None or unit.unsharded:
            return
        builder = self.builder
        if unit.reshard_event is not None:
            self._gather_streams_wait(unit.reshard_event)
            unit.reshard_event = None
        ranks = unit.reshard if unit.post_forward_shard else self.shards
        if ranks == 1:
            unit.gathered = builder.last(COMPUTE)
            return
        numels = [numel * self.shards // ranks for numel in unit.shard_numels]
        total, where = sum(numels), f"{unit.name}:{self.micro}"
        arguments = {"module": unit.name, "micro": self.micro}
        flat = f"gather input:{where}"
        # _get_param_all_gather_inputs: cast into one flat buffer; without a cast the shards themselves
        reads = self.compute_size if unit.post_forward_shard else self.store_size
        if self.plan.cpu_offload:
            builder.alloc(flat, "all_gather_buffers", total * self.store_size)
            copy = builder.launch(H2D, "shard to GPU", phase, Copy("h2d", total * self.store_size), **arguments)
            builder.stream_wait(COPY_IN, copy)
        if self.cast:
            builder.alloc(f"cast:{where}", "all_gather_buffers", total * self.compute_size)
            kernel = foreach("copy", numels, reads, self.compute_size)
            builder.launch(COPY_IN, "all-gather cast", phase, Compute((kernel,)), **arguments)
        key = self._gather_key(unit)
        builder.alloc(key, "all_gather_buffers", total * ranks * self.compute_size)
        kernel = foreach("copy", numels, self.compute_size, self.compute_size)
        builder.launch(COPY_IN, "all-gather copy-in", phase, Compute((kernel,)), **arguments)
        if self.cast:
            builder.free(f"cast:{where}")
        if self.plan.cpu_offload:
            builder.free(flat)
        builder.wait_stream(ALL_GATHER, COPY_IN)
        work = Collective("all_gather", self.plan.param_dtype, total, total * ranks, self._shard_group(ranks))
        unit.gathered = builder.launch(ALL_GATHER, "all-gather", phase, work, **arguments)

    def _wait_for_unshard(self, unit: Unit, phase: str) -> None:
        if unit.gathered is None:
            return
        builder, ranks = self.builder, unit.reshard if unit.post_forward_shard else self.shards
        forward = unit.training is Training.FORWARD
        if forward:
            self._drop_kept_gather()
        builder.alloc(f"unsharded:{unit.name}", "all_gather_buffers", unit.full * self.compute_size)
        if ranks == 1:
            kernel = Memory(
                "copy", unit.full * self.store_size, unit.full * self.compute_size, 2 * len(unit.params)
            )  # a cast and a copy per parameter
            builder.launch(COMPUTE, "unshard copy", phase, Compute((kernel,)), module=unit.name, micro=self.micro)
        else:
            builder.stream_wait(COMPUTE, unit.gathered)
            kernel = foreach("copy", [unit.full], self.compute_size, self.compute_size)
            builder.launch(
                COMPUTE, "all-gather copy-out", phase, Compute((kernel,)), module=unit.name, micro=self.micro
            )
        if unit.post_forward_shard:
            builder.free(f"post-forward shard:{unit.name}")
            unit.post_forward_shard = False
        unit.unsharded = True
        if forward and ranks > 1:
            # The next gather's copy-in overlaps with this copy-out, so its buffer is freed by the next unit.
            self.gather_kept = (self._gather_key(unit), builder.last(COMPUTE))
        else:
            self._gather_streams_wait(builder.last(COMPUTE))
            if ranks > 1:
                builder.free(self._gather_key(unit))
        unit.gathered = None

    def _drop_kept_gather(self) -> None:
        if self.gather_kept is not None:
            key, event = self.gather_kept
            self._gather_streams_wait(event)
            self.builder.free(key)
            self.gather_kept = None

    def _gather_streams_wait(self, event: int) -> None:
        self.builder.stream_wait(COPY_IN, event)
        self.builder.stream_wait(ALL_GATHER, event)

    def _gather_key(self, unit: Unit) -> str:
        return f"all-gather:{unit.name}"

    def _shard_group(self, ranks: int) -> str:
        if ranks != self.shards:
            return "post_forward"
        return "shard" if self.hsdp else "world"

    # Releasing them.

    def _reshard_after_forward(self, unit: Unit) -> None:
        if unit.reshard is False:
            return
        builder = self.builder
        if unit.reshard is not True and unit.reshard != self.shards:
            part = unit.full // unit.reshard * self.compute_size
            builder.alloc(f"post-forward shard:{unit.name}", "all_gather_buffers", part)
            kernel = Memory("copy", part, part, len(unit.params))
            event = builder.launch(
                COMPUTE, "reshard to fewer ranks", "forward", Compute((kernel,)), module=unit.name, micro=self.micro
            )
            unit.reshard_event, unit.post_forward_shard = event, True
        self._free_unsharded(unit)

    def _free_unsharded(self, unit: Unit) -> None:
        if unit.unsharded:
            self.builder.free(f"unsharded:{unit.name}")
            unit.unsharded = False

    # Gradients.

    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            unit = self.owner[param]
            if param not in unit.grads:
                unit.grads[param] = self.plan.param_dtype
                self.builder.alloc(
                    f"grad:{unit.name}:{param}", "gradients", self.model.parameters[param].numel * self.compute_size
                )

    def _post_backward(self, unit: Unit) -> None:
        builder, plan = self.builder, self.plan
        unit.training = Training.POST_BACKWARD
        builder.host_work("fsdp2 post-backward", "backward", module=unit.name)
        reshard = self.last or not plan.reshard_backward_only_last
        if plan.sync_only_last and not self.last:
            if reshard:
                self._free_unsharded(unit)
            return
        if reshard:
            self._free_unsharded(unit)
        self._recycle_scatter_input()
        if unit.grads:
            self._reduce(unit)

    def _recycle_scatter_input(self) -> None:
        if self.scatter_input is not None:
            key, event = self.scatter_input
            self.builder.stream_wait(COMPUTE, event)
            self.builder.free(key)
            self.scatter_input = None

    def _reduce(self, unit: Unit) -> None:
        """foreach_reduce"""
        builder, plan = self.builder, self.plan
        arguments = {"module": unit.name, "micro": self.micro}
        if unit.reduce_event is not None:
            builder.stream_wait(COMPUTE, unit.reduce_event)
            unit.reduce_event = None
        with_grad = [place for place, param in enumerate(unit.params) if param in unit.grads]
        shard_numels = [unit.shard_numels[place] for place in with_grad]
        shard = sum(shard_numels)
        full = shard * self.shards
        key = f"reduce-scatter input:{unit.name}"
        builder.alloc(key, "reduce_buffers", full * self.reduce_size)
        kernel = foreach("copy", [numel * self.shards for numel in shard_numels], self.compute_size, self.reduce_size)
        builder.launch(COMPUTE, "reduce-scatter copy-in", "backward", Compute((kernel,)), **arguments)
        for param in unit.grads:
            builder.free(f"grad:{unit.name}:{param}")
        unit.grads.clear()
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)
        sharded = f"sharded grad:{unit.name}"
        # Without a cast, what the reduce-scatter writes is the sharded gradient.
        in_place = not unit.sharded_grads and plan.reduce_dtype == plan.storage_dtype and not plan.cpu_offload
        output = sharded if in_place else f"reduce output:{unit.name}"
        builder.alloc(output, "gradients" if in_place else "reduce_buffers", shard * self.reduce_size)
        lane = REDUCE_SCATTER
        # fp16 could overflow: a sum with divisions around it instead of an average
        before, after = divide_factors(plan.world_size) if plan.reduce_dtype == "float16" else (1, 1)
        mean = "SUM" if plan.reduce_dtype == "float16" or plan.world_size == 1 else "AVG"
        if before > 1:
            self._divide(lane, full, unit)
        if self.shards > 1:
            work = Collective("reduce_scatter", plan.reduce_dtype, full, shard, self._shard_group(self.shards), mean)
            event = builder.launch(REDUCE_SCATTER, "reduce-scatter", "backward", work, **arguments)
        else:
            kernel = Memory("copy", shard * self.reduce_size, shard * self.reduce_size)
            event = builder.launch(REDUCE_SCATTER, "reduce copy", "backward", Compute((kernel,)), **arguments)
        if self.hsdp and not (plan.all_reduce_only_last and not self.last):
            lane = ALL_REDUCE
            builder.wait_stream(ALL_REDUCE, REDUCE_SCATTER)
            work = Collective("all_reduce", plan.reduce_dtype, shard, shard, "replicate", mean)
            builder.launch(ALL_REDUCE, "all-reduce", "backward", work, **arguments)
        if after > 1:
            self._divide(lane, shard, unit)
        if not in_place:
            if not unit.sharded_grads:
                builder.alloc(sharded, "gradients", shard * self.store_size, self.device)
            kernel = Memory("copy", shard * self.reduce_size, shard * self.store_size, len(with_grad))
            if plan.cpu_offload:
                builder.stream_wait(D2H, builder.last(lane))
                copy = Copy("d2h", shard * self.store_size)
                self.post_reduce[D2H] = builder.launch(D2H, "gradient to host", "backward", copy, **arguments)
                builder.stream_wait(lane, self.post_reduce[D2H])
            else:
                builder.launch(lane, "accumulate gradient", "backward", Compute((kernel,)), **arguments)
            builder.free(output)
        unit.sharded_grads = True
        unit.reduce_event = self.post_reduce[lane] = builder.last(lane)
        self.scatter_input = (key, event)

    def _divide(self, lane: str, numel: int, unit: Unit) -> None:
        kernel = Memory("copy", numel * self.reduce_size, numel * self.reduce_size)
        work = Compute((kernel,))
        self.builder.launch(lane, "divide gradient", "backward", work, module=unit.name, micro=self.micro)

    def _finish_backward(self) -> None:
        """_root_post_backward_final_callback: units whose inputs have no gradient reduce here, the root among them."""
        builder = self.builder
        finalize = self.last or not self.plan.last_backward_only_last  # is_last_backward
        for unit in self.units:
            if unit.training is not Training.POST_BACKWARD:
                self._post_backward(unit)
            unit.training = Training.IDLE
            if not finalize:
                continue
            unit.indices.clear()
            if unit.gathered is not None:  # a prefetch that nobody used
                builder.stream_wait(COMPUTE, unit.gathered)
                builder.free(self._gather_key(unit))
                unit.gathered = None
        if not finalize:
            return
        for event in self.post_reduce.values():
            if self.plan.cpu_offload:
                builder.host_wait(event)
            builder.stream_wait(COMPUTE, event)
        self.post_reduce.clear()
        self.post_forward_order.clear()
        self._recycle_scatter_input()

    # The optimizer.

    def _optimizer(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        owned = [
            numel
            for unit in self.units
            for param, numel in zip(unit.params, unit.shard_numels, strict=True)
            if self.model.parameters[param].trainable
        ]
        if plan.grad_clip:
            grad_norm(builder, owned, plan.storage_dtype)
            if self.shards > 1:
                count = len(self.trainable)
                work = Collective("all_reduce", "float32", count, count, self._shard_group(self.shards), "SUM")
                builder.launch(COMPUTE, "grad norm", "optimizer", work)
            clip(builder, owned, plan.storage_dtype)
        update(builder, plan.optimizer, owned, plan.storage_dtype, first=first, device=self.device)
        for unit in self.units:
            if unit.sharded_grads:
                builder.free(f"sharded grad:{unit.name}")
                unit.sharded_grads = False


def lower_fsdp2(model: ModelSpec, tree: Module, plan: Fsdp2Plan, workload: Workload, steps: int) -> Program:
    """Steps differ only in the optimizer's states, which the first one allocates."""
    if plan.cpu_offload and plan.optimizer.impl == "fused" and plan.optimizer.name not in ("adamw", "adam", "sgd"):
        raise NotModeled(f"{plan.optimizer.name} on the CPU", field="optimizer")
    rank = Fsdp2(model, tree, plan)
    rank.allocate()
    init = tuple(rank.builder.instructions)
    built = []
    for index in range(min(steps, 2)):
        rank.builder = Builder()
        rank.step(first=index == 0)
        built.append(tuple(rank.builder.instructions))
    return Program(plan.world_size, _groups(rank), init, tuple(built + built[-1:] * (steps - len(built))))


def _groups(rank: Fsdp2) -> dict[str, tuple[tuple[int, ...], ...]]:
    world, shards, plan = rank.plan.world_size, rank.shards, rank.plan
    groups = {"world": (tuple(range(world)),)}
    if rank.hsdp:
        groups["shard"] = consecutive(world, shards)
        groups["replicate"] = strided(world, shards)
    if type(plan.reshard_after_forward) is int:
        groups["post_forward"] = consecutive(world, plan.reshard_after_forward)
    return groups
