"""Modules that train whole beside adapters, from a scenario file to the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LLAMA = SCENARIOS / "llama31_8b_4xa100_zero2.yaml"
QLORA = SCENARIOS / "llama31_8b_4090_qlora.yaml"
COPIES = 2 * 128_256 * 4_096
SAVED = "lora={r: 16, targets: [q_proj, v_proj], modules_to_save: [embed_tokens, lm_head]}"


@pytest.mark.parametrize("framework", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_what_copies_cost(framework: str) -> None:
    """1.05e9 parameters that train: 2 bytes each of optimizer states twice under DDP, where they stay as loaded; 8 and
    a master weight of 4 under ZeRO, 8 of shards in float32 under FSDP. The frozen ones are there as well."""
    kind = framework if not framework.startswith("zero") else "deepspeed"
    zero = f"zero={{stage: {framework[-1]}}}" if kind == "deepspeed" else "zero=null"
    result = zsim.simulate(
        LLAMA, [f"framework={kind}", zero, SAVED, "seq_len=512", "optimizer.impl=fused", "fsdp=null"]
    )
    held = result.gpu.by_category
    adapters, ranks = 6_815_744, 1 if kind == "ddp" else 4
    states = 2 * (2 * COPIES + 4 * adapters) if kind == "ddp" else 2 * 4 * (COPIES + adapters) / ranks
    assert held["optimizer_states"] == pytest.approx(states, rel=0.01)
    base = 2 * 8_030_261_248
    if kind == "ddp":
        assert held["parameters"] == pytest.approx(base + 2 * COPIES + 4 * adapters, rel=0.01)
    if kind.startswith("fsdp"):
        assert held["parameters"] == pytest.approx((base + 4 * (COPIES + adapters)) / 4, rel=0.01)
    assert result.trainable_params == COPIES + adapters


def test_copies_on_a_quantized_base() -> None:
    """Embedding and output projection are not quantized; their copies are in 16 bits too, or in what is asked for."""
    without = zsim.simulate(QLORA).gpu.by_category
    extra = ["lora.modules_to_save=[embed_tokens, lm_head]"]
    saved = zsim.simulate(QLORA, extra).gpu.by_category
    assert saved["parameters"] - without["parameters"] == pytest.approx(2 * COPIES, rel=0.01)
    wide = zsim.simulate(QLORA, [*extra, "lora.modules_dtype=float32"]).gpu.by_category
    assert wide["parameters"] - without["parameters"] == pytest.approx(4 * COPIES, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "field", "says", "accepted"),
    [
        (
            ["framework=ddp", "zero=null", "precision=fp16", SAVED],
            "lora.modules_dtype",
            "GradScaler refuses",
            "float32",
        ),
        (["lora={r: 8, modules_dtype: float32}"], "lora.modules_dtype", "one dtype for all", "framework: ddp"),
        (["lora={r: 8, modules_to_save: [3]}"], "lora.modules_to_save.0", "3 is not text", "text"),
        (["lora={r: 8, modules_to_keep: [lm_head]}"], "lora.modules_to_keep", "modules_to_save", ""),
    ],
)
def test_refused(overrides: list[str], field: str, says: str, accepted: str) -> None:
    with pytest.raises(InputError) as caught:
        zsim.load_scenario(LLAMA, overrides).resolve()
    assert caught.value.field == field
    assert says in str(caught.value)
    assert accepted in str(caught.value.accepted)


def test_adapters_are_units_under_fsdp1_alone() -> None:
    """The Trainer sets peft's policy where it makes the optimizer after the model is sharded, which FSDP2 does not."""
    lora = ["zero=null", "fsdp=null", "lora={r: 16}"]
    units = {
        kind: zsim.load_scenario(LLAMA, [f"framework={kind}", *lora]).resolve().plan for kind in ("fsdp1", "fsdp2")
    }
    assert units["fsdp1"].adapter_units  # type: ignore[union-attr]
    assert not units["fsdp2"].adapter_units  # type: ignore[union-attr]
