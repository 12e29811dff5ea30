"""What ZeRO-3's hooks do around modules in a forward: fetch and prefetch, wait, release.

DeepSpeed 0.19.8 runtime/zero/parameter_offload.py. An engine has them for all its forwards, be they of training or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.model.spec import ModelSpec, Module
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import collective
from zsim.program.execute import Hooks
from zsim.program.ops import COMPUTE
from zsim.program.versions import before, hook
from zsim.program.walk import modules_in_order
from zsim.program.zero3_coordinator import Coordinator
from zsim.program.zero3_early import EarlyParameters
from zsim.program.zero3_leaves import called, leaves
from zsim.program.zero3_modules import external, hooked, inside, lent, reads
from zsim.program.zero3_parameters import Parameters


class Gathering(Hooks[DeepSpeedPlan]):
    """An engine's parameters and the coordinator that knows when to gather which."""

    def __init__(self, builder: Builder, model: ModelSpec, tree: Module, plan: DeepSpeedPlan) -> None:
        self.builder, self.model, self.tree, self.plan = builder, model, tree, plan
        early = before(plan, 0, 6)
        self.parameters = (EarlyParameters if early else Parameters)(builder, model, plan)
        self.modules = dict(called(tree))
        self.coordinator = Coordinator(
            owned={
                name: tuple(sorted({*module.params}.difference(reads(module)))) for name, module in self.modules.items()
            },
            inside=inside(tree),
            leaves=leaves(tree, plan, self.parameters.numel),
            numel=self.parameters.numel,
            persistent=_persistent(self.parameters.numel, plan),
            frozen=frozenset(range(len(model.parameters))).difference(self.parameters.trainable),
            prefetch_bucket_size=0 if early else _prefetch_bucket(plan),
            max_live_parameters=plan.stage3_max_live_parameters,
            max_reuse_distance=0 if early else plan.stage3_max_reuse_distance,
            lent=lent(model, tree),
            unread=self.parameters.unread,
        )
        # Only modules outside leaves have hooks, and of these only some take part in backward.
        self.hooked = set(hooked(tree, self.coordinator.leaves))
        if plan.stage3_module_granularity_threshold:
            self.parameters.fast = self.coordinator.leaves
        self.recomputed = {
            inner.name for module in modules_in_order(tree) if module.checkpointed for inner in modules_in_order(module)
        }
        self.micro, self.recording = 0, False
        self.saved: dict[str, tuple[int, ...]] = {}  # weights that autograd keeps a view of, by module
        self.external = external(model, tree, self.hooked)
        self.read_by_others = {param for params in self.external.values() for param in params}
        self.hook_calls = 0

    def pre_forward(self, module: Module, phase: str) -> None:
        if module.role == "root" and phase == "forward":
            self.reset_step(module)
        if module.name in self.hooked:
            self.fetch(module.name, phase)

    def read(self, module: Module, params: Sequence[int], phase: str) -> None:
        """ZeROOrderedDict.__getitem__: what is not there is gathered by itself, and with the module from then on."""
        if module.name not in self.hooked:
            return
        for param in params:
            if self.coordinator.read(module.name, param):
                self.parameters.gather((param,), module.name, phase)
                self.parameters.wait((param,), module.name, phase)

    def post_forward(self, module: Module, phase: str) -> None:
        if module.name in self.hooked:
            self.hook_calls += 1
            if released := self.coordinator.release(module.name):
                dropped = phase == "forward" and module.name in self.recomputed
                held = () if dropped or self.without_grad else self.saved.get(module.name, ())
                self.parameters.free(released, held, at_once=module.name in self.parameters.fast)

    def fetch(self, module: str, phase: str) -> None:
        if dropped := self.coordinator.expect(module):
            self.parameters.clean(dropped, module, phase)
        needed, prefetched = self.coordinator.fetch(module, phase)
        self.hook_calls += 1
        if needed or prefetched:
            self.charge_hooks(phase, module)
            self.builder.host_work("zero3 gather", phase, len(needed) + len(prefetched), module=module)
        if needed:
            # what the code around it read before this module was called has come by itself
            read = tuple(p for p in needed if p in self.read_by_others) if self.recording else ()
            if 0 < len(read) < len(needed):
                self.parameters.gather(read, module, phase)
                self.parameters.gather(tuple(p for p in needed if p not in read), module, phase)
            else:
                self.parameters.gather(needed, module, phase)
        own = self.coordinator.params[module]
        if own:
            self.parameters.wait(own, module, phase)
        if prefetched:
            self.parameters.gather(prefetched, module, phase)
        if self.parameters.nvme and self.coordinator.prefetch_bucket_size:
            self.parameters.read_ahead(self.coordinator.upcoming(), phase)

    def charge_hooks(self, phase: str, module: str = "") -> None:
        """One entry for the Python of the hooks since the last one."""
        if self.hook_calls:
            label = hook(self.plan.version, "zero3 backward hook" if phase == "backward" else "zero3 hook")
            self.builder.host_work(label, phase, self.hook_calls, module=module, micro=self.micro)
            self.hook_calls = 0

    def reset_step(self, module: Module) -> None:
        """utils.py assert_ints_same_as_other_ranks: a list's length, then the list, from rank 0."""
        if dropped := self.coordinator.drop_in_flight():  # what an evaluation's end took for the start of a backward
            self.parameters.clean(dropped, module.name, "forward")
        for length in self.coordinator.reset_step():
            for numel in (1, length):
                event = collective(
                    self.builder, COMPUTE, "broadcast", "int64", numel, numel, "forward", "compare trace",
                    micro=self.micro, root=0,
                )  # fmt: skip
                self.builder.host_wait(event)


def _prefetch_bucket(plan: DeepSpeedPlan) -> int:
    """engine.py _configure_zero_optimizer sets it to 1, after it has left for MiCS's own optimizer."""
    sequential = plan.stage3_allgather_sequential and plan.mics_shard_size <= 0
    return 1 if sequential else plan.stage3_prefetch_bucket_size


def _persistent(numel: Sequence[int], plan: DeepSpeedPlan) -> frozenset[int]:
    """mark_persistent_parameters: small parameters, in order, while their sum stays within the model's limit."""
    limit = plan.stage3_model_persistence_threshold
    chosen, total = [], 0
    for param, elements in enumerate(numel):
        if limit is not None and elements + total > limit:
            continue
        if elements <= plan.stage3_param_persistence_threshold:
            chosen.append(param)
            total += elements
    return frozenset(chosen)
