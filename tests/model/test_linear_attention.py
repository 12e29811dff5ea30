"""Qwen3-Next and Qwen3.5. That a step is the recorded one, for each of them, is in test_families."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, block, computes, flops, modules
from zsim import simulate
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Gemm
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import Compute, Module, Workload
from zsim.model.trace import trace
from zsim.scenario import load

DENSE = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "vocab_size": 248320,
}  # fmt: skip
SMALL = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199, "head_dim": 32, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MODELS = {  # as transformers 5.24 has them on the meta device
    "Qwen3-Next-80B-A3B": (
        79_674_391_296,
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
            "vocab_size": 151936, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        },
    ),
    "Qwen3.5-9B (text)": (8_953_803_264, DENSE),
    "Qwen3.5-27B (text)": (
        26_895_998_464,
        DENSE | {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen3.5-35B-A3B (text)": (
        34_660_610_688,
        {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "vocab_size": 248320,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str):
    count, config = MODELS[name]
    spec = from_config(config, name)
    assert spec.numel == count
    assert [kind.mixer for kind in spec.arch.kinds[:8]] == [*["delta"] * 3, "attention"] * 2
    assert spec.arch.rotary_dim == 64
    assert spec.buffers_bytes == 256
    trace(spec, Workload(1, 128))


@pytest.mark.parametrize("share", [0.5, None])
def test_a_rotated_part(share: float | None):
    rope = {"rope_type": "default", "rope_theta": 1e7} | ({"partial_rotary_factor": share} if share else {})
    assert from_config(DENSE | {"rope_parameters": rope}, "q").arch.rotary_dim == (128 if share else 64)


def test_a_loop_over_chunks():
    """Each of 64 tokens: three products before the loop, five in it, of which the last one's state goes unread."""
    spec = from_config(SMALL, "q")
    products = Counter(
        (kernel.m, kernel.n, kernel.k, kernel.batch)
        for module in modules(block(trace(spec, Workload(1, 256))))
        if module.name.endswith("linear_attn")
        for compute in module.body
        if isinstance(compute, Compute)
        for kernel in compute.forward
        if isinstance(kernel, Gemm)
    )
    assert products == {
        (64, 64, 16, 4 * 4): 2,  # of keys and of queries with keys, four heads and four chunks
        (64, 24, 16, 4): 8,  # of keys and of queries with the state
        (64, 24, 64, 4): 4,  # within the chunk
        (16, 24, 64, 4): 4,  # into the state
    }


def test_gradients_of_chunks_are_as_large_as_all_of_them():
    """Each entry's gradient is a zeroed tensor of the whole sequence: backward moves its square."""
    spec = from_config(SMALL, "q")

    def moved(tokens: int) -> float:
        return sum(k.bytes for c in computes(trace(spec, Workload(1, tokens))) for k in c.backward if k.label != "gemm")

    grown = moved(64 * 64) / moved(64 * 32)
    assert grown > 3
    forward = [sum(k.bytes for c in computes(trace(spec, Workload(1, n))) for k in c.forward) for n in (2048, 4096)]
    assert forward[1] / forward[0] < 2.01


def test_what_no_adapter_reaches_keeps_nothing():
    """Adapters on the full attention of layer 3 alone: the three layers before it save nothing for backward."""
    spec = tune(from_config(SMALL, "q"), Tuning(Lora(8, ("q_proj", "v_proj"))))
    tree = trace(spec, Workload(1, 128))
    layers = [module for module in modules(tree) if module.role == "block"]
    assert [bool(_saved(layer)) for layer in layers] == [False, False, False, True]
    ledger = Ledger(spec, tree)
    assert ledger.saved == 0
    assert all(".lora_" in name for name in ledger.ready)


def _saved(module: Module) -> int:
    return sum(compute.saved_bytes for compute in computes(module))


