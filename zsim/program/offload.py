"""ZeRO-Offload of DeepSpeed 0.19.8: master weights, Adam's states and gradients in host memory, Adam on the CPU.

zero3_gradients.py and zero12.py hand the reduced gradients of this rank to one of the classes here and ask it for
the optimizer step. What the host computes blocks it: its op runs on the `cpu` lane and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import accum_dtype, collective, dtype_bytes, elementwise, master_dtype, state_dtype
from zsim.program.ops import COMPUTE, CPU, D2H, H2D, copy_of
from zsim.program.optimizer import FRESH_ON_CPU, GRADIENT_SHARE, WEIGHT_SHARE, on_host, update
from zsim.program.versions import before

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients
    from zsim.program.zero12 import Zero12


def fresh(nbytes: float) -> float:
    """What a new tensor of `nbytes` costs beside the traffic, in bytes moved. Smaller ones than malloc.h's largest
    M_MMAP_THRESHOLD come from memory that the process has already."""
    return FRESH_ON_CPU * nbytes if nbytes > 32 << 20 else 0.0


def copy(builder: Builder, lane: str, label: str, phase: str, nbytes: float, pinned: bool, micro: int = 0) -> int:
    """`non_blocking` between GPU and host; from or to pageable memory the host waits all the same."""
    direction = "d2h" if lane == D2H else "h2d"
    event = builder.launch(lane, label, phase, copy_of(direction, nbytes, pinned), micro=micro)
    if not pinned:
        builder.host_wait(event)
    return event


def step_on_host(builder: Builder, plan: DeepSpeedPlan, numel: int, first: bool, index: int, pinned: float) -> None:
    """The optimizer on a flat piece of `numel` elements, number `index`; `pinned`: the share of what it moves."""
    update(
        builder, plan.optimizer, [numel], master_dtype(plan), first=first, device="host", key=f"optimizer:{index}",
        state_dtype=state_dtype(plan), pinned=pinned,
    )  # fmt: skip
    builder.host_wait(builder.last(CPU))


class Zero3OnCpu:
    """offload_optimizer in stage 3 (stage3.py, the branches on `self.offload_optimizer`)."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.builder, self.plan = gradients.builder, gradients.plan
        self.shard = gradients.shard
        self.sub_groups = gradients.sub_groups
        self.accum_size = dtype_bytes(accum_dtype(self.plan))
        self.master_size = dtype_bytes(master_dtype(self.plan))
        self.pinned = self.plan.offload_optimizer_pin_memory
        # zeros_like fills moments with all threads, and master weights are pageable: gradients alone are pinned
        self.pinned_share = GRADIENT_SHARE if self.pinned else 0.0
        self.blocking = before(self.plan, 0, 15, 4)
        # ZeRO-Offload++ (_create_fp32_partitions, subgroup_to_device): the first sub-groups stay on the GPU
        self.gpu_groups = int((1 - self.plan.offload_optimizer_ratio) * len(self.sub_groups))
        self.on_gpu = {param for group in self.sub_groups[: self.gpu_groups] for param in group}

    def allocate(self) -> None:
        """stage3.py: of the gradients one buffer in all, and one per sub-group like the master weights, are pinned."""
        builder, owned = self.builder, [sum(self.shard[param] for param in group) for group in self.sub_groups]
        size = self.master_size
        builder.alloc("master weights", "master_weights", size * sum(owned[self.gpu_groups :]), "host")
        if self.gpu_groups:
            there = size * sum(owned[: self.gpu_groups])
            builder.alloc("master weights on the GPU", "master_weights", there)
            builder.alloc("master gradients on the GPU", "gradients", there)
        # initialize_optimizer_states: zeros for states on NVMe, made without need for those on the host too
        builder.alloc("zeros of a sub-group", "buffers", size * max(owned, default=0), "host")
        for index, numel in enumerate(owned[self.gpu_groups :]):
            builder.alloc_host(f"master gradients:{index}", "gradients", size * numel, self.pinned)
        builder.free("zeros of a sub-group")
        builder.alloc_host("gradient shards", "gradients", sum(owned) * self.accum_size, self.pinned)

    def keep(self, params: list[int]) -> None:
        """partition_grads: to the host buffer and back; from the second micro-step on first added to it on the GPU.

        At the boundary the norm of each shard is taken on the GPU, and it goes to the host in the master weights' type.
        """
        gradients, builder, lane = self.gradients, self.builder, self.gradients.lane
        for param in params:
            numel = self.shard[param]
            nbytes = numel * self.accum_size
            key = f"offload:{param}"
            builder.alloc(key, "gradients", nbytes, lane=lane)
            if gradients.micro:
                self._move(H2D, nbytes)
                elementwise(builder, lane, "accumulate", "backward", 2 * nbytes, nbytes, micro=gradients.micro)
                self._move(D2H, nbytes)
            else:
                self._move(D2H, nbytes)
                self._move(H2D, nbytes)
            if gradients.last_micro:
                elementwise(
                    builder, lane, "grad_norm", "backward", (self.accum_size + 8) * numel, 8 * numel, launches=4,
                    micro=gradients.micro, temp_peak=8 * numel,
                )  # fmt: skip
                if param not in self.on_gpu and self.blocking:
                    self._blocking_to_host(numel)
                else:
                    self._cast_to_host(param, f"{key} cast")
            builder.free(key)

    def _blocking_to_host(self, numel: int) -> None:
        """A blocking copy_ converts on the CPU, out of a new, pageable tensor (ATen/native/cuda/Copy.cu); until pull
        request 6670 of DeepSpeed."""
        self._move(D2H, numel * self.accum_size, pinned=False)
        if self.accum_size != self.master_size:
            moved = (self.master_size + self.accum_size) * numel
            on_host(self.builder, "cast", numel, moved + fresh(numel * self.accum_size))

    def _cast_to_host(self, param: int, key: str) -> None:
        numel, builder, lane = self.shard[param], self.builder, self.gradients.lane
        cast = self.accum_size != self.master_size
        if cast:
            builder.alloc(key, "gradients", self.master_size * numel, lane=lane)
            nbytes = numel * self.accum_size
            elementwise(builder, lane, "cast", "backward", nbytes, self.master_size * numel, micro=self.gradients.micro)
        self._cast_gradient(param)
        if cast:
            builder.free(key)

    def _cast_gradient(self, param: int) -> None:
        nbytes = self.master_size * self.shard[param]
        if param in self.on_gpu:
            elementwise(self.builder, self.gradients.lane, "copy", "backward", nbytes, nbytes)
            return
        event = self._move(D2H, nbytes)
        if before(self.plan, 0, 19, 6):  # not `non_blocking` before _offload_grad_partition_at_boundary
            self.builder.host_wait(event)

    def _move(self, lane: str, nbytes: float, pinned: bool | None = None) -> int:
        """A copy on the reduction stream: in order with its kernels."""
        stream, pinned = self.gradients.lane, self.pinned if pinned is None else pinned
        self.builder.wait_stream(lane, stream)
        label = "offload gradient" if lane == D2H else "fetch gradient"
        event = copy(self.builder, lane, label, "backward", nbytes, pinned, self.gradients.micro)
        self.builder.stream_wait(stream, event)
        return event

    def step(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        if plan.dtype == "float16":
            owned = sum(self.shard[param] for group in self.sub_groups for param in group)
            on_host(builder, "overflow", owned, 4 * owned * self.accum_size)
            event = collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow")
            builder.host_wait(event)
        for group in self.sub_groups:  # complete_grad_norm_calculation_for_cpu_offload
            elementwise(builder, COMPUTE, "grad_norm", "optimizer", 8 * len(group), 8, launches=2 * len(group))
            builder.host_wait(builder.last(COMPUTE))
            for home in self.gradients.norm_groups(group):
                collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm", group=home)
            builder.host_wait(builder.last(COMPUTE))
        for index, group in enumerate(self.sub_groups):
            numel = sum(self.shard[param] for param in group)
            if index < self.gpu_groups:
                self._update_on_gpu(index, numel, first)
            else:
                self._update(index, numel, first)

    def _update_on_gpu(self, index: int, numel: int, first: bool) -> None:
        """backup_optimizer: torch's, on the sub-groups that stay; its states are like the weights."""
        builder, plan, size = self.builder, self.plan, dtype_bytes(self.plan.dtype)
        master, optimizer = self.master_size * numel, replace(self.plan.optimizer, impl="foreach")
        elementwise(builder, COMPUTE, "scale", "optimizer", master, master)
        update(builder, optimizer, [numel], master_dtype(plan), first=first, key=f"optimizer:{index}")
        elementwise(builder, COMPUTE, "cast", "optimizer", master, size * numel)
        if plan.offload_param:
            builder.wait_stream(D2H, COMPUTE)
            builder.host_wait(copy(builder, D2H, "parameters to host", "optimizer", size * numel, True))

    def _update(self, index: int, numel: int, first: bool) -> None:
        """Scale, Adam, copy back: between types a blocking copy_ converts on the CPU (ATen/native/cuda/Copy.cu)."""
        builder, plan, master = self.builder, self.plan, self.master_size
        size = dtype_bytes(plan.dtype)
        on_host(builder, "scale", numel, 2 * master * numel, float(self.pinned))
        step_on_host(builder, plan, numel, first, index, self.pinned_share)
        if plan.offload_param:
            copied = size / (master + size) if plan.offload_param_pin_memory else 0.0
            on_host(builder, "cast", numel, (master + size) * numel, copied)
        elif master != size:  # copy_ makes a new tensor
            on_host(builder, "cast", numel, (master + size) * numel + fresh(size * numel))
        if not plan.offload_param:
            event = copy(builder, H2D, "upload parameters", "optimizer", size * numel, pinned=False)
            builder.stream_wait(COMPUTE, event)
        elif self.gradients.parameters.nvme:
            self.gradients.parameters.nvme.write(self.sub_groups[index])


class Zero12OnCpu:
    """offload_optimizer in stages 1 and 2 (stage_1_and_2.py, the branches on `self.cpu_offload`)."""

    def __init__(self, rank: Zero12) -> None:
        self.rank, self.builder, self.plan = rank, rank.builder, rank.plan
        self.partitions = rank.partitions
        self.pinned = self.plan.offload_optimizer_pin_memory
        self.size, self.master_size = dtype_bytes(self.plan.dtype), dtype_bytes(master_dtype(self.plan))
        # _use_compact_grad_partition_buffer: float32 accumulation stays on the GPU until the boundary
        self.compact = accum_dtype(self.plan) == "float32" and self.plan.dtype != "float32"
        self.compact_held = False
        self.accumulated: set[int] = set()  # parameters with a buffer in accumulated_grads_in_cpu
        self.pending: list[int] = []  # _pending_offload_events

    def allocate(self) -> None:
        builder, parts = self.builder, [group.size for group in self.partitions.groups]
        for index, part in enumerate(parts):
            builder.alloc_host(f"master weights {index}", "master_weights", self.master_size * part, self.pinned)
            builder.alloc_host(f"updated parameters {index}", "buffers", self.size * part, self.pinned)
            if self.pinned:  # the pageable one has a name until the next one, or until the optimizer is built
                if index:
                    builder.free(f"updated parameters {index - 1}, still pageable")
                builder.alloc(f"updated parameters {index}, still pageable", "buffers", self.size * part, "host")
        largest = max(self.rank.numel[param] for group in self.partitions.groups for param in group.order) * self.size
        builder.alloc_host("staged gradient", "buffers", largest, self.pinned)
        builder.alloc("staged gradient on the GPU", "reduce_buffers", largest)
        for index, part in enumerate(parts):
            builder.alloc_host(f"master gradients {index}", "gradients", self.master_size * part, self.pinned)
        if self.pinned:
            builder.free(f"updated parameters {len(parts) - 1}, still pageable")

    def add_reduced(self, kept: Mapping[int, int]) -> None:
        """_add_to_grad_partition_buffer, as without offload."""
        if not self.compact:
            return
        rank, elements = self.rank, sum(kept.values())
        if not self.compact_held:
            self.compact_held = True
            self.builder.alloc("kept gradients", "gradients", 4 * self.partitions.size, lane=rank.lane)
        elementwise(
            self.builder, rank.lane, "accumulate", "backward", (rank.comm_size + 8) * elements, 8 * elements,
            launches=2 * len(kept), micro=rank.micro, temp_peak=4 * max(kept.values()),
        )  # fmt: skip

    def keep(self, param: int) -> None:
        """copy_grads_in_partition: sums over micro-steps are kept on the host, whole parameters at a time."""
        rank = self.rank
        if self.compact:
            if rank.boundary:
                self._offload(param, self.partitions.fullest[param], 4)
            rank.drop(param)
            return
        if self.plan.stage == 2 and self.plan.grad_accum > 1:  # stage 1 reduces, and counts, one micro-step
            self._accumulate(param)
        if rank.boundary:
            self._offload(param, self.partitions.fullest[param], rank.grad_size)
        rank.drop(param)

    def _accumulate(self, param: int) -> None:
        """async_accumulate_grad_in_cpu_via_gpu: the host's sum comes to the GPU, is added there and goes back.

        Of the whole gradient in a buffer of its own; beside master weights in the model's type of this rank's part, in
        their gradient.
        """
        rank, builder = self.rank, self.builder
        if not before(self.plan, 0, 19, 6):  # no _wait_for_offload_copies yet (main, August 2026)
            self._wait_for_copies()
        apart = self.master_size == 4
        nbytes = (rank.numel[param] if apart else self.partitions.fullest[param]) * self.size
        if apart and param not in self.accumulated:
            self.accumulated.add(param)
            builder.alloc_host(f"summed:{param}", "gradients", nbytes, self.pinned)
        if rank.micro:
            self._move(H2D, nbytes)
            elementwise(builder, rank.lane, "accumulate", "backward", 2 * nbytes, nbytes, micro=rank.micro)
        self.pending.append(self._move(D2H, nbytes))

    def _offload(self, param: int, elements: int, size: int) -> None:
        """At the boundary: norm and overflow on the GPU (the host asks for each), then to the host, cast if need be."""
        rank, builder, master = self.rank, self.builder, self.master_size
        elementwise(
            builder, rank.lane, "grad_norm", "backward", (3 * size + 8) * elements, 8 * elements, launches=6,
            micro=rank.micro, temp_peak=8 * elements,
        )  # fmt: skip
        builder.host_wait(builder.last(rank.lane))  # update_offload_overflow_tracker
        if size != master:
            builder.alloc("cast gradient", "gradients", master * elements, lane=rank.lane)
            elementwise(builder, rank.lane, "cast", "backward", size * elements, master * elements, micro=rank.micro)
        self.pending.append(self._move(D2H, master * elements))
        if size != master:
            builder.free("cast gradient")

    def _move(self, lane: str, nbytes: float) -> int:
        stream = self.rank.lane
        self.builder.wait_stream(lane, stream)
        label = "offload gradient" if lane == D2H else "fetch gradient"
        event = copy(self.builder, lane, label, "backward", nbytes, self.pinned, self.rank.micro)
        self.builder.stream_wait(stream, event)
        return event

    def _wait_for_copies(self) -> None:
        for event in self.pending[-1:]:  # one copy engine: the last one done means all done
            self.builder.host_wait(event)
        self.pending.clear()

    def end_backward(self) -> None:
        """The kept gradients are on the host already."""

    def step(self, first: bool) -> None:
        """Everything on the host, then the partitions go back before the all-gather."""
        builder, plan = self.builder, self.plan
        self._wait_for_copies()
        if self.compact_held:
            self.compact_held = False
            builder.free("kept gradients")
        if plan.dtype == "float16" or (plan.dtype == "bfloat16" and plan.check_grad_overflow):
            builder.host_wait(collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow"))
        # complete_grad_norm_calculation_for_cpu_offload: .item() of one norm after another
        for _ in self.partitions.groups:
            builder.host_wait(collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm"))
        self.rank.average_expert_norms()
        for index, group in enumerate(self.partitions.groups):
            self._update(index, group.size, first)

    def _update(self, index: int, part: int, first: bool) -> None:
        builder, plan = self.builder, self.plan
        if plan.grad_clip or plan.dtype == "float16":
            on_host(builder, "scale", part, 2 * self.master_size * part, float(self.pinned))
        # master weights, their gradients and the parameters to upload are pinned, moments are not
        step_on_host(builder, plan, part, first, index, GRADIENT_SHARE + WEIGHT_SHARE if self.pinned else 0.0)
        on_host(builder, "cast", part, (self.master_size + self.size) * part, float(self.pinned))
        event = copy(builder, H2D, "upload parameters", "optimizer", self.size * part, self.pinned)
        builder.stream_wait(COMPUTE, event)
