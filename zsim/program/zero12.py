"""ZeRO-1 and ZeRO-2 of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py): full parameters in one flat buffer, of which
each rank updates one partition. Stage 1 reduces gradients at the accumulation boundary, stage 2 in every micro-step.

Gradients are copied into a contiguous bucket and all-reduced with it. With overlap_comm that runs on the
`reduce_scatter` lane (`reduction_stream`) out of two buckets in turn, else on the compute stream.

Under torch.compile engine.compile() takes the model as one graph, checkpointed blocks with it. Its backward is one node
of autograd, which hands over all gradients at its end (checked with torch 2.13: one CompiledFunctionBackward, all hooks
after it; torch's FAQ of torch.compile, "Do you support Distributed code?"): nothing is reduced before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from zsim.model.architecture import Architecture
from zsim.model.families import breaks_graphs
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder, repeated
from zsim.program.deepspeed import (
    Gradients,
    accum_dtype,
    broadcast_model,
    charge_gradient,
    charge_step,
    check,
    check_experts,
    collective,
    comm_dtype,
    dtype_bytes,
    elementwise,
    frozen_bytes,
    overlaps,
    parameter_groups,
    stop_timer,
    trainable,
    whole_world,
)
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution, Hooks
from zsim.program.muon import is_muon, matrices
from zsim.program.offload import Zero12OnCpu
from zsim.program.ops import COMPUTE, REDUCE_SCATTER, Program
from zsim.program.partitions import Flat, partition
from zsim.program.preference import Second, comparison
from zsim.program.ulysses import differing, shared
from zsim.program.versions import before, hook
from zsim.program.zero0 import EngineReplica, lower_zero0
from zsim.program.zero12_update import Zero12OnGpu


def lower_zero12(model: ModelSpec, tree: Module, plan: DeepSpeedPlan, workload: Workload, steps: int) -> Program:
    """Stages 0, 1 and 2. Step 1 creates the optimizer's states; all later steps are the same."""
    check(plan)
    check_experts(plan, model)
    # engine.py _do_optimizer_sanity_check: bf16 with float32 accumulation is BF16_Optimizer's, not this file's
    bf16_optimizer = plan.dtype == "bfloat16" and accum_dtype(plan) == "float32" and not plan.offload_optimizer
    if plan.stage == 0 or (plan.stage == 1 and bf16_optimizer):
        return lower_zero0(model, tree, plan, workload, steps)
    if plan.stage == 1 and before(plan, 0, 12, 7):
        # engine.py until pull request 4887: "overlap and contiguous grads are meaningless in stage 1 and are ignored"
        plan = replace(plan, overlap_comm=False, contiguous_gradients=False, round_robin_gradients=False)
    builder = Builder(rounds_pinned=not before(plan, 0, 6))
    rank = Zero12(builder, model, plan, whole=_whole(model, workload))
    rank.shared = shared(builder, plan, workload)
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = builder.finish()
    built = repeated(builder, lambda first: rank.step(tree, first=first), steps, differing(plan))
    return Program(plan.world_size, whole_world(plan), init, built)


def _whole(model: ModelSpec, workload: Workload) -> bool:
    """Whether torch.compile makes one graph of the model: experts one by one break it, as FlashAttention may."""
    return workload.compile and cast(Architecture, model.arch).moe is None and not breaks_graphs(model.family, workload)


