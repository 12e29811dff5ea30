"""The gradients of ZeRO-3 on one rank: buckets, their reduction, the shard that is kept, and the update of it.

DeepSpeed 0.19.8, runtime/zero/stage3.py. The optimizer's states live on the GPU here; `offload.py` moves them.
"""

from __future__ import annotations

from collections import deque

from zsim.model.kernels import EXPERT_DATA_PARALLEL, EXPERT_PARALLEL
from zsim.model.spec import ModelSpec
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import (
    accum_dtype,
    charge_gradient,
    collective,
    comm_dtype,
    dtype_bytes,
    elementwise,
    master_dtype,
    overlaps,
    sub_groups,
)
from zsim.program.muon import applied, auxiliary, is_muon, matrices
from zsim.program.nvme import Zero3OnNvme
from zsim.program.offload import Zero3OnCpu
from zsim.program.ops import COMPUTE, REDUCE_SCATTER, Compute
from zsim.program.optimizer import update
from zsim.program.superoffload import Zero3SuperOffload
from zsim.program.versions import steps_at_start
from zsim.program.zero3_mics import reduce_replicas
from zsim.program.zero3_muon import Zero3Muon
from zsim.program.zero3_parameters import Parameters
from zsim.program.zero3_quantized import QuantizedReduction, reduces_quantized

MAX_REDUCE_EVENTS = 2  # DeepSpeedZeroOptimizer_Stage3.max_param_reduce_events


