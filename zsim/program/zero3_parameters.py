"""The parameters of ZeRO-3 on one rank: shards, gathers on their own stream, what a module waits for, releases.

DeepSpeed 0.19.8: runtime/zero/partition_parameters.py (all_gather_coalesced, AllGather*Handle, _partition) and the
part of partitioned_param_coordinator.py that touches streams and events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from zsim.model.spec import ModelSpec
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import collective, dtype_bytes, elementwise, overlaps, sub_groups, trainable
from zsim.program.nvme import ParametersOnNvme
from zsim.program.ops import ALL_GATHER, COMPUTE, D2H, H2D, Copy, copy_of
from zsim.program.zero3_coordinator import Params
from zsim.program.zero3_gather import Gather
from zsim.program.zero3_mics import SHARDS, gather_mics
from zsim.program.zero3_quantized import QuantizedGathers

if TYPE_CHECKING:
    from zsim.program.experts import Places

MAX_ONGOING_FETCH_EVENTS = 2  # PartitionedParameterCoordinator.__max_ongoing_fetch_events


class Parameters:
    """`shard[p]` = ceil(numel / world) elements: each parameter is padded by itself."""

    def __init__(self, builder: Builder, model: ModelSpec, plan: DeepSpeedPlan) -> None:
        self.builder, self.plan = builder, plan
        self.mics = plan.mics_shard_size > 0
        self.world = plan.mics_shard_size if self.mics else plan.world_size  # ranks that share a parameter
        self.home = SHARDS if self.mics else "world"  # their group
        self.numel = [parameter.numel for parameter in model.parameters]
        self.homes = [self.home if self.mics else parameter.home for parameter in model.parameters]
        self.shard = [ceil(numel / self.ranks(home)) for numel, home in zip(self.numel, self.homes, strict=True)]
        self.places = _places(model) if plan.autoep_size else None
        self.trainable = trainable(model)
        self.size = dtype_bytes(plan.dtype)
        self.nvme = None
        if plan.offload_param == "nvme":
            groups = sub_groups(model, plan, self.shard)
            self.nvme = ParametersOnNvme(builder, plan, self.numel, self.shard, groups)
        # parameter_offload.py: __allgather_stream is the default stream unless overlap_comm
        self.stream = ALL_GATHER if overlaps(plan) else COMPUTE
        self.quantized = QuantizedGathers(self, model)
        self.hpz = plan.zero_hpz_partition_size if plan.zero_hpz_partition_size > 1 else 0
        self.secondary: set[int] = set()  # parameters that have a shard over the small hpZ group
        self.micro = 0
        self.fast: frozenset[str] = frozenset()  # leaves under fast_sharding_for_leaf_module: no events, no waits
        self._inflight: dict[int, Gather] = {}
        self._views: dict[int, Gather] = {}  # parameters that live inside a flat buffer
        self._buffers: dict[int, str] = {}  # of parameters that are gathered
        self._held: dict[int, str] = {}  # those that autograd has saved a view of
        self._flats = 0
        self.events: deque[int] = deque()  # __ongoing_fetch_events

    def allocate(self) -> None:
        if self.nvme:
            self.nvme.allocate()
        elif self.plan.offload_param:
            self._allocate_on_host()
        else:
            nbytes = sum(self.quantized.nbytes(param, shard) for param, shard in enumerate(self.shard))
            self.builder.alloc("parameter shards", "parameters", nbytes)
        for param in range(len(self.numel)) if self.hpz else ():
            self._alloc_secondary(param)

    def _allocate_on_host(self) -> None:
        """partition_parameters.py _partition_param makes, and may pin, a tensor of each shard. stage3.py
        _create_param_groups_fp16_flat_cpu_memory, always pinned, takes the trained ones only; torch keeps the pinned
        blocks that those leave for good."""
        builder, pinned, sizes = self.builder, self.plan.offload_param_pin_memory, [n * self.size for n in self.shard]
        own = [builder.pinned_bytes(nbytes) if pinned else nbytes for nbytes in sizes]
        if self.trainable:
            flat = builder.pinned_bytes(sum(sizes[param] for param in self.trainable))
            builder.alloc("parameter shards", "parameters", flat, "host")
            if pinned:
                builder.alloc("shards as first pinned", "buffers", sum(own[param] for param in self.trainable), "host")
        if frozen := set(range(len(own))).difference(self.trainable):
            builder.alloc("frozen shards", "parameters", sum(own[param] for param in frozen), "host")

    # ---- gather ----------------------------------------------------------------------------------------------------
    def gather(self, params: Params, module: str, phase: str) -> None:
        """__all_gather_params: those stored in int8, then the others; of each those with an hpZ shard and those
        without, in one call each, ordered by id."""
        stored = self.quantized.stored
        kinds = [(params, self.plan.zero_quantized_weights)]
        if stored:
            kinds = [
                (tuple(param for param in params if param in stored), True),
                (tuple(param for param in params if param not in stored), self.plan.zero_quantized_weights),
            ]
        for some, quantize in kinds:
            if self.hpz:
                small = tuple(param for param in some if param in self.secondary)
                self._gather(small, "hpz", module, phase, quantize)
                some = tuple(param for param in some if param not in self.secondary)
            if self.places:
                self._gather_by_home(some, module, phase, quantize)
            else:
                self._gather(some, self.home, module, phase, quantize)

    def _gather_by_home(self, params: Params, module: str, phase: str, quantize: bool) -> None:
        """all_gather_coalesced, of parameters that not the same ranks share: a call each, which are waited for as one.

        DeepSpeed goes through them as a Python set happens to lie, here it is by number.
        """
        for home in dict.fromkeys(self.homes[param] for param in params):
            self._gather(tuple(p for p in params if self.homes[p] == home), home, module, phase, quantize)
        together = tuple({id(gather): gather for param in params if (gather := self._inflight.get(param))}.values())
        for gather in together if len(together) > 1 else ():
            gather.together = together

    def _gather(self, params: Params, group: str, module: str, phase: str, quantize: bool) -> None:
        if not params:
            return
        if self.ranks(group) == 1:
            if self.plan.offload_param:
                self._copy(params, module, phase)
            elif group != self.home:  # NoGatherHandle: there already, but whoever waits for it synchronizes the stream
                gather = Gather(params, self.builder.last(self.stream), None, len(params), alone=True)
                self._inflight.update(dict.fromkeys(params, gather))
            return
        if self.nvme:
            self.nvme.fetch(params, phase, self.micro)
        if self.mics:
            self._inflight.update(dict.fromkeys(params, gather_mics(self, params, module, phase)))
            return
        for some in zip(params) if self.plan.stage3_allgather_sequential else (params,):
            if quantize:
                self._gather_quantized(some, group, module, phase)
            elif len(some) == 1:
                self._gather_alone(some[0], group, module, phase)
            else:
                self._gather_coalesced(some, group, module, phase)

    def _gather_quantized(self, params: Params, group: str, module: str, phase: str) -> None:
        event, key, sent = self.quantized.start(params, group, module, phase)
        gather = Gather(params, event, key, len(params), ranks=self.ranks(group), sent=sent)
        self._inflight.update(dict.fromkeys(params, gather))

    def _copy(self, params: Params, module: str, phase: str) -> None:
        """_no_gather_coalesced: the shard is the parameter, `.to(device, non_blocking=True)`."""
        if self.nvme:
            self.nvme.fetch(params, phase, self.micro)
        for param in params:
            self.builder.alloc(self.full(param), "all_gather_buffers", self.numel[param] * self.size, lane=self.stream)
            if not (self.nvme and self.nvme.on_gpu(param)):
                self.builder.wait_stream(H2D, ALL_GATHER)
                work = copy_of("h2d", self.numel[param] * self.size)
                event = self.builder.launch(H2D, "fetch shard", phase, work, module=module, micro=self.micro)
                self._inflight[param] = Gather((param,), event, None, 1)

    def unread(self, param: int) -> bool:
        """Whether its shard lies on NVMe and nobody is reading it."""
        return self.nvme is not None and self.nvme.unread(param)

    def read_ahead(self, upcoming: Iterator[int], phase: str) -> None:
        """__prefetch_nvme_param_partitions: past twice the elements that are being gathered nothing is read."""
        assert self.nvme
        considered, in_flight = 0, sum(self.numel[param] for param in self._inflight)
        ahead: list[int] = []
        for param in upcoming:
            if considered > 2 * in_flight or len(ahead) >= self.nvme.free_buffers:
                break
            if self.nvme.unread(param):
                ahead.append(param)
            considered += self.numel[param]
        self.nvme.start(ahead, phase, self.micro)

    def _gather_alone(self, param: int, group: str, module: str, phase: str) -> None:
        """_all_gather_sequential: straight into the parameter's own buffer."""
        ranks = self.ranks(group)
        part = self.part(param, ranks)
        self.builder.alloc(self.full(param), "all_gather_buffers", part * ranks * self.size, lane=self.stream)
        self.to_device((param,), group, module, phase)
        event = self.call("all_gather", part, part * ranks, group, module, phase)
        self._inflight[param] = Gather((param,), event, None, 1)

    def _gather_coalesced(self, params: Params, group: str, module: str, phase: str) -> None:
        """_all_gather_coalesced: one flat buffer, copied apart when the first of them is waited for.

        With use_all_reduce_for_fetch_params a sum over ranks of a buffer that is zero outside the own shards,
        in which the parameters stay.
        """
        ranks = self.ranks(group)
        part = sum(self.part(param, ranks) for param in params)
        reduce = self.plan.use_all_reduce_for_fetch_params and group == "world"
        flat = self.new_key("flat")
        self.builder.alloc(flat, "all_gather_buffers", part * ranks * self.size, lane=self.stream)
        self.to_device(params, group, module, phase)
        shard_bytes = part * self.size
        elementwise(
            self.builder, ALL_GATHER, "copy", phase, shard_bytes, shard_bytes + reduce * shard_bytes * ranks,
            module=module, micro=self.micro,
        )  # fmt: skip
        if reduce:
            event = self.call("all_reduce", part * ranks, part * ranks, group, module, phase)
        else:
            event = self.call("all_gather", part, part * ranks, group, module, phase)
        gather = Gather(params, event, flat, len(params))
        for param in params:
            self._inflight[param] = gather
            if reduce:
                self._views[param] = gather

    def begin_step(self) -> None:
        """Keys of equal steps are equal."""
        self._flats = 0

    def new_key(self, kind: str) -> str:
        self._flats += 1
        return f"{kind}:{self._flats}"

    def ranks(self, group: str) -> int:
        return self.world if group == self.home else self.hpz if group == "hpz" else self.plan.sharing(group)

    def part(self, param: int, ranks: int) -> int:
        return self.shard[param] * (self.ranks(self.homes[param]) // ranks)

    def to_device(self, params: Params, group: str, module: str, phase: str) -> None:
        """offload_param: `.to(device)` of each shard, a blocking copy, on the all-gather stream."""
        if not self.plan.offload_param:
            return
        for param in params:
            nbytes = self.part(param, self.ranks(group)) * self.size
            if self.nvme and self.nvme.on_gpu(param):
                continue
            self.builder.wait_stream(H2D, ALL_GATHER)
            event = self.builder.launch(
                H2D, "fetch shard", phase, copy_of("h2d", nbytes), module=module, micro=self.micro
            )
            self.builder.host_wait(event)
            self.builder.stream_wait(ALL_GATHER, event)

    def call(
        self, kind: str, in_numel: int, out_numel: int, group: str, module: str, phase: str, dtype: str | None = None
    ) -> int:
        if not overlaps(self.plan):  # the all-gather stream is the default stream: the call comes after its kernels
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
        return collective(
            self.builder, ALL_GATHER, kind, dtype or self.plan.dtype, in_numel, out_numel, phase, "gather parameters",
            group=group, module=module, micro=self.micro,
        )  # fmt: skip

    # ---- wait and release --------------------------------------------------------------------------------------------
    def wait(self, params: Params, module: str, phase: str) -> None:
        """fetch_sub_module: compute waits for the module's parameters, the host for the third last wait before."""
        for param in params:
            gather = self._inflight.pop(param, None)
            if gather is None:
                continue
            if len(self.events) > MAX_ONGOING_FETCH_EVENTS:
                self.builder.host_wait(self.events.popleft())
            for other in gather.together or (gather,):
                if not other.done:
                    self._complete(other, module, phase)
            gather.unfetched -= 1
            if gather.flat and gather.unfetched == 0 and param not in self._views:
                for key in self.quantized.buffers(gather) if gather.ranks else (gather.flat,):
                    self.builder.free(key)
            if module not in self.fast:
                self.events.append(gather.event)
            if self.world == 1:  # NoGatherHandle.wait synchronizes the stream
                self.builder.host_wait(gather.event)
            self.builder.stream_wait(COMPUTE, gather.event)

    def clean(self, params: Params, module: str, phase: str) -> None:
        """_clean_inflight_param_registry: flat buffers go when all is released."""
        gathers = {param: self._inflight.pop(param) for param in params if param in self._inflight}
        for param, gather in gathers.items():
            if not gather.done:
                self._complete(gather, module, phase)
            self.builder.stream_wait(COMPUTE, gather.event)
            self.free((param,))
        for flat in dict.fromkeys(gather.flat for gather in gathers.values() if gather.flat):
            self.builder.free(flat)

    def _complete(self, gather: Gather, module: str, phase: str) -> None:
        """AllGatherCoalescedHandle.wait: all parameters of the flat buffer are copied out of it, the later ones too."""
        gather.done = True
        if gather.alone:
            self.builder.host_wait(self.builder.last(self.stream))
            return
        if gather.ranks:
            gather.event = self.quantized.complete(gather, module, phase)
            return
        if gather.flat is None or gather.params[0] in self._views:
            return
        nbytes = 0
        for param in gather.params:
            self.builder.alloc(self.full(param), "all_gather_buffers", self.numel[param] * self.size, lane=self.stream)
            nbytes += self.numel[param] * self.size
        gather.event = elementwise(
            self.builder, ALL_GATHER, "copy", phase, nbytes, nbytes,
            launches=len(gather.params), module=module, micro=self.micro,
        )  # fmt: skip

    def full(self, param: int) -> str:
        """A key for the buffer that `param` is gathered into, beside the one that may still be held."""
        first = f"full:{param}"
        self._buffers[param] = f"regathered:{param}" if self._held.get(param) == first else first
        return self._buffers[param]

    def free(self, params: Params, held: Collection[int] = (), *, at_once: bool = False) -> None:
        """param.partition: the shard exists already, so only the full parameter goes, once compute is done with it.

        Of those in `held` autograd has saved a view: their buffers stay until `drop`.
        `at_once`: the parameter's tensor is replaced instead, and no stream is recorded.
        """
        for param in params:
            if self.hpz and param not in self.secondary:
                self._make_secondary(param)
            if self.nvme:
                self.nvme.release(param)
            if self.ranks(self.homes[param]) == 1 and not self.plan.offload_param:
                continue
            key, view = self._buffers.get(param, ""), self._views.pop(param, None)
            viewed = view is not None and any(self._views.get(other) is view for other in view.params)
            if view is not None:
                key = view.flat or ""
            if param in held and param not in self._held:
                self._held[param] = key
            elif not viewed and key not in self._held.values():
                self.builder.free(key, after=None if at_once else self.builder.last(COMPUTE))

    def drop(self, params: Iterable[int]) -> None:
        """Autograd has run what it had saved a view of `params` for."""
        for param in params:
            key = self._held.pop(param, None)
            if not key or key in self._held.values():
                continue
            if not any(view.flat == key for view in self._views.values()):
                self.builder.free(key, after=self.builder.last(COMPUTE))

    def gather_persistent(self, params: Params) -> None:
        """_allgather_params_coalesced after the optimizer step: one call each, then the device is synchronized."""
        self.events.clear()  # the host has waited for the gradient norm, and with it for every gather before
        if self.world == 1 and self.plan.offload_param and params:
            self._copy(params, "", "optimizer")
            self._inflight.clear()
            self.builder.host_wait(None)
        if self.world == 1 or not params:
            return
        if not self.plan.stage3_allgather_sequential:
            params = tuple(sorted(params, key=self.quantized.stored.__contains__))
        for param in self.places.by_home(params, self.homes) if self.places else params:
            if param in self.quantized.stored:
                self.quantized.gather_persistent(param)
                continue
            home = self.homes[param]
            if self.ranks(home) == 1:
                continue
            full = self.shard[param] * self.ranks(home)
            self.builder.alloc(self.full(param), "all_gather_buffers", full * self.size)
            self.to_device((param,), home, "", "optimizer")
            self.builder.wait_stream(ALL_GATHER, COMPUTE)
            self.call("all_gather", self.shard[param], full, home, "", "optimizer")
        self.builder.host_wait(None)

    # ---- hpZ ---------------------------------------------------------------------------------------------------------
    def _make_secondary(self, param: int) -> None:
        """_partition_param_sec: the first release cuts a shard over the small group and waits for the copy."""
        self._alloc_secondary(param)
        nbytes = self.part(param, self.hpz) * self.size
        if self.plan.offload_param:
            self.builder.wait_stream(D2H, COMPUTE)
            copy = Copy("d2h", nbytes, pinned=self.plan.offload_param_pin_memory)
            event = self.builder.launch(D2H, "store second shard", "backward", copy, micro=self.micro)
        else:
            event = elementwise(
                self.builder, COMPUTE, "copy", "backward", nbytes, 2 * nbytes, launches=2, micro=self.micro
            )
        self.builder.host_wait(event)

    def _alloc_secondary(self, param: int) -> None:
        self.secondary.add(param)
        nbytes = self.quantized.nbytes(param, self.part(param, self.hpz))
        if self.plan.offload_param:  # on the device of the first shards
            pinned = self.plan.offload_param_pin_memory
            nbytes = self.builder.pinned_bytes(nbytes) if pinned else nbytes
            self.builder.alloc(f"secondary:{param}", "parameters", nbytes, "host")
        else:
            self.builder.alloc(f"secondary:{param}", "parameters", nbytes)

    def drop_secondary(self) -> None:
        """invalidate_secondary_tensor after the step: trainable parameters have changed."""
        for param in self.trainable:
            if param in self.secondary:
                self.secondary.remove(param)
                self.builder.free(f"secondary:{param}")


def _places(model: ModelSpec) -> Places:
    from zsim.program.experts import Places

    return Places(model)
