"""What FSDP2 moves for one unit, on which stream, through which buffers.

torch 2.13 `_fully_shard/_fsdp_collectives.py` (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce) and
`_fsdp_param.py`. Buffers are allocated and freed at the calls, and on the streams, where the framework does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from math import ceil, prod

from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec
from zsim.plan.spec import Fsdp2Plan
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.foreach import foreach
from zsim.program.fsdp2_float8 import Float8Shards
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


class Training(Enum):
    IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = auto(), auto(), auto(), auto()


class Unit:
    """FSDPParamGroup: parameters that travel together. Element counts include the padding of dim 0 to the shards."""

    def __init__(
        self, group: Group, model: ModelSpec, plan: Fsdp2Plan, shards: int, reshard: bool | int,
        float8: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.name, self.modules, self.params, self.role = group.name, group.modules, group.params, group.role
        self.input_has_grad, self.in_backward = group.input_has_grad, group.in_backward
        parameters = [model.parameters[index] for index in self.params]
        shapes = [parameter.shape for parameter in parameters]
        # _fsdp_param.py _init_sharded_param: torch.chunk along dim 0, every chunk padded to the first
        self.shard_numels = [ceil(shape[0] / shards) * prod(shape[1:]) if shape else 1 for shape in shapes]
        self.shard = sum(self.shard_numels)
        frozen = int(DTYPE_BYTES[plan.frozen_dtype or plan.storage_dtype])
        trained = int(DTYPE_BYTES[plan.storage_dtype])
        self.store_sizes = [trained if parameter.trainable else frozen for parameter in parameters]  # bytes per element
        self.shard_sizes = [numel * size for numel, size in zip(self.shard_numels, self.store_sizes, strict=True)]
        self.full = self.shard * shards
        size = int(DTYPE_BYTES[plan.param_dtype])
        self.wire_sizes = [1 if param in float8 else size for param in self.params]  # bytes per element, gathered
        self.in_float8 = [n for param, n in zip(self.params, self.shard_numels, strict=True) if param in float8]
        self.reshard = reshard  # after forward; an int: to that many ranks
        self.forward_prefetch: Sequence[Unit] = ()
        self.backward_prefetch: Sequence[Unit] = ()

        self.training = Training.IDLE
        self.running: set[str] = set()  # modules still to run in this forward
        self.indices: list[int] = []  # places in the post-forward order
        self.unsharded = False
        self.post_forward_shard = False  # resharded to fewer ranks
        self.gathered: int | None = None  # event of an all-gather not yet waited for
        self.reshard_event: int | None = None
        self.reduce_event: int | None = None
        self.grads: set[int] = set()  # parameters with an unsharded gradient from autograd
        self.accumulated: set[int] = set()  # those whose earlier gradients are kept in the reduce dtype
        self.has_sharded_grad = False
        self.has_partial_reduce = False  # reduce-scattered, not all-reduced yet
        self.all_reduce_input: str | None = None  # kept alive until the end of backward


class Collectives:
    def __init__(self, model: ModelSpec, plan: Fsdp2Plan, builder: Builder) -> None:
        self.plan, self.model, self.builder = plan, model, builder
        self.replicas, self.shards = mesh_of(plan.mesh, plan.world_size)
        self.hsdp = plan.mesh is not None
        self.compute_size = int(DTYPE_BYTES[plan.param_dtype])
        self.store_size = int(DTYPE_BYTES[plan.storage_dtype])
        self.reduce_size = int(DTYPE_BYTES[plan.reduce_dtype])
        self.device = "host" if plan.cpu_offload else "gpu"
        self.float8: Float8Shards | None = None

    def stored_bytes(self, sizes: Sequence[int]) -> int:
        """Of shards or their gradients, as kept between steps: on the host each is pinned by itself."""
        if self.plan.cpu_offload and self.plan.offload_pin_memory:
            return sum(map(pinned_bytes, sizes))
        return sum(sizes)

    def ranks(self, unit: Unit) -> int:
        """How many ranks hold a shard of the unit now."""
        return int(unit.reshard) if unit.post_forward_shard else self.shards

    def group(self, ranks: int) -> str:
        if ranks != self.shards:
            return "post_forward"
        return "shard" if self.hsdp else "world"

    def gather_streams_wait(self, event: int) -> None:
        self.builder.stream_wait(COPY_IN, event)
        self.builder.stream_wait(ALL_GATHER, event)

    # Parameters.

    def all_gather(self, unit: Unit, phase: str, micro: int) -> int:
        """foreach_all_gather; returns its event."""
        builder, plan, ranks = self.builder, self.plan, self.ranks(unit)
        numels = [numel * self.shards // ranks for numel in unit.shard_numels]
        shard = sum(n * size for n, size in zip(numels, unit.wire_sizes, strict=True))
        stored = zip(numels, unit.store_sizes, unit.wire_sizes, strict=True)
        cast = [n for n, size, wire in stored if size != self.compute_size == wire]
        copied, flat = f"shard on GPU:{unit.name}", f"gather input:{unit.name}"
        if self.float8 and unit.in_float8:
            self.float8.cast(unit.name, unit.in_float8, phase, micro)
        # _get_param_all_gather_inputs: the shards in the compute dtype, cast into one flat buffer
        if plan.cpu_offload:
            sizes = [numel * size for numel, size in zip(numels, unit.store_sizes, strict=True)]
            # with a cast a parameter's copy dies before the next one's
            staged = max(sizes) if cast else sum(sizes)
            builder.alloc(copied, "all_gather_buffers", staged, lane=COPY_IN)
            builder.wait_stream(H2D, COPY_IN)
            copy = Copy("h2d", sum(sizes), plan.offload_pin_memory)
            event = builder.launch(H2D, "shard to GPU", phase, copy, module=unit.name, micro=micro)
            builder.stream_wait(COPY_IN, event)
        if cast:
            builder.alloc(flat, "all_gather_buffers", sum(cast) * self.compute_size, lane=COPY_IN)
            reads = self.compute_size if unit.post_forward_shard else self.store_size
            self._kernel(COPY_IN, "all-gather cast", phase, unit, micro, cast, reads, self.compute_size)
        builder.alloc(self.gather_key(unit), "all_gather_buffers", shard * ranks, lane=COPY_IN)
        self._copy(COPY_IN, "all-gather copy-in", phase, unit, micro, numels)
        builder.wait_stream(ALL_GATHER, COPY_IN)
        dtype, size = self._wire(unit)
        work = Collective("all_gather", dtype, shard // size, shard // size * ranks, self.group(ranks))
        event = builder.launch(ALL_GATHER, "all-gather", phase, work, module=unit.name, micro=micro)
        if self.float8 and unit.in_float8:
            self.float8.free(unit.name, len(unit.in_float8))
        if cast:
            builder.free(flat)
        if plan.cpu_offload:
            builder.free(copied)
        return event

    def copy_out(self, unit: Unit, phase: str, micro: int) -> int:
        """foreach_all_gather_copy_out: from the gathered buffer into the parameters; returns its event."""
        builder = self.builder
        full = zip(unit.shard_numels, unit.wire_sizes, strict=True)
        sizes = tuple([numel * self.shards * size for numel, size in full])
        builder.alloc(self.unsharded_key(unit), "all_gather_buffers", sum(sizes), tensors=sizes)
        if self.ranks(unit) > 1:
            assert unit.gathered is not None
            builder.stream_wait(COMPUTE, unit.gathered)
            numels = [numel * self.shards for numel in unit.shard_numels]
            event = self._copy(COMPUTE, "all-gather copy-out", phase, unit, micro, numels)
        else:  # wait_for_unshard without a group: a cast and a copy per parameter
            self._fetch(unit, phase, micro)
            cast = unit.full * self.compute_size
            reads = sum(unit.shard_sizes) * self.shards + cast
            copies = Memory("copy", reads, 2 * cast, 2 * len(unit.params))
            event = builder.launch(
                COMPUTE, "unshard copy", phase, Compute((copies,)), module=unit.name, micro=micro,
                temp_peak=max(unit.shard_numels) * self.compute_size, temp_category="all_gather_buffers",
            )  # fmt: skip
        if unit.post_forward_shard:
            builder.free(f"post-forward shard:{unit.name}")
            unit.post_forward_shard = False
        return event

    def _fetch(self, unit: Unit, phase: str, micro: int) -> None:
        """all_gather_inputs of offloaded shards, here on the compute stream."""
        if self.plan.cpu_offload:
            self.builder.wait_stream(H2D, COMPUTE)
            copy = Copy("h2d", sum(unit.shard_sizes), self.plan.offload_pin_memory)
            event = self.builder.launch(H2D, "shard to GPU", phase, copy, module=unit.name, micro=micro)
            self.builder.stream_wait(COMPUTE, event)

    def reshard_to_fewer(self, unit: Unit, micro: int) -> None:
        """to_sharded_post_forward: keeps the part of this rank within `reshard` ranks, as a copy."""
        nbytes = unit.full // int(unit.reshard) * self.compute_size
        self.builder.alloc(f"post-forward shard:{unit.name}", "all_gather_buffers", nbytes)
        copy = Compute((Memory("copy", nbytes, nbytes, len(unit.params)),))
        label = "reshard to fewer ranks"
        unit.reshard_event = self.builder.launch(COMPUTE, label, "forward", copy, module=unit.name, micro=micro)
        unit.post_forward_shard = True

    def _wire(self, unit: Unit) -> tuple[str, int]:
        """_get_all_gather_input_metadatas: the type of what is gathered, bytes where they differ, and its size."""
        if not unit.in_float8:
            return self.plan.param_dtype, self.compute_size
        return ("float8" if len(unit.in_float8) == len(unit.params) else "uint8"), 1

    def _copy(self, lane: str, label: str, phase: str, unit: Unit, micro: int, numels: Sequence[int]) -> int:
        """Of a unit's parameters as they are gathered."""
        if unit.in_float8:
            numels = [numel * size for numel, size in zip(numels, unit.wire_sizes, strict=True)]
        size = self._wire(unit)[1]
        return self._kernel(lane, label, phase, unit, micro, numels, size, size)

    @staticmethod
    def gather_key(unit: Unit) -> str:
        return f"all-gather:{unit.name}"

    @staticmethod
    def unsharded_key(unit: Unit) -> str:
        return f"unsharded:{unit.name}"

    # Gradients.

    def reduce(self, unit: Unit, micro: int, *, all_reduce: bool) -> tuple[str, int]:
        """foreach_reduce: returns the buffer to free and the event after which nothing reads it any more.

        `unit.reduce_event` ends the whole reduction. Without `all_reduce` HSDP keeps what is reduce-scattered.
        """
        builder, plan, size = self.builder, self.plan, self.reduce_size
        reduced = unit.grads | unit.accumulated
        numels = [n for param, n in zip(unit.params, unit.shard_numels, strict=True) if param in reduced]
        shard, full = sum(numels), sum(numels) * self.shards
        source = f"reduce-scatter input:{unit.name}"
        builder.alloc(source, "reduce_buffers", full * size)
        read = size if unit.accumulated else self.compute_size
        copy_in = Compute((foreach("copy", [n * self.shards for n in numels], read, size),))
        builder.launch(COMPUTE, "reduce-scatter copy-in", "backward", copy_in, module=unit.name, micro=micro)
        self.free_grads(unit)
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)

        output, category = self._output(unit, all_reduce)
        builder.alloc(output, category, shard * size, lane=REDUCE_SCATTER)
        # fp16 could overflow: a sum with divisions around it instead of an average
        careful = plan.reduce_dtype == "float16"
        before, after = divide_factors(plan.world_size) if careful else (1, 1)
        mean = "SUM" if careful or plan.world_size == 1 else "AVG"
        if before > 1:
            self._elementwise(REDUCE_SCATTER, "divide gradient", unit, micro, full * size, full * size)
        if self.shards > 1:
            work = Collective("reduce_scatter", plan.reduce_dtype, full, shard, self.group(self.shards), mean)
            event = builder.launch(REDUCE_SCATTER, "reduce-scatter", "backward", work, module=unit.name, micro=micro)
        else:
            event = self._elementwise(REDUCE_SCATTER, "reduce copy", unit, micro, shard * size, shard * size)
        lane = REDUCE_SCATTER
        if unit.has_partial_reduce:
            self._elementwise(lane, "add partial reduction", unit, micro, 2 * shard * size, shard * size)
        if not self.hsdp or all_reduce:
            if self.hsdp:
                lane = ALL_REDUCE
                builder.wait_stream(ALL_REDUCE, REDUCE_SCATTER)
                work = Collective("all_reduce", plan.reduce_dtype, shard, shard, "replicate", mean)
                builder.launch(ALL_REDUCE, "all-reduce", "backward", work, module=unit.name, micro=micro)
            if after > 1:
                self._elementwise(lane, "divide gradient", unit, micro, shard * size, shard * size)
            self._store_gradient(unit, output, numels, lane, micro)
            if unit.has_partial_reduce:
                builder.free(f"partial reduce:{unit.name}")
            unit.has_partial_reduce, unit.has_sharded_grad = False, True
        elif unit.has_partial_reduce:
            builder.free(output)
        else:
            unit.has_partial_reduce = True
        unit.reduce_event = builder.last(lane)
        return source, event

    def free_grads(self, unit: Unit) -> None:
        for param in unit.accumulated:
            self.builder.free(f"accumulated grad:{unit.name}:{param}")
        for param in unit.grads:
            self.builder.free(f"grad:{unit.name}:{param}")
        unit.grads.clear()
        unit.accumulated.clear()

    def _output(self, unit: Unit, all_reduce: bool) -> tuple[str, str]:
        """What the reduce-scatter writes becomes the sharded gradient, or the partial one, unless it is added to it."""
        plan = self.plan
        if self.hsdp and not all_reduce:
            if not unit.has_partial_reduce:
                return f"partial reduce:{unit.name}", "gradients"
        elif not (unit.has_sharded_grad or plan.cpu_offload) and plan.reduce_dtype == plan.storage_dtype:
            return f"sharded grad:{unit.name}", "gradients"
        return f"reduce output:{unit.name}", "reduce_buffers"

    def _store_gradient(self, unit: Unit, output: str, numels: Sequence[int], lane: str, micro: int) -> None:
        """Casts to the shards' dtype, copies to the host, adds to what an earlier micro-step left."""
        builder, plan, shard = self.builder, self.plan, sum(numels)
        sharded, stored = f"sharded grad:{unit.name}", shard * self.store_size
        if output == sharded:
            return
        current = output
        if plan.reduce_dtype != plan.storage_dtype:
            lasting = not (unit.has_sharded_grad or plan.cpu_offload)
            current = sharded if lasting else f"cast gradient:{unit.name}"
            builder.alloc(current, "gradients" if lasting else "reduce_buffers", stored, lane=lane)
            self._elementwise(lane, "cast gradient", unit, micro, shard * self.reduce_size, stored)
            if not self.hsdp:
                builder.free(output)
        if plan.cpu_offload:
            self._to_host(unit, numels, lane, micro)
        elif unit.has_sharded_grad:
            self._elementwise(lane, "accumulate gradient", unit, micro, 2 * stored, stored)
        if current not in (sharded, output):
            builder.free(current)
        if self.hsdp:
            unit.all_reduce_input = output  # FSDPParamGroup._all_reduce_state
        elif current == output:
            builder.free(output)

    def _to_host(self, unit: Unit, numels: Sequence[int], lane: str, micro: int) -> None:
        """A copy in the background; where a gradient is there already, one that Python waits for and adds."""
        builder, stored = self.builder, sum(numels) * self.store_size
        adds = unit.has_sharded_grad
        pinned = self.plan.offload_pin_memory and not adds
        if adds:
            builder.alloc(f"new gradient:{unit.name}", "gradients", max(numels) * self.store_size, "host")
        else:
            builder.alloc(
                f"sharded grad:{unit.name}",
                "gradients",
                self.stored_bytes([numel * self.store_size for numel in numels]),
                "host",
            )
        builder.stream_wait(D2H, builder.last(lane))
        copy = Copy("d2h", stored, pinned)
        event = builder.launch(D2H, "gradient to host", "backward", copy, module=unit.name, micro=micro)
        builder.stream_wait(lane, event)
        if not pinned:
            builder.host_wait(event)
        if adds:
            add = CpuWork("accumulate gradient", sum(numels), 3 * stored)
            builder.host_wait(
                builder.launch(CPU, "accumulate gradient", "backward", add, module=unit.name, micro=micro)
            )
            builder.free(f"new gradient:{unit.name}")

    def drop_all_reduce_input(self, unit: Unit) -> None:
        if unit.all_reduce_input is not None:
            self.builder.free(unit.all_reduce_input)
            unit.all_reduce_input = None

    # Kernels.

    def _kernel(
        self, lane: str, label: str, phase: str, unit: Unit, micro: int, numels: Sequence[int], read: int, write: int
    ) -> int:
        work = Compute((foreach("copy", numels, read, write),))
        return self.builder.launch(lane, label, phase, work, module=unit.name, micro=micro)

    def _elementwise(self, lane: str, label: str, unit: Unit, micro: int, read: float, write: float) -> int:
        work = Compute((Memory("copy", read, write),))
        return self.builder.launch(lane, label, "backward", work, module=unit.name, micro=micro)
