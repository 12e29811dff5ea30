"""FSDP's units by class and by size. Their collectives are held against recordings in tests/validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, said
from zsim.api import load_scenario
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import Fsdp1Plan
from zsim.program.lower import lower
from zsim.program.ops import Collective, Launch
from zsim.program.units import groups_by_size, groups_of
from zsim.scenario import Setup

MODELS = Path("scenarios/models").absolute()


def setup_of(tmp_path: Path, model: str, fsdp: str, more: str = "") -> Setup:
    file = tmp_path / "scenario.yaml"
    file.write_text(f"""
model: {MODELS / model / "config.json"}
cluster: {Path("topologies/hgx_h100_8.yaml").absolute()}
framework: fsdp1
fsdp: {fsdp}
micro_batch: 1
seq_len: 512
precision: bf16
{more}
""")
    return load_scenario(file).resolve()


def units(setup: Setup) -> dict[str, int]:
    assert isinstance(setup.plan, Fsdp1Plan)
    assert setup.plan.min_num_params
    groups = groups_by_size(setup.model, setup.tree, setup.plan.min_num_params)
    return {group.name: sum(setup.model.parameters[param].numel for param in group.params) for group in groups}


def test_all_attentions_of_an_8b_model_are_one_unit_from_1e8_on(tmp_path: Path):
    """14,336 x 4,096 is 59 million: an MLP is a unit, an attention (42 million) and its block's rest are none, and so
    are left to the stack around all blocks, whose unit stays gathered while they run."""
    found = units(setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 100000000}"))
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096  # with the block's norms
    assert found.pop("model") == 32 * attention + 4096
    assert found.pop("model.embed_tokens") == found.pop("lm_head") == 128_256 * 4096
    assert found == {f"model.layers.{layer}.mlp": 3 * 4096 * 14_336 for layer in range(32)}


def test_the_largest_unit_is_named(tmp_path: Path):
    setup = setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 100000000}")
    (text,) = lower(setup.model, setup.tree, setup.plan, setup.workload).assumptions
    assert "35 units; the largest, model, holds 1,342,443,520" in text


def test_with_smaller_sizes_projections_are_units(tmp_path: Path):
    found = units(setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 40000000}"))
    assert found["model.layers.0.mlp.gate_proj"] == 4096 * 14_336
    assert found["model.layers.0.self_attn"] == 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert found[""] == 65 * 4096  # the norms, with the root


def test_a_model_smaller_than_the_size_is_one_unit(tmp_path: Path):
    assert list(units(setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 10000000000}"))) == [""]


def test_tied_weights_in_two_units_are_refused(tmp_path: Path):
    config = json.loads((MODELS / "llama-3.1-8b/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    setup = setup_of(tmp_path, str(tmp_path), "{min_num_params: 100000000}")
    with pytest.raises(InputError, match=r"embed_tokens\.weight is tied, and would be in two units"):
        units(setup)
    assert list(units(setup_of(tmp_path, str(tmp_path), "{min_num_params: 10000000000}"))) == [""]


def test_beside_other_units(tmp_path: Path):
    with pytest.raises(InputError, match="flat says what the units are, too"):
        setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 1000, flat: true}")
    with pytest.raises(InputError, match=r"fsdp\.wrap: flat says what the units are, too"):
        setup_of(tmp_path, "llama-3.1-8b", "{wrap: [LlamaMLP], flat: true}")
    setup = setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 1000}", "lora: {r: 8}")
    assert isinstance(setup.plan, Fsdp1Plan)
    assert setup.plan.min_num_params is None
    assert any("min_num_params has no effect" in text for text in setup.assumptions)
    with pytest.raises(NotModeled, match="units by size of a model with adapters"):
        setup_of(tmp_path, "llama-3.1-8b", "{min_num_params: 1000, adapter_units: false}", "lora: {r: 8}")


@pytest.mark.parametrize("least", [1, 3000, 1_000_000])
def test_every_unit_reduces_once(least: int):
    """Also where a gradient comes after the module's own work, as of Llama 4's experts."""
    config = {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "vocab_size": 199, "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size_mlp": 160, "intermediate_size": 48, "num_local_experts": 4, "moe_layers": [1, 2],
    }  # fmt: skip
    model, workload = from_config(config, "llama4"), Workload(1, 32)
    tree = trace(model, workload)
    units = groups_by_size(model, tree, least)
    assert (len(units) > 1) == (least < 1_000_000)
    program = lower(model, tree, Fsdp1Plan(world_size=4, min_num_params=least), workload)
    for step in program.steps:
        works = [i.op.work for i in step if isinstance(i, Launch)]
        assert sum(isinstance(w, Collective) and w.kind == "reduce_scatter" for w in works) == len(units)


def test_units_of_one_class_leave_the_rest_to_the_root(tmp_path: Path):
    setup = setup_of(tmp_path, "llama-3.1-8b", "{wrap: [LlamaMLP]}")
    assert isinstance(setup.plan, Fsdp1Plan)
    groups = groups_of(setup.model, setup.tree, wrap=setup.plan.wrap)
    sizes = {group.name: sum(setup.model.parameters[param].numel for param in group.params) for group in groups}
    mlps = 32 * 3 * 4096 * 14_336
    assert sizes.pop("") == setup.model.numel - mlps
    assert sizes == {f"model.layers.{layer}.mlp": 3 * 4096 * 14_336 for layer in range(32)}


def test_a_class_that_the_model_has_not(tmp_path: Path):
    setup = setup_of(tmp_path, "llama-3.1-8b", "{wrap: [LlamaLayer]}")
    with pytest.raises(InputError, match="the model has no module of class LlamaLayer") as caught:
        lower(setup.model, setup.tree, setup.plan, setup.workload)
    assert caught.value.accepted == "LlamaDecoderLayer"


@pytest.mark.parametrize(
    ("section", "wrap"),
    [
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, ["LlamaDecoderLayer"]),
        ({"fsdp_transformer_layer_cls_to_wrap": "Qwen3_5DecoderLayer, Qwen3_5VisionBlock"},
         ["Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"]),
        ({"transformer_layer_cls_to_wrap": ["MixtralSparseMoeBlock"]}, ["MixtralSparseMoeBlock"]),
        ({}, None),
    ],
)  # fmt: skip
def test_classes_that_accelerate_is_told(section: dict[str, Any], wrap: list[str] | None):
    assert accelerate({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | section).get("fsdp.wrap") == wrap
    assert "fsdp.wrap" not in accelerate({"fsdp_auto_wrap_policy": "NO_WRAP"} | section)


def test_what_names_no_class():
    with pytest.raises(InputError, match=r"'\$\{LAYER\}' names no classes"):
        accelerate(
            {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "${LAYER}"}
        )


def accelerate(section: dict[str, Any]) -> dict[str, Any]:
    wrap = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    data = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": wrap | section}
    return said(read("accelerate", data))


def test_what_accelerate_takes_for_the_size():
    """commands/launch.py: 1e8 unless said; utils/dataclasses.py, set_auto_wrap_policy: 0 is no policy."""
    assert accelerate({})["fsdp.min_num_params"] == 10**8
    assert accelerate({"fsdp_min_num_params": 2000})["fsdp.min_num_params"] == 2000
    assert accelerate({"fsdp_min_num_params": "1e7"})["fsdp.min_num_params"] == 10**7
    without = accelerate({"fsdp_min_num_params": 0})
    assert without["fsdp.flat"] is True
    assert "fsdp.min_num_params" not in without


@pytest.mark.parametrize("value", ["many", -1, True, [1], 1e400])
def test_a_size_that_is_none(value: Any):
    with pytest.raises(InputError, match="is not a number of parameters"):
        accelerate({"fsdp_min_num_params": value})


def test_fsdp2_fails_on_the_list_of_blocks():
    with pytest.raises(InputError, match="the list of blocks too, which FSDP2 refuses"):
        accelerate({"fsdp_version": 2})


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        ({"fsdp": "full_shard auto_wrap", "fsdp_min_num_params": 2000}, 2000),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 3000}, "warmup_ratio": 0.1}, 3000),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_min_num_params": 3000}, "warmup_ratio": 0.1}, 3000),
        ({"fsdp": "full_shard", "fsdp_min_num_params": 2000}, None),
        ({"fsdp": "full_shard auto_wrap", "fsdp_min_num_params": 0}, None),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 3000}}, None),
    ],
)
def test_arguments_of_transformers_4_mean_units_by_size(arguments: dict[str, Any], least: int | None):
    """training_args.py of 4.57, _process_fsdp_args. transformers 5 looks at auto_wrap_policy, of blocks unless said."""
    reading = read("trainer", {"per_device_train_batch_size": 1, "bf16": True} | arguments)
    assert said(reading).get("fsdp.min_num_params") == least
