"""Linear modules in float8 against torchao 0.18 under fake tensors: live bytes, kernels, which are converted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.model.ledger import computes, modules
from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.float8 import FIRST, LAST, SMALL, Casts
from zsim.model.huggingface import from_architecture, from_config
from zsim.model.kernels import Gemm, Kernel, Memory
from zsim.model.layers import Linear, Net
from zsim.model.spec import Float8, ModelSpec, Module, Workload
from zsim.model.tape import Tape
from zsim.model.trace import trace

ARCH = Architecture(
    family="llama", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
    kinds=(LayerKind(),) * 3, tied=False,
)  # fmt: skip
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Peaks(Tape):
    highest = 0

    def new_peak(self) -> None:
        self.highest = max(self.highest, self.peak)
        super().new_peak()

    def top(self) -> int:
        highest, self.highest, self.peak = max(self.highest, self.peak), 0, self.live
        return highest


@pytest.mark.parametrize(
    ("recipe", "shape", "forward", "backward"),
    [
        # Run: convert_to_float8_training on nn.Linear(k, n, dtype=bfloat16) under FakeTensorMode on x [2, 48, k]: bytes
        # of all storages but of x, weight and the weight's gradient; backward from a gradient of ones.
        ("tensorwise", (32, 64), 27_652, 94_220),
        ("tensorwise", (128, 32), 110_596, 157_712),
        ("rowwise", (32, 64), 28_032, 94_976),
        ("rowwise", (128, 32), 110_976, 159_232),
        ("rowwise_with_gw_hp", (32, 64), 28_032, 80_256),
    ],
)
def test_live_bytes_of_one_module(recipe: str, shape: tuple[int, int], forward: int, backward: int) -> None:
    tape = Peaks(cuda=False)
    linear = Linear(Net(ARCH, tape), *shape)
    linear.float8, linear.weight.param.index = Casts(recipe), 0
    tape.begin().module = linear
    x = tape.empty((2, 48, shape[0]), "bfloat16")
    given = x.nbytes
    tape.link((), lambda g: (), x)
    y = linear(x)
    del x
    assert tape.top() - given == forward
    tape.finish_forward()
    tape.backward(y)
    assert tape.top() - given == backward


def small(**changes: object) -> ModelSpec:
    return from_architecture("small", replace(ARCH, **changes))  # type: ignore[arg-type]


def names(tree: Module) -> list[str]:
    return [module.name for module in modules(tree) if module.module_class == "Float8Linear"]


def kernels(tree: Module, way: str = "") -> list[Kernel]:
    ways = (way,) if way else ("forward", "recompute", "backward")
    return [kernel for compute in computes(tree) for one in ways for kernel in getattr(compute, one)]


def test_which_modules_are_converted() -> None:
    def left(*exclude: str, recipe: str = "tensorwise") -> set[str]:
        every = set(names(trace(small(), Workload(2, 8, float8=Float8()))))
        return every - set(names(trace(small(), Workload(2, 8, float8=Float8(recipe, exclude)))))

    assert len(names(trace(small(), Workload(2, 8, float8=Float8())))) == 3 * 7 + 1
    assert left("lm_head") == {"lm_head"}
    assert left("mlp.up_proj") == {f"model.layers.{layer}.mlp.up_proj" for layer in range(3)}
    # accelerate's find_first_last_linear_layers: one module of one layer, which no longer runs as the others do
    assert left(FIRST, LAST) == {"model.layers.0.self_attn.q_proj", "lm_head"}
    assert left("layers.1.mlp") == {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    for exclude, error in ((("model.", "lm_head"), "leaves no Linear"), ((SMALL,), "leaves no Linear")):
        with pytest.raises(InputError, match=error):
            left(*exclude)
    with pytest.raises(InputError, match="refused by torchao for rowwise_with_gw_hp"):
        left(SMALL, recipe="rowwise_with_gw_hp")


def test_dimensions_that_are_no_multiples_of_16_stay() -> None:
    tree = trace(small(intermediate=136), Workload(2, 8, float8=Float8()))
    assert {name.rpartition(".")[2] for name in names(tree)} == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    with pytest.raises(InputError, match="14 tokens of a micro-batch"):
        trace(small(), Workload(2, 7, float8=Float8()))


def test_modules_that_compute_something_else_are_refused() -> None:
    config = {
        "model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256,
        "multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "alibi": False,
    }  # fmt: skip
    with pytest.raises(NotModeled, match="float8 of FalconLinear"):
        trace(from_config(config, "falcon"), Workload(2, 8, float8=Float8()))


def test_a_module_whose_weight_other_code_reads_is_refused() -> None:
    with pytest.raises(NotModeled, match="float8 of lm_head, whose weight other code reads"):
        trace(small(), Workload(2, 8, loss="fused", float8=Float8()))
    trace(small(), Workload(2, 8, loss="fused", float8=Float8(exclude=("lm_head",))))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products(recipe: str, compiled: bool) -> None:
    """Three each, of the same FLOP as in 16 bits; the weight's gradient in high precision where the recipe says so."""
    plain, low = (
        trace(small(), Workload(2, 16, compile=compiled, float8=float8))
        for float8 in (None, Float8(recipe, ("lm_head",)))
    )
    assert sum(kernel.flops for kernel in kernels(plain)) == sum(kernel.flops for kernel in kernels(low))
    found = Counter(kernel.float8 for kernel in kernels(low) if isinstance(kernel, Gemm) and kernel.label == "gemm")
    modules, high = 3 * 7, 3  # the head's
    if recipe == "rowwise_with_gw_hp":
        assert found == {"rowwise": modules, "split": modules, "": modules + high}
    else:
        assert found == {recipe: modules, "split": 2 * modules, "": high}
    (gate,) = [k for k in kernels(low, "forward") if isinstance(k, Gemm) and k.n == 128][:1]
    assert gate.bytes == 32 * 64 + 64 * 128 + 2 * 32 * 128


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_their_order_are_those_of_16_bits(recipe: str) -> None:
    plain, low = (trace(small(), Workload(2, 16, float8=float8)) for float8 in (None, Float8(recipe)))

    def produced(tree: Module) -> list[int]:
        return [grad for compute in reversed(list(computes(tree))) for grad in compute.grads]

    assert produced(low) == produced(plain)


