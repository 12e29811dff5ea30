"""FSDP2 that gathers weights in float8: torchao 0.18 float8/fsdp_utils.py, `WeightWithDynamicFloat8CastTensor`.

A shard is cast on the stream of the copy-in, by operators of torch's own, with the largest magnitude of all shards: an
all-reduce for every weight in every gather, or one for all weights after the optimizer's step
(`precompute_float8_dynamic_scale_for_fsdp`), from the second step on.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError, NotModeled
from zsim.model.kernels import Memory
from zsim.model.spec import Module, Workload
from zsim.plan.spec import Fsdp2Plan
from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, COPY_IN, Collective, Compute
from zsim.program.walk import modules_in_order

LABEL = "float8"
_SCALE = 6  # launches: the magnitude in float64, clamped, the largest number over it in two steps, in float32


def gathered_in_float8(tree: Module, plan: Fsdp2Plan, workload: Workload, shards: int) -> frozenset[int]:
    """Parameters whose shards travel in a byte per element. Raises InputError for what torch refuses, NotModeled."""
    if workload.float8 is None or not workload.float8.all_gather:
        return frozenset()
    if type(plan.reshard_after_forward) is int:  # _fsdp_param.py all_gather_inputs: NotImplementedError
        why = "torch refuses to reshard to fewer ranks what is gathered in float8"
        raise InputError(why, field="reshard_after_forward", accepted="true, false")
    if plan.cpu_offload or shards == 1:
        what = "offloaded to the host" if plan.cpu_offload else "whole on each rank"
        raise NotModeled(f"weights gathered in float8 that are {what}", field="float8.all_gather", accepted="false")
    modules = [module for module in modules_in_order(tree) if module.module_class == "Float8Linear"]
    return frozenset(param for module in modules for param in module.params)


class Float8Shards:
    """Casts of one rank's shards. `group`: of the ranks that hold them."""

    def __init__(self, builder: Builder, plan: Fsdp2Plan, store_size: int, group: str, *, precompute: bool) -> None:
        self.builder, self.plan, self.store_size, self.group = builder, plan, store_size, group
        self.precompute, self.known = precompute, False

    def cast(self, unit: str, numels: Sequence[int], phase: str, micro: int) -> None:
        """fsdp_pre_all_gather of each weight of a unit."""
        builder, size = self.builder, self.store_size
        for number, numel in enumerate(numels):
            full = numel * size
            if not self.known:
                amax = Memory(LABEL, 2 * full, full, 2)  # abs, max
                self._launch("float8 amax", amax, unit, phase, micro, full)
                work = Collective("all_reduce", self.plan.storage_dtype, 1, 1, self.group, "MAX")
                builder.launch(COPY_IN, "float8 amax all-reduce", phase, work, module=unit, micro=micro)
            builder.alloc(f"float8 shard:{unit}:{number}", "all_gather_buffers", numel, lane=COPY_IN)
            wide = 0 if size == 4 else 4 * numel  # a copy in float32
            launches = 3 + bool(wide) + (0 if self.known else _SCALE)
            cast = Memory(LABEL, full + wide + 8 * numel, wide + 9 * numel, launches)
            self._launch("float8 cast", cast, unit, phase, micro, 8 * numel)

    def free(self, unit: str, count: int) -> None:
        for number in range(count):
            self.builder.free(f"float8 shard:{unit}:{number}")

    def after_step(self, numels: Sequence[int]) -> None:
        """precompute_float8_dynamic_scale_for_fsdp: norms of all, stacked, and one all-reduce."""
        if not self.precompute:
            return
        read = sum(numels) * self.store_size
        self.builder.launch(COMPUTE, "float8 scales", "optimizer", Compute((Memory(LABEL, read, 4 * len(numels), 2),)))
        work = Collective("all_reduce", self.plan.storage_dtype, len(numels), len(numels), self.group, "MAX")
        self.builder.launch(COMPUTE, "float8 scales all-reduce", "optimizer", work)
        self.builder.launch(
            COMPUTE, "float8 scales", "optimizer", Compute((Memory(LABEL, 0, 8 * len(numels), _SCALE),))
        )
        self.known = True

    def _launch(self, label: str, work: Memory, unit: str, phase: str, micro: int, temporary: int) -> None:
        self.builder.launch(
            COPY_IN, label, phase, Compute((work,)), module=unit, micro=micro, temp_peak=temporary,
            temp_category="all_gather_buffers",
        )  # fmt: skip
