"""The partition that one rank of ZeRO-1 and 2 updates: its gradients, master weights and Adam's states on the GPU.

DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py. `offload.py` has the same on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zsim.program.deepspeed import MIXED, accum_dtype, collective, dtype_bytes, elementwise, master_dtype
from zsim.program.muon import applied, auxiliary, orthogonalize
from zsim.program.ops import COMPUTE, Compute
from zsim.program.optimizer import update
from zsim.program.versions import steps_at_start

if TYPE_CHECKING:
    from zsim.program.zero12 import Zero12


class Zero12OnGpu:
    """Master weights, Adam's states and the kept gradients of the rank's partition on the GPU."""

    def __init__(self, rank: Zero12) -> None:
        self.rank, self.builder, self.plan = rank, rank.builder, rank.plan
        self.partitions = rank.partitions
        self.accum_size = dtype_bytes(accum_dtype(self.plan))
        self.master_size = dtype_bytes(master_dtype(self.plan))
        # _use_compact_grad_partition_buffer: accumulation in float32 goes straight into the flat partition
        self.compact = accum_dtype(self.plan) == "float32" and self.plan.dtype in MIXED
        self.kept: str | None = None  # the accumulated gradients; their key, with a number if each group has a buffer
        self.fresh: str | None = None  # this micro-step's
        self.muon = rank.muon
        self.momentum = False  # of Muon: whether it is there yet
        self.updates: dict[int, str] = {}  # of Muon, by group: the key of what it made of the kept gradients

    def allocate(self) -> None:
        for index, group in enumerate(self.partitions.groups):
            self.builder.alloc(f"master weights {index}", "master_weights", self.master_size * group.size)
        if not steps_at_start(self.plan):
            return
        for index, group in enumerate(self.partitions.groups):
            self.builder.alloc(f"gradients of zero {index}", "gradients", self.master_size * group.size)
        for index, group in enumerate(self.partitions.groups):
            self._adam(index, group.size, first=True)
        for index in range(len(self.partitions.groups)):
            self.builder.free(f"gradients of zero {index}")

    def add_reduced(self, kept: Mapping[int, int]) -> None:
        """_add_to_grad_partition_buffer: parameter -> elements, cast to float32 (a temporary) and added."""
        if not self.compact:
            return
        rank, builder = self.rank, self.builder
        if self.kept is None:
            self.kept = "kept gradients"
            for index, group in enumerate(self.partitions.groups):
                builder.alloc(f"{self.kept} {index}", "gradients", 4 * group.size, lane=rank.lane)
            elementwise(builder, rank.lane, "fill", "backward", 0, 4 * self.partitions.size, micro=rank.micro)
        elements = sum(kept.values())
        elementwise(
            builder, rank.lane, "accumulate", "backward", (rank.comm_size + 8) * elements, 8 * elements,
            launches=2 * len(kept), micro=rank.micro, temp_peak=4 * max(kept.values()),
        )  # fmt: skip

    def keep(self, param: int) -> None:
        """copy_grads_in_partition: the bucket will be overwritten. Without contiguous gradients they stay put."""
        rank, builder = self.rank, self.builder
        if self.compact:
            rank.drop(param)
        elif rank.contiguous:
            self._allocate_fresh()
            nbytes = rank.numel[param] * rank.grad_size
            elementwise(builder, rank.lane, "copy", "backward", nbytes, nbytes, micro=rank.micro)
            rank.drop(param)

    def _allocate_fresh(self) -> None:
        if self.fresh is None:
            self.fresh = "kept gradients" if self.kept is None else "fresh gradients"
            sizes = [elements * self.rank.grad_size for elements in self.partitions.touched]
            if self._one_buffer:
                self.builder.alloc(self.fresh, "gradients", sum(sizes), lane=self.rank.lane)
                return
            for index, nbytes in enumerate(sizes):
                self.builder.alloc(f"{self.fresh} {index}", "gradients", nbytes, lane=self.rank.lane)

    @property
    def _one_buffer(self) -> bool:
        """copy_grads_in_partition: grads_in_partition holds the gradients of all groups."""
        return self.rank.contiguous and not self.compact

    def _drop(self, key: str, index: int) -> None:
        """Group `index` has done with `key`; with a buffer that all have, the last one gives it back."""
        if not self._one_buffer:
            self.builder.free(f"{key} {index}")
        elif index == len(self.partitions.groups) - 1:
            self.builder.free(key)

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue: keep what was reduced, or add it to what is kept."""
        rank, builder = self.rank, self.builder
        if self.compact:
            return
        if not rank.contiguous:  # the same tensors, known to the optimizer instead of the model
            for param in self.partitions.fullest:
                rank.drop(param)
            self._allocate_fresh()
        if self.kept is None:
            self.kept, self.fresh = self.fresh, None
        elif self.fresh is not None:
            nbytes = sum(self.partitions.touched) * rank.grad_size
            elementwise(
                builder, COMPUTE, "accumulate", "backward", 2 * nbytes, nbytes,
                launches=len(self.partitions.fullest), micro=rank.micro,
            )  # fmt: skip
            for index in range(len(self.partitions.groups)):
                self._drop(self.fresh, index)
            self.fresh = None
        if self.muon and rank.boundary:
            self._orthogonalize()

    def _orthogonalize(self) -> None:
        """get_flat_partition: Muon's updates take the place of whole gradients; the momentum is kept twice, so that a
        step can be dropped."""
        builder, rank = self.builder, self.rank
        for index, kept in enumerate(self.partitions.kept):
            if not kept or not self.muon.issuperset(kept):
                continue
            shapes = [rank.model.parameters[param].shape for param in kept]
            nbytes = self.partitions.touched[index] * rank.grad_size
            if not self.momentum:
                builder.alloc(f"momentum {index}", "optimizer_states", nbytes)
                builder.alloc(f"next momentum {index}", "optimizer_states", nbytes)
            elementwise(builder, COMPUTE, "copy", "backward", nbytes, nbytes, micro=rank.micro)
            builder.alloc(f"updates {index}", "gradients", nbytes)
            orthogonalize(builder, shapes, self.plan, rank.grad_size, "backward", rank.micro)
            self.updates[index] = f"updates {index}"
        self.momentum = True

    def step(self, first: bool) -> None:
        builder, plan, numel = self.builder, self.plan, self.partitions.size
        assert self.kept is not None
        kept_bytes = numel * self.accum_size
        count = len(self.partitions.fullest)
        if plan.dtype == "float16" or (plan.dtype == "bfloat16" and plan.check_grad_overflow):
            # has_inf_or_nan: a maximum and a minimum of every gradient
            elementwise(builder, COMPUTE, "grad_norm", "optimizer", 2 * kept_bytes, 0, launches=4 * count)
            builder.host_wait(collective(builder, COMPUTE, "all_reduce", "uint8", 1, 1, "optimizer", "overflow"))
        # get_grad_norm_direct: every gradient in float64, one sum over ranks per group
        for group, kept in zip(self.partitions.groups, self.partitions.kept, strict=True):
            elementwise(
                builder, COMPUTE, "grad_norm", "optimizer", (self.accum_size + 8) * group.size, 8 * group.size,
                launches=2 * len(kept), temp_peak=8 * max(kept.values(), default=0),
            )  # fmt: skip
            event = collective(builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm")
        event = self.rank.average_expert_norms() or event
        if plan.dtype != "bfloat16" or plan.check_grad_overflow:  # is_invalid_grad_norm
            builder.host_wait(event)
        for index, group in enumerate(self.partitions.groups):
            self._update(index, group.size, first)
        self.kept = None

    def _update(self, index: int, numel: int, first: bool) -> None:
        """One parameter group after the other."""
        builder, plan = self.builder, self.plan
        updates = self.updates.pop(index, None)
        gradients = self._flat_gradients(index, numel)
        if updates:
            builder.free(updates)
        if self.kept and not self.compact:
            self._drop(self.kept, index)  # free_grad_in_param_list
        if plan.grad_clip or plan.dtype == "float16":  # unscale_and_clip_grads
            elementwise(builder, COMPUTE, "scale", "optimizer", self.master_size * numel, self.master_size * numel)
        if updates:
            builder.launch(COMPUTE, "muon", "optimizer", Compute(applied(numel, 4)))
        else:
            self._adam(index, numel, first and not steps_at_start(plan))
        builder.free(gradients)
        elementwise(builder, COMPUTE, "cast", "optimizer", self.master_size * numel, dtype_bytes(plan.dtype) * numel)

    def _adam(self, index: int, numel: int, first: bool) -> None:
        aux, dtype = auxiliary(self.plan.optimizer), master_dtype(self.plan)
        update(self.builder, aux, [numel], dtype, first=first, key=f"optimizer:{index}")

    def _flat_gradients(self, index: int, numel: int) -> str:
        """Flattened in the accumulation's dtype (a copy, but for the compact partition), cast to the master weights'
        (another)."""
        builder, flat = self.builder, f"{self.kept} {index}"
        if not self.compact:
            flat = "flat gradients"
            builder.alloc(flat, "gradients", numel * self.accum_size)
            elementwise(builder, COMPUTE, "copy", "optimizer", numel * self.accum_size, numel * self.accum_size)
        if self.accum_size == self.master_size:
            return flat
        builder.alloc("cast gradients", "gradients", self.master_size * numel)
        elementwise(builder, COMPUTE, "cast", "optimizer", numel * self.accum_size, self.master_size * numel)
        builder.free(flat)
        return "cast gradients"
