"""torch.nn.parallel.DistributedDataParallel: full replicas, gradients all-reduced in buckets.

The rules of torch 2.13 `nn/parallel/distributed.py` and `csrc/distributed/c10d/reducer.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zsim.errors import InputError
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import ModelSpec, Module, Preference, Workload
from zsim.plan.spec import DdpPlan
from zsim.program import muon
from zsim.program.builder import Builder, repeated
from zsim.program.evaluation import evaluating
from zsim.program.execute import Execution, Hooks
from zsim.program.ops import ALL_REDUCE, COMPUTE, Collective, Compute, Program
from zsim.program.optimizer import clip, grad_norm, unscale, update
from zsim.program.preference import Replica, Second, comparison
from zsim.program.walk import gradients

MIB = 1 << 20
DEFAULT_CAP_MB, FIRST_BUCKET_BYTES = 25, MIB  # distributed.py: bucket_cap_mb None; dist._DEFAULT_FIRST_BUCKET_BYTES
BROADCAST_BYTES = 250 * MIB  # broadcast_bucket_size
# Recorded with torch 2.13: a compiled region hands over all its gradients at its end, in an order of its own. FSDP2's
# collectives under compiled blocks are those of eager mode.
COMPILED_AUTOCAST = (
    "torch.compile under torch.autocast: the share of traffic that fusion leaves is that of 16-bit activations"
)
COMPILED = "DDP's buckets under torch.compile: filled in eager mode's gradient order"


def assign(order: Iterable[int], sizes: Sequence[int], dtypes: Sequence[str], limits: Sequence[int]) -> list[list[int]]:
    """compute_bucket_assignment_by_size: a bucket closes once its bytes reach its limit; each has one dtype.

    `limits` are those of the first, second, ... bucket of a dtype; the last one holds for the rest. What is left over
    comes as libstdc++'s unordered_map has it, whose last key is its first.
    """
    closed: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    count: dict[str, int] = {}
    for index in order:
        dtype = dtypes[index]
        bucket, size = filling.get(dtype, ([], 0))
        bucket.append(index)
        size += sizes[index]
        if size >= limits[min(count.get(dtype, 0), len(limits) - 1)]:
            closed.append(bucket)
            count[dtype] = count.get(dtype, 0) + 1
            bucket, size = [], 0
        filling[dtype] = (bucket, size)
    return closed + [bucket for bucket, _ in reversed(filling.values()) if bucket]


class Ddp(Hooks[DdpPlan]):
    """One rank's replica and its Reducer, which lives across steps: its buckets change once."""

    def __init__(self, model: ModelSpec, tree: Module, plan: DdpPlan) -> None:
        self.model, self.tree, self.plan = model, tree, plan
        self.params = [index for index, p in enumerate(model.parameters) if p.trainable]
        with_gradient = gradients(tree)
        self.used = [param for param in self.params if param in with_gradient]
        self.unused = [param for param in self.params if param not in with_gradient]
        # the last three stand for the buffers, a tower's first; .to(dtype) casts the floats among them
        indices, rotations = model.index_buffers_bytes // 8, model.complex_buffers_bytes // 8
        wide = model.buffers_bytes // 4 - 2 * indices - 2 * rotations
        self.numels = [p.numel for p in model.parameters] + [indices, rotations, wide]
        self.dtypes = [p.dtype or plan.dtype for p in model.parameters] + ["int64", "complex64", plan.dtype]
        self.sizes = [n * int(DTYPE_BYTES[dtype]) for n, dtype in zip(self.numels, self.dtypes, strict=True)]
        first = len(model.parameters)
        self.buffers = [index for index in range(first, len(self.numels)) if self.numels[index]]
        self.limits = self._limits()
        self.builder = Builder()
        self.alone = plan.world_size == 1  # trainers wrap nothing then: no Reducer, no buckets
        if self.alone:
            self.buckets = []
        elif plan.find_unused_parameters and not plan.static_graph:
            self.buckets = self._assign(self.params)[::-1]  # last parameters first
        else:
            one_of_each_dtype = sorted(assign(self.params, self.sizes, self.dtypes, [sum(self.sizes) + 1]))
            self.buckets = one_of_each_dtype[::-1]
        self.micro, self.sync = 0, True
        self.rebuilt = False
        self.ready_order: list[int] = []
        self.generation = 0  # of the bucket buffers
        self.grads: dict[int, str] = {}  # parameters with a gradient: "own", or "view" of a bucket
        self.cast: set[int] = set()  # weights of which a cast exists
        self.casts_saved = set(_saved(tree))
        self.iterations = 0
        self.broadcast_buffers = not self.alone

    def second(self, builder: Builder, model: ModelSpec, tree: Module, how: Preference) -> Second:
        if self.plan.autocast:
            from zsim.program.ddp_reference import AutocastReplica

            return AutocastReplica(builder, model, tree, self.plan, cached=how.log_probs == "shifted")
        return Replica(builder, model, self.plan, how.stored or self.plan.dtype)

    def _limits(self) -> tuple[int, int]:
        if self.plan.bucket_cap_mb is None:
            return FIRST_BUCKET_BYTES, DEFAULT_CAP_MB * MIB
        cap = int(self.plan.bucket_cap_mb * MIB)
        return cap, cap

    def _assign(self, order: Iterable[int]) -> list[list[int]]:
        return assign(order, self.sizes, self.dtypes, self.limits)

    # Start.

    def allocate(self) -> None:
        builder, world = self.builder, self.plan.world_size
        if self.comparison:
            self.comparison.allocate()
        if not self.alone:
            shapes = [self.model.parameters[param].shape for param in self.params]
            # _verify_param_shape_across_processes: the number of parameters, then sizes and strides
            self._collective("all_gather", "int64", 1, "init", out=world)
            self._collective("broadcast", "int64", sum(2 * len(shape) for shape in shapes), "init")
        parameters = range(len(self.model.parameters))
        sizes = tuple([self.sizes[param] for param in parameters])
        builder.alloc("parameters", "parameters", sum(sizes), tensors=sizes)
        if self.buffers:
            builder.alloc("buffers", "parameters", sum(self.sizes[buffer] for buffer in self.buffers))
        if self.alone:
            return
        # _sync_module_states: parameters and buffers from rank 0, coalesced
        everything = [*parameters, *self.buffers]
        for bucket in sorted(assign(everything, self.sizes, self.dtypes, [BROADCAST_BYTES])):
            self._collective("broadcast", self.dtypes[bucket[0]], self._numel(bucket), "init")
        self._alloc_buckets()

    def _alloc_buckets(self) -> None:
        for index, bucket in enumerate(self.buckets):
            key = f"bucket:{self.generation}:{index}"
            self.builder.alloc(key, "reduce_buffers", sum(self.sizes[param] for param in bucket))

    def _numel(self, bucket: Iterable[int]) -> int:
        return sum(self.numels[param] for param in bucket)

    def _collective(
        self, kind: str, dtype: str, numel: int, phase: str, *, out: int | None = None, lane: str = COMPUTE
    ) -> int:
        work = Collective(
            kind, dtype, numel, numel if out is None else out,
            reduce_op="SUM" if kind == "all_reduce" else None, root=0 if kind == "broadcast" else None,
        )  # fmt: skip
        return self.builder.launch(lane, kind.replace("_", "-"), phase, work, micro=self.micro)

    # One step.

    def step(self, first: bool) -> None:
        for micro in range(self.plan.grad_accum):
            last = not self.plan.no_sync or micro == self.plan.grad_accum - 1
            self.micro, self.sync = micro, last and not self.alone
            execution = Execution(self.builder, self, micro)
            self._before_forward()
            execution.forward(self.tree)
            self._end_autocast()
            self.compare(execution)
            self._prepare_for_backward()
            execution.backward(self.tree)
        self._optimizer(first)
        self.evaluate()

    def _before_forward(self) -> None:
        """_pre_forward"""
        if not self.alone:
            self.builder.host_work("ddp forward", "forward", micro=self.micro)
        if self.ready_order and not self.rebuilt:
            self._rebuild_buckets()
        self._broadcast_buffers()
        self.broadcast_buffers = self.sync  # _post_forward: require_forward_param_sync

    def _broadcast_buffers(self) -> None:
        for buffer in self.buffers if self.broadcast_buffers else ():
            self._collective("broadcast", self.dtypes[buffer], self.numels[buffer], "forward")

    def _rebuild_buckets(self) -> None:
        """Buckets in the order in which gradients became ready, parameters without one behind; rank 0's order is
        everybody's."""
        old, self.buckets = self.buckets, self._assign([*self.ready_order, *self.unused])
        self._collective("broadcast", "int32", len(self.params) + 1, "forward")
        self._collective("broadcast", "int32", len(self.buckets), "forward")
        for index in range(len(old)):
            self.builder.free(f"bucket:{self.generation}:{index}")
        self.generation += 1
        self._alloc_buckets()
        self.rebuilt = True

    # torch.autocast: matrix products run on a cast of their weights, kept until autocast ends and while saved.

    def _casts(self, param: int) -> bool:
        parameter, wide = self.model.parameters[param], self.dtypes[param] != self.plan.autocast
        return wide and self._in_products(param) and parameter.module_class != "Embedding"

    def _in_products(self, param: int) -> bool:
        """Of matrix products that autocast casts for: that of grouped experts is none (pytorch/pytorch#174763), nor is
        bitsandbytes' in int8."""
        parameter = self.model.parameters[param]
        if parameter.module_class == "Conv1d" and parameter.shape[1:2] == (1,):  # what its product gets is a view
            return False
        return len(parameter.shape) > 1 and not parameter.expert and parameter.dtype != "int8"

    def _low_bytes(self, param: int) -> int:
        return self.numels[param] * int(DTYPE_BYTES[self.plan.autocast or self.plan.dtype])

    def pre_forward(self, module: Module, phase: str) -> None:
        # a Float8Linear casts its own weight, from the type it has
        if not self.plan.autocast or module.role == "embedding" or module.module_class == "Float8Linear":
            return
        for param in module.params:
            wide = self.dtypes[param] not in (self.plan.autocast, "int8")  # in 16 bits, or not cast by its own product
            if wide and self._in_products(param) and param not in self.cast:
                self.builder.alloc(f"cast:{param}", "activations", self._low_bytes(param))
                self._kernel("cast weight", self.sizes[param], self._low_bytes(param), phase=phase)
                self.cast.add(param)

    def post_forward(self, module: Module, phase: str) -> None:
        """Casts of frozen weights are not in the cache (ATen/autocast_mode.cpp cached_cast): they are gone with their
        product, unless autograd saves them."""
        again = phase == "recompute" and module.reached
        frozen = (param for param in module.params if not self.model.parameters[param].trainable)
        self._drop_casts(() if again else set(frozen) - self.casts_saved)

    def compare(self, execution: Execution) -> None:
        super().compare(execution)
        self._end_autocast()

    def begin_evaluation(self) -> None:
        """Without gradients there are no parameters to keep in step (_post_forward)."""
        self._broadcast_buffers()
        self.broadcast_buffers = False

    def end_evaluation(self) -> None:
        self._drop_casts(set(self.cast))

    def _end_autocast(self) -> None:
        """Leaving the context empties its cache, but for what autograd saves of it."""
        self._drop_casts(self.cast - self.casts_saved)

    def post_backward(self, module: Module) -> None:
        self._drop_casts(module.params)

    def _drop_casts(self, params: Iterable[int]) -> None:
        for param in sorted(self.cast.intersection(params)):
            self.builder.free(f"cast:{param}")
            self.cast.discard(param)

    # The Reducer.

    def _prepare_for_backward(self) -> None:
        if not self.sync:
            return
        self.iterations += 1
        self.pending = [set(bucket) for bucket in self.buckets]
        self.bucket_of = {param: index for index, bucket in enumerate(self.buckets) for param in bucket}
        self.next_bucket = 0
        self.reduced: list[int] = []
        for param in self.unused:  # found unused: their part of a bucket is zeros
            self._kernel("zeros to bucket", 0, self.sizes[param])
            self.pending[self.bucket_of[param]].discard(param)
        if not self.plan.static_graph:
            self._reduce_ready()

    def alloc_grads(self, params: Sequence[int]) -> None:
        """AccumulateGrad keeps the first gradient and adds later ones to it."""
        for param in params:
            if self.plan.autocast and self._casts(param):
                self.builder.alloc(f"low grad:{param}", "gradients", self._low_bytes(param))
            else:
                self.builder.alloc(self._fresh_key(param), "gradients", self.sizes[param])

    def _fresh_key(self, param: int) -> str:
        return f"{'new grad' if param in self.grads else 'grad'}:{param}"

    def grad_ready(self, param: int) -> None:
        """AccumulateGrad; then Reducer::autograd_hook, mark_variable_ready"""
        nbytes, key = self.sizes[param], self._fresh_key(param)
        if self.plan.autocast and self._casts(param):  # backward of the weight's cast
            self.builder.alloc(key, "gradients", nbytes)
            self._kernel("cast gradient", self._low_bytes(param), nbytes)
            self.builder.free(f"low grad:{param}")
        if param in self.grads:
            self._kernel("accumulate gradient", 2 * nbytes, nbytes)
            self.builder.free(key)
        self.grads.setdefault(param, "own")
        if not self.sync:
            return
        self.builder.host_work("ddp gradient hook", "backward")
        delay = self.plan.static_graph and self.iterations == 1
        if not (self.rebuilt or delay or (self.plan.find_unused_parameters and not self.plan.static_graph)):
            self.ready_order.append(param)
        # divided by the world size on its way into the bucket, or in place where it is a view of it
        self._kernel("gradient to bucket", nbytes, nbytes)
        if self.plan.gradient_as_bucket_view and self.grads[param] == "own":
            self.builder.free(f"grad:{param}")
            self.grads[param] = "view"
        self.pending[self.bucket_of[param]].discard(param)
        if delay:
            # delay_all_reduce: the first iteration of a static graph reduces once the backward is over
            if not any(self.pending):
                self._collective("all_reduce", "int32", len(self.params), "backward", lane=ALL_REDUCE)
                self._reduce_ready()
                self._finalize()
            return
        self._reduce_ready()
        if self.next_bucket == len(self.buckets):
            if self.plan.find_unused_parameters and not self.plan.static_graph:
                self._collective("all_reduce", "int32", len(self.params), "backward", lane=ALL_REDUCE)
            self._finalize()

    def _reduce_ready(self) -> None:
        while self.next_bucket < len(self.buckets) and not self.pending[self.next_bucket]:
            bucket = self.buckets[self.next_bucket]
            self.builder.wait_stream(ALL_REDUCE, COMPUTE)
            dtype, numel = self.dtypes[bucket[0]], self._numel(bucket)
            self.reduced.append(self._collective("all_reduce", dtype, numel, "backward", lane=ALL_REDUCE))
            self.next_bucket += 1

    def _finalize(self) -> None:
        """finalize_backward: each bucket is waited for and copied back to the gradients, unless they are views."""
        for bucket, event in zip(self.buckets, self.reduced, strict=True):
            self.builder.stream_wait(COMPUTE, event)
            if not self.plan.gradient_as_bucket_view:
                nbytes = sum(self.sizes[param] for param in bucket)
                self._kernel("bucket to gradients", nbytes, nbytes, launches=len(bucket))

    def _kernel(self, label: str, read: int, write: int, *, launches: int = 1, phase: str = "backward") -> None:
        work = Compute((Memory("copy", read, write, launches),))
        self.builder.launch(COMPUTE, label, phase, work, micro=self.micro)

    def _trained_dtypes(self) -> list[str]:
        """The plan's first; another one is that of what peft copies from a base in 16 bits."""
        return list(dict.fromkeys([self.plan.dtype, *(self.dtypes[param] for param in self.used)]))

    def _optimizer(self, first: bool) -> None:
        builder, plan = self.builder, self.plan
        # one pass over the tensors of each dtype (torch 2.13 utils/_foreach_utils.py)
        used = {dtype: [p for p in self.used if self.dtypes[p] == dtype] for dtype in self._trained_dtypes()}
        numels = {dtype: [self.numels[param] for param in params] for dtype, params in used.items()}
        scaled = plan.autocast == "float16"  # as every trainer has it, with torch.amp.GradScaler
        checked = unscale(builder, numels[plan.dtype], plan.dtype) if scaled else None
        for norm in (grad_norm, clip) if plan.grad_clip else ():
            for dtype, each in numels.items():
                norm(builder, each, dtype)
        if checked is not None and (muon.is_muon(plan.optimizer) or plan.optimizer.impl != "fused"):
            builder.host_wait(checked)  # _maybe_opt_step: found_inf.item(); fused kernels look themselves
        hidden = muon.matrices(self.model) if muon.is_muon(plan.optimizer) else frozenset()
        shapes = {param: self.model.parameters[param].shape for param in self.used}
        for dtype, params in used.items():
            muon.update_whole(builder, [shapes[p] for p in params if p in hidden], dtype, first=first)
            rest = [param for param in params if param not in hidden]
            update(
                builder, muon.auxiliary(plan.optimizer), [self.numels[param] for param in rest], dtype, first=first,
                shapes=[shapes[param] for param in rest],
                key="optimizer" if dtype == plan.dtype else f"optimizer of {dtype}",
            )  # fmt: skip
        for param, kind in sorted(self.grads.items()):  # zero_grad
            if kind == "own":
                builder.free(f"grad:{param}")
        self.grads.clear()