class Gradients:
    """`lane`: reduce_and_partition_stream, which is the compute stream unless overlap_comm."""

    def __init__(self, builder: Builder, model: ModelSpec, plan: DeepSpeedPlan, parameters: Parameters) -> None:
        self.builder, self.plan = builder, plan
        self.parameters = parameters
        self.numel, self.shard = parameters.numel, parameters.shard
        self.lane = REDUCE_SCATTER if overlaps(plan) else COMPUTE
        self.param_size = dtype_bytes(plan.dtype)
        self.comm = comm_dtype(plan)
        self.comm_size = dtype_bytes(self.comm)
        self.quantized = QuantizedReduction(builder, model, plan, self.lane) if reduces_quantized(plan) else None
        self.sub_groups = sub_groups(model, plan, self.shard)
        self.shapes = [parameter.shape for parameter in model.parameters]
        self.hidden = matrices(model) if is_muon(plan.optimizer) else frozenset()
        worker = plan.offload_optimizer == "cpu" and plan.offload_optimizer_super_offload
        self.owner = OWNERS["super" if worker else plan.offload_optimizer](self)
        self.micro = 0
        self.last_micro = False
        self._bucket: list[int] = []
        self._elements = 0
        self._events: deque[int] = deque()  # param_reduce_events
        self._in_bucket_buffer: set[int] = set()

    def allocate(self) -> None:
        self.owner.allocate()
        if self.plan.contiguous_gradients:
            nbytes = self.plan.reduce_bucket_size * self.comm_size
            self.builder.alloc("bucket", "reduce_buffers", nbytes)

    def alloc(self, param: int) -> None:
        self.builder.alloc(f"grad:{param}", "gradients", self.numel[param] * self.param_size)

    def ready(self, param: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads, then __add_grad_to_ipg_bucket."""
        numel = self.numel[param]
        charge_gradient(self.builder, self.plan, len(self.parameters.trainable))
        homes = self.parameters.homes
        other = bool(self._bucket) and homes[self._bucket[0]] != homes[param]
        if other or (self._bucket and self._elements + numel > self.plan.reduce_bucket_size):
            self.reduce()
        if self.lane != COMPUTE:
            self.builder.wait_stream(self.lane, COMPUTE)
        if self.plan.contiguous_gradients and self._elements + numel <= self.plan.reduce_bucket_size:
            event = elementwise(
                self.builder, self.lane, "copy", "backward", numel * self.param_size, numel * self.comm_size,
                micro=self.micro,
            )  # fmt: skip
            self.builder.free(f"grad:{param}", after=event)
            self._in_bucket_buffer.add(param)
        self._bucket.append(param)
        self._elements += numel

    def reduce(self) -> None:
        """__reduce_and_partition_ipg_grads"""
        builder, bucket = self.builder, sorted(self._bucket)
        if not bucket:
            return
        if len(self._events) > MAX_REDUCE_EVENTS:
            builder.host_wait(self._events.popleft())
        in_buffer = self.plan.contiguous_gradients and self._elements <= self.plan.reduce_bucket_size
        whole = in_buffer and not self.plan.reduce_scatter
        if self.quantized:
            temporaries = self._reduce_quantized(bucket)
        else:
            temporaries = self._all_reduce(bucket) if whole else self._reduce_scatter(bucket)
        self.owner.keep(bucket)
        if self.parameters.mics and self.last_micro:
            reduce_replicas(self, bucket, accum_dtype(self.plan))
        for key in temporaries:
            builder.free(key)
        for param in bucket:
            if param not in self._in_bucket_buffer:
                builder.free(f"grad:{param}", after=builder.last(self.lane))
        self._in_bucket_buffer.clear()
        self._bucket, self._elements = [], 0
        self._events.append(builder.last(self.lane))

    def _all_reduce(self, bucket: list[int]) -> list[str]:
        """__avg_scatter_contiguous_grads: in the bucket's own buffer, unpadded; scaled by 1.0 into a new tensor."""
        temporaries: list[str] = []
        nbytes = self._elements * self.comm_size
        elementwise(self.builder, self.lane, "scale", "backward", nbytes, nbytes, micro=self.micro)
        self._call("all_reduce", self._elements, self._elements, self.parameters.homes[bucket[0]])
        if self.parameters.world > 1:
            self._temporary(temporaries, "scaled gradients", nbytes, nbytes)
        if self.comm != accum_dtype(self.plan):
            size = dtype_bytes(accum_dtype(self.plan))
            self._temporary(temporaries, "cast gradients", nbytes, self._elements * size)
            if len(temporaries) > 1:
                self.builder.free(temporaries.pop(0))
        return temporaries

    def _reduce_scatter(self, bucket: list[int], mark: str = "") -> list[str]:
        """__avg_scatter_grads and reduce_scatter_coalesced: interleaved by rank and padded in a temporary, unless it
        is one parameter that divides evenly. Returns the keys of the temporaries, which end with `mark`."""
        part, home = sum(self.shard[param] for param in bucket), self.parameters.homes[bucket[0]]
        full = part * self.parameters.ranks(home)
        nbytes = full * self.comm_size
        temporaries: list[str] = []
        outside = sum(self.numel[param] for param in bucket if param not in self._in_bucket_buffer)
        if outside and self.comm != self.plan.dtype:
            self._temporary(temporaries, f"cast gradients{mark}", outside * self.param_size, outside * self.comm_size)
        if len(bucket) > 1 or self.numel[bucket[0]] != full:
            self._temporary(temporaries, f"reduce input{mark}", nbytes, nbytes)
        elementwise(self.builder, self.lane, "scale", "backward", nbytes, nbytes, micro=self.micro)
        self._call("reduce_scatter", full, part, home)
        if home == EXPERT_DATA_PARALLEL and full < part * self.plan.world_size:
            # _gradient_averaging_world_size: averaged over all ranks, whose tokens the experts have seen
            self._temporary(temporaries, f"scaled shards{mark}", part * self.comm_size, part * self.comm_size)
        if self.comm != accum_dtype(self.plan):
            size = dtype_bytes(accum_dtype(self.plan))
            self._temporary(temporaries, f"cast shards{mark}", part * self.comm_size, part * size)
        return temporaries

    def _reduce_quantized(self, bucket: list[int]) -> list[str]:
        """Each gradient by itself. Returns the keys of what holds their shards."""
        assert self.quantized
        held: list[str] = []
        for param in bucket:
            if self.quantized.takes(param):
                held.append(self.quantized.reduce(param, self.numel[param], self.micro))
            else:
                held += self._reduce_scatter([param], f" {param}")
        self.quantized.finish()
        return held

    def _temporary(self, keys: list[str], key: str, read_bytes: int, nbytes: int) -> None:
        keys.append(key)
        self.builder.alloc(key, "reduce_buffers", nbytes, lane=self.lane)
        label = "copy" if key.startswith("reduce input") else "scale" if key.startswith("scaled") else "cast"
        elementwise(self.builder, self.lane, label, "backward", read_bytes, nbytes, micro=self.micro)

    def _call(self, kind: str, in_numel: int, out_numel: int, group: str) -> None:
        collective(
            self.builder, self.lane, kind, self.comm, in_numel, out_numel, "backward",
            "reduce gradients", group=group, micro=self.micro,
        )  # fmt: skip

    def norm_groups(self, group: list[int]) -> list[str]:
        """Over whom a sub-group's norm is summed: the ranks that share it and, of experts, those that have others."""
        home = self.parameters.homes[group[0]]
        others = home == EXPERT_DATA_PARALLEL and self.plan.autoep_size > 1
        return [home, EXPERT_PARALLEL] if others else [home]

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue: the rest, then the host waits for the stream."""
        self.reduce()
        self.builder.host_wait(self.builder.last(self.lane))
        self._events.clear()


class Zero3OnGpu:
    """float32 master weights, Adam's states and the accumulated gradient shard on the GPU."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.builder, self.plan = gradients.builder, gradients.plan
        self.shard = gradients.shard
        self.sub_groups = gradients.sub_groups
        self.accum_size = dtype_bytes(accum_dtype(self.plan))
        self.master_size = dtype_bytes(master_dtype(self.plan))
        self.muon = Zero3Muon(gradients)

    def allocate(self) -> None:
        owned = sum(self.shard[param] for group in self.sub_groups for param in group)
        # A model in their type has them too: _create_fp32_partitions compares a torch.device with a string, in vain
        self.builder.alloc("master weights", "master_weights", self.master_size * owned)
        self.builder.alloc("gradient shards", "gradients", owned * self.accum_size)
        self.muon.allocate(self.sub_groups)
        if not steps_at_start(self.plan):
            return
        numels = [sum(self.shard[param] for param in group) for group in self.sub_groups]
        self.builder.alloc("gradients of zero", "gradients", self.master_size * max(numels))
        for index, numel in enumerate(numels):
            self._adam(index, numel, first=True)
        self.builder.free("gradients of zero")

    def keep(self, params: list[int]) -> None:
        """partition_grads: into the flat gradient buffer, added from the second micro-step on."""
        gradients = self.gradients
        part = sum(self.shard[param] for param in params)
        reads = gradients.comm_size + (self.accum_size if gradients.micro else 0)
        elementwise(
            self.builder, gradients.lane, "accumulate", "backward", part * reads, part * self.accum_size,
            launches=len(params), micro=gradients.micro,
        )  # fmt: skip

    def step(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        if plan.dtype == "float16":
            self._overflow()
        self.muon.step(self.sub_groups)
        for group in self.sub_groups:
            self._norm(group)
        builder.host_wait(builder.last(COMPUTE))  # step: is_invalid_grad_norm
        for index, group in enumerate(self.sub_groups):
            self._update(index, sum(self.shard[param] for param in group), first)

    def _overflow(self) -> None:
        """has_overflow: looks through the flat gradient buffer for inf, then for nan; boolean temporaries."""
        builder = self.builder
        owned = sum(self.shard[param] for group in self.sub_groups for param in group)
        nbytes = owned * self.accum_size
        elementwise(
            builder, self.gradients.lane, "grad_norm", "optimizer", 2 * (nbytes + owned), 2 * owned, launches=4,
            temp_peak=owned,
        )  # fmt: skip
        builder.wait_stream(COMPUTE, self.gradients.lane)
        home = self.gradients.parameters.home
        event = collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow", group=home)
        builder.host_wait(event)

    def _norm(self, group: list[int]) -> None:
        """get_grad_norm_direct: the norm of each shard in float64, one sum over ranks per sub-group."""
        numel = sum(self.shard[param] for param in group)
        elementwise(
            self.builder, COMPUTE, "grad_norm", "optimizer", (self.accum_size + 8) * numel, 8 * numel,
            launches=2 * len(group), temp_peak=8 * max(self.shard[param] for param in group),
        )  # fmt: skip
        for call in self.gradients.norm_groups(group):
            collective(self.builder, COMPUTE, "all_reduce", "float64", 1, 1, "optimizer", "grad norm", group=call)

    def _update(self, index: int, numel: int, first: bool) -> None:
        """_prepare_sub_group flattens and casts the gradients; unscale_and_clip_grads; Adam; copy to the shards."""
        builder, plan, size = self.builder, self.plan, self.master_size
        builder.alloc("flat gradients", "gradients", numel * self.accum_size)
        elementwise(builder, COMPUTE, "copy", "optimizer", numel * self.accum_size, numel * self.accum_size)
        key = "flat gradients"
        if accum_dtype(plan) != master_dtype(plan):
            key = "fp32 gradients"
            builder.alloc(key, "gradients", size * numel)
            elementwise(builder, COMPUTE, "cast", "optimizer", numel * self.accum_size, size * numel)
            builder.free("flat gradients")
        elementwise(builder, COMPUTE, "scale", "optimizer", size * numel, size * numel)
        if self.muon.hidden.issuperset(self.sub_groups[index]):
            builder.launch(COMPUTE, "muon", "optimizer", Compute(applied(numel, 4)))
        else:
            self._adam(index, numel, first and not steps_at_start(plan))
        elementwise(builder, COMPUTE, "cast", "optimizer", size * numel, dtype_bytes(plan.dtype) * numel)
        builder.free(key)

    def _adam(self, index: int, numel: int, first: bool) -> None:
        aux, dtype = auxiliary(self.plan.optimizer), master_dtype(self.plan)
        update(self.builder, aux, [numel], dtype, first=first, key=f"optimizer:{index}")


OWNERS: dict[str | None, type[Zero3OnGpu] | type[Zero3OnCpu]] = {
    None: Zero3OnGpu,
    "cpu": Zero3OnCpu,
    "nvme": Zero3OnNvme,
    "super": Zero3SuperOffload,
}
