"""ZeRO++ in DeepSpeed 0.19.8: weights gathered in int8 (qwZ), gradients reduced in int4 (qgZ).

runtime/zero/partition_parameters.py (CUDAQuantizer and the quantized branches of gathers and their handles) and
runtime/comm/coalesced_collectives.py. The kernels know float16 alone, so that weights of any other type are cast before
and after; gradients are not cast.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zsim.errors import InputError
from zsim.model.spec import ModelSpec
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import collective, elementwise
from zsim.program.ops import ALL_GATHER
from zsim.program.zero3_coordinator import Params

if TYPE_CHECKING:
    from zsim.program.zero3_parameters import Gather, Parameters

GROUP = 8000  # CUDAQuantizer.target_group_size, weights
SCALE_BYTES, HALF = 4, 2
NODE, ACROSS = "node", "across nodes"  # the groups of qgZ's two steps


@lru_cache(maxsize=65536)
def scales_of(numel: int) -> int:
    """CUDAQuantizer.quantize: as few equal groups as are multiples of 8 weights and no more than 8000.

    Raises InputError where there are none.
    """
    if numel % 8:
        raise InputError(
            f"DeepSpeed quantizes weights in groups that are multiples of 8, and a rank's share is {numel:,}",
            field="zero.zero_quantized_weights",
        )
    eights = numel // 8
    return eights // next(size for size in range(min(GROUP // 8, eights), 0, -1) if eights % size == 0)


class QuantizedGathers:
    """Gathers in int8. `stored`: frozen weights whose shards are int8 (zero_quantized_nontrainable_weights): those that
    were frozen when they were cut, which under zero.Init is before anybody can freeze them."""

    def __init__(self, parameters: Parameters, model: ModelSpec) -> None:
        self.parameters, self.builder, self.plan = parameters, parameters.builder, parameters.plan
        frozen = set(range(len(model.parameters))).difference(parameters.trainable)
        quantizes = self.plan.zero_quantized_nontrainable_weights and not self.plan.zero_init
        self.stored = frozenset(frozen if quantizes else ())

    def nbytes(self, param: int, numel: int) -> int:
        """Of a shard of `numel` elements, as it is kept."""
        return numel + SCALE_BYTES * scales_of(numel) if param in self.stored else numel * self.parameters.size

    def start(self, params: Params, group: str, module: str, phase: str) -> tuple[int, str, tuple[str, ...]]:
        """Quantize what is to be sent, then gather values and scales: event, key of the buffer, keys of what is sent.

        Raises InputError for several stored in int8: AllGatherCoalescedHandle.wait gives parameters the type of their
        shards, and the model's products of bfloat16 and int8 fail.
        """
        if len(params) > 1 and params[0] in self.stored:
            raise InputError(
                "DeepSpeed gathers several int8 weights at once, leaves them int8 and fails in the first forward",
                field="zero.zero_quantized_nontrainable_weights",
                accepted="with stage3_allgather_sequential: true",
            )
        parameters, builder = self.parameters, self.builder
        ranks = parameters.ranks(group)
        part = sum(parameters.part(param, ranks) for param in params)
        scales = scales_of(part)
        key = parameters.new_key("int8")
        builder.alloc(key, "all_gather_buffers", part * ranks, lane=parameters.stream)
        parameters.to_device(params, group, module, phase)
        sent = () if params[0] in self.stored else self._quantize(key, part, len(params), module, phase)
        builder.alloc(f"{key} scales", "all_gather_buffers", SCALE_BYTES * scales * ranks, lane=parameters.stream)
        parameters.call("all_gather", part, part * ranks, group, module, phase, "int8")
        event = parameters.call("all_gather", scales, scales * ranks, group, module, phase, "float32")
        return event, key, sent

    def _quantize(self, key: str, part: int, shards: int, module: str, phase: str) -> tuple[str, ...]:
        parameters, builder = self.parameters, self.builder
        scales = SCALE_BYTES * scales_of(part)
        temporary = (part * parameters.size if shards > 1 else 0) + (0 if self._half else part * HALF)
        if temporary:
            builder.alloc(f"{key} input", "all_gather_buffers", temporary, lane=parameters.stream)
            builder.alloc(f"{key} sent", "all_gather_buffers", part + scales, lane=parameters.stream)
            copies = (shards > 1) + (not self._half)
            moved = copies * part * max(parameters.size, HALF)
            self._kernel("copy", moved, moved, copies, module, phase)
        else:
            builder.alloc(f"{key} sent", "all_gather_buffers", part + scales, lane=parameters.stream)
        self._kernel("quantize", part * HALF, part + scales, 1, module, phase)
        if temporary:
            builder.free(f"{key} input")
        return (f"{key} sent",)

    def complete(self, gather: Gather, module: str, phase: str) -> int:
        """The handles' wait: all of the buffer becomes float16, then each parameter a tensor of its own."""
        parameters, builder, key = self.parameters, self.builder, gather.flat
        alone = len(gather.params) == 1
        numel = {param: parameters.numel[param] for param in gather.params}
        part = sum(parameters.part(param, gather.ranks) for param in gather.params)
        whole = sum(numel.values()) if alone else part * gather.ranks
        for sent in gather.sent:
            builder.free(sent)
        if not (alone and self._half):
            builder.alloc(f"{key} values", "all_gather_buffers", whole * HALF, lane=parameters.stream)
        for param, elements in numel.items():
            if cast := not (alone or self._half):
                builder.alloc(f"{key} uncast", "all_gather_buffers", elements * HALF, lane=parameters.stream)
            nbytes = elements * parameters.size
            builder.alloc(parameters.full(param), "all_gather_buffers", nbytes, lane=parameters.stream)
            if cast:
                builder.free(f"{key} uncast")
        scales = SCALE_BYTES * scales_of(part) * gather.ranks
        event = self._kernel("dequantize", whole + scales, whole * HALF, 1, module, phase)
        if alone and self._half:
            return event
        moves = (not alone) + (not self._half)
        moved = moves * whole * max(parameters.size, HALF)
        event = self._kernel("copy", moved, moved, moves * len(numel), module, phase)
        if alone:
            builder.free(f"{key} values")
        return event

    def buffers(self, gather: Gather) -> list[str]:
        """What the handle holds until the last of its parameters has been waited for."""
        kept = [f"{gather.flat}", f"{gather.flat} scales"]
        return kept if len(gather.params) == 1 else [*kept, f"{gather.flat} values"]

    def gather_persistent(self, param: int) -> None:
        """_allgather_params_coalesced and _sequential, of a parameter stored in int8."""
        parameters, builder = self.parameters, self.builder
        shard, world = parameters.shard[param], parameters.world
        scales, full = scales_of(shard), shard * world
        builder.alloc("int8 persistent", "all_gather_buffers", full + SCALE_BYTES * scales * world)
        parameters.call("all_gather", shard, full, "world", "", "optimizer", "int8")
        parameters.call("all_gather", scales, scales * world, "world", "", "optimizer", "float32")
        temporary = 0 if self._half else full * HALF
        builder.alloc(parameters.full(param), "all_gather_buffers", full * parameters.size)
        self._kernel("dequantize", full, full * HALF + temporary, 1 + bool(temporary), "", "optimizer", temporary)
        builder.free("int8 persistent")

    @property
    def _half(self) -> bool:
        return self.plan.dtype == "float16"

    def _kernel(
        self, label: str, read: float, written: float, launches: int, module: str, phase: str, temporary: int = 0
    ) -> int:
        return elementwise(
            self.builder, ALL_GATHER, label, phase, read, written,
            launches=launches, module=module, micro=self.parameters.micro, temp_peak=temporary,
        )  # fmt: skip