def traffic(**settings: object) -> int:
    recipe, gathered = str(settings.pop("recipe", "tensorwise")), bool(settings.pop("gathered", False))
    workload = Workload(2, 16, float8=Float8(recipe, ("lm_head",), gathered), **settings)  # type: ignore[arg-type]
    tree = trace(small(kinds=(LayerKind(),)), workload)
    return round(sum(k.bytes for k in kernels(tree) if isinstance(k, Memory) and k.label == "float8"))


def test_traffic_of_casts() -> None:
    """Per element as torchao's roofline_utils.py counts a compiled cast, an input of several products cast once."""
    weights = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    inputs = 32 * (64 + 64 + 64 + 128)  # of q, k and v; of o; of gate and up; of down
    results = 32 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
    tensorwise = (2 + 3 + 3) * weights + (2 + 3 + 3) * inputs + (2 + 4) * results
    amaxes = 2 * (7 + 4 + 7)  # written
    assert traffic(compile=True) == tensorwise + amaxes
    assert traffic(compile=True, gathered=True) == tensorwise + amaxes - 8 * weights - 2 * 7
    rescaled = 4 * (weights + 32 * (4 * 64 + 2 * 64 + 128))  # 16-bit results of backward's products, read and written
    assert (
        traffic(compile=True, recipe="rowwise") == (3 + 7) * weights + (1 + 7) * inputs + (3 + 3) * results + rescaled
    )
    high = 4 * 32 * (4 * 64 + 2 * 64 + 128)
    assert traffic(compile=True, recipe="rowwise_with_gw_hp") == (3 + 3) * weights + inputs + results + high
    for recipe in RECIPES:  # eager: 33 bytes per element, more than three times as many
        assert traffic(recipe=recipe) > 3 * traffic(recipe=recipe, compile=True)