@pytest.mark.parametrize("frozen", ["conv1d", "A_log", "in_proj_a", "linear_attn", "in_proj_qkv"])
def test_a_part_may_be_frozen(frozen: str):
    spec = from_config(SMALL, "q")
    kept = tuple(replace(p, trainable=frozen not in p.name) for p in spec.parameters)
    spec = replace(spec, parameters=kept)
    for checkpointing in ("none", "full"):
        ledger = Ledger(spec, trace(spec, Workload(1, 128, checkpointing=checkpointing)))
        assert sorted(ledger.ready) == sorted(p.name for p in kept if p.trainable)
        assert ledger.saved == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_what_a_file_cannot_say(changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        from_config(SMALL | changes, "q")
    assert caught.value.field == field


def test_layers_that_pass_a_state_on_are_not_shared_along_the_sequence():
    with pytest.raises(NotModeled, match="sequence parallelism"):
        trace(from_config(SMALL, "q"), Workload(1, 128, sequence_parallel_size=2))


FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "fla.json.gz"


@cache
def recorded() -> dict[str, Any]:
    """validation/oracles/fla.py"""
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


@pytest.mark.parametrize("name", recorded())
@pytest.mark.parametrize("index", range(6))
def test_a_step_with_the_kernels_of_fla_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = from_config(model["config"], name)
    checkpointing = run["checkpointing"]
    workload = Workload(
        run["batch"], run["seq"], attention=run["attention"], checkpointing=checkpointing, device="cpu", kernels="fla"
    )
    ledger = Ledger(spec, trace(spec, workload))
    assert ledger.calls == [tuple(call) for call in model["calls"]]
    assert ledger.ready == model["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    # What the first layer reads is the embedding, which is held anyway: of the others' input the tape has no copy.
    states = 2 * run["batch"] * run["seq"] * spec.arch.hidden if "wide" in name and checkpointing == "none" else 0
    assert ledger.peak_forward == run["peak"]["forward"] - states
    assert ledger.peak_backward == run["peak"]["backward"]


def test_kernels_of_fla_save_a_fraction():
    spec = from_config(DENSE, "q")
    saved = {}
    for kernels in ("torch", "fla"):
        tree = trace(spec, Workload(1, 4096, kernels=kernels))
        saved[kernels] = next(_saved(module) for module in modules(tree) if module.name.endswith("linear_attn"))
    assert 3 < saved["torch"] / saved["fla"] < 3.2


@pytest.mark.parametrize(
    ("changes", "field"), [({"hidden_act": "gelu"}, "kernels"), ({"linear_key_head_dim": 257}, "kernels")]
)
def test_what_the_kernels_refuse(changes: dict[str, Any], field: str):
    with pytest.raises(NotModeled) as caught:
        trace(from_config(SMALL | changes, "q"), Workload(1, 64, kernels="fla"))
    assert caught.value.field == field


def test_other_models_have_no_linear_attention():
    llama = {key: value for key, value in SMALL.items() if not key.startswith("linear")} | {"model_type": "llama"}
    with pytest.raises(NotModeled, match="flash-linear-attention"):
        trace(from_config(llama, "l"), Workload(1, 64, kernels="fla"))
    with pytest.raises(NotModeled, match="compile of qwen3_5_text"):
        trace(from_config(SMALL, "q"), Workload(1, 64, compile=True))


def test_a_scenario_says_what_is_assumed(tmp_path: Path):
    root = FILE.parents[3]
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    path = tmp_path / "scenario.yaml"
    path.write_text(
        f"model: config.json\ncluster: {root / 'topologies' / 'hgx_h100_8.yaml'}\nframework: deepspeed\n"
        "zero: {stage: 3}\nmicro_batch: 1\nseq_len: 4096\nattention: flash\n"
    )
    found = {kernels: load(path, [f"kernels={kernels}"]).resolve() for kernels in ("torch", "fla")}
    notes = {kernels: " ".join(setup.assumptions) for kernels, setup in found.items()}
    assert "linear attention as PyTorch code" in notes["torch"]
    assert "as fast as the memory that they read and write" in notes["fla"]
    results = {kernels: simulate(setup) for kernels, setup in found.items()}
    speed = {kernels: result.throughput.tokens_per_s for kernels, result in results.items()}
    assert speed["fla"] > speed["torch"]
    with pytest.raises(NotModeled, match="sequence parallelism"):
        load(path, ["sequence_parallel_size=2"]).resolve()


@pytest.mark.parametrize(("kernels", "measured"), [("torch", 1.22), ("fla", 0.60)])
def test_published_steps(tmp_path: Path, kernels: str, measured: float):
    """huggingface/transformers 48692 and 48718: Qwen3.5-9B on 8 B200, FSDP2, with and without the two packages."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    path = tmp_path / "scenario.yaml"
    path.write_text(
        f"model: config.json\ncluster: {FILE.parents[3] / 'topologies' / 'hgx_b200_8.yaml'}\nframework: fsdp2\n"
        f"micro_batch: 8\nseq_len: 1024\nattention: sdpa\nkernels: {kernels}\n"
    )
    result = simulate(load(path).resolve())
    assert 65536 / result.throughput.tokens_per_s == pytest.approx(measured, rel=0.1)
