"""ZeRO-Infinity of DeepSpeed 0.19.8: optimizer states, gradients and parameters on NVMe, through pinned host buffers.

runtime/swap_tensor/: PartitionedOptimizerSwapper, PipelinedOptimizerSwapper, AsyncPartitionedParameterSwapper. Reads
and writes are one queue: pipelining gives each its own, but how fast a drive does both at once is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import dtype_bytes
from zsim.program.offload import Zero3OnCpu, copy
from zsim.program.ops import CPU, D2H, NVME, Copy

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients

MIN_AIO_BYTES = 1 << 20  # swap_tensor/utils.py
AIO_ALIGNED_BYTES = 1024
STATES = 3  # of Adam, with the master weights; a fourth buffer holds the gradients (offload_config.py buffer_count)


def min_swapped_bytes(plan: DeepSpeedPlan) -> int:
    """optimizer_utils.py and partitioned_param_swapper.py: smaller tensors are not swapped."""
    return max(MIN_AIO_BYTES, plan.aio_block_size)


def aligned_bytes(plan: DeepSpeedPlan, numel: int, size: int) -> int:
    """Of a buffer: whole multiples of AIO_ALIGNED_BYTES for each thread."""
    unit = AIO_ALIGNED_BYTES * plan.aio_intra_op_parallelism
    return ceil(numel * size / unit) * unit


def swap(
    builder: Builder, plan: DeepSpeedPlan, direction: str, label: str, phase: str, nbytes: float, micro: int = 0,
    direct: bool = False,
) -> int:  # fmt: skip
    """A read or write of the NVMe queue (csrc/aio/common/deepspeed_aio_common.cpp)."""
    in_flight = plan.aio_block_size * plan.aio_queue_depth * plan.aio_intra_op_parallelism
    return builder.launch(NVME, label, phase, Copy(direction, nbytes, True, in_flight, direct), micro=micro)


class Zero3OnNvme(Zero3OnCpu):
    """offload_optimizer: {device: nvme}. A sub-group's states pass through `buffer_count` pinned buffers."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.pinned_share = 1.0
        self.blocking = False  # partition_grads: what is swapped was float32 on the GPU before pull request 6670 too
        # pipelined_optimizer_swapper.py: with it the next sub-group's buffers, and those of the one being written
        piped = self.plan.offload_optimizer_pipeline_read + self.plan.offload_optimizer_pipeline_write
        count, groups = self.plan.offload_optimizer_buffer_count, min(1 + piped, len(self.sub_groups))
        needed = (STATES + 1) * groups
        if count < needed:
            raise InputError(
                f"{count} buffers: DeepSpeed runs out of them, with Adam's 4 tensors of {groups} sub-groups at a time",
                field="zero.offload_optimizer.buffer_count",
                accepted=f"{needed} or more",
            )
        self.reading: dict[int, int] = {}  # sub-group -> the read that fetches its states
        self.writing: int | None = None  # the last write that nobody has waited for
        # optimizer_utils.py _swap_out_gradients: too small to swap, float32 gradients stay where they are, on the GPU
        self.unswapped = {param for param, numel in enumerate(self.shard) if 4 * numel < min_swapped_bytes(self.plan)}
        self.held: list[set[int]] = [set(group) & self.unswapped for group in self.sub_groups]

    def allocate(self) -> None:
        """All in elements of the largest sub-group, as the buffer manager allocates them."""
        builder, plan = self.builder, self.plan
        owned = [sum(self.shard[param] for param in group) for group in self.sub_groups]
        builder.alloc(
            "swap buffers", "buffers", aligned_bytes(plan, max(owned), 4) * plan.offload_optimizer_buffer_count, "host"
        )
        builder.alloc_host("gradient shards", "gradients", sum(owned) * self.accum_size, self.pinned)
        builder.alloc("states on NVMe", "optimizer_states", 4 * STATES * sum(owned), "nvme")
        swapped = sum(owned) - sum(self.shard[param] for held in self.held for param in held)
        if swapped:
            builder.alloc("gradients on NVMe", "gradients", 4 * swapped, "nvme")

    def _cast_gradient(self, param: int) -> None:
        """swap_out_gradients: written as soon as they are in a buffer, in the background."""
        nbytes = 4 * self.shard[param]
        if param in self.unswapped:
            self.builder.alloc(f"unswapped gradient:{param}", "gradients", nbytes, lane=self.gradients.lane)
            return
        self._move(D2H, nbytes)
        self.builder.wait_stream(NVME, D2H)
        swap(self.builder, self.plan, "nvme_write", "gradients to NVMe", "backward", nbytes, self.gradients.micro)

    def _update(self, index: int, numel: int, first: bool) -> None:
        """swap_in_optimizer_state, the step on the CPU, swap_out_optimizer_state."""
        builder, plan, last = self.builder, self.plan, index == len(self.sub_groups) - 1
        self._read(index, first)
        builder.host_wait(self.reading.pop(index))
        held = self.held[index]
        if held:  # read_unswapped_gradients: into the buffer that holds the others
            nbytes = 4 * sum(self.shard[param] for param in held)
            builder.host_wait(copy(builder, D2H, "unswapped gradients to host", "optimizer", nbytes, self.pinned))
        if plan.offload_optimizer_pipeline_read and not last:
            self._read(index + 1, first)
        if first:  # Adam makes its moments in pageable memory; after the update they live in the swap buffers
            builder.alloc(f"new moments:{index}", "optimizer_states", 4 * (STATES - 1) * numel, "host")
        super()._update(index, numel, first=False)
        if self.writing is not None:
            builder.host_wait(self.writing)
        builder.wait_stream(NVME, CPU)
        self.writing = swap(builder, plan, "nvme_write", "states to NVMe", "optimizer", 4 * STATES * numel)
        if first:
            builder.free(f"new moments:{index}")
        for param in sorted(held):
            builder.free(f"unswapped gradient:{param}")
        if last or not plan.offload_optimizer_pipeline_write:
            builder.host_wait(self.writing)
            self.writing = None

    def _read(self, index: int, first: bool) -> None:
        """States and gradients; before the first update there are no moments."""
        if index not in self.reading:
            states = 1 if first else STATES
            swapped = [param for param in self.sub_groups[index] if param not in self.unswapped]
            numels = [sum(self.shard[param] for param in params) for params in (self.sub_groups[index], swapped)]
            nbytes = 4 * (states * numels[0] + numels[1])
            self.reading[index] = swap(self.builder, self.plan, "nvme_read", "states from NVMe", "optimizer", nbytes)


