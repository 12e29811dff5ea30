"""The flat parameter buffer of DeepSpeed stages 1 and 2 and its partitions (0.19.8, stage_1_and_2.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from zsim.plan.spec import DeepSpeedPlan


@dataclass(frozen=True)
class Partitions:
    """The flat buffer: parameters in `order`, padded at its end and cut into `world` partitions of `size` elements."""

    order: tuple[int, ...]
    numel: Sequence[int]
    world: int

    @cached_property
    def offset(self) -> dict[int, int]:
        offsets, total = {}, 0
        for param in self.order:
            offsets[param] = total
            total += self.numel[param]
        return offsets

    @cached_property
    def size(self) -> int:
        """nccl_start_alignment_factor = 2: the whole buffer is a multiple of 2 x world elements."""
        total = sum(self.numel[param] for param in self.order)
        return ceil(total / (2 * self.world)) * 2

    def slices(self, param: int) -> Iterator[tuple[int, int]]:
        """(partition, elements) of a parameter, which may cross into the next partitions."""
        start, end = self.offset[param], self.offset[param] + self.numel[param]
        while start < end:
            owner = start // self.size
            stop = min(end, (owner + 1) * self.size)
            yield owner, stop - start
            start = stop

    @cached_property
    def fullest(self) -> dict[int, int]:
        """Parameters of the partition that touches the most elements -> elements inside it.

        Ranks differ only in this: a parameter that crosses a boundary is kept whole on both sides.
        """
        return self._touched[self.fullest_rank]

    @cached_property
    def fullest_rank(self) -> int:
        return max(range(self.world), key=lambda rank: sum(self.numel[param] for param in self._touched[rank]))

    @cached_property
    def _touched(self) -> list[dict[int, int]]:
        touched: list[dict[int, int]] = [{} for _ in range(self.world)]
        for param in self.order:
            for owner, elements in self.slices(param):
                touched[owner][param] = elements
        return touched


def partition(params: Sequence[int], numel: Sequence[int], plan: DeepSpeedPlan) -> Partitions:
    """_round_robin_reorder gives every world-th parameter to the same partition."""
    world = plan.world_size
    if plan.round_robin_gradients:
        params = [param for first in range(world) for param in params[first::world]]
    return Partitions(tuple(params), numel, world)
