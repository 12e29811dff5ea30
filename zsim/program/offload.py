"""ZeRO-Offload of DeepSpeed 0.19.8: master weights, Adam's states and gradients in host memory, Adam on the CPU.

zero3_gradients.py and zero12.py hand the reduced gradients of this rank to one of the classes here and ask it for
the optimizer step. What the host computes blocks it: its op runs on the `cpu` lane and the host waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.program.builder import Builder
from zsim.program.deepspeed import accum_dtype, collective, dtype_bytes, elementwise
from zsim.program.ops import COMPUTE, CPU, D2H, H2D, Copy, CpuWork
from zsim.program.optimizer import update

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients


def on_host(builder: Builder, label: str, numel: int, nbytes: float) -> None:
    """Arithmetic of the host itself: it can do nothing else meanwhile."""
    builder.host_wait(builder.launch(CPU, label, "optimizer", CpuWork(label, numel, nbytes)))


def copy(builder: Builder, lane: str, label: str, phase: str, nbytes: float, pinned: bool, micro: int = 0) -> int:
    """`non_blocking` between GPU and host; from or to pageable memory the host waits all the same."""
    direction = "d2h" if lane == D2H else "h2d"
    event = builder.launch(lane, label, phase, Copy(direction, nbytes, pinned), micro=micro)
    if not pinned:
        builder.host_wait(event)
    return event


class Zero3OnCpu:
    """offload_optimizer in stage 3 (stage3.py, the branches on `self.offload_optimizer`)."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.builder, self.plan = gradients.builder, gradients.plan
        self.shard = gradients.shard
        self.sub_groups = gradients.sub_groups
        self.accum_size = dtype_bytes(accum_dtype(self.plan))
        self.pinned = self.plan.offload_optimizer_pin_memory

    def allocate(self) -> None:
        owned = sum(self.shard[param] for group in self.sub_groups for param in group)
        self.builder.alloc("master weights", "master_weights", 4 * owned, "host")
        self.builder.alloc("fp32 gradients", "gradients", 4 * owned, "host")
        self.builder.alloc("gradient shards", "gradients", owned * self.accum_size, "host")

    def keep(self, params: list[int]) -> None:
        """partition_grads: to the host buffer and back; from the second micro-step on first added to it on the GPU.

        At the boundary the norm of each shard is taken on the GPU and its float32 copy goes to the host.
        """
        gradients, builder, lane = self.gradients, self.builder, self.gradients.lane
        for param in params:
            numel = self.shard[param]
            nbytes = numel * self.accum_size
            key = f"offload:{param}"
            builder.alloc(key, "gradients", nbytes)
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
                if self.accum_size != 4:
                    builder.alloc(f"{key} fp32", "gradients", 4 * numel)
                    elementwise(builder, lane, "cast", "backward", nbytes, 4 * numel, micro=gradients.micro)
                self._move(D2H, 4 * numel)
                if self.accum_size != 4:
                    builder.free(f"{key} fp32")
            builder.free(key)

    def _move(self, lane: str, nbytes: float) -> None:
        """A copy on the reduction stream: in order with its kernels."""
        stream = self.gradients.lane
        self.builder.wait_stream(lane, stream)
        label = "offload gradient" if lane == D2H else "fetch gradient"
        event = copy(self.builder, lane, label, "backward", nbytes, self.pinned, self.gradients.micro)
        self.builder.stream_wait(stream, event)

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
            event = collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm")
            builder.host_wait(event)
        for index, group in enumerate(self.sub_groups):
            self._update(index, sum(self.shard[param] for param in group), first)

    def _update(self, index: int, numel: int, first: bool) -> None:
        """Scale, Adam, cast and copy back: a blocking copy_ converts on the CPU (ATen/native/cuda/Copy.cu)."""
        builder, plan = self.builder, self.plan
        size = dtype_bytes(plan.dtype)
        on_host(builder, "scale", numel, 8 * numel)
        update(builder, plan.optimizer, [numel], "float32", first=first, device="host", key=f"optimizer:{index}")
        builder.host_wait(builder.last(CPU))
        on_host(builder, "cast", numel, (4 + size) * numel)
        if not plan.offload_param:
            event = copy(builder, H2D, "upload parameters", "optimizer", size * numel, pinned=False)
            builder.stream_wait(COMPUTE, event)
