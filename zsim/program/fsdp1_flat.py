"""What FSDP1 moves for one flat parameter, on which stream, through which buffers.

torch 2.13 `fsdp/_flat_param.py` (FlatParamHandle) and the reductions of `fsdp/_runtime_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from zsim.errors import InputError
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec
from zsim.plan.spec import Fsdp1Plan
from zsim.program.builder import Builder
from zsim.program.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    CPU,
    D2H,
    H2D,
    REDUCE_SCATTER,
    Collective,
    Compute,
    Copy,
    CpuWork,
)
from zsim.program.units import Group, divide_factors, mesh_of

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
ALIGNMENT = 16  # bytes, _get_aligned_numel


class Handle:
    """FlatParamHandle: the parameters of one wrapped module in one padded flat tensor."""

    def __init__(self, group: Group, model: ModelSpec, plan: Fsdp1Plan, shards: int) -> None:
        self.name, self.module, self.params = group.name, group.modules[0], group.params
        self.is_root = group.role == "root"
        self.input_has_grad, self.output_has_grad = group.input_has_grad, group.output_has_grad
        self.in_backward = group.in_backward
        self.numels = [model.parameters[param].numel for param in self.params]
        self.trainable = [param for param in self.params if model.parameters[param].trainable]
        align = int(ALIGNMENT // DTYPE_BYTES[plan.param_dtype]) if plan.use_orig_params else 1
        total = 0
        for numel in self.numels:
            total = ceil(total / align) * align + numel
        self.shard = ceil(total / shards)
        self.full = self.shard * shards
        stored = plan.storage_dtype if self.trainable else plan.frozen_dtype or plan.storage_dtype
        self.stored_size = int(DTYPE_BYTES[stored])  # bytes per element between steps
        self.mixed = stored != plan.param_dtype

        self.unsharded = False
        self.prefetched = False
        self.needs_forward = False  # _needs_pre_forward_unshard
        self.needs_backward = False
        self.ran_pre_backward = False
        self.forward_index: int | None = None  # place in the order of the first iteration
        self.post_forward_index: int | None = None
        self.differentiated: list[int] = []  # parameters that have a gradient: with trained ones, frozen ones
        self.pending: set[int] = set()  # parameters whose gradient is still to come
        self.left = False  # backward is through with its module
        self.posted = False  # its gradients have all come, and are reduced or kept
        self.prefetcher: Handle | None = None  # in whose pre-forward this forward's views were made
        self.delayed: list[Handle] = []  # units whose gradients wait for this module's backward
        self.has_flat_grad = False  # an unsharded gradient that no_sync left
        self.has_sharded_grad = False
        self.written_back = False  # a copy of its gradients on the host


class FlatParameters:
    def __init__(self, model: ModelSpec, plan: Fsdp1Plan, builder: Builder) -> None:
        if plan.sharding_strategy not in STRATEGIES:
            raise InputError(plan.sharding_strategy, field="sharding_strategy", accepted=", ".join(STRATEGIES))
        self.model, self.plan, self.builder = model, plan, builder
        self.sharded = plan.sharding_strategy != "NO_SHARD"
        self.hybrid = plan.sharding_strategy in HYBRID
        self.replicas, self.shards = mesh_of(plan.mesh if self.hybrid else None, plan.world_size)
        self.param_size = int(DTYPE_BYTES[plan.param_dtype])
        self.reduce_size = int(DTYPE_BYTES[plan.reduce_dtype])
        self.master_size = int(DTYPE_BYTES[plan.storage_dtype])  # of gradients of shards and the optimizer's states
        self.device = "host" if plan.cpu_offload else "gpu"
        self.group = "shard" if self.hybrid else "world"

    # Parameters.

    def pre_unshard(self, handle: Handle, phase: str, micro: int) -> None:
        """The shard on the GPU in the compute dtype, on a stream of its own."""
        builder, plan = self.builder, self.plan
        on_gpu, low = f"on GPU:{handle.name}", f"low-precision shard:{handle.name}"
        if plan.cpu_offload:
            builder.alloc(on_gpu, "all_gather_buffers", handle.stored_size * handle.shard, lane=COPY_IN)
            copy = Copy("h2d", handle.stored_size * handle.shard)
            builder.stream_wait(
                COPY_IN, builder.launch(H2D, "shard to GPU", phase, copy, module=handle.name, micro=micro)
            )
        if handle.mixed:
            builder.alloc(low, "all_gather_buffers", handle.shard * self.param_size, lane=COPY_IN)
            nbytes = handle.stored_size * handle.shard, self.param_size * handle.shard
            self._kernel(COPY_IN, "cast shard", phase, handle, micro, [nbytes])
            if plan.cpu_offload:
                builder.free(on_gpu)
        builder.wait_stream(ALL_GATHER, COPY_IN)

    def write_back(self, handle: Handle, micro: int) -> None:
        """_writeback_orig_params: after forward each parameter's .grad is a view of _cpu_grad, which the flat one knows
        nothing of. It gets a new tensor of zeros and copies into it, on the host, and gives it up in
        prepare_gradient_for_backward. A unit gathered twice until then (prefetched, resharded after a checkpointed
        block's second forward) copies twice into the same one."""
        if not (self.plan.cpu_offload and self.plan.use_orig_params and self.sharded and handle.trainable):
            return
        builder, nbytes = self.builder, self.master_size * handle.shard
        if not handle.written_back:
            builder.alloc(f"gradient written back:{handle.name}", "gradients", nbytes, "host")
        work = CpuWork("write back gradients", handle.shard, 3 * nbytes, pinned=nbytes)
        builder.host_wait(builder.launch(CPU, work.label, "backward", work, module=handle.name, micro=micro))
        handle.written_back = True

    def drop_written_back(self, handle: Handle) -> None:
        if handle.written_back:
            handle.written_back = False
            self.builder.free(f"gradient written back:{handle.name}")

    def unshard(self, handle: Handle, phase: str, micro: int) -> None:
        handle.unsharded = True
        if not self.sharded:
            return  # the low-precision copy is the parameter
        builder = self.builder
        builder.alloc(f"unsharded:{handle.name}", "all_gather_buffers", handle.full * self.param_size, lane=ALL_GATHER)
        work = Collective("all_gather", self.plan.param_dtype, handle.shard, handle.full, self.group)
        gathered = builder.launch(ALL_GATHER, "all-gather", phase, work, module=handle.name, micro=micro)
        if handle.mixed:
            builder.free(f"low-precision shard:{handle.name}", gathered)
        elif self.plan.cpu_offload:
            builder.free(f"on GPU:{handle.name}", gathered)

    def free_unsharded(self, handle: Handle) -> None:
        if self.sharded:
            # record_stream on the compute stream: the bytes are free when what was issued there is done
            self.builder.free(f"unsharded:{handle.name}", self.builder.last(COMPUTE))
        elif handle.mixed:
            self.builder.free(f"low-precision shard:{handle.name}")
        elif self.plan.cpu_offload:
            self.builder.free(f"on GPU:{handle.name}")
        handle.unsharded = False

    # Gradients.

    def collect(self, handle: Handle, micro: int) -> None:
        """The views' gradients are concatenated (SplitWithSizesBackward), then added to what no_sync left."""
        builder, nbytes = self.builder, handle.full * self.param_size
        key = f"{'new' if handle.has_flat_grad else 'flat'} grad:{handle.name}"
        builder.alloc(key, "gradients", nbytes)
        self._kernel(COMPUTE, "flatten gradients", "backward", handle, micro, [(nbytes, nbytes)])
        for param in handle.differentiated:
            builder.free(f"grad:{param}")
        if handle.has_flat_grad:
            self._kernel(COMPUTE, "accumulate gradient", "backward", handle, micro, [(2 * nbytes, nbytes)])
            builder.free(key)
        handle.has_flat_grad = True

    def reduce(self, handle: Handle, micro: int) -> None:
        """_reduce_grad, _reduce_grad_no_shard"""
        builder, plan, size = self.builder, self.plan, self.reduce_size
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)
        unsharded, handle.has_flat_grad = f"flat grad:{handle.name}", False
        sources, passes = [unsharded], []
        if plan.reduce_dtype != plan.param_dtype:
            unsharded = f"reduce input:{handle.name}"
            if not self.sharded:
                unsharded = self._output_key(handle, unsharded)
            sources.append(unsharded)
            builder.alloc(unsharded, "reduce_buffers", handle.full * size, lane=REDUCE_SCATTER)
            passes.append((handle.full * self.param_size, handle.full * size))
        before, after = divide_factors(plan.world_size)
        if before > 1:
            passes.append((handle.full * size, handle.full * size))
        if passes:
            self._kernel(REDUCE_SCATTER, "prepare gradient", "backward", handle, micro, passes)
        lane = REDUCE_SCATTER
        if self.sharded:
            reduced = self._output_key(handle, f"reduce output:{handle.name}")
            category = "gradients" if reduced.startswith("sharded") else "reduce_buffers"
            builder.alloc(reduced, category, handle.shard * size, lane=REDUCE_SCATTER)
            work = Collective("reduce_scatter", plan.reduce_dtype, handle.full, handle.shard, self.group, "SUM")
            builder.launch(lane, "reduce-scatter", "backward", work, module=handle.name, micro=micro)
            if self.hybrid:
                lane = ALL_REDUCE
                builder.wait_stream(ALL_REDUCE, REDUCE_SCATTER)
                work = Collective("all_reduce", plan.reduce_dtype, handle.shard, handle.shard, "replicate", "SUM")
                builder.launch(lane, "all-reduce", "backward", work, module=handle.name, micro=micro)
        else:
            reduced = sources.pop()
            work = Collective("all_reduce", plan.reduce_dtype, handle.full, handle.full, self.group, "SUM")
            builder.launch(lane, "all-reduce", "backward", work, module=handle.name, micro=micro)
        self._store_gradient(handle, reduced, lane, micro, divide=after > 1)
        # The hook holds them until it returns; record_stream, as the gradient came from the compute stream.
        for source in sources:
            builder.free(source, builder.last(REDUCE_SCATTER))

    def _output_key(self, handle: Handle, otherwise: str) -> str:
        """A result in the shards' dtype is the gradient that the optimizer sees, if not added to one or copied."""
        lasting = self.reduce_size == self.master_size and not handle.has_sharded_grad
        return f"sharded grad:{handle.name}" if lasting else otherwise

    def _store_gradient(self, handle: Handle, reduced: str, lane: str, micro: int, *, divide: bool) -> None:
        """_accumulate_sharded_grad, _offload_grad: cast to the shards' dtype, added to an earlier one, to the host."""
        builder, size, master = self.builder, handle.shard * self.reduce_size, self.master_size * handle.shard
        sharded, cast = f"sharded grad:{handle.name}", reduced
        passes = [(size, size)] if divide else []
        if self.reduce_size != self.master_size:
            cast = f"cast grad:{handle.name}" if handle.has_sharded_grad else sharded
            builder.alloc(cast, "reduce_buffers" if handle.has_sharded_grad else "gradients", master, lane=lane)
            passes.append((size, master))
        elif reduced != sharded and not handle.has_sharded_grad:  # NO_SHARD in one type: it is the gradient, and stays
            builder.free(reduced)
            builder.alloc(sharded, "gradients", master)
            reduced = cast = sharded
        if handle.has_sharded_grad:
            passes.append((2 * master, master))
        if passes:
            self._kernel(lane, "finish gradient", "backward", handle, micro, passes)
        if reduced != cast:
            builder.free(reduced)
        if self.plan.cpu_offload:
            builder.wait_stream(D2H, lane)
            builder.launch(D2H, "gradient to host", "backward", Copy("d2h", master), module=handle.name, micro=micro)
            builder.wait_stream(lane, D2H)
        if cast != sharded:
            builder.free(cast)
        handle.has_sharded_grad = True

    def owned(self, handles: Sequence[Handle]) -> list[int]:
        """Elements of the tensors that this rank updates: its parts of the original parameters, or the flat shards.
        A unit that backward never comes to has no gradient, and the optimizer makes no states for it."""
        handles = [handle for handle in handles if handle.differentiated]
        if not self.plan.use_orig_params:
            return [handle.shard for handle in handles if handle.trainable]
        found = {}
        for handle in handles:
            start = 0
            for param, numel in zip(handle.params, handle.numels, strict=True):
                part = min(numel, handle.shard - start)
                if part > 0 and param in handle.trainable:
                    found[param] = part
                start += numel
        return [found[param] for param in sorted(found)]  # as named_parameters() has them, whatever the units

    def _kernel(
        self, lane: str, label: str, phase: str, handle: Handle, micro: int, passes: Sequence[tuple[int, int]]
    ) -> int:
        """Elementwise kernels one after the other, each with the bytes it reads and writes."""
        work = Compute(tuple(Memory("copy", read, write) for read, write in passes))
        return self.builder.launch(lane, label, phase, work, module=handle.name, micro=micro)
