"""ZeRO-Infinity of DeepSpeed 0.19.8: optimizer states, gradients and parameters on NVMe, through pinned host buffers.

runtime/swap_tensor/: PartitionedOptimizerSwapper, PipelinedOptimizerSwapper, AsyncPartitionedParameterSwapper. What a
request costs (aio's block size, queue depth, threads) is in the rates of the topology's NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING

from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.deepspeed import dtype_bytes
from zsim.program.offload import Zero3OnCpu, copy
from zsim.program.ops import CPU, D2H, NVME, Copy

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients

MIN_AIO_BYTES = 1 << 20  # swap_tensor/utils.py: smaller tensors are not swapped
AIO_ALIGNED_BYTES = 1024
STATES = 3  # of Adam, with the master weights; a fourth buffer holds the gradients (offload_config.py buffer_count)


def aligned_bytes(numel: int, size: int) -> int:
    """Of a buffer: whole multiples of swap_tensor/utils.py AIO_ALIGNED_BYTES (intra_op_parallelism 1)."""
    return ceil(numel * size / AIO_ALIGNED_BYTES) * AIO_ALIGNED_BYTES


def swap(builder: Builder, direction: str, label: str, phase: str, nbytes: float, micro: int = 0) -> int:
    """A read or write of the NVMe queue."""
    return builder.launch(NVME, label, phase, Copy(direction, nbytes), micro=micro)


class Zero3OnNvme(Zero3OnCpu):
    """offload_optimizer: {device: nvme}. A sub-group's states pass through `buffer_count` pinned buffers."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
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
        self.unswapped = {param for param, numel in enumerate(self.shard) if 4 * numel < MIN_AIO_BYTES}
        self.held: list[set[int]] = [set(group) & self.unswapped for group in self.sub_groups]

    def allocate(self) -> None:
        """All in elements of the largest sub-group, as the buffer manager allocates them."""
        builder, plan = self.builder, self.plan
        owned = [sum(self.shard[param] for param in group) for group in self.sub_groups]
        builder.alloc(
            "swap buffers", "buffers", aligned_bytes(max(owned), 4) * plan.offload_optimizer_buffer_count, "host"
        )
        builder.alloc_host("gradient shards", "gradients", sum(owned) * self.accum_size, self.pinned)
        builder.alloc("states on NVMe", "optimizer_states", 4 * STATES * sum(owned), "nvme")
        swapped = sum(owned) - sum(self.shard[param] for held in self.held for param in held)
        if swapped:
            builder.alloc("gradients on NVMe", "gradients", 4 * swapped, "nvme")

    def _fp32_to_host(self, param: int) -> None:
        """swap_out_gradients: written as soon as they are in a buffer, in the background."""
        nbytes = 4 * self.shard[param]
        if param in self.unswapped:
            self.builder.alloc(f"unswapped gradient:{param}", "gradients", nbytes, lane=self.gradients.lane)
            return
        self._move(D2H, nbytes)
        self.builder.wait_stream(NVME, D2H)
        swap(self.builder, "nvme_write", "gradients to NVMe", "backward", nbytes, self.gradients.micro)

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
        self.writing = swap(builder, "nvme_write", "states to NVMe", "optimizer", 4 * STATES * numel)
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
            self.reading[index] = swap(self.builder, "nvme_read", "states from NVMe", "optimizer", nbytes)


class ParametersOnNvme:
    """offload_param: {device: nvme}: shards beyond `max_in_cpu` elements are read through pinned buffers.

    Reads are not started ahead of the gather that needs them (DeepSpeed does, as buffers allow).
    """

    def __init__(self, builder: Builder, plan: DeepSpeedPlan, shard: list[int]) -> None:
        self.builder, self.plan, self.shard = builder, plan, shard
        self.size = dtype_bytes(plan.dtype)
        if shard and max(shard) > plan.offload_param_buffer_size:
            raise InputError(
                f"a buffer of {plan.offload_param_buffer_size:,} elements cannot hold a shard of {max(shard):,}",
                field="zero.offload_param.buffer_size",
            )
        kept, self.swapped = 0, set[int]()
        for param, numel in enumerate(shard):
            if kept + numel <= plan.offload_param_max_in_cpu:
                kept += numel
            else:
                self.swapped.add(param)
        self.kept_bytes = kept * self.size
        self.swapped_bytes = sum(shard[param] for param in self.swapped) * self.size  # on NVMe

    def allocate(self) -> None:
        builder, plan = self.builder, self.plan
        buffers = aligned_bytes(plan.offload_param_buffer_size, self.size) * plan.offload_param_buffer_count
        builder.alloc("parameter swap buffers", "buffers", buffers, "host")
        # stage3.py _create_param_groups_fp16_flat_cpu_memory: as much as max_in_cpu allows, pinned
        builder.alloc("parameter shards", "parameters", pinned_bytes(self.kept_bytes), "host")
        if self.swapped_bytes:
            builder.alloc("parameters on NVMe", "parameters", self.swapped_bytes, "nvme")

    def read(self, param: int, nbytes: int, phase: str, micro: int) -> None:
        if param in self.swapped:
            event = swap(self.builder, "nvme_read", "shard from NVMe", phase, nbytes, micro)
            self.builder.host_wait(event)

    def write(self, params: Iterable[int]) -> None:
        """_reassign_or_swap_out_partitioned_parameters: what an update has changed."""
        nbytes = self.size * sum(self.shard[param] for param in params if param in self.swapped)
        if nbytes:
            event = swap(self.builder, "nvme_write", "shards to NVMe", "optimizer", nbytes)
            self.builder.host_wait(event)
