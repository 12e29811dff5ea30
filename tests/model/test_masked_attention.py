"""SDPA that is given a mask: torch's memory-efficient kernel on repeated heads, over the whole square."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import NotModeled
from zsim.model.huggingface import from_config, read_config
from zsim.model.kernels import Attention
from zsim.model.spec import Compute, Module, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DdpPlan, DeepSpeedPlan
from zsim.program.lower import under

LLAMA = Path(__file__).parents[2] / "scenarios" / "models" / "llama-3.1-8b"
TOKENS = 512


def works(module: Module) -> list[Compute]:
    return [work for item in module.body for work in (works(item) if isinstance(item, Module) else [item])]


def test_kernels_and_saved_bytes_beside_flash_attention() -> None:
    """32 query heads share 8 keys and values, which are repeated, and saved so; one mask of 16-bit numbers serves all
    layers. The kernel knows nothing of causality; its seed is one number where FlashAttention's state is two."""
    model = read_config(LLAMA)
    flash, masked = (works(trace(model, Workload(1, TOKENS, attention=name))) for name in ("flash", "efficient"))
    saved = [sum(work.saved_bytes for work in each) for each in (flash, masked)]
    assert saved[1] - saved[0] == 32 * (TOKENS * 2 * (32 - 8) * 128 * 2 - 8) + TOKENS * TOKENS * 2
    kernels = [kernel for work in masked for kernel in (*work.forward, *work.backward) if isinstance(kernel, Attention)]
    assert len(kernels) == 64
    assert {(kernel.impl, kernel.causal, kernel.kv_heads) for kernel in kernels} == {("efficient", False, 32)}


def test_from_torch_2_11_on_the_kernel_is_the_one_that_sdpa_takes() -> None:
    """Allocated as the other; DeepSpeed's releases stand for those of torch in their time."""
    model = read_config(LLAMA)
    asked = Workload(1, TOKENS, attention="efficient")
    plans = (DdpPlan(world_size=1, version="2.10.0"), DdpPlan(world_size=1), DeepSpeedPlan(world_size=1, stage=2))
    old = DeepSpeedPlan(world_size=1, stage=2, version="0.18.3")
    assert [under(plan, asked).cudnn_masks for plan in (*plans, old)] == [False, True, True, False]
    before, after = (works(trace(model, each)) for each in (asked, under(plans[1], asked)))
    assert [work.saved_bytes for work in before] == [work.saved_bytes for work in after]
    kernels = [kernel for work in after for kernel in work.forward if isinstance(kernel, Attention)]
    assert {(kernel.impl, kernel.causal) for kernel in kernels} == {("masked", False)}


def test_refused_where_the_model_makes_no_mask() -> None:
    model = from_config({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
                         "vocab_size": 64}, "falcon")  # fmt: skip
    with pytest.raises(NotModeled, match="memory-efficient"):
        trace(model, Workload(1, 16, attention="efficient"))
