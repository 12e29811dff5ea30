"""ZeRO-3 of DeepSpeed 0.19.8: parameters are sharded, gathered for a module and released after it.

Streams: all-gathers run on `all_gather` (`__allgather_stream`), gradient reductions on `reduce_scatter`
(`reduce_and_partition_stream`) if overlap_comm, else on the compute stream. Hooks: runtime/zero/parameter_offload.py
on every module, runtime/zero/stage3.py on every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.model.spec import COPY, ModelSpec, Module, Parameter, Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.deepspeed import (
    broadcast_model,
    charge_step,
    check,
    check_experts,
    collective,
    in_backward,
    parameter_groups,
    stop_timer,
    whole_world,
)
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import COMPUTE, Instruction, Program
from zsim.program.ulysses import shared
from zsim.program.versions import before, hook
from zsim.program.walk import modules_in_order
from zsim.program.zero3_built import as_built, with_untied
from zsim.program.zero3_coordinator import Coordinator
from zsim.program.zero3_early import EarlyParameters
from zsim.program.zero3_gradients import Gradients
from zsim.program.zero3_leaves import by_keyword, called, check_leaves, leaves, unmatched
from zsim.program.zero3_mics import check_mics, mics_groups
from zsim.program.zero3_modules import external, hooked, inside, lent, linear_biases, reads, saved_weights
from zsim.program.zero3_parameters import Parameters
from zsim.program.zero3_quantized import reduction_groups

Instructions = tuple[Instruction, ...]


def lower_zero3(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, workload: Workload, steps: int) -> Program:
    """Step 1 records the trace, which the next forward compares between ranks; after that all steps are the same."""
    check(plan)
    check_experts(plan, model)
    if plan.mics_shard_size > 0:
        check_mics(plan)
    builder = Builder(rounds_pinned=not before(plan, 0, 6))
    rank = Zero3(builder, model, tree, plan)
    rank.shared = shared(builder, plan, workload)
    rank.allocate()
    init = builder.finish()
    prologue, body = rank.step(first=True)
    built = [prologue + body]
    if steps > 1:
        prologue, body = rank.step(first=False)
        built.append(prologue + body if prologue else body)
        if rank.shared and steps > 2:  # samples precede the first forward, too
            prologue, body = rank.step(first=False)
            body = prologue + body
        built += [body] * (steps - 2)
    notes = tuple(unmatched(tree, plan))
    return Program(plan.world_size, rank.process_groups(), init, tuple(built), assumptions=notes)


class Zero3(Hooks[DeepSpeedPlan]):
    def __init__(self, builder: Builder, model: ModelSpec, tree: Module, plan: DeepSpeedPlan) -> None:
        self.builder, self.model, self.tree, self.plan = builder, model, tree, plan
        early = before(plan, 0, 6)
        self.parameters = (EarlyParameters if early else Parameters)(builder, model, plan)
        self.gradients = Gradients(builder, model, plan, self.parameters)
        modules = dict(called(tree))
        self.coordinator = Coordinator(
            owned={name: tuple(sorted({*module.params}.difference(reads(module)))) for name, module in modules.items()},
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
        self.in_backward = in_backward(tree) & self.hooked
        if plan.stage3_module_granularity_threshold:
            self.parameters.fast = self.coordinator.leaves
        self.trained_leaves = {
            leaf
            for leaf in self.coordinator.leaves & self.hooked
            if any(model.parameters[param].trainable for param in self.coordinator.inside[leaf])
        }
        check_leaves({leaf for leaf in self.trained_leaves if not self._notices(modules[leaf])}, modules)
        self.in_leaf = {param: leaf for leaf in self.coordinator.leaves for param in self.coordinator.inside[leaf]}
        self.bias_of = linear_biases(model)
        self.saved = saved_weights(model, tree, plan, self.in_backward, self.coordinator.leaves)
        self.recomputed = {
            inner.name for module in modules_in_order(tree) if module.checkpointed for inner in modules_in_order(module)
        }
        self.biases = frozenset(self.bias_of.values())
        self.micro, self.recording = 0, False
        self.external = external(model, tree, self.hooked)
        self.read_by_others = {param for params in self.external.values() for param in params}
        self.hook_calls = 0

    def process_groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        world, hpz = self.plan.world_size, self.parameters.hpz
        groups = whole_world(self.plan)
        if hpz:  # groups.py _create_zero_param_parallel_group: neighbours
            groups["hpz"] = tuple(tuple(range(start, start + hpz)) for start in range(0, world, hpz))
        if self.plan.zero_quantized_gradients:
            groups |= reduction_groups(self.plan)
        if self.parameters.mics:
            groups |= mics_groups(self.plan)
        return groups

    def allocate(self) -> None:
        """The engine broadcasts the model; the conversion to shards does so again (zero.Init: only that)."""
        builder, plan = self.builder, self.plan
        whole = () if plan.zero_init else self.model.parameters
        for parameter in whole:  # _configure_distributed_model: all of it goes to the GPU first
            nbytes = parameter.numel * self.parameters.size
            builder.alloc(f"whole:{parameter.name}", "parameters", nbytes)
        broadcast_model(builder, whole, plan)
        self._broadcast_shards()
        for parameter in whole:
            builder.free(f"whole:{parameter.name}")
        self.parameters.allocate()
        self.gradients.allocate()
        for _ in range(3):  # stage3.py: before the flat partitions, before and after the optimizer's states
            collective(builder, COMPUTE, "barrier", "uint8", 1, 1, "init", "barrier")
        # create_reduce_and_remove_grad_hooks
        for param in [param for group in parameter_groups(self.model, plan) for param in group]:
            shard, key = self.parameters.shard[param], f"gathered for hooks:{param}"
            home = self.parameters.homes[param]
            full = shard * self.parameters.ranks(home)
            builder.alloc(key, "all_gather_buffers", full * self.parameters.size)
            collective(builder, COMPUTE, "all_gather", plan.dtype, shard, full, "init", "gather for hooks", group=home)
            builder.free(key)

    def _broadcast_shards(self) -> None:
        """partition_parameters.py _zero_init_param; adapters come to the model after zero.Init."""
        builder, plan, conversion = self.builder, self.plan, self.model.conversion
        built: Sequence[Parameter] = self.model.parameters
        if plan.zero_init:
            built = with_untied(as_built(conversion.source.parameters if conversion else built), self.model, self.tree)
        adapters = {p for p in built if plan.zero_init and (".lora_" in p.name or COPY in p.name)}
        broadcast_model(builder, [p for p in built if p not in adapters], plan)
        if plan.zero_init:
            self._gather_for_copies()
            broadcast_model(builder, [p for p in built if p in adapters], plan)
        if conversion and plan.zero_init:
            from zsim.program.zero3_conversion import convert

            convert(builder, self.model, plan, conversion)

    def _gather_for_copies(self) -> None:
        """peft 0.21 utils/other.py, ModulesToSaveWrapper.update: GatheredParameters(modifier_rank=0)."""
        builder, size = self.builder, self.parameters.size
        for param in [param for module in modules_in_order(self.tree) for param in module.idle]:
            shard = self.parameters.shard[param]
            full = shard * self.plan.world_size
            builder.alloc("gathered for a copy", "all_gather_buffers", full * size)
            collective(builder, COMPUTE, "all_gather", self.plan.dtype, shard, full, "init", "gather for a copy")
            broadcast_model(builder, [self.model.parameters[param]], self.plan)
            builder.free("gathered for a copy")

    def step(self, first: bool) -> tuple[Instructions, Instructions]:
        """The comparison of the trace that precedes the first forward (if any), and the rest."""
        self.prologue: Instructions = ()
        self.ended: set[str] = set()
        for micro in range(self.plan.grad_accum):
            self.micro = self.parameters.micro = self.gradients.micro = micro
            self.gradients.last_micro = micro == self.plan.grad_accum - 1
            if micro:
                stop_timer(self.builder, self.plan, first)
            execution = Execution(self.builder, self, micro)
            self.recording = first and not micro
            execution.forward(self.tree)
            if self.recording:
                self.recording = False
                self.coordinator.register(self.external)
            self._charge_hooks("forward")
            execution.backward(self.tree)
            self._charge_hooks("backward")
            self.gradients.end_backward()
            leftovers = self.coordinator.release_leftovers(keep=before(self.plan, 0, 19, 3))
            self.parameters.free(leftovers)
        self.parameters.free(self.coordinator.partition_all())
        charge_step(self.builder, self.model, self.plan)
        self.gradients.owner.step(first)
        self.parameters.gather_persistent(self.coordinator.gather_persistent())
        self.parameters.drop_secondary()
        stop_timer(self.builder, self.plan, first)
        return self.prologue, self.builder.finish()

    # ---- module hooks ------------------------------------------------------------------------------------------------
    def pre_forward(self, module: Module, phase: str) -> None:
        if module is self.tree and phase == "forward":
            self._reset_step()
        self.ended.discard(module.name)
        if module.name in self.hooked:
            self._fetch(module.name, phase)

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
                held = () if dropped else self.saved.get(module.name, ())
                self.parameters.free(released, held, at_once=module.name in self.parameters.fast)

    def pre_backward(self, module: Module) -> None:
        """Once for each result that a gradient comes to. A full backward hook joins all results in one node, which
        passes on that there is none for those that nothing has read."""
        if module.name in self.in_backward:
            joined = module.name in self.trained_leaves
            for _ in range(module.differentiable if joined else module.in_backward):
                self._fetch(module.name, "backward")

    def post_backward(self, module: Module) -> None:
        """The hook sits on the module's inputs: where none requires a gradient (token ids), it never fires. Each call
        counts its inputs anew (parameter_offload.py `ds_grads_remaining`), so it fires for a module's last call alone:
        what an earlier one's backward gathers again stays until the step."""
        if module.name not in self.in_backward or not self._notices(module):
            return
        if module.name in self.ended:  # of a module that was called twice, its earlier call
            return
        self.ended.add(module.name)
        if module.name in self.coordinator.leaves:  # register_full_backward_hook: all gradients at once, by parameter
            for param in self.coordinator.inside[module.name]:
                if self.model.parameters[param].trainable:
                    self.gradients.ready(param)
        self.hook_calls += 1
        self.parameters.free(
            self.coordinator.release(module.name, backward=True), at_once=module.name in self.parameters.fast
        )
        self.parameters.drop(self.saved.get(module.name, ()))

    def _notices(self, module: Module) -> bool:
        """Whether a positional argument requires a gradient: its hook tells that the module's backward is done."""
        return module.reached and not by_keyword(module)

    def _fetch(self, module: str, phase: str) -> None:
        needed, prefetched = self.coordinator.fetch(module, phase)
        self.hook_calls += 1
        if needed or prefetched:
            self._charge_hooks(phase, module)
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

    def _charge_hooks(self, phase: str, module: str = "") -> None:
        """One entry for the Python of the hooks since the last one."""
        if self.hook_calls:
            label = hook(self.plan.version, "zero3 backward hook" if phase == "backward" else "zero3 hook")
            self.builder.host_work(label, phase, self.hook_calls, module=module, micro=self.micro)
            self.hook_calls = 0

    def _reset_step(self) -> None:
        """utils.py assert_ints_same_as_other_ranks: a list's length, then the list, from rank 0."""
        for length in self.coordinator.reset_step():
            for numel in (1, length):
                event = collective(
                    self.builder, COMPUTE, "broadcast", "int64", numel, numel, "forward", "compare trace",
                    micro=self.micro, root=0,
                )  # fmt: skip
                self.builder.host_wait(event)
        if self.micro == 0:
            self.prologue = self.builder.finish(counting_on=True)

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            self.gradients.alloc(param)

    def grad_ready(self, param: int) -> None:
        """linear.py LinearFunctionForZeroStage3 returns the weight's gradient before the bias's; addmm, bias first."""
        self.parameters.drop((param,))  # what made the gradient has run
        if param in self.in_leaf or param in self.biases:
            return
        self.gradients.ready(param)
        if param in self.bias_of:
            self.gradients.ready(self.bias_of[param])


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
