"""SuperOffload of DeepSpeed 0.19.8 (runtime/superoffload): Adam of a sub-group in its own process, during backward.

As soon as the last gradient of a sub-group is on the host, its update is queued, speculating that the step will be
taken: a gradient that overflows has it rolled back, which training past its first steps does not see. With gradient
clipping nothing is speculated in this version: the updates wait for the norm, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.program.builder import pinned_bytes
from zsim.program.deepspeed import dtype_bytes
from zsim.program.offload import Zero3OnCpu, copy
from zsim.program.ops import COMPUTE, H2D, WORKER, CpuWork
from zsim.program.optimizer import on_host, rule_of, state_bytes

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients


class Zero3SuperOffload(Zero3OnCpu):
    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.blocking = False
        self.speculates = not self.plan.grad_clip
        self.group_of = {param: index for index, group in enumerate(self.sub_groups) for param in group}
        self.missing = [len(group) for group in self.sub_groups]  # gradients of this micro-step yet to come
        self.pending: dict[int, int] = {}  # sub-group -> the worker's update of it
        self.updated: set[int] = set()  # sub-groups whose states exist

    def allocate(self) -> None:
        super().allocate()
        largest = 4 * max((self._numel(index) for index in range(len(self.sub_groups))), default=0)
        nbytes = pinned_bytes(largest) if self.pinned else largest
        self.builder.alloc("gradients in the worker", "buffers", nbytes, "host")

    def _numel(self, index: int) -> int:
        return sum(self.shard[param] for param in self.sub_groups[index])

    def keep(self, params: list[int]) -> None:
        """partition_grads: at the boundary the host waits for the copies of a complete sub-group and queues it."""
        super().keep(params)
        complete = []
        for param in params:
            index = self.group_of[param]
            self.missing[index] -= 1
            if not self.missing[index]:
                self.missing[index] = len(self.sub_groups[index])
                complete.append(index)
        if self.gradients.last_micro and complete:
            self.builder.host_wait(self.builder.last(self.gradients.lane))
            for index in complete:
                if index >= self.gpu_groups and self.speculates:
                    self.pending[index] = self._queue(index, "backward")

    def _queue(self, index: int, phase: str) -> int:
        """superoffload_optimizer_worker: gradients into its own buffer, then DeepSpeedCPUAdam on its share of cores."""
        builder, numel, optimizer = self.builder, self._numel(index), self.plan.optimizer
        if index not in self.updated:
            self.updated.add(index)
            states = state_bytes(optimizer, [numel], 4)
            builder.alloc(f"optimizer:{index}_states", "optimizer_states", states, "host")
        single = rule_of(optimizer).fused
        assert single
        share = self.plan.offload_optimizer_cpuadam_cores_perc
        builder.launch(WORKER, "copy gradients", phase, CpuWork("copy gradients", numel, 8 * numel, share))
        nbytes = 4 * (single.reads + single.writes) * numel
        return builder.launch(WORKER, optimizer.name, phase, CpuWork(optimizer.name, numel, nbytes, share))

    def step(self, first: bool) -> None:
        """_wait_for_async_operations, then as ever: what the worker has updated is not updated again."""
        for index, event in self.pending.items():
            self._take(index, event)
        super().step(first)
        self.pending.clear()

    def _take(self, index: int, event: int) -> None:
        """_reassign_or_swap_out_partitioned_parameters_async: out of the memory shared with the worker."""
        self.builder.host_wait(event)
        on_host(self.builder, "copy parameters", self._numel(index), 8 * self._numel(index))

    def _update(self, index: int, numel: int, first: bool) -> None:
        builder, size = self.builder, dtype_bytes(self.plan.dtype)
        on_host(builder, "scale", numel, 8 * numel)
        if index not in self.pending:
            self._take(index, self._queue(index, "optimizer"))
        on_host(builder, "cast", numel, (4 + size) * numel)
        if not self.plan.offload_param:
            event = copy(builder, H2D, "upload parameters", "optimizer", size * numel, pinned=False)
            builder.stream_wait(COMPUTE, event)