class Zero12(Hooks[DeepSpeedPlan]):
    def __init__(self, builder: Builder, model: ModelSpec, plan: DeepSpeedPlan, whole: bool) -> None:
        """`whole`: the backward is one compiled graph."""
        self.builder, self.model, self.plan, self.whole = builder, model, plan, whole
        self.numel = [parameter.numel for parameter in model.parameters]
        self.trained = len(trainable(model))
        self.groups = parameter_groups(model, plan)
        self.partitions = partition(model, self.groups, plan)
        self.lane = REDUCE_SCATTER if overlaps(plan) else COMPUTE
        self.contiguous = plan.contiguous_gradients or bool(plan.offload_optimizer)
        self.size = dtype_bytes(plan.dtype)
        self.comm_size = dtype_bytes(comm_dtype(plan))
        # use_grad_accum_attribute: stage 1 accumulates in another dtype than the model's, and reduces that
        self.separate = plan.stage == 1 and accum_dtype(plan) != plan.dtype
        self.grad_size = dtype_bytes(accum_dtype(plan)) if self.separate else self.size
        # create_gradient_handling_hooks; for buckets alone since pull request 7018
        early = plan.stage == 2 or overlaps(plan) or self.separate
        self.hooked = early or (self.contiguous and not before(plan, 0, 16, 5))
        self.muon = matrices(model) if is_muon(plan.optimizer) else frozenset()
        self.owner = Zero12OnCpu(self) if plan.offload_optimizer else Zero12OnGpu(self)
        self.micro = 0
        self.boundary = False
        self.gradients = Gradients(builder, model, plan.dtype)
        self.summed: set[int] = set()  # the same for .grad_accum
        self.buckets_allocated = False
        self.handed_over: list[int] = []  # gradients of a compiled backward, whose hooks come after it
        self.bucket: list[int] = []
        self.elements = 0
        self.reduced_before: list[int] = []  # previous_reduced_grads

    def allocate(self) -> None:
        builder, plan = self.builder, self.plan
        if self.comparison:
            self.comparison.allocate()
        broadcast_model(builder, self.model.parameters, plan)
        flat = sum(group.size * group.world for group in self.partitions.groups)
        nbytes = flat * self.size + frozen_bytes(self.model, plan.dtype)
        builder.alloc("parameters", "parameters", nbytes)
        self.owner.allocate()

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second:
        return EngineReplica(builder, model, self.plan, self.plan.dtype)

    def step(self, tree: Module, first: bool) -> None:
        plan = self.plan
        for micro in range(plan.grad_accum):
            self.micro, self.boundary = micro, micro == plan.grad_accum - 1
            if micro:
                stop_timer(self.builder, plan, first)
            execution = Execution(self.builder, self, micro)
            execution.forward(tree)
            self.compare(execution)
            execution.backward(tree)
            for param in self.handed_over:
                self._process(param)
            self.handed_over = []
            if plan.stage == 2 or self.boundary:
                self._end_backward()
        charge_step(self.builder, self.model, self.plan)
        self.owner.step(first)
        for group in self.partitions.groups:
            if group.world > 1:  # all_gather_into_tensor_dp_groups: allgather_bucket_size has no say
                collective(
                    self.builder, COMPUTE, "all_gather", plan.dtype, group.size, group.size * group.world, "optimizer",
                    "gather parameters", group=group.home,
                )  # fmt: skip
        stop_timer(self.builder, plan, first)
        self.evaluate()

    def average_expert_norms(self) -> int | None:
        """_average_expert_grad_norms; the event of the last one, if there is any."""
        event = None
        for group in self.partitions.groups:
            if group.home != "world":
                event = collective(
                    self.builder, COMPUTE, "all_reduce", "float32", 1, 1, "optimizer", "grad norm", group=group.home
                )
        return event

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def alloc_grads(self, params: Sequence[int]) -> None:
        for param in params:
            self.gradients.alloc(param)

    def grad_ready(self, param: int) -> None:
        self.gradients.ready(param)
        if self.whole:
            self.handed_over.append(param)
        else:
            self._process(param)

    def _process(self, param: int) -> None:
        """process_gradients"""
        if self.hooked:
            charge_gradient(self.builder, self.plan, self.trained)
        self._allocate_buckets()
        if self.separate:
            self._accumulate(param)
        if self.plan.stage == 2 or (overlaps(self.plan) and self.boundary):
            self._add(param)

    def _allocate_buckets(self) -> None:
        """setup_buckets, at the first gradient; kept until the reduction is over."""
        if self.contiguous and not self.buckets_allocated:
            nbytes = self.plan.reduce_bucket_size * self.grad_size
            for key in self._bucket_keys():
                self.builder.alloc(key, "reduce_buffers", nbytes)
        self.buckets_allocated = True

    def _bucket_keys(self) -> tuple[str, ...]:
        return ("bucket 0", "bucket 1") if overlaps(self.plan) else ("bucket 0",)

    def _accumulate(self, param: int) -> None:
        """_fill_param_grad_accum_attribute: .grad is added to .grad_accum and dropped."""
        elements = self.numel[param]
        reads, casts = self.size, 1
        if param in self.summed:  # the cast is a temporary
            reads, casts = self.size + 2 * self.grad_size, 2
        else:
            self.summed.add(param)
            self.builder.alloc(f"accum:{param}", "gradients", elements * self.grad_size)
        elementwise(
            self.builder, COMPUTE, "accumulate", "backward", elements * reads, casts * elements * self.grad_size,
            launches=casts, micro=self.micro, temp_peak=(casts - 1) * elements * self.grad_size,
        )  # fmt: skip
        self.gradients.free(param)

    def drop(self, param: int) -> None:
        """clear_grad_attribute, unless it already lives in a bucket."""
        if self.separate and param in self.summed:
            self.summed.remove(param)
            self.builder.free(f"accum:{param}")
        elif param in self.gradients.held:
            self.gradients.free(param)

    # ---- buckets -----------------------------------------------------------------------------------------------------
    def _add(self, param: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads"""
        elements = self.numel[param]
        label = hook(self.plan.version, "zero12 bucket") if self.contiguous else "zero12 gradient"
        self.builder.host_work(label, "backward")
        if self.elements + elements > self.plan.reduce_bucket_size:
            self._flush()
        if self.contiguous and elements <= self.plan.reduce_bucket_size:  # an oversize gradient stays where it is
            nbytes = elements * self.grad_size
            elementwise(self.builder, COMPUTE, "copy", "backward", nbytes, nbytes, micro=self.micro)
            self.drop(param)
        self.bucket.append(param)
        self.elements += elements

    def _flush(self) -> None:
        """reduce_ipg_grads"""
        if not self.bucket:
            return
        if self.contiguous:
            if self.lane != COMPUTE:  # average_tensor: compute goes on once the reduction before this one is over
                before = self.builder.last(self.lane)
                self.builder.wait_stream(self.lane, COMPUTE)
                self.builder.stream_wait(COMPUTE, before)
            self._average()
        else:
            self._synchronize()  # allreduce_and_copy: all of it is copied back
            temporaries = self._call("all_reduce", self.elements, None, flattened=len(self.bucket) > 1)
            self._kernel("copy", self.elements * self.grad_size, self.elements * self.grad_size)
            self._keep_reduced(temporaries)
        for param in self.bucket:
            if param in self.partitions.fullest:
                self.owner.keep(param)
            elif self.lane != COMPUTE and not self.contiguous:
                self.reduced_before.append(param)
            elif self.plan.stage == 2:
                self.drop(param)
        self.bucket, self.elements = [], 0

    def _average(self) -> None:
        """average_tensor: the bucket as one all-reduce, or as a reduce to each rank that owns a part of it."""
        plan, elements = self.plan, self.elements
        if before(plan, 0, 14, 1):  # all of the buffer, filled or not, until pull request 5268
            elements = max(elements, plan.reduce_bucket_size)
        if not plan.reduce_scatter:  # gradient_reduction_w_predivide
            temporaries = self._call("all_reduce", elements, None, flattened=False)
            self._kernel("scale", elements * self.comm_size, elements * self.comm_size)
            self._keep_reduced(temporaries)
            return
        self._kernel("scale", elements * self.grad_size, elements * self.grad_size)
        if before(plan, 0, 12, 4):
            self._reduce_slices(elements)
            return
        calls: dict[tuple[int | None, str], list[tuple[int, bool]]] = {}
        for owner, elements, sharers, flat in self._slices():
            root = None if plan.use_multi_rank_bucket_allreduce or sharers else owner
            owned = root in (None, flat.of(self.partitions.fullest_rank))
            calls.setdefault((root, flat.home), []).append((elements, owned))
        for (root, home), slices in calls.items():
            for call in _split([elements for elements, _ in slices], plan.reduce_bucket_size):
                if root is not None:
                    self._synchronize()  # allreduce_and_copy
                kind = "all_reduce" if root is None else "reduce"
                temporaries = self._call(kind, sum(call), root, flattened=len(call) > 1, group=home)
                self._keep_reduced(temporaries, owned=slices[0][1])

    def _reduce_slices(self, averaged: int) -> None:
        """average_tensor until 0.12.3: each run of the bucket is reduced to its owner, in place and without a wait in
        between. (The all-reduce of a bucket came with use_multi_rank_bucket_allreduce, pull request 4695.)"""
        builder, cast = self.builder, self.comm_size != self.grad_size
        if cast:
            builder.alloc("cast gradients", "reduce_buffers", averaged * self.comm_size, lane=self.lane)
            self._kernel("cast", averaged * self.grad_size, averaged * self.comm_size)
        for owner, elements, *_ in self._slices():
            collective(
                builder, self.lane, "reduce", comm_dtype(self.plan), elements, elements, "backward",
                "reduce gradients", micro=self.micro, root=owner,
            )  # fmt: skip
        if cast:
            self._kernel("cast", averaged * self.comm_size, averaged * self.grad_size)
            builder.free("cast gradients")
        if kept := self._kept():
            self.owner.add_reduced(kept)

    def _keep_reduced(self, temporaries: list[str], owned: bool = True) -> None:
        """What this rank owns goes from the call's buffer back into the bucket, or is added to a float32 partition."""
        kept = self._kept()
        if owned and kept:
            self.owner.add_reduced(kept)
            nbytes = sum(kept.values()) * self.grad_size
            self._kernel("copy", nbytes, nbytes)
        for key in temporaries:
            self.builder.free(key)

    def _kept(self) -> dict[int, int]:
        """Parameters of the bucket -> elements of them that this rank owns."""
        return {param: self.partitions.fullest[param] for param in self.bucket if param in self.partitions.fullest}

    def _slices(self) -> list[tuple[int, int, tuple[int, ...], Flat]]:
        """Runs of the bucket that belong to one rank; what goes into a float32 partition is not joined into runs.

        Of each the owner, the elements, for a matrix that Muon needs whole on several ranks these ranks, and the flat
        buffer that the last of it belongs to.
        """
        runs: list[tuple[int, int, tuple[int, ...], Flat]] = []
        for param in self.bucket:
            slices, flat = list(self.partitions.slices(param)), self.partitions.group[param]
            apart = flat.of(self.partitions.fullest_rank) if self.owner.compact else None
            split = param in self.muon and len(slices) > 1
            sharers = tuple(owner for owner, _ in slices) if split else ()
            for owner, elements in slices:
                last = runs[-1] if runs else None
                if last and last[0] == owner != apart and last[2] == sharers and last[3].home == flat.home:
                    runs[-1] = (owner, last[1] + elements, sharers, flat)
                else:
                    runs.append((owner, elements, sharers, flat))
        return runs

    def _call(self, kind: str, elements: int, root: int | None, flattened: bool, group: str = "world") -> list[str]:
        """allreduce_bucket: slices are flattened into a temporary, and cast into another to communicate."""
        builder = self.builder
        temporaries: list[str] = []
        if flattened:
            temporaries.append("flat gradients")
            builder.alloc("flat gradients", "reduce_buffers", elements * self.grad_size, lane=self.lane)
            self._kernel("copy", elements * self.grad_size, elements * self.grad_size)
        cast = self.comm_size != self.grad_size
        if cast:
            temporaries.append("cast gradients")
            builder.alloc("cast gradients", "reduce_buffers", elements * self.comm_size, lane=self.lane)
            self._kernel("cast", elements * self.grad_size, elements * self.comm_size)
        collective(
            builder, self.lane, kind, comm_dtype(self.plan), elements, elements, "backward", "reduce gradients",
            group=group, micro=self.micro, root=root,
        )  # fmt: skip
        if cast:
            self._kernel("cast", elements * self.comm_size, elements * self.grad_size)
        return temporaries

    def _kernel(self, label: str, read_bytes: float, write_bytes: float) -> None:
        elementwise(self.builder, self.lane, label, "backward", read_bytes, write_bytes, micro=self.micro)

    def _synchronize(self) -> None:
        if self.lane != COMPUTE:
            self.builder.host_wait(None)
            for param in self.reduced_before:
                self.drop(param)
            self.reduced_before = []

    def _end_backward(self) -> None:
        """reduce_gradients (stage 1: all of them only now, group by group), then the epilogue."""
        if self.plan.stage == 1 and not overlaps(self.plan):
            for group in self.groups:
                for param in group:
                    if param in self.gradients.held or param in self.summed:  # a tower that is given nothing has none
                        self._add(param)
        self._flush()
        self._synchronize()
        self.owner.end_backward()
        if self.contiguous and self.buckets_allocated:
            for key in self._bucket_keys():
                self.builder.free(key)
        self.buckets_allocated = False
        for param in sorted(self.gradients.held | self.summed):
            self.drop(param)


def _split(slices: list[int], limit: int) -> Iterator[list[int]]:
    """allreduce_and_scatter, allreduce_no_retain: a call goes out as soon as it exceeds the bucket size."""
    call: list[int] = []
    for elements in slices:
        call.append(elements)
        if sum(call) > limit:
            yield call
            call = []
    if call:
        yield call
