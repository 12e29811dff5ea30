"""What a tape is made of: storages, tensors, parameters, the nodes of backward, segments and calls of modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from sys import _getframe
from typing import TYPE_CHECKING, Any

from zsim.model.kernels import DTYPE_BYTES, Calls, Work
from zsim.model.spec import Alive, Saved

if TYPE_CHECKING:
    from zsim.model.checkpoint import Frame
    from zsim.model.tape import Tape

ITEM: dict[str, int] = {name: int(size) for name, size in DTYPE_BYTES.items() if size >= 1}


@cache
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Storage:
    """Bytes of device memory. Uncounted ones are parameters, their gradients and the model's inputs."""

    __slots__ = ("counted", "dtype", "kept", "nbytes", "number", "shape", "tape")

    def __init__(self, tape: Tape, shape: tuple[int, ...], dtype: str, counted: bool) -> None:
        self.tape, self.shape, self.dtype, self.counted = tape, shape, dtype, counted
        self.kept = not counted  # some segment has it among its saved tensors
        self.nbytes = prod(shape) * ITEM[dtype]
        if counted:
            self.number = tape.born = tape.born + 1
            tape.alive[self.number] = self.nbytes
            tape.live += self.nbytes
            if tape.live > tape.peak:
                tape.peak, tape.peak_born = tape.live, tape.born
                tape.died.clear()

    def __del__(self) -> None:
        if self.counted:
            self.tape.live -= self.nbytes
            self.tape.died[self.number] = self.tape.alive.pop(self.number)
            releasing = _getframe().f_back  # None: a thread that ends
            if releasing is None or not releasing.f_globals["__name__"].startswith("zsim.model."):
                self.tape.disturbed = True


class Tensor:
    """Shape, strides and dtype over a storage. `node` made it (None: a leaf); `param` is set on parameters."""

    __slots__ = ("dtype", "index", "node", "param", "shape", "storage", "strides", "tape")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        node: Node | None = None,
        index: int = 0,
        param: Param | None = None,
    ) -> None:
        self.tape, self.storage, self.shape, self.strides, self.dtype = storage.tape, storage, shape, strides, dtype
        self.node, self.index, self.param = node, index, param

    @property
    def needs_grad(self) -> bool:
        wanted = self.node is not None or (self.param is not None and self.param.trainable)
        return wanted and self.tape.grad_enabled

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM[self.dtype]

    def is_contiguous(self) -> bool:
        if self.strides == row_major(self.shape):
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def detach(self) -> Tensor:
        return Tensor(self.storage, self.shape, self.strides, self.dtype)


class Param:
    """A parameter of the model: `index` into its spec, and how many gradients are still to come."""

    __slots__ = ("grad", "index", "pending", "trainable")

    def __init__(self, index: int, trainable: bool) -> None:
        self.index, self.trainable, self.pending = index, trainable, 0
        self.grad: Tensor | None = None  # the sum so far of a parameter used more than once


Edge = tuple["Node | Param | None", int, tuple[int, ...]]
Backward = Callable[..., "tuple[Tensor | None, ...]"]


class Node:
    """An operation to run backward: `edges` are where its gradients go, and the shapes they must have. `results_of`:
    the calls of modules that return what it made."""

    __slots__ = ("backward", "edges", "grads", "label", "results_of", "segment", "seq")

    def __init__(
        self, seq: int, segment: Segment, label: str, edges: tuple[Edge, ...], backward: Backward, outputs: int
    ) -> None:
        self.seq, self.segment, self.label, self.edges = seq, segment, label, edges
        self.backward: Backward | None = backward
        self.results_of: list[tuple[Call, tuple[int, int] | None]] = []  # and where in a list among the results
        self.grads: list[Tensor | None] = [None] * outputs


NOTHING: Alive = ((), ())


class Pass:
    """Work of a segment one way: kernels in order, and what is counted of the thread that issues them."""

    __slots__ = (
        "backwards", "blocks", "grads", "kernels", "models", "modules", "nodes", "rebuilds", "saves",
        "views",
    )  # fmt: skip

    def __init__(self) -> None:
        self.kernels: list[Work] = []
        self.models = self.backwards = self.modules = self.views = self.nodes = self.grads = 0
        self.saves = self.rebuilds = self.blocks = 0

    @property
    def eager(self) -> Calls:
        return Calls(
            self.models, self.backwards, self.modules, self.views, self.nodes, self.grads, self.saves, self.rebuilds,
        )  # fmt: skip

    def compiled(self, blocks: int) -> Calls:
        """As part of compiled blocks, of which it enters that many."""
        return Calls(self.models, self.backwards, grads=self.grads, graphs=blocks)


class Segment:
    """Work of one module between two calls of its children: what becomes a `spec.Compute`."""

    __slots__ = (
        "backward", "backward_alive", "backward_live", "backward_peak", "forward", "forward_alive", "forward_live",
        "forward_peak", "frame", "grads", "handed", "held", "idle", "kept", "label", "leads", "logits", "order",
        "reads", "recompute", "recompute_alive", "recompute_live", "recompute_peak", "resaved", "saved", "saved_bytes",
    )  # fmt: skip

    def __init__(self, order: int, label: str, logits: bool, frame: Frame | None) -> None:
        self.order, self.label, self.logits, self.frame = order, label, logits, frame
        self.forward, self.backward, self.recompute = Pass(), Pass(), Pass()
        self.saved: list[Saved] = []
        self.resaved: list[Saved] = []
        self.leads = (
            False  # what a model does before each of its blocks: it is there as often as the block that follows
        )
        self.idle: list[Saved] = []  # of `saved`: kept by selective checkpointing, and needed by no backward
        self.saved_bytes = 0  # of both
        self.handed = 0  # bytes of saved tensors that become gradients of parameters as they are
        self.held: list[Tensor] = []  # tensors that all blocks share
        self.grads: list[int] = []
        self.reads: list[int] = []
        self.forward_peak = self.forward_live = self.backward_peak = self.backward_live = 0
        self.recompute_peak = self.recompute_live = 0
        self.kept: list[int] = []  # numbers of what is saved
        # The tensors behind peak and live.
        self.forward_alive = self.backward_alive = self.recompute_alive = NOTHING


class Call:
    """One call of a module: child calls and segments in order."""

    __slots__ = ("body", "differentiable", "in_backward", "module", "reached")

    def __init__(self, module: Any, reached: bool) -> None:
        self.module, self.reached = module, reached  # what it is called with requires a gradient
        self.differentiable = 0  # of what it returns, how many require a gradient
        # to which of its results one comes: each of a list by its place, the others as None
        self.in_backward: set[tuple[int, int] | None] = set()
        self.body: list[Call | Segment] = []
