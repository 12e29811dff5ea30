"""Experts that are modules, as transformers 4.57 ran them (validation/oracles/expert_modules.py)."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, computes, flops, modules
from zsim.model.expert_modules import with_modules
from zsim.model.huggingface import from_config
from zsim.model.kernels import WAIT
from zsim.model.spec import Images, ModelSpec, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "expert_modules.json.gz"
MASK = 64 * 64 * 2  # Qwen2-MoE and OLMoE still made one mask for all sequences, by other steps


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


def built(name: str) -> ModelSpec:
    spec = with_modules(from_config(recorded()[name]["config"], name), (4, 57, 6))
    parameters = [replace(p, trainable="visual" not in p.name) for p in spec.parameters]
    return replace(spec, parameters=tuple(parameters))


@pytest.mark.parametrize("name", recorded())
def test_parameters_are_those_of_named_parameters(name: str):
    assert [[p.name, list(p.shape), p.module_class] for p in built(name).parameters] == recorded()[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "index"), [(name, i) for name, m in recorded().items() for i in range(len(m["runs"]))]
)
def test_a_step_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = built(name)
    workload = Workload(
        run["batch"], run["seq"], attention="eager", checkpointing=run["checkpointing"], device="cpu",
        images=Images(1, *run["size"]) if "size" in run else None,
    )  # fmt: skip
    ledger = Ledger(spec, trace(spec, workload))
    assert ledger.calls == [tuple(call) for call in model["calls"]]
    assert ledger.ready == model["ready"]
    arch = spec.arch
    rotated = arch.mla.rope if arch.latent else arch.rotary_dim or arch.head_dim
    # 4.57 multiplies positions with rotary frequencies as matrices; those of sequences differ where there are images
    multiplied = 3 * run["batch"] * run["seq"] if "size" in run else 64
    assert flops(ledger.forward_kernels) + multiplied * rotated == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    if run["checkpointing"] == "full" and name in ("qwen2_moe", "olmoe"):
        assert ledger.after_forward - run["after_forward"] == MASK - 128
        assert ledger.peak_backward - run["peak"]["backward"] == MASK - 128
        return
    # beside a mask, positions of the cache are another tensor, int64, which checkpoints held
    cached = 8 * run["seq"] if "size" in run and run["checkpointing"] == "full" else 0
    assert ledger.after_forward + cached == run["after_forward"]
    assert ledger.peak_backward + cached == run["peak"]["backward"]
    if "size" not in run:  # the tower's steps were others
        assert ledger.peak_forward == run["peak"]["forward"]


def waits(release: tuple[int, ...]) -> int:
    """How often the host waits for the GPU in a layer of five experts."""
    spec = with_modules(from_config(recorded()["qwen3_moe"]["config"], "qwen3_moe"), release)
    tree = trace(spec, Workload(1, 64))
    layer = next(module for module in modules(tree) if module.module_class == "Qwen3MoeSparseMoeBlock")
    return sum(compute.forward.count(WAIT) for compute in computes(layer))


def test_the_host_waits_for_each_expert():
    """For its rows; since 4.53 for which experts have any, and for the number of each."""
    assert waits((4, 51)) == 5
    assert waits((4, 53)) == 1 + 2 * 5


def test_rows_are_dealt_out_to_the_last():
    """128 choices of five experts: three get 26, two 25."""
    spec = built("qwen3_moe")
    tree = trace(spec, Workload(1, 64))
    layer = next(module for module in modules(tree) if module.module_class == "Qwen3MoeSparseMoeBlock")
    experts = [module for module in layer.body if getattr(module, "module_class", "") == "Qwen3MoeMLP"]
    gate = [next(computes(expert.body[0])).forward[0].m for expert in experts]
    assert gate == [26, 26, 26, 25, 25]


def test_others_stay_as_they_are():
    dense = from_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                         "intermediate_size": 64, "vocab_size": 99}, "dense")  # fmt: skip
    moe = from_config(recorded()["mixtral"]["config"], "mixtral")
    assert with_modules(dense, (4, 57)) is dense
    assert with_modules(moe, (5, 0)) is moe
    assert with_modules(moe, None) is moe
