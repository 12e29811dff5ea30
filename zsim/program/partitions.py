"""The flat parameter buffers of DeepSpeed stages 1 and 2 and their partitions (0.19.8, stage_1_and_2.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from zsim.model.kernels import EXPERT_DATA_PARALLEL
from zsim.model.spec import ModelSpec
from zsim.plan.spec import DeepSpeedPlan


@dataclass(frozen=True)
class Flat:
    """A group's flat buffer: parameters in `order`, padded at the end, in `world` partitions of `size` elements.

    `home`: the group of ranks that has one partition each; of all ranks, rank r has number r // `stride` % `world`.
    """

    order: tuple[int, ...]
    numel: Sequence[int]
    world: int
    home: str = "world"
    stride: int = 1

    def of(self, rank: int) -> int:
        """The partition of a rank."""
        return rank // self.stride % self.world

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
    def touched(self) -> list[dict[int, int]]:
        """Per partition: its parameters -> elements of them inside it."""
        touched: list[dict[int, int]] = [{} for _ in range(self.world)]
        for param in self.order:
            for owner, elements in self.slices(param):
                touched[owner][param] = elements
        return touched


@dataclass(frozen=True)
class Partitions:
    """The flat buffers of `ranks` ranks, one per parameter group of the optimizer; a rank owns a partition of each."""

    groups: tuple[Flat, ...]
    ranks: int

    @property
    def size(self) -> int:
        """Elements that a rank owns."""
        return sum(group.size for group in self.groups)

    def slices(self, param: int) -> Iterator[tuple[int, int]]:
        return self.group[param].slices(param)

    @cached_property
    def group(self) -> dict[int, Flat]:
        return {param: group for group in self.groups for param in group.order}

    @cached_property
    def fullest(self) -> dict[int, int]:
        """Parameters of the rank that touches the most elements -> elements inside its partitions.

        Ranks differ only in this: a parameter that crosses a boundary is kept whole on both sides.
        """
        return {param: elements for kept in self.kept for param, elements in kept.items()}

    @property
    def kept(self) -> list[dict[int, int]]:
        """The same, per group."""
        return [group.touched[group.of(self.fullest_rank)] for group in self.groups]

    @cached_property
    def fullest_rank(self) -> int:
        return max(range(self.ranks), key=lambda rank: sum(map(sum, self._whole(rank))))

    @property
    def touched(self) -> list[int]:
        """Per group: elements of the parameters of the fullest rank, each counted whole."""
        return [sum(numels) for numels in self._whole(self.fullest_rank)]

    def _whole(self, rank: int) -> list[list[int]]:
        return [[group.numel[param] for param in group.touched[group.of(rank)]] for group in self.groups]


def partition(model: ModelSpec, groups: Sequence[Sequence[int]], plan: DeepSpeedPlan) -> Partitions:
    numel = [parameter.numel for parameter in model.parameters]
    return Partitions(tuple(_flat(model, params, numel, plan) for params in groups), plan.world_size)


def _flat(model: ModelSpec, params: Sequence[int], numel: Sequence[int], plan: DeepSpeedPlan) -> Flat:
    """_round_robin_reorder gives every world-th parameter to the same partition."""
    home = model.parameters[params[0]].home
    world = plan.sharing(home)
    if plan.round_robin_gradients:
        params = [param for first in range(world) for param in params[first::world]]
    apart = home == EXPERT_DATA_PARALLEL and not plan.use_data_before_expert_parallelism
    return Flat(tuple(params), numel, world, home, plan.autoep_size if apart else 1)