class ParametersOnNvme:
    """offload_param: {device: nvme}: sub-groups beyond `max_in_cpu` elements are read through pinned buffers."""

    def __init__(
        self, builder: Builder, plan: DeepSpeedPlan, numel: list[int], shard: list[int], sub_groups: list[list[int]]
    ) -> None:
        self.builder, self.plan, self.shard = builder, plan, shard
        self.size = dtype_bytes(plan.dtype)
        # partition_parameters.py _partition_param: a smaller shard stays in host memory, pinned by itself
        large = [param for param, numel in enumerate(shard) if numel * self.size >= min_swapped_bytes(plan)]
        if large and max(shard) > plan.offload_param_buffer_size:
            raise InputError(
                f"a buffer of {plan.offload_param_buffer_size:,} elements cannot hold a shard of {max(shard):,}",
                field="zero.offload_param.buffer_size",
            )
        # stage3.py _create_fp16_partitions_with_defragmentation: whole sub-groups go to the flat buffer while they fit
        owned = [sum(shard[param] for param in group) for group in sub_groups]
        self.flat = min(sum(owned), plan.offload_param_max_in_cpu)
        kept = {
            param for index, group in enumerate(sub_groups) if sum(owned[: index + 1]) <= self.flat for param in group
        }
        self.swapped = set(large) - kept
        self.alone = [param for param in range(len(shard)) if param not in kept and param not in self.swapped]
        self.reading: dict[int, int] = {}  # parameter -> the read of its shard (INFLIGHT)
        self.read = set[int]()  # parameters whose shard lies in a buffer (AVAILABLE)
        # reserve_partitioned_swap_space: updated shards wait for their write in a buffer for the largest sub-group's
        # whole parameters (t.ds_numel is that of the parameter)
        largest = sub_groups[owned.index(max(owned))] if owned else []
        whole = [aligned_bytes(plan, numel[param], self.size) for param in largest]
        self.write_buffer = sum(whole) if any(set(group) - kept for group in sub_groups) else 0

    def allocate(self) -> None:
        builder, plan, size = self.builder, self.plan, self.size
        buffers = aligned_bytes(plan, plan.offload_param_buffer_size, size) * plan.offload_param_buffer_count
        if plan.aio_use_gds:
            builder.alloc("parameter swap buffers", "all_gather_buffers", buffers)
        else:
            builder.alloc("parameter swap buffers", "buffers", buffers, "host")
        # _create_param_groups_fp16_flat_cpu_memory: as much as max_in_cpu allows, pinned
        builder.alloc("parameter shards", "parameters", builder.pinned_bytes(self.flat * size), "host")
        for param in self.alone:
            nbytes = self.shard[param] * size
            pinned = builder.pinned_bytes(nbytes) if plan.offload_param_pin_memory else nbytes
            builder.alloc(f"small shard:{param}", "parameters", pinned, "host")
        if self.write_buffer:
            builder.alloc("parameters to be written", "buffers", self.write_buffer, "host")
        if self.swapped:
            builder.alloc("parameters on NVMe", "parameters", size * self._numel(self.swapped), "nvme")

    @property
    def free_buffers(self) -> int:
        return self.plan.offload_param_buffer_count - len(self.reading) - len(self.read)

    def unread(self, param: int) -> bool:
        """PartitionedParamStatus.NOT_AVAILABLE"""
        return param in self.swapped and param not in self.reading and param not in self.read

    def on_gpu(self, param: int) -> bool:
        """GPUDirect Storage reads into buffers of the GPU."""
        return self.plan.aio_use_gds and param in self.swapped

    def fetch(self, params: Iterable[int], phase: str, micro: int) -> None:
        """_ensure_availability_of_partitioned_params: the host waits for all reads there are."""
        self.start([param for param in params if self.unread(param)], phase, micro)
        if any(param in self.reading for param in params):
            self.builder.host_wait(next(reversed(self.reading.values())))
            self.read.update(self.reading)
            self.reading.clear()

    def start(self, params: list[int], phase: str, micro: int) -> None:
        """swap_in: a buffer for each. What DeepSpeed asserts is refused here."""
        if len(set(params)) < len(params):
            raise InputError(
                "DeepSpeed reads a parameter ahead for two uses at once, and stops: already assigned a swap buffer",
                field="zero.offload_param.buffer_count",
                accepted="fewer buffers",
            )
        if len(params) > self.free_buffers:
            raise InputError(
                f"DeepSpeed runs out of buffers: it asks for {len(params)} when {self.free_buffers} of "
                f"{self.plan.offload_param_buffer_count} are free, as gathered parameters keep theirs until released",
                field="zero.offload_param.buffer_count",
                accepted="more buffers, or a smaller stage3_max_reuse_distance",
            )
        for param in params:
            self.reading[param] = swap(
                self.builder, self.plan, "nvme_read", "shard from NVMe", phase, self.shard[param] * self.size, micro,
                self.plan.aio_use_gds,
            )  # fmt: skip

    def release(self, param: int) -> None:
        """remove_partition_and_release_buffers, as the gathered parameter goes."""
        self.read.discard(param)

    def write(self, params: Iterable[int]) -> None:
        """_reassign_or_swap_out_partitioned_parameters: what an update has changed."""
        nbytes = self.size * self._numel(self.swapped.intersection(params))
        if nbytes:
            event = swap(self.builder, self.plan, "nvme_write", "shards to NVMe", "optimizer", nbytes)
            self.builder.host_wait(event)

    def _numel(self, params: Iterable[int]) -> int:
        return sum(self.shard[param] for param in params)