def _saved(module: Module) -> Iterator[int]:
    """Weights whose products save them: their inputs require a gradient, and no checkpoint runs them again."""
    if not module.checkpointed:
        yield from module.params if module.reached else ()
        for item in module.body:
            if isinstance(item, Module):
                yield from _saved(item)


def lower_ddp(model: ModelSpec, tree: Module, plan: DdpPlan, workload: Workload, steps: int) -> Program:
    """Step 1 has one bucket; buckets are rebuilt before the second forward that follows a reduction.

    Raises InputError for what torch itself fails on.
    """
    if plan.static_graph and plan.no_sync and plan.grad_accum > 1:
        # reducer.cpp 1732 (torch 2.13): "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in the first backward
        raise InputError("static_graph: torch fails on a first backward under no_sync", field="static_graph",
                         accepted="static_graph without no_sync")  # fmt: skip
    rank = Ddp(model, tree, plan)
    if rank.unused and not (rank.alone or plan.find_unused_parameters or plan.static_graph):
        raise InputError(
            f"{model.parameters[rank.unused[0]].name} gets no gradient, on which torch fails in the second step",
            field="find_unused_parameters", accepted="true, or freeze them",
        )  # fmt: skip
    rank.comparison, rank.evaluating = comparison(rank, workload), evaluating(rank, workload)
    rank.allocate()
    init = rank.builder.finish()
    programs = repeated(rank.builder, rank.step, steps, differing=4)
    groups = {"world": (tuple(range(plan.world_size)),)}
    not_modeled: tuple[str, ...] = (COMPILED,) if workload.compile else ()
    not_modeled += (COMPILED_AUTOCAST,) if workload.compile and workload.weights else ()
    return Program(plan.world_size, groups, init, programs, not_modeled=not_modeled)
