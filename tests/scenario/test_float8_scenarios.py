"""Float8 from a scenario file to memory and time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError, NotModeled
from zsim.model.spec import Float8
from zsim.program.lower import lower
from zsim.program.ops import Collective, Launch

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]
TITAN = {
    "model": str(ROOT / "scenarios/models/llama-3.1-8b"), "framework": "fsdp2", "implementation": "torchtitan",
    "seq_len": "8k", "compile": "true", "loss": "compiled", "checkpointing": "selective",
}  # fmt: skip


def test_what_is_left_out_is_what_the_framework_leaves_out(write: Write) -> None:
    def of(**fields: str) -> Float8 | None:
        return zsim.load_scenario(write(**fields)).resolve().workload.float8

    assert of(framework="fsdp2") is None
    assert of(framework="fsdp2", float8="rowwise") == Float8("rowwise", ("first_linear", "last_linear"))
    assert of(**TITAN, float8="tensorwise") == Float8("tensorwise", ("output",))
    assert of(framework="ddp", float8="{exclude: []}", checkpointing="full") == Float8("tensorwise", ())


def test_refusals(write: Write) -> None:
    for fields, error, says in (
        ({"framework": "deepspeed"}, NotModeled, "float8 under DeepSpeed or FSDP1"),
        ({"framework": "fsdp1"}, NotModeled, "float8 under DeepSpeed or FSDP1"),
        ({"cluster": str(ROOT / "topologies/dgx_a100_8.yaml")}, InputError, "A100-SXM-80GB has no float8 products"),
        ({"lora": "16"}, NotModeled, "float8 with adapters"),
        ({"precision": "fp16"}, NotModeled, "float8 beside fp16"),
        ({"kernels": "unsloth"}, NotModeled, "float8 with kernels of unsloth"),
        ({"framework": "ddp", "float8": "{all_gather: true}"}, InputError, "an option of fsdp2, not ddp"),
        ({"float8": "{recipe: rowwise, all_gather: true}"}, InputError, "torchao refuses it with rowwise"),
        ({"float8": "{precompute: true}"}, InputError, "goes with all_gather"),
        ({"float8": "{exclude: [model, lm_head]}"}, InputError, "leaves no Linear"),
        ({"seq_len": "1001"}, InputError, "1,001 tokens of a micro-batch"),
        ({"float8": "delayed"}, InputError, "tensorwise"),
    ):
        with pytest.raises(error, match=says) as raised:
            zsim.simulate(write(**{"framework": "fsdp2", "float8": "tensorwise", **fields}))
        assert raised.value.file is not None
    offloaded = write("fsdp:\n  cpu_offload: true\n", framework="fsdp2", float8="{all_gather: true}")
    with pytest.raises(NotModeled, match="offloaded to the host"):
        zsim.simulate(offloaded)


def test_gathering_in_float8_halves_what_blocks_gather(write: Write) -> None:
    moved = {}
    for setting in ("null", "tensorwise", "{all_gather: true}", "{all_gather: true, precompute: true}"):
        setup = zsim.load_scenario(write(**TITAN, float8=setting)).resolve()
        steps = lower(setup.model, setup.tree, setup.plan, setup.workload).steps
        works = [i.op.work for i in steps[-1] if isinstance(i, Launch) and isinstance(i.op.work, Collective)]
        sizes = {"uint8": 1, "bfloat16": 2}
        gathered = sum(work.in_numel * sizes[work.dtype] for work in works if work.kind == "all_gather")
        amaxes = [work.in_numel for work in works if work.kind == "all_reduce" and work.reduce_op == "MAX"]
        moved[setting] = gathered, amaxes
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    plain, amaxes = moved["tensorwise"]
    assert (plain, amaxes) == moved["null"] == (plain, [])
    low, amaxes = moved["{all_gather: true}"]
    assert plain - low == 2 * linear // 8  # a byte less for each element of a shard, forward and backward
    assert amaxes == [1] * (2 * 32 * 7)
    assert moved["{all_gather: true, precompute: true}"] == (low, [32 * 7])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_compiled_float8_is_faster_and_eager_is_not(write: Write, recipe: str) -> None:
    """As torchao says of both; compiled, memory is that of 16 bits (30.89 and 30.91 GiB in its log of June 2025)."""
    plain, low = zsim.simulate(write(**TITAN)), zsim.simulate(write(**TITAN, float8=recipe))
    speedup = plain.time.step_s / low.time.step_s
    assert 1.05 < speedup < 1.3
    assert low.gpu.peak_allocated_bytes == pytest.approx(plain.gpu.peak_allocated_bytes, rel=0.01)
    assert low.throughput.mfu == pytest.approx(plain.throughput.mfu * speedup)  # type: ignore[operator]
    assert any("MFU is that of 16-bit products" in note for note in low.assumptions)
    eager = TITAN | {"compile": "false", "loss": "hf"}
    assert zsim.simulate(write(**eager, float8=recipe)).time.step_s > zsim.simulate(write(**eager)).time.step_s


def test_ddp_casts_no_weight_of_a_float8_module(write: Write) -> None:
    """torch.autocast casts for F.linear; a Float8Linear casts its float32 weight to float8 by itself."""
    fields = {"framework": "ddp", "compile": "true", "checkpointing": "full", "model": TITAN["model"]}
    casts = {}
    for setting in ("null", "{exclude: []}"):
        setup = zsim.load_scenario(write(**fields, float8=setting)).resolve()
        steps = lower(setup.model, setup.tree, setup.plan, setup.workload).steps
        casts[setting] = sum(isinstance(i, Launch) and i.op.label == "cast weight" for i in steps[-1])
    assert any("axolotl" in note for note in setup.assumptions)
    assert casts["null"] == 2 * 32 * 7 + 1
    assert casts["{exclude: []}"] == 0
