"""Muon in ZeRO-3 of DeepSpeed 0.19.8 (runtime/zero/stage3.py): before the norm, gradients become its updates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from zsim.program.deepspeed import collective, comm_dtype, elementwise
from zsim.program.muon import orthogonalize
from zsim.program.ops import COMPUTE

if TYPE_CHECKING:
    from zsim.program.zero3_gradients import Gradients

MUON_CACHE = 256 << 20  # _muon_allgather_max_cached_bytes


class Zero3Muon:
    """Of one rank; without Muon it has no matrices (`hidden`) and does nothing."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.builder, self.plan = gradients, gradients.builder, gradients.plan
        self.hidden = gradients.hidden
        self.packed: list[int] = []  # sizes of the buffers that are kept

    def allocate(self, sub_groups: Sequence[Sequence[int]]) -> None:
        """_create_momentum_buffer"""
        own = [param for group in self._own(sub_groups) for param in group]
        if own:
            nbytes = sum(self.gradients.shard[param] for param in own) * self.gradients.comm_size
            self.builder.alloc("momentum", "optimizer_states", nbytes)

    def step(self, sub_groups: Sequence[Sequence[int]]) -> None:
        """_apply_muon_to_accumulated_grads: as many matrices at a time as a reduction bucket has room for."""
        numel = self.gradients.numel
        for group in self._own(sub_groups):
            chunk: list[int] = []
            for param in group:
                if chunk and sum(numel[other] for other in chunk) + numel[param] > self.plan.reduce_bucket_size:
                    self._chunk(chunk)
                    chunk = []
                chunk.append(param)
            self._chunk(chunk)

    def _own(self, sub_groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [group for group in sub_groups if self.hidden.issuperset(group)]

    def _chunk(self, chunk: list[int]) -> None:
        """_muon_update_sub_group: gradients and momentum are gathered whole; ranks take a matrix each in turn and
        gather what the others made of theirs, padded where shapes differ."""
        builder, gradients, world = self.builder, self.gradients, self.gradients.parameters.world
        size, dtype = gradients.comm_size, comm_dtype(self.plan)
        part = sum(self.gradients.shard[param] for param in chunk)
        held = []
        for what in ("gradients", "momentum"):
            packed = self._pack(part * size * (world + 1))
            elementwise(builder, COMPUTE, "copy", "optimizer", part * size, part * size, launches=len(chunk))
            if world > 1:
                collective(builder, COMPUTE, "all_gather", dtype, part, part * world, "optimizer", f"gather {what}")
            held.append(f"whole {what}")
            builder.alloc(held[-1], "all_gather_buffers", part * world * size)
            nbytes = part * world * size
            elementwise(builder, COMPUTE, "copy", "optimizer", nbytes, nbytes, launches=world * len(chunk))
            if packed:
                builder.free(packed)
        for start in range(0, len(chunk), world):
            params = chunk[start : start + world]
            shapes = [gradients.shapes[param] for param in params]
            hardest = max(shapes, key=lambda shape: prod(shape) * min(shape[-2:]))  # the others wait for it
            orthogonalize(builder, [hardest], self.plan, size, "optimizer")
            largest = max(gradients.numel[param] for param in params)
            uniform = len(params) == world and len(set(shapes)) == 1
            if not uniform:
                builder.alloc("padded", "all_gather_buffers", 2 * largest * size * (world + 1))
            for what in ("gradients", "momentum"):
                collective(
                    builder, COMPUTE, "all_gather", dtype, largest, largest * world, "optimizer", f"gather {what}"
                )
            if not uniform:
                builder.free("padded")
        elementwise(builder, COMPUTE, "copy", "optimizer", 2 * part * size, 2 * part * size, launches=2 * len(chunk))
        for key in held:
            builder.free(key)

    def _pack(self, nbytes: int) -> str | None:
        """_partitioned_buffers_all_gather: what a rank packs and what is gathered of it. Up to `MUON_CACHE` bytes of
        that are kept for later; returns the key of what is not."""
        if nbytes in self.packed:
            return None
        keep = sum(self.packed) + nbytes <= MUON_CACHE
        key = f"packed {len(self.packed)}" if keep else "packed"
        self.builder.alloc(key, "all_gather_buffers", nbytes)
        if keep:
            self.packed.append(nbytes)
        return None if keep else key
