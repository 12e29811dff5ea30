"""torch.autocast over float32 weights: dtypes as CUDA's lists have them.

Bytes of whole runs, counted in real torch: validation/oracles/storage, `ddp_autocast_*`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.model.ledger import computes
from tests.model.test_families import recorded
from zsim.model.huggingface import from_config
from zsim.model.kernels import Attention, Gemm
from zsim.model.spec import Compute, Workload
from zsim.model.trace import trace

B, S = 2, 24
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip


def run(config: dict[str, Any], **workload: Any) -> list[Compute]:
    spec = from_config(config, "x")
    return list(computes(trace(spec, Workload(B, S, **{"weights": "float32", "attention": "eager"} | workload))))


def saved(works: list[Compute], label: str = "") -> Counter[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what work of one kind keeps, or all of it."""
    of_kind = [work for work in works if not label or work.label.partition(".")[0] == label]
    return Counter((tensor.shape, tensor.dtype) for work in of_kind for tensor in work.saved)


@pytest.mark.parametrize("name", recorded())
def test_products_and_attention_are_in_autocast_s_dtype_in_every_family(name: str) -> None:
    """But those of grouped experts, which autocast does not know. What GPT-J and GPT-Neo widen it casts back. In each
    layer of linear attention two triangular systems are solved, whose backward multiplies outside autocast."""
    works = run(recorded()[name]["config"], attention=recorded()[name]["runs"][0]["attention"])
    kernels = [kernel for work in works for kernel in (*work.forward, *work.backward)]
    products = Counter((k.dtype, k.label == "grouped_gemm") for k in kernels if isinstance(k, Gemm | Attention))
    linear = sum(kind.mixer == "delta" for kind in from_config(recorded()[name]["config"], name).arch.kinds)
    assert products.pop(("float32", False), 0) == 2 * linear
    assert set(products) <= {("bfloat16", False), ("float32", True)}
    assert products["bfloat16", False]


def test_each_linear_keeps_a_copy_of_its_own_of_a_float32_input() -> None:
    """Llama: three copies of a block's first norm's result and two of the second's. Norms keep float32."""
    works = run(LLAMA, attention="flash")
    products = saved(works, "gemm")
    assert products[(B, S, 64), "bfloat16"] == 2 * (3 + 2) + 1  # and the head's
    norms = saved(works, "norm")
    assert (B, S, 64) in {shape for shape, _ in norms}
    assert {dtype for _, dtype in norms} == {"float32"}


def test_eager_attention_keeps_its_softmax_in_float32_and_in_16_bits() -> None:
    scores = (B, 4, S, S)
    under, without = saved(run(GPT2)), saved(run(GPT2, weights=None))
    assert (under[scores, "float32"], under[scores, "bfloat16"]) == (2, 2)  # a block's softmax, its copy for products
    assert (without[scores, "float32"], without[scores, "bfloat16"]) == (0, 2)


def test_gelu_new_runs_in_float32_from_its_power_on() -> None:
    kept = saved(run(GPT2), "activation")
    wide = [shape for shape, dtype in kept.elements() if dtype == "float32" and shape[-1] == 256]
    assert len(wide) == 2 * 3  # per block: the cast for pow, tanh's result, 1 + tanh
    assert {dtype for _, dtype in saved(run(GPT2, weights=None), "activation")} == {"bfloat16"}


def test_llama_over_16_bit_weights_is_as_without_autocast() -> None:
    """Its norms return their input's dtype. GPT-2's layer_norm returns float32 then, too."""
    of_llama, of_gpt2 = ((run(c, weights="bfloat16"), run(c, weights=None)) for c in (LLAMA, GPT2))
    assert saved(of_llama[0]) == saved(of_llama[1])
    assert saved(of_gpt2[0])[(B, S, 64), "float32"] > saved(of_gpt2[1])[(B, S, 64), "float32"] == 0


def test_parameters_kept_in_16_bits_hand_on_16_bits() -> None:
    """The frozen base of a LoRA run: its embedding makes the residual stream, whatever the adapters are in."""
    spec = from_config(LLAMA, "x")
    low = replace(spec, parameters=tuple(replace(p, dtype="bfloat16") for p in spec.parameters))
    kept = [
        [work.saved for work in computes(trace(model, Workload(B, S, weights=weights)))]
        for model, weights in ((low, "float32"), (spec, "bfloat16"), (spec, "float32"))
    ]
    assert kept[0] == kept[1] != kept[2]
