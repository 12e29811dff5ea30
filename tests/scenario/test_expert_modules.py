"""Experts as modules, where a scenario's framework is one of before transformers 5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zsim.api import simulate
from zsim.errors import InputError, NotModeled
from zsim.program.ops import Collective, HostWait, Launch
from zsim.scenario import Setup
from zsim.scenario.load import load

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]
SIZES = {
    "model_type": "mixtral", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
THREE = "{stage: 3, stage3_param_persistence_threshold: 0}"


def setup_of(write: Write, framework: str, **fields: str) -> Setup:
    config = write().parent / "config.json"
    config.write_text(json.dumps(SIZES | json.loads(fields.pop("over", "{}"))))
    return load(write(model=str(config), framework=framework, **fields)).resolve()


@pytest.mark.parametrize(
    ("framework", "modules"),
    [
        ("{name: deepspeed, transformers: '4.51.3'}", "all"),
        ("{name: deepspeed, transformers: '4.57'}", "hit"),
        ("{name: deepspeed, version: 0.18.4}", "hit"),  # of January 7th, 2026; transformers 5.0 came on the 26th
        ("{name: deepspeed, version: 0.18.5}", ""),
        ("{name: fsdp2, version: 2.10.0}", "hit"),
        ("{name: fsdp2, version: 2.10.0, transformers: '5.0'}", ""),
        ("fsdp2", ""),
    ],
)
def test_the_release_decides(write: Write, framework: str, modules: str) -> None:
    setup = setup_of(write, framework)
    assert setup.model.arch.moe.modules == modules
    assert any("a module for each expert" in note for note in setup.assumptions) == bool(modules)


def gathers(setup: Setup) -> list[str]:
    """Modules that gather in the third step's forward."""
    launched = (item.op for item in simulate(setup).program.steps[-1] if isinstance(item, Launch))
    return [op.module for op in launched if isinstance(op.work, Collective) and op.work.kind == "all_gather"]


def test_zero3_gathers_each_projection_of_each_expert(write: Write) -> None:
    """Before DeepSpeed 0.18, which takes the block of experts for one."""
    one_by_one = setup_of(write, "{name: deepspeed, version: 0.16.9, transformers: '4.51.3'}", zero=THREE)
    whole = setup_of(write, "{name: deepspeed, version: 0.18.4}", zero=THREE)
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w{part}" for expert in range(4) for part in (1, 2, 3)]
    prefetch = {"zero": "{stage: 3, stage3_param_persistence_threshold: 0, stage3_prefetch_bucket_size: 0}"}
    asked = gathers(setup_of(write, "{name: deepspeed, version: 0.16.9, transformers: '4.51.3'}", **prefetch))
    assert set(names) <= set(asked)
    assert not set(names) & set(gathers(whole))
    assert simulate(one_by_one).time.step_s > 1.2 * simulate(whole).time.step_s


def test_the_host_waits_before_each_expert(write: Write) -> None:
    waits = [
        sum(isinstance(item, HostWait) for item in simulate(setup_of(write, framework)).program.steps[-1])
        for framework in ("{name: ddp, transformers: '4.51.3'}", "ddp")
    ]
    assert waits[0] - waits[1] == 2 * 4  # layers, experts


def test_adapters_reach_every_expert(write: Write) -> None:
    setup = setup_of(write, "{name: ddp, version: 2.6.0}", lora="{r: 8, targets: [w1, w2]}")
    adapted = [p for p in setup.model.parameters if p.trainable]
    assert len(adapted) == 2 * 4 * 2 * 2
    assert sum(p.numel for p in adapted) == 2 * 4 * 2 * 8 * (256 + 512)


def test_peft_passes_over_names_that_a_model_has_not(write: Write) -> None:
    fields = {"lora": "{r: 8, targets: [q_proj, gate_proj, w1], exclude: [w1]}"}
    setup = setup_of(write, "{name: ddp, transformers: '4.57'}", **fields)
    assert sum(p.trainable for p in setup.model.parameters) == 2 * 2
    assert [note for note in setup.model.notes if "passes over" in note] == [
        "lora.targets: the model has no gate_proj, which peft passes over"  # it has w1, which is excluded
    ]
    with pytest.raises(InputError, match=r"leaves out all that .* chooses: gate, w1") as error:
        setup_of(write, "{name: ddp, transformers: '4.57'}", lora="{r: 8, targets: [w1, gate], exclude: [w1, gate]}")
    assert error.value.field == "lora.exclude"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"compile": "true"}, "torch.compile of experts that are modules"),
        ({"zero": "{stage: 2, autoep_size: 4}"}, "AutoEP. of experts that are modules"),
    ],
)
def test_refused(write: Write, fields: dict[str, str], says: str) -> None:
    with pytest.raises(NotModeled, match=says):
        setup_of(write, "{name: deepspeed, transformers: '4.57'}", **fields)


def test_said_where_they_are_not_modeled(write: Write) -> None:
    over = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    setup = setup_of(write, "{name: deepspeed, transformers: '4.57'}", over=json.dumps(over))
    assert any("how transformers 4.57 ran the experts of ernie4_5_moe" in text for text in setup.not_modeled)
