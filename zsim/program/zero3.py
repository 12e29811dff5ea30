"""ZeRO-3 of DeepSpeed 0.19.8: parameters are sharded, gathered for a module and released after it.

Streams: all-gathers run on `all_gather` (`__allgather_stream`), gradient reductions on `reduce_scatter`
(`reduce_and_partition_stream`) if overlap_comm, else on the compute stream. Hooks: runtime/zero/parameter_offload.py
on every module, runtime/zero/stage3.py on every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.model.spec import COPY, ModelSpec, Module, Parameter, Preference, Workload
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
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution
from zsim.program.ops import COMPUTE, Instruction, Program
from zsim.program.preference import comparison
from zsim.program.ulysses import shared
from zsim.program.versions import before
from zsim.program.walk import modules_in_order
from zsim.program.zero3_built import as_built, with_untied
from zsim.program.zero3_forward import Gathering
from zsim.program.zero3_gradients import Gradients
from zsim.program.zero3_leaves import by_keyword, check_leaves, unmatched
from zsim.program.zero3_mics import check_mics, mics_groups
from zsim.program.zero3_modules import linear_biases, saved_weights
from zsim.program.zero3_quantized import reduction_groups
from zsim.program.zero3_reference import Zero3Reference, plan_of_reference

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
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = builder.finish()
    prologue, body = rank.step(first=True)
    built = [prologue + body]
    if steps > 1:
        prologue, body = rank.step(first=False)
        built.append(prologue + body if prologue else body)
        # samples precede the first forward, and traces are compared
        if (rank.shared or rank.comparison or rank.evaluating) and steps > 2:
            prologue, body = rank.step(first=False)
            body = prologue + body
        built += [body] * (steps - 2)
    notes = tuple(unmatched(tree, plan))
    return Program(plan.world_size, rank.process_groups(), init, tuple(built), assumptions=notes)


class Zero3(Gathering):
    def __init__(self, builder: Builder, model: ModelSpec, tree: Module, plan: DeepSpeedPlan) -> None:
        super().__init__(builder, model, tree, plan)
        self.gradients = Gradients(builder, model, plan, self.parameters)
        self.in_backward = in_backward(tree) & self.hooked
        self.trained_leaves = {
            leaf
            for leaf in self.coordinator.leaves & self.hooked
            if any(model.parameters[param].trainable for param in self.coordinator.inside[leaf])
        }
        check_leaves({leaf for leaf in self.trained_leaves if not self._notices(self.modules[leaf])}, self.modules)
        self.in_leaf = {param: leaf for leaf in self.coordinator.leaves for param in self.coordinator.inside[leaf]}
        self.bias_of = linear_biases(model)
        self.saved = saved_weights(model, tree, plan, self.in_backward, self.coordinator.leaves)
        self.biases = frozenset(self.bias_of.values())

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Zero3Reference:
        return Zero3Reference(builder, model, tree, plan_of_reference(self.plan))

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
        if self.comparison:
            self.comparison.allocate()
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
        self.parameters.begin_step()
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
            self.charge_hooks("forward")
            self.compare(execution)
            self.charge_hooks("forward")
            execution.backward(self.tree)
            self.charge_hooks("backward")
            self.gradients.end_backward()
            leftovers = self.coordinator.release_leftovers(keep=before(self.plan, 0, 19, 3))
            self.parameters.free(leftovers)
        self.parameters.free(self.coordinator.partition_all())
        charge_step(self.builder, self.model, self.plan)
        self.gradients.owner.step(first)
        self.parameters.gather_persistent(self.coordinator.gather_persistent())
        self.parameters.drop_secondary()
        stop_timer(self.builder, self.plan, first)
        self.evaluate()
        if self.evaluating:
            self.parameters.events.clear()  # the host has waited for the losses
        return self.prologue, self.builder.finish()

    # ---- module hooks ------------------------------------------------------------------------------------------------
    def pre_forward(self, module: Module, phase: str) -> None:
        """A forward without gradients starts the count of a module's inputs anew, too, but counts none: the backward of
        an earlier one then ends unnoticed, unless recomputation calls the module once more."""
        if self.without_grad:
            self.ended.add(module.name)
        else:
            self.ended.discard(module.name)
        super().pre_forward(module, phase)

    def reset_step(self, module: Module) -> None:
        super().reset_step(module)
        if module is self.tree and self.micro == 0:
            self.prologue = self.builder.finish(counting_on=True)

    def pre_backward(self, module: Module) -> None:
        """Once for each result that a gradient comes to. A full backward hook joins all results in one node, which
        passes on that there is none for those that nothing has read."""
        if module.name in self.in_backward:
            joined = module.name in self.trained_leaves
            for _ in range(module.differentiable if joined else module.in_backward):
                self.fetch(module.name, "backward")

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
