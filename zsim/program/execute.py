"""Runs a module tree forward and backward for one micro-batch, calling the hooks that frameworks install.

The order of calls is PyTorch's: modules in execution order forward, the mirror image backward, and a
checkpointed module runs its forward again when its backward needs the first dropped tensor. A strategy
subclasses `Hooks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zsim.model import spec
from zsim.model.kernels import Calls, Exchange, Kernel, Wait, Work
from zsim.plan.spec import Plan
from zsim.program.activations import OffloadedInputs, StreamedTensors
from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, Collective, Compute
from zsim.program.ulysses import Shared

if TYPE_CHECKING:
    from zsim.program.evaluation import Evaluating
    from zsim.program.preference import Comparison

P = TypeVar("P", bound=Plan)
Parts = tuple[tuple[Compute | Collective, bool], ...]


class Hooks(Generic[P]):
    """What a framework does around modules and gradients. Phases: forward, recompute, backward."""

    plan: P
    builder: Builder
    shared: Shared | None = None  # sequences that ranks share
    comparison: Comparison | None = None  # with a reference, of pairs
    evaluating: Evaluating | None = None  # after each step
    without_grad = False  # what runs is such a reference, or an evaluation

    def compare(self, execution: Execution) -> None:
        """Between the forward and the backward of a micro-step."""
        if self.comparison:
            self.comparison.run(execution)

    def evaluate(self) -> None:
        """After the update of a step."""
        if self.evaluating:
            self.evaluating.run()

    def begin_evaluation(self) -> None:
        """Before the forward of each of its batches."""

    def end_evaluation(self) -> None:
        """After it."""

    def pre_forward(self, module: spec.Module, phase: str) -> None: ...

    def post_forward(self, module: spec.Module, phase: str) -> None: ...

    def pre_backward(self, module: spec.Module) -> None: ...

    def post_backward(self, module: spec.Module) -> None: ...

    def read(self, module: spec.Module, params: Sequence[int], phase: str) -> None:
        """The module's own code takes `params` of other modules."""

    def alloc_grads(self, params: Sequence[int]) -> None:
        """Just before the backward kernels that produce the gradients of `params` are issued."""

    def grad_ready(self, param: int) -> None:
        """The gradient of `param` has been issued (its AccumulateGrad hook)."""


