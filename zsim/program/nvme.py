"""ZeRO-Infinity of DeepSpeed 0.19.8: optimizer states, gradients and parameters on NVMe, through pinned host buffers.

runtime/swap_tensor/: PartitionedOptimizerSwapper, PipelinedOptimizerSwapper, AsyncPartitionedParameterSwapper. What a
request costs (aio's block size, queue depth, threads) is in the rates of the topology's NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.deepspeed import dtype_bytes
from zsim.program.offload import Zero3OnCpu
from zsim.program.ops import CPU, D2H, NVME, Copy

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients

STATES = 3  # of Adam, with the master weights; a fourth buffer holds the gradients (offload_config.py buffer_count)


def swap(builder: Builder, direction: str, label: str, phase: str, nbytes: float, micro: int = 0) -> int:
    """A read or write of the NVMe queue."""
    return builder.launch(NVME, label, phase, Copy(direction, nbytes), micro=micro)


class Zero3OnNvme(Zero3OnCpu):
    """offload_optimizer: {device: nvme}. A sub-group's states pass through `buffer_count` pinned buffers."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        if self.plan.offload_optimizer_buffer_count < STATES + 1:
            raise InputError(
                f"{self.plan.offload_optimizer_buffer_count} buffers, and Adam has 4 tensors per parameter",
                field="zero.offload_optimizer.buffer_count",
                accepted="4 or more",
            )
        self.reading: dict[int, int] = {}  # sub-group -> the read that fetches its states
        self.writing: int | None = None  # the last write that nobody has waited for

    def allocate(self) -> None:
        """All in elements of the largest sub-group, as the buffer manager allocates them."""
        builder, plan = self.builder, self.plan
        owned = [sum(self.shard[param] for param in group) for group in self.sub_groups]
        builder.alloc("swap buffers", "buffers", 4 * max(owned) * plan.offload_optimizer_buffer_count, "host")
        builder.alloc_host("gradient shards", "gradients", sum(owned) * self.accum_size, self.pinned)
        builder.alloc("states on NVMe", "optimizer_states", 4 * STATES * sum(owned), "nvme")
        builder.alloc("gradients on NVMe", "gradients", 4 * sum(owned), "nvme")

    def _fp32_to_host(self, param: int) -> None:
        """swap_out_gradients: written as soon as they are in a buffer, in the background."""
        nbytes = 4 * self.shard[param]
        self._move(D2H, nbytes)
        self.builder.wait_stream(NVME, D2H)
        swap(self.builder, "nvme_write", "gradients to NVMe", "backward", nbytes, self.gradients.micro)

    def _update(self, index: int, numel: int, first: bool) -> None:
        """swap_in_optimizer_state, the step on the CPU, swap_out_optimizer_state."""
        builder, plan, last = self.builder, self.plan, index == len(self.sub_groups) - 1
        self._read(index, numel)
        builder.host_wait(self.reading.pop(index))
        if plan.offload_optimizer_pipeline_read and not last:
            following = sum(self.shard[param] for param in self.sub_groups[index + 1])
            self._read(index + 1, following)
        super()._update(index, numel, first=False)  # the states live in the swap buffers
        if self.writing is not None:
            builder.host_wait(self.writing)
        builder.wait_stream(NVME, CPU)
        self.writing = swap(builder, "nvme_write", "states to NVMe", "optimizer", 4 * STATES * numel)
        if last or not plan.offload_optimizer_pipeline_write:
            builder.host_wait(self.writing)
            self.writing = None

    def _read(self, index: int, numel: int) -> None:
        """States and gradients."""
        if index not in self.reading:
            nbytes = 4 * (STATES + 1) * numel
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
        buffers = plan.offload_param_buffer_size * plan.offload_param_buffer_count * self.size
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
