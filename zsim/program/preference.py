"""What a trainer that trains by preference does between the forward of a micro-step and its backward.

trl's DPOTrainer (get_batch_loss_metrics), whose order LLaMA-Factory and others keep: the trained model first, then the
reference on the same pairs without gradients, then the metrics, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol, cast

from zsim.model.architecture import Architecture
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.model.trace import trace_reference
from zsim.plan.spec import AnyPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.builder import Builder
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import COMPUTE, Collective, Compute


class Rank(Protocol):
    """A strategy: the hooks of the trained model, and those that its framework puts around a second one."""

    builder: Builder
    model: ModelSpec
    plan: Any
    without_grad: bool

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second: ...


class Second(Hooks[Any]):
    """The hooks of a second model, which has no backward."""

    micro = 0

    def allocate(self) -> None: ...

    def begin(self, micro: int) -> None:
        self.micro = micro

    def end(self) -> None: ...


class Replica(Second):
    """All of it on every rank, with no hooks at all: accelerate's prepare_model(evaluation_mode=True)."""

    def __init__(self, builder: Builder, model: ModelSpec, plan: AnyPlan, stored: str) -> None:
        self.builder, self.model, self.stored = builder, model, stored
        self.plan = cast(Any, replace(plan, offload_activations=None))

    def allocate(self) -> None:
        sizes = tuple(p.numel * int(DTYPE_BYTES[p.dtype or self.stored]) for p in self.model.parameters)
        self.builder.alloc("parameters", "parameters", sum(sizes), tensors=sizes)
        if self.model.buffers_bytes:
            self.builder.alloc("buffers", "parameters", self.model.buffers_bytes)


def comparison(rank: Rank, workload: Workload) -> Comparison | None:
    return None if workload.preference is None else Comparison(rank, workload)


class Comparison:
    def __init__(self, rank: Rank, workload: Workload) -> None:
        assert workload.preference is not None
        self.rank, self.workload, self.how = rank, workload, workload.preference
        self.builder = rank.builder
        if self.how.sharded and isinstance(rank.plan, Fsdp1Plan | Fsdp2Plan) and self.how.reference == "model":
            # accelerate, whose autocast widens what the trained model returns, has not prepared it
            workload = replace(workload, preference=replace(self.how, widened=False))
        self.tree = None if self.how.reference == "none" else trace_reference(rank.model, workload)
        self.second: Second | None = None
        if self.tree is not None and self.how.reference == "model":
            frozen = tuple(replace(parameter, trainable=False) for parameter in rank.model.parameters)
            model = replace(rank.model, parameters=frozen)
            self.second = rank.second(cast(Builder, Apart(self.builder)), model, self.tree, self.how)

    def allocate(self) -> None:
        """Trainers prepare the reference as they are made, before the trained model."""
        if self.second:
            self.second.allocate()

    def run(self, execution: Execution) -> None:
        """After the forward of `execution`."""
        if self._held_bytes:
            self.builder.alloc("logits that are held", "logits", self._held_bytes)
        self.builder.phases = {"forward": "reference"}
        if self.tree is not None and self.second is None:
            self.rank.without_grad = True
            execution.forward(self.tree)
            self.rank.without_grad = False
        elif self.tree is not None and self.second is not None:
            self.second.begin(execution.micro)
            Execution(self.second.builder, self.second, execution.micro).forward(self.tree)
            self.second.end()
        self.builder.phases = {}
        if self.how.surveyed:
            self._survey(execution.micro)
        self._report(execution.micro)
        if self._held_bytes:
            self.builder.free("logits that are held")

    @property
    def _held_bytes(self) -> int:
        return round(self.how.held * self._logits_bytes)

    @property
    def _logits_bytes(self) -> int:
        vocabulary = cast(Architecture, self.rank.model.arch).vocab
        return self.workload.tokens * vocabulary * int(DTYPE_BYTES[self._dtype])

    @property
    def _dtype(self) -> str:
        return "float32" if self.how.widened else self.workload.dtype

    def _survey(self, micro: int) -> None:
        """trl since 0.29: the entropy of all logits in chunks (entropy_from_logits), means of those of chosen and of
        rejected sequences, which are copied, and the likeliest token of chosen ones. The reference's are there still,
        as they came and copied."""
        logits, key = self._logits_bytes, "logits of the reference that are held"
        if self.tree is not None:
            self.builder.alloc(key, "logits", 2 * logits)
        passes = Compute((Memory("cross_entropy", round(7.5 * logits), 4 * logits, 16),))
        self.builder.launch(
            COMPUTE, "metrics", "forward", passes, micro=micro, temp_peak=logits // 2, temp_category="logits"
        )
        if self.tree is not None:
            self.builder.free(key)

    def _report(self, micro: int) -> None:
        """Each of the metrics is a mean that the host waits for, since trl 0.14 over all ranks."""
        world = self.rank.plan.world_size
        for dtype, numel in self._metrics():
            nbytes = numel * int(DTYPE_BYTES[dtype])
            if self.how.gathered and world > 1:
                work = Collective("all_gather", dtype, numel, numel * world, "world")
                self.builder.launch(COMPUTE, "gather metrics", "forward", work, micro=micro)
            mean = Compute((Memory("pointwise", nbytes, nbytes, 2),))
            self.builder.host_wait(self.builder.launch(COMPUTE, "metrics", "forward", mean, micro=micro))

    def _metrics(self) -> Iterator[tuple[str, int]]:
        """Rewards of chosen and rejected, which is higher, their margins, log-probabilities; then means of logits, or
        what is found of all of them, with the numbers of tokens that it is of."""
        pairs = self.workload.micro_batch
        for number in range(self.how.metrics):
            if number < 6:
                yield "float32" if number == 2 else self._dtype, pairs
            else:
                yield "int64" if self.how.surveyed and number >= 9 else self._dtype, 1


class Apart:
    """A builder whose memory has names of its own."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def alloc(self, key: str, *arguments: Any, **settings: Any) -> None:
        self._builder.alloc(f"reference {key}", *arguments, **settings)

    def alloc_host(self, key: str, *arguments: Any, **settings: Any) -> None:
        self._builder.alloc_host(f"reference {key}", *arguments, **settings)

    def free(self, key: str, after: int | None = None) -> None:
        self._builder.free(f"reference {key}", after)