class Execution:
    """One micro-batch of one rank."""

    def __init__(self, builder: Builder, hooks: Hooks[Any], micro: int = 0) -> None:
        self.builder, self.hooks, self.micro = builder, hooks, micro
        self._layer: int | None = None
        self._dropped: spec.Module | None = None  # checkpointed, in backward, not yet recomputed
        self._known_sizes: dict[int, tuple[int, ...]] = {}  # equal blocks share their tuples of tensors
        self._known_parts: dict[tuple[int, Calls], Parts] = {}
        offload = hooks.plan.offload_activations
        self._offloaded = OffloadedInputs(builder, micro) if offload == "blocking" else None
        self._streamed = StreamedTensors(builder, micro) if offload == "stream" else None

    def forward(self, module: spec.Module, phase: str = "forward") -> None:
        outer = self._enter(module)
        shared = self.hooks.shared if module.role == "root" else None
        if shared:
            shared.deal(self.micro)
        kept = list(self._kept(module)) if self._offloaded and module.checkpointed else ()
        self.hooks.pre_forward(module, phase)
        if self._offloaded and kept:
            self._offloaded.store(module, kept)
        for item in module.body:
            if isinstance(item, spec.Module):
                self.forward(item, phase)
            else:
                self._forward_compute(module, item, phase)
        if self._offloaded and kept:
            self._offloaded.drop(kept)
        self.hooks.post_forward(module, phase)
        if shared:
            shared.average_loss(self.micro)
        self._layer = outer

    def backward(self, module: spec.Module) -> None:
        outer = self._enter(module)
        if self.hooks.shared and module.role == "root":
            self.hooks.shared.average_loss_backward(self.micro)
        self.hooks.pre_backward(module)
        if module.checkpointed:
            self._dropped = module
            if self._offloaded and (kept := list(self._kept(module))):
                self._offloaded.fetch(module, kept)
            if self._streamed:
                for key, _, _ in self._kept(module):
                    self._streamed.unpack(key)
        for item in reversed(module.body):
            if isinstance(item, spec.Module):
                self.backward(item)
            else:
                self._backward_compute(module, item)
        if self._dropped is module:  # it has no backward (a frozen tower)
            self._dropped = None
        self.hooks.post_backward(module)
        self._layer = outer

    def _recompute(self, module: spec.Module) -> None:
        """torch.utils.checkpoint, not reentrant: stops once the last saved tensor exists again, or at the block's end
        (Workload.early_stop).

        transformers 5 checkpoints a block's `forward`, not its `__call__`, so the block's own hooks stay silent.
        """
        self._dropped = None
        if module.called_again:
            self.hooks.pre_forward(module, "recompute")
        self._replay(module, _count_again(module))

    def _replay(self, module: spec.Module, remaining: int) -> int:
        """Runs the body until `remaining` computes have run again; modules then open get no post-forward."""
        for item in module.body:
            if isinstance(item, spec.Module):
                self.hooks.pre_forward(item, "recompute")
                remaining = self._replay(item, remaining)
                if remaining == 0:
                    return 0
                self.hooks.post_forward(item, "recompute")
            else:
                self._forward_compute(module, item, "recompute")
                remaining -= _runs_again(module, item)
                if remaining == 0:
                    return 0
        return remaining

    def _enter(self, module: spec.Module) -> int | None:
        outer = self._layer
        if module.role == "block":
            self._layer = int("".join(filter(str.isdigit, module.name.rsplit(".", 1)[-1])) or 0)
        return outer

    def _forward_compute(self, module: spec.Module, compute: spec.Compute, phase: str) -> None:
        again = phase == "recompute"
        if compute.reads:
            self.hooks.read(module, compute.reads, phase)
        tensors = self._sizes(compute.resaved if again else compute.saved)
        if tensors:
            key = self._key(module, compute, again)
            self.builder.alloc(key, compute.category, sum(tensors), tensors=tensors)
        if again:
            peak, live, alive = compute.recompute_peak, compute.recompute_live, compute.recompute_alive
            self._launch(module, compute, phase, compute.recompute, compute.recompute_calls, peak, live, alive)
        else:
            peak, live, alive = compute.forward_peak, compute.forward_live, compute.forward_alive
            self._launch(module, compute, phase, compute.forward, compute.forward_calls, peak, live, alive)
            if self._streamed and tensors and module.role != "head":
                self._streamed.pack(key, compute.category, tensors)

    def _launch(
        self,
        module: spec.Module,
        compute: spec.Compute,
        phase: str,
        work: tuple[Work, ...],
        calls: Calls,
        peak: int,
        live: int,
        alive: spec.Alive,
    ) -> None:
        """Kernels as one op, or between collectives and waits as one each; their temporaries count until the last."""
        key = id(work), calls
        parts = self._known_parts.get(key)
        if parts is None:
            parts = self._known_parts[key] = _parts(work, calls)
        builder, name, layer, micro = self.builder, module.name, self._layer, self.micro
        last = parts[-1]
        for each in parts:
            part, awaited = each
            if isinstance(part, Collective):
                event = builder.launch(COMPUTE, part.kind, phase, part, module=name, layer=layer, micro=micro)
                if awaited:
                    builder.host_wait(event)
                continue
            event = builder.launch(
                COMPUTE,
                compute.label,
                phase,
                part,
                module=name,
                layer=layer,
                micro=micro,
                temp_peak=peak,
                temp_live=live if each is last else peak,
                temp_category=compute.category,
                temp_tensors=alive[0],
                temp_left=alive[1] if each is last else alive[0],
            )
            if awaited:
                builder.host_wait(event)

    def _backward_compute(self, module: spec.Module, compute: spec.Compute) -> None:
        if self._dropped is not None and _saves(module, compute):
            self._recompute(self._dropped)
        if self._streamed and compute.saved:
            self._streamed.unpack(self._key(module, compute, False))
        if compute.grads:
            self.hooks.alloc_grads(compute.grads)
        peak, live, alive = compute.backward_peak, compute.backward_live, compute.backward_alive
        self._launch(module, compute, "backward", compute.backward, compute.backward_calls, peak, live, alive)
        for again, saved in ((True, compute.resaved), (False, compute.saved)):
            if self._sizes(saved):
                self.builder.free(self._key(module, compute, again))
        for param in compute.grads:
            self.hooks.grad_ready(param)

    def _kept(self, module: spec.Module) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """What forward leaves of a checkpointed block: (key, category, bytes) of its inputs."""
        for item in module.body:
            if isinstance(item, spec.Module):
                yield from self._kept(item)
            elif sizes := self._sizes(item.saved):
                yield self._key(module, item, False), item.category, sizes

    def _sizes(self, saved: tuple[spec.Saved, ...]) -> tuple[int, ...]:
        sizes = self._known_sizes.get(id(saved))
        if sizes is None:
            sizes = self._known_sizes[id(saved)] = tuple([tensor.nbytes for tensor in saved if tensor.nbytes])
        return sizes

    def _key(self, module: spec.Module, compute: spec.Compute, again: bool) -> str:
        return f"{'re' if again else ''}saved:{self.micro}:{module.name}.{compute.label}"


def _parts(work: tuple[Work, ...], calls: Calls) -> Parts:
    """Runs of kernels, cut by collectives and waits among them; one run, though empty, where there are none. Of each
    whether the host waits for it. The calls are those of the last one."""
    parts: list[tuple[Compute | Collective, bool]] = []
    kernels: list[Kernel] = []
    for item in work:
        if not isinstance(item, Exchange | Wait):
            kernels.append(item)
            continue
        if kernels:
            parts.append((Compute(tuple(kernels)), isinstance(item, Wait)))
        kernels = []
        if isinstance(item, Wait):
            continue
        call = Collective(item.kind, item.dtype, item.in_numel, item.out_numel, item.group)
        parts.append((call, item.awaited))
    if not parts:
        return ((Compute(work, calls), False),)  # type: ignore[arg-type]
    return (*parts, (Compute(tuple(kernels), calls), False))


def _saves(module: spec.Module, compute: spec.Compute) -> bool:
    """Whether autograd keeps anything of it, be it only the (frozen) weight: the hooks of checkpoint see that too."""
    if compute.saved or compute.resaved:
        return True
    reading = [item for item in module.body if isinstance(item, spec.Compute) and item.reads]
    return bool(module.params and compute.backward and (compute.reads or not reading))


def _runs_again(module: spec.Module, compute: spec.Compute) -> bool:
    return bool(compute.recompute) or _saves(module, compute)


def _count_again(module: spec.Module) -> int:
    again = (_count_again(item) if isinstance(item, spec.Module) else _runs_again(module, item) for item in module.body)
    return sum(again)
