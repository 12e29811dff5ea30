"""A symbolic torch: tensors that have shapes and no values, an autograd that has memory and no arithmetic.

A model is written once, as in PyTorch (`zsim.model.families`), and run forward and backward on a `Tape`. Every
fact that zsim needs about compute follows from that one run: kernels and their shapes, what autograd saves, the
order in which gradients become ready, and how many bytes are alive at each moment. Storages are freed by Python's
reference counting, as PyTorch's are, so a local variable that keeps a tensor alive there keeps it alive here.
`zsim.model.undisturbed` sees to it that nobody else does.

Rules, from torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`):
- Nodes run in descending order of creation; AccumulateGrad runs as soon as its last gradient has arrived.
- A node's saved tensors are released after it has run, before its outputs are handed on.
- Two gradients for one input are added into the first if nothing else holds it, else into a new tensor. Under
  fake tensors or a dispatch mode, as torch's memory tracker runs, always into a new one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

from zsim.model.bytes_alive import Bytes
from zsim.model.graph import Backward, Call, Edge, Node, Param, Pass, Segment, Storage, Tensor, row_major
from zsim.model.kernels import Gemm, Memory, Work
from zsim.model.spec import Saved

if TYPE_CHECKING:
    from zsim.model.checkpoint import Frame


class Tape(Bytes):
    """Records one forward and backward. `cuda` false: as torch's recordings with fake tensors on a CPU show it.

    `autocast`: the dtype of torch.autocast, None where it is off. Which operators it casts for is torch 2.13's list for
    CUDA (ATen/autocast_mode.h): `functional.low` and `functional.wide` stand where an operator is on it. The copies of
    weights that it makes and keeps are the strategy's (`zsim.program.ddp`), as the weights themselves are.
    """

    def __init__(self, cuda: bool = True, autocast: str | None = None) -> None:
        super().__init__()
        self.cuda = cuda
        self.autocast = autocast
        self.phase = "forward"
        self.unread: list[Tensor] = []  # gradients that leaves keep to the end of the backward, and these leaves
        self.label = ""  # kind of the memory-bound kernels to come
        self.segments: list[Segment] = []
        self.frame: Frame | None = None  # the checkpointed region that runs now
        self._stack: list[Call] = []
        self._seq = 0
        self._current: Segment | None = None
        self._pass = Pass()
        self._models = self._blocks = self._entered = 0  # calls of them that the next segment counts
        self._boundary = True
        self._leads = False  # what segments to come do, they do before each block
        self.grad_enabled = True
        self.forward_only = False  # no backward follows
        self._unread = ""  # whether what autograd saves is held, though no backward will ask for it
        self._released = 0  # segments from here on have given their saved tensors back
        self._made: set[tuple[str, str, int | None]] = set()  # see `first`

    # -- modules and segments ------------------------------------------------------------------------------

    def begin(self) -> Call:
        """The outermost call, whose only child will be the root module."""
        self._stack = [Call(None, False)]
        return self._stack[0]

    def enter(self, module: Any, args: tuple[Any, ...]) -> None:
        call = Call(module, any(isinstance(arg, Tensor) and arg.needs_grad for arg in args))
        self._entered += 1
        self._blocks += module.role == "block"
        self._models += module.role == "root" and module.net.implementation == "hf"
        if self.phase == "forward":
            self._stack[-1].body.append(call)
        self._stack.append(call)
        self._boundary = True

    def leave(self, result: Any) -> None:
        call = self._stack.pop()
        self._boundary = True
        if self.phase != "forward":
            return
        for number, item in enumerate(result if isinstance(result, tuple | list) else (result,)):
            for place, tensor in enumerate(item if isinstance(item, list) else (item,)):
                if isinstance(tensor, Tensor) and tensor.node is not None:
                    call.differentiable += 1
                    tensor.node.results_of.append((call, (number, place) if isinstance(item, list) else None))

    def part(self) -> None:
        """What follows is a segment of its own.

        A segment's weight gradients count from the start of its backward, so where they are large the product that
        makes them should stand alone.
        """
        self._boundary = True

    def read(self, *weights: Tensor | None) -> None:
        """Parameters of other modules that the open module takes by itself, in that order."""
        segment = self.open()
        if self.phase == "forward":
            segment.reads += [weight.param.index for weight in weights if weight is not None]  # type: ignore[union-attr]

    @contextmanager
    def before_each_block(self) -> Iterator[None]:
        """Segments apart, which the block that follows has before it wherever it is repeated."""
        self._boundary = self._leads = True
        yield
        self._boundary, self._leads = True, False

    def open(self) -> Segment:
        """The segment that the next kernel or tensor belongs to."""
        if not self._boundary:
            return self._current  # type: ignore[return-value]
        self._boundary = False
        if self.phase == "recompute":
            segment = self.frame.next_segment()  # type: ignore[union-attr]
            self._switch(segment, segment.recompute)
            return segment
        call = self._stack[-1]
        segment = Segment(len(self.segments), self.label, call.module.logits, self.frame)
        segment.leads = self._leads
        call.body.append(segment)
        self.segments.append(segment)
        if self.frame is not None:
            self.frame.segments.append(segment)
        self._switch(segment, segment.forward)
        return segment

    def _switch(self, segment: Segment | None, way: Pass) -> None:
        self._measure()
        self.new_peak()
        self._current, self._pass = segment, way
        way.models += self._models
        way.blocks += self._blocks
        way.modules += self._entered
        self._models = self._blocks = self._entered = 0

    def _measure(self) -> None:
        """Close the open segment: its peak, and what is alive now that it is over."""
        segment = self._current
        if segment is None:
            return
        peak, live = self.peak - self.base, self.live - self.base
        if self.phase == "forward":
            segment.forward_peak, segment.forward_live = peak, live
            segment.forward_alive = self.at_peak(peak), self.unsaved(live)
        elif self.phase == "recompute":
            segment.recompute_peak, segment.recompute_live = peak, live
            segment.recompute_alive = self.at_peak(peak), self.unsaved(live)
        else:
            segment.backward_peak = peak - segment.handed  # which the strategy counts as gradients
            alive = self.at_peak(segment.backward_peak)
            self._release(segment)
            segment.backward_live = self.live - self.base
            segment.backward_alive = alive, self.unsaved(segment.backward_live)

    def _release(self, segment: Segment) -> None:
        segment.held.clear()
        self.saved.difference_update(segment.kept)
        self.base -= segment.saved_bytes
        self._released -= 1

    # -- tensors and kernels -------------------------------------------------------------------------------

    def empty(
        self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, counted: bool = True
    ) -> Tensor:
        if counted:
            self.open()
        return Tensor(Storage(self, shape, dtype, counted), shape, strides or row_major(shape), dtype)

    def viewed(self) -> None:
        """An operator that launches nothing. Those of a backward belong to their node."""
        if self.phase != "backward":
            self._pass.views += 1

    def kernel(self, kernel: Work) -> None:
        self.open()
        self._pass.kernels.append(kernel)

    def memory(self, reads: int, writes: int, label: str = "") -> None:
        self.open()
        self._pass.kernels.append(Memory(label or self.label, reads, writes))

    def gemm(
        self,
        m: int,
        n: int,
        k: int,
        dtype: str,
        batch: int = 1,
        label: str = "gemm",
        float8: str = "",
        unaligned: bool = False,
    ) -> None:
        self.open()
        self._pass.kernels.append(Gemm(m, n, k, dtype, batch, label, float8=float8, unaligned=unaligned))

    def first(self, what: str, tensor: Tensor) -> bool:
        """Whether `what` is made of these bytes for the first time in this phase, as compilers see it."""
        key = what, self.phase, getattr(tensor.storage, "number", None)
        known = key in self._made
        self._made.add(key)
        return not known

    def link(self, inputs: tuple[Tensor, ...], backward: Backward, *outputs: Tensor) -> None:
        """Make `outputs` the result of a node whose backward returns one gradient (or None) per input.

        A view that follows a child's call belongs to the child's segment: it is no work of its own.
        """
        if self.forward_only:
            return
        edges: list[Edge] = []
        for tensor in inputs:
            param = tensor.param
            if param is not None:
                edges.append((param if param.trainable else None, 0, tensor.shape))
            else:
                edges.append((tensor.node, tensor.index, tensor.shape))
        self._seq += 1
        node = Node(self._seq, self._current or self.open(), self.label, tuple(edges), backward, len(outputs))
        for index, output in enumerate(outputs):
            output.node, output.index = node, index

    def save(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Keep tensors for backward; returns what gives them back there."""
        segment = self.open()
        if not tensors or self.forward_only:
            return lambda: ()
        if self._unread:
            held = tuple(tensor.detach() for tensor in tensors) if self._unread == "held" else ()
            return lambda: held
        if self.frame is not None:
            if self.phase == "recompute":
                self._pass.rebuilds += len(tensors)
            else:
                self._pass.saves += len(tensors)
            return self.frame.pack(segment, tensors)
        self.keep(segment, *tensors)
        kept = tuple(tensor.detach() for tensor in tensors)
        return lambda: kept

    @contextmanager
    def without_backward(self, holding: bool) -> Iterator[None]:
        """What no loss depends on: its tensors live as long as its results do, and count as theirs. `holding` false: in
        a checkpointed region, whose second run would make them."""
        self._unread = "held" if holding else "not held"
        yield
        self._unread = ""

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """torch.no_grad"""
        self.grad_enabled = False
        yield
        self.grad_enabled = True

    def keep(self, segment: Segment, *tensors: Tensor) -> None:
        """Count tensors as saved by `segment`, each storage once."""
        into = segment.resaved if self.phase == "recompute" else segment.saved
        for tensor in tensors:
            storage = tensor.storage
            if not storage.kept:
                storage.kept = True
                segment.kept.append(storage.number)
                self.saved.add(storage.number)
                into.append(Saved(segment.label, storage.shape, storage.dtype))
                segment.saved_bytes += storage.nbytes
                self.base += storage.nbytes

    def hold(self, tensor: Tensor) -> Tensor:
        """What an autograd function keeps as an attribute: to its backward, out of checkpointing's reach."""
        if self.phase == "forward" and not self.forward_only:
            self.keep(self.open(), tensor)
        return tensor.detach()

    def share(self, *tensors: Tensor) -> None:
        """Keep what every block uses (rotary tables, masks) once, until the backward of the segment that made it."""
        if self.forward_only:
            return
        segment = self.open()
        self.keep(segment, *tensors)
        segment.held += [tensor.detach() for tensor in tensors]

    def gradient(self, of: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A new gradient of `of`. The last one of a parameter is not counted: strategies account for it."""
        param = of.param
        final = param is not None and param.pending == 1
        return self.empty(shape, dtype, counted=not final)

    # -- the engine ----------------------------------------------------------------------------------------

    def finish_forward(self) -> None:
        self._switch(None, Pass())
        self.phase = "backward"
        self._boundary = False
        self._released = len(self.segments)

    def backward(self, loss: Tensor) -> None:
        nodes = self._reachable(loss)
        for param in [edge[0] for node in nodes for edge in node.edges if isinstance(edge[0], Param)]:
            param.pending += 1
        seed = self._seed(loss)  # the caller's, so it outlives the first node
        loss.node.grads[loss.index] = seed  # type: ignore[union-attr]
        while nodes:
            node = nodes.pop()
            if node.segment is not self._current:
                self._begin_backward(node.segment)
            self._run(node)
        self._measure()
        self._current = None
        self._skip_to(0)
        self.unread.clear()

    def _seed(self, loss: Tensor) -> Tensor:
        self._begin_backward(loss.node.segment)  # type: ignore[union-attr]
        self._pass.backwards += 1
        return self.empty(loss.shape, loss.dtype)

    def _reachable(self, loss: Tensor) -> list[Node]:
        """Nodes in ascending order of creation."""
        seen: dict[int, Node] = {}
        todo = [loss.node]
        while todo:
            node = todo.pop()
            if isinstance(node, Node) and node.seq not in seen:
                seen[node.seq] = node
                todo.extend(edge[0] for edge in node.edges if isinstance(edge[0], Node))
        return [seen[seq] for seq in sorted(seen)]

    def _begin_backward(self, segment: Segment) -> None:
        self._measure()
        self._current = None
        self._skip_to(segment.order + 1)
        if segment.frame is not None and segment.frame.asked_by(segment):
            segment.frame.recompute(self)
        self.new_peak()
        self._current, self._pass = segment, segment.backward

    def _skip_to(self, end: int) -> None:
        """Segments that have no node (rotary tables, masks) give back what they keep on the way."""
        while self._released > end:
            segment = self.segments[self._released - 1]
            segment.backward_peak = self.live - self.base
            alive = self.unsaved(segment.backward_peak)
            self._release(segment)
            segment.backward_live = self.live - self.base
            segment.backward_alive = alive, self.unsaved(segment.backward_live)

    def rerun(self, run: Callable[[], object], stop: type[Exception]) -> None:
        """Run a checkpointed region again (from `Frame.recompute`)."""
        stack, label = list(self._stack), self.label
        self.phase, self._boundary = "recompute", True
        with suppress(stop):
            run()
        self._switch(None, Pass())
        self.phase, self._boundary = "backward", False
        self._stack, self.label = stack, label

    def _run(self, node: Node) -> None:
        self._pass.nodes += 1
        backward, node.backward = node.backward, None
        grads, node.grads = node.grads, []
        self.label = node.label
        for call, place in node.results_of:
            call.in_backward.add(place)
        results = list(backward(*grads))  # type: ignore[misc]
        del grads
        for position, (result, edge) in enumerate(zip(results, node.edges, strict=True)):
            if result is not None and prod(result.shape) != prod(edge[2]):
                results[position] = self._sum_to(result, edge)
            del result
        del backward  # releases what it saved
        for position, (target, index, _) in enumerate(node.edges):
            result, results[position] = results[position], None
            if result is None or target is None:
                continue
            if isinstance(target, Param):
                self._accumulate_grad(target, result)
            else:
                self._accumulate(target.grads, index, result)
            del result

    def _sum_to(self, grad: Tensor, edge: Edge) -> Tensor:
        target, _, shape = edge
        final = isinstance(target, Param) and target.pending == 1
        out = self.empty(shape, grad.dtype, counted=not final)
        self.memory(grad.nbytes, out.nbytes)
        return out

    def _accumulate(self, grads: list[Tensor | None], index: int, new: Tensor) -> None:
        old = grads[index]
        if old is None:
            grads[index] = new
            return
        self.memory(old.nbytes + new.nbytes, old.nbytes)
        # 3: the list, `old`, the call's argument. 2: the tensor, the call's argument.
        alone = sys.getrefcount(old) == 3 and sys.getrefcount(old.storage) == 2
        if not (self.cuda and alone):
            grads[index] = self.empty(old.shape, old.dtype, old.strides)

    def _accumulate_grad(self, param: Param, grad: Tensor) -> None:
        param.pending -= 1
        if param.grad is not None:
            self.memory(param.grad.nbytes + grad.nbytes, grad.nbytes)
            if not self.cuda:
                self.empty(grad.shape, grad.dtype)  # the sum is a third tensor
            param.grad = None
        if param.pending:
            param.grad = grad
        else:
            self._pass.grads += 1
            self._current.grads.append(param.index)  # type: ignore[union-attr]
            if grad.storage.counted:
                self._current.handed += grad.storage.nbytes  # type: ignore[union-attr]
