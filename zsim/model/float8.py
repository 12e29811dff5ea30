"""Linear modules in float8, as torchao's `convert_to_float8_training` makes them (0.18, torchao/float8).

Parameters stay what they are. A product casts both of its operands, each scaled by the largest magnitude of the whole
tensor or of a row or column, in every pass anew: the autograd function saves input and weight as they came
(float8_linear.py `matmul_with_hp_or_float8_args`). The bias is added by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from zsim.errors import InputError, NotModeled
from zsim.model import families
from zsim.model import functional as F
from zsim.model.graph import Tensor, row_major
from zsim.model.kernels import Memory
from zsim.model.layers import Linear, Module, Net
from zsim.model.spec import Float8
from zsim.model.tape import Tape
from zsim.model.views import view_of

FIRST, LAST, SMALL = "first_linear", "last_linear", "auto_filter_small_kn"  # in `exclude`, for what they name
MULTIPLE = 16  # torch._scaled_mm: of both dimensions of a weight, and of the tokens, which the weight's gradient sums
LABEL = "float8"  # of the kernels that cast, scale and transpose
# The axis of an operand that one scale serves, None: all of it (config.py `from_recipe_name`). The operands of forward,
# of the input's gradient ("grad", "weight again") and of the weight's ("grad again", "input again").
AXES: Mapping[str, Mapping[str, int | None]] = {
    "tensorwise": dict.fromkeys(("input", "weight", "grad", "weight again", "grad again", "input again")),
    "rowwise": {"input": -1, "weight": 0, "grad": -1, "weight again": -1, "grad again": 0, "input again": 0},
    "rowwise_with_gw_hp": {"input": -1, "weight": 0, "grad": -1, "weight again": None},
}
# What torch.compile leaves of a cast: how often it reads and writes the operand as it came, how often it writes it in
# float8, in how many kernels. As torchao counts them (0.18 testing/training/roofline_utils.py
# `get_tensor_memory_traffic_ovhd_s`): the largest magnitude of a whole tensor is a pass of its own, in two stages; that
# of a row is found by the kernel that makes the row; a cast along columns transposes first. Run with torch 2.13 on the
# CPU, AOTAutograd casts an input once for all products that read it, casts a gradient once for both of its products
# where one scale serves both, and keeps the magnitudes of inputs and weights for backward where each is one number.
FUSED: Mapping[str, Mapping[str, tuple[int, int, int, int]]] = {
    "tensorwise": {
        "input": (1, 0, 1, 1), "weight": (1, 0, 1, 1), "grad": (1, 0, 2, 1),
        "weight again": (1, 0, 1, 1), "grad again": (0, 0, 0, 0), "input again": (1, 0, 1, 1),
    },
    "rowwise": {
        "input": (0, 0, 1, 0), "weight": (1, 0, 1, 1), "grad": (0, 1, 1, 0),
        "weight again": (2, 1, 1, 2), "grad again": (1, 0, 1, 1), "input again": (2, 1, 1, 2),
    },
    "rowwise_with_gw_hp": {
        "input": (0, 0, 1, 0), "weight": (1, 0, 1, 1), "grad": (0, 0, 1, 0), "weight again": (1, 0, 1, 1),
    },
}  # fmt: skip
Operand = tuple[Tensor, Tensor]  # a matrix in float8, and its scale or scales


def layer_keys(net: Net, float8: Float8) -> tuple[Hashable, ...]:
    """What tells the layers of a model apart, which modules of theirs are left out among it. Raises NotModeled for a
    model with two stacks of layers where that differs between layers."""
    model = families.build(net)
    left: dict[int, set[str]] = {}
    chosen = {path for path, _ in converted(model, float8)}
    for name, layer, owner, _ in model.named_weights():
        path = name.rpartition(".")[0]
        if layer >= 0 and isinstance(owner, Linear) and path not in chosen:
            left.setdefault(layer, set()).add(path.partition(f".{layer}.")[2])
    layers = len(net.arch.kinds)
    same = [frozenset(left.get(layer, ())) for layer in range(layers)]
    if len(set(same)) == 1:
        return net.layer_keys
    if getattr(net.arch, "vision", None) or getattr(net.arch, "seq2seq", None):
        raise NotModeled("float8 of some layers in a model with two stacks of them", field="float8.exclude")
    return tuple(zip(net.layer_keys or (None,) * layers, same, strict=True))


def converted(model: Module, float8: Float8) -> Iterator[tuple[str, Linear]]:
    """Names, each with its layer's number, and modules of what becomes a Float8Linear.

    As torchtitan's filter (components/quantization/utils.py) and accelerate's (utils/ao.py) have it: not what is
    excluded, nor what has a dimension that is no multiple of 16. Raises InputError.
    """
    found = [
        (name.removesuffix(".weight"), owner)
        for name, _, owner, _ in model.named_weights()
        if isinstance(owner, Linear) and name.endswith(".weight")
    ]
    for number, (path, owner) in enumerate(found):
        ends = {FIRST: number == 0, LAST: number == len(found) - 1, SMALL: _is_small(owner, float8)}
        left = any(ends.get(part, part in path) for part in float8.exclude)
        if not left and not any(size % MULTIPLE for size in owner.size):
            yield path, owner


def _is_small(linear: Linear, float8: Float8) -> bool:
    """torchao float8_linear_utils.py `_auto_filter_for_recipe`. Raises InputError for a recipe that it refuses."""
    if SMALL not in float8.exclude:
        return False
    (n, k), recipe = linear.size, float8.recipe
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    if recipe != "rowwise":
        raise InputError(f"{SMALL} is refused by torchao for {recipe}", field="float8.exclude", accepted="names")
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


def convert(model: Module, float8: Float8, compiled: bool) -> None:
    """Mark the modules of a freshly built model. Raises InputError where none are left, NotModeled for a module that
    torchao would replace with one that computes something else."""
    found: dict[Linear, None] = dict.fromkeys(owner for _, owner in converted(model, float8))
    if not found:
        raise InputError(f"leaves no Linear of dimensions that {MULTIPLE} divides", field="float8.exclude")
    broken = [block for block in model.all_modules() if block.checkpointed and block.net.breaks_graphs]
    eager = {id(module) for block in broken for module in block.all_modules()}
    eager |= {id(linear) for linear in found if linear.logits}
    for linear in found:
        if linear.class_name != Linear.class_name:
            why = f"float8 of {linear.class_name}, whose own computation torchao drops"
            raise NotModeled(why, field="float8.exclude", accepted=f"its name, {linear.path.rpartition('.')[2]}")
        linear.float8 = Casts(float8.recipe, float8.all_gather, compiled and id(linear) not in eager)
        linear.class_name = "Float8Linear"


def check_called(model: Module) -> None:
    """Raises NotModeled where a module was left aside, as by the fused loss: other code reads its weight itself."""
    for module in model.all_modules():
        if isinstance(module, Linear) and module.float8 is not None and not module.called:
            why = f"float8 of {module.path}, whose weight other code reads"
            raise NotModeled(why, field="float8.exclude", accepted="its name")


@dataclass(frozen=True, slots=True)
class Casts:
    """How the products of a Float8Linear get their operands. `gathered`: the weight arrives in float8
    (`enable_fsdp_float8_all_gather`). `compiled`: by the kernels of `FUSED`, without temporaries of torch's own."""

    recipe: str
    gathered: bool = False
    compiled: bool = False

    @property
    def rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T (+ bias)`. Shapes: x [..., k], weight [n, k], result [..., n]. Both gradients are computed,
        asked for or not, the input's first. Raises InputError for numbers of tokens that the products do not take.

        The nodes of the function and of the weight's transposition, here in two segments: the last product of backward,
        which makes the weight's gradient, stands alone (`Tape.part`).
        """
        tape, x = x.tape, F.low(x)
        (n, k), m, shape, dtype = weight.shape, prod(x.shape[:-1]), x.shape, x.dtype
        if m % MULTIPLE:
            why = f"float8 products sum over the {m:,} tokens of a micro-batch, which are no multiple of {MULTIPLE}"
            raise InputError(why, field="float8", accepted=f"micro_batch x seq_len in multiples of {MULTIPLE}")
        x_grad, w_grad = x.needs_grad, weight.needs_grad
        tape.open()
        with _labelled(tape):
            pair = [self._cast(x.detach(), "input"), self._cast(_swapped(weight), "weight")]
        made: list[tuple[Tensor, tuple[Operand, ...], object]] = []

        def end(_: Tensor) -> tuple[Tensor | None, Tensor | None]:
            grad_x, operands, kept = made.pop()  # noqa: RUF059  what the function's frame holds to its end
            with _labelled(tape):
                grad_w = self._product(tape, operands, (n, k, m), dtype, split=True, of=weight if w_grad else None)
            return grad_x if x_grad else None, grad_w if w_grad else None

        if x_grad or w_grad:
            token = tape.empty((), dtype, counted=False)
            tape.link((x, weight), end, token)
        tape.part()

        def product() -> tuple[Tensor]:
            return (self._product(tape, pair, (m, n, k), dtype),)

        # Compiled, a block that runs again stops before its last product, which nothing reads.
        early = tape.save(x, weight) if self.compiled and (x_grad or w_grad) else None
        (out,) = tape.frame.cached("mm", tape.open(), product) if tape.frame is not None else product()
        pair.clear()
        out = view_of(out, (*shape[:-1], n), row_major((*shape[:-1], n)))
        if x_grad or w_grad:
            saved = early or tape.save(x, weight)

            def begin(g: Tensor) -> tuple[Tensor]:
                x, held = saved()
                with _labelled(tape):
                    g = F.reshape(g.detach(), m, n)
                    first, again = self._cast(g, "grad"), self._cast(_swapped(held), "weight again")
                    grad_x = self._product(tape, (first, self._by_columns(again)), (m, k, n), dtype, split=True)
                    casts = self._cast_again(g, F.reshape(x, m, k))
                    operands = tuple(self._by_columns(cast) for cast in casts)
                kept = x, g, first, again, casts
                made.append((view_of(grad_x, shape, row_major(shape)), operands, kept))
                return (tape.empty((), dtype, counted=False),)

            tape.link((token,), begin, out)
        return out if bias is None else F.add(out, F.to(bias, dtype))

    def _product(
        self, tape: Tape, operands: Sequence[Operand], shape: tuple[int, int, int], dtype: str, *,
        split: bool = False, of: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`torch._scaled_mm`, m by n over k; without operands in float8 a product in high precision. Backward's sums
        are promoted to float32 as they go (`split`: use_fast_accum is false), and rows and columns are then scaled
        after cuBLAS's product instead of within CUTLASS's (float8_ops.py `addmm_float8_unwrapped`). `of`: what the
        result is the gradient of."""
        m, n, k = shape
        rescaled, factors = split and self.rowwise and bool(operands), None
        if operands and not self.compiled:
            inverses = [F.pointwise(scale) for _, scale in operands]
            if rescaled:
                factors = tape.empty((m, n), "float32")
                tape.memory(sum(scale.nbytes for scale in inverses), factors.nbytes)
        out = tape.empty((m, n), dtype) if of is None else tape.gradient(of, (m, n), dtype)
        if not operands:
            tape.gemm(m, n, k, dtype)
            return out
        tape.gemm(m, n, k, "float8", float8="split" if split else "rowwise" if self.rowwise else "tensorwise")
        if rescaled:
            tape.memory(out.nbytes + (factors.nbytes if factors is not None else 0), out.nbytes)
        return out

    def _cast_again(self, g: Tensor, x: Tensor) -> tuple[Operand, ...]:
        """For the weight's gradient, by their columns; none where that is computed in high precision."""
        if "grad again" not in AXES[self.recipe]:
            return ()
        return self._cast(g, "grad again"), self._cast(x, "input again")

    def _cast(self, x: Tensor, role: str) -> Operand:
        """`hp_tensor_to_float8_dynamic` of a tensor [..., k] or a transposed weight [k, n]."""
        if self.gathered and role.startswith("weight"):
            return Tensor(x.storage, x.shape, x.strides, "float8"), x.tape.empty((), "float32", counted=False)
        if self.compiled:
            return self._fused_cast(x, role)
        scale = self._scale(x, AXES[self.recipe][role])
        wide = F.pointwise(F.to(x, "float32"), scale)
        clamped = F.pointwise(wide)
        return F.pointwise(clamped, dtype="float8"), scale

    def _scale(self, x: Tensor, axis: int | None) -> Tensor:
        """float8_utils.py `tensor_to_scale`: in float64, for the same result as compiled."""
        amax = _amax(x, axis)
        wide = F.pointwise(amax, dtype="float64")
        scale = F.pointwise(F.pointwise(F.pointwise(wide)))  # clamp, and the largest number over it in two steps
        scale = F.pointwise(scale, dtype="float32")
        return F.pointwise(F.pointwise(F.pointwise(scale))) if self.rowwise else scale  # rounded to a power of 2

    def _fused_cast(self, x: Tensor, role: str) -> Operand:
        tape, (reads, writes, casts, launches) = x.tape, FUSED[self.recipe][role]
        out, scale = tape.empty(x.shape, "float8", x.strides), tape.empty((), "float32")
        if role.startswith("input") and not tape.first(role, x):
            return out, scale
        if not self.rowwise and role in ("input", "weight", "grad"):
            _amax(x, None, fused=True)
        tape.kernel(Memory(LABEL, reads * x.nbytes, writes * x.nbytes + casts * out.nbytes, launches))
        return out, scale

    def _by_columns(self, operand: Operand) -> Operand:
        """As `torch._scaled_mm` wants it: a transposed copy, which a compiled cast is from the start."""
        data, scale = operand
        return operand if self.compiled else (F.contiguous(_swapped(data)), scale)


def _amax(x: Tensor, axis: int | None, fused: bool = False) -> Tensor:
    """`max(abs(x))`; of a whole tensor it is kept by selective checkpointing (torchtitan's `_save_list`)."""
    tape = x.tape
    size = x if fused else F.pointwise(x)
    shape = () if axis is None else (*x.shape[:-1], 1) if axis else (1, *x.shape[1:])

    def largest() -> tuple[Tensor]:
        amax = tape.empty(shape, x.dtype)
        tape.kernel(Memory(LABEL, size.nbytes, amax.nbytes, 2 if fused else 1))
        return (amax,)

    if axis is None and tape.frame is not None:
        return tape.frame.cached("max", tape.open(), largest)[0]
    return largest()[0]


def _swapped(x: Tensor) -> Tensor:
    """A matrix transposed, outside of autograd."""
    return view_of(x, x.shape[::-1], x.strides[::-1])


@contextmanager
def _labelled(tape: Tape) -> Iterator[None]:
    outer, tape.label = tape.label, LABEL
    yield
    tape.label = outer