class Step(NamedTuple):
    """One of the two exchanges of a gradient: `numel` elements of it in int4, in `scales` groups."""

    group: str
    numel: int
    scales: int


class QuantizedReduction:
    """all_to_all_quant_reduce: a gradient goes in int4 to the GPUs of the node, and their sums to the other nodes."""

    def __init__(self, builder: Builder, model: ModelSpec, plan: DeepSpeedPlan, lane: str) -> None:
        self.builder, self.plan, self.lane = builder, plan, lane
        self.shapes = [parameter.shape for parameter in model.parameters]
        self.local, self.nodes = gpus_and_nodes(plan)
        self._held: dict[str, str] = {}  # local variables of the function -> keys

    def takes(self, param: int) -> bool:
        """Whether it is not left to a reduce-scatter of its own: vectors, and what 2 x world does not divide."""
        shape, numel = self.shapes[param], 1
        for size in shape:
            numel *= size
        return len(shape) > 1 and numel % (2 * self.plan.world_size) == 0

    def reduce(self, param: int, numel: int, micro: int) -> str:
        """Returns the key of the result, this rank's shard in float16. `finish` ends a series of these."""
        groups = max(*self.shapes[param][:2], self.plan.world_size)
        sums = numel // self.local
        self._exchange(param, Step(NODE, numel, groups), "quantize", numel * HALF, micro)
        self._exchange(param, Step(ACROSS, sums, groups // self.local), "dequantize", numel / 2, micro)
        shard = sums // self.nodes
        self._assign("values", param, sums * HALF)
        self._kernel("dequantize", sums / 2, sums * HALF, 1, micro)
        total, key = f"sum:{param}", f"reduced:{param}"
        for result in (total, key):
            self.builder.alloc(result, "reduce_buffers", shard * HALF, lane=self.lane)
        self._kernel("sum", 2 * sums * HALF, sums * HALF, self.nodes + 1, micro)
        self.builder.free(total)
        return key

    def finish(self) -> None:
        for key in self._held.values():
            self.builder.free(key)
        self._held.clear()

    def _exchange(self, param: int, step: Step, label: str, read: float, micro: int) -> None:
        nbytes = step.numel // 2 + SCALE_BYTES * step.scales
        self._assign(f"to {step.group}", param, nbytes)
        self._kernel(label, read, nbytes, 1, micro)
        self._assign(f"from {step.group}", param, nbytes)
        for dtype, numel in (("int8", step.numel // 2), ("float32", step.scales)):
            collective(
                self.builder, self.lane, "all_to_all", dtype, numel, numel, "backward", "reduce gradients",
                group=step.group, micro=micro,
            )  # fmt: skip

    def _assign(self, variable: str, param: int, nbytes: int) -> None:
        """A local variable of the loop over gradients: its tensor lives until that of the next one is there."""
        before, self._held[variable] = self._held.get(variable), f"{variable}:{param}"
        self.builder.alloc(self._held[variable], "reduce_buffers", nbytes, lane=self.lane)
        if before:
            self.builder.free(before)

    def _kernel(self, label: str, read: float, written: float, launches: int, micro: int) -> None:
        elementwise(self.builder, self.lane, label, "backward", read, written, launches=launches, micro=micro)


def gpus_and_nodes(plan: DeepSpeedPlan) -> tuple[int, int]:
    """As DeepSpeed counts them, by the devices that a process sees; no nodes where the world does not fill one."""
    local = plan.gpus_per_node or plan.world_size
    return local, plan.world_size // local


def reduces_quantized(plan: DeepSpeedPlan) -> bool:
    """stage3.py __avg_scatter_grads: inside one node nothing is quantized."""
    return plan.zero_quantized_gradients and gpus_and_nodes(plan)[1] > 1


def reduction_groups(plan: DeepSpeedPlan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """groups.py _get_local_all_to_all_group. Raises InputError where nodes are not full, of which DeepSpeed asks."""
    local, nodes = gpus_and_nodes(plan)
    if nodes and plan.world_size % local:
        raise InputError(
            f"{plan.world_size} ranks do not fill nodes of {local} GPUs",
            field="zero.zero_quantized_gradients",
            accepted=f"a multiple of {local} ranks",
        )
    if nodes < 2:
        return {}
    return {
        NODE: tuple(tuple(range(node * local, (node + 1) * local)) for node in range(nodes)),
        ACROSS: tuple(tuple(range(gpu, plan.world_size, local)) for gpu in range(local)),
    }
