"""zero.autoep_size of a scenario, and the DeepSpeed configuration that it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zsim.api import simulate
from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan
from zsim.scenario import Setup
from zsim.scenario.load import load
from zsim.sweep.launch import deepspeed

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "scenarios/qwen3_30b_a3b_8xh100_experts.yaml"
QWEN = str(ROOT / "scenarios/models/qwen3-30b-a3b/config.json")
LLAMA = str(ROOT / "scenarios/models/llama-3.1-8b/config.json")

Write = Callable[..., Path]


def resolved(write: Write, *overrides: str, **fields: str) -> Setup:
    given = {"model": QWEN, "zero": "{stage: 2, autoep_size: 8}", "seq_len": "4096"} | fields
    return load(write(**given), overrides).resolve()


def test_what_is_assumed_is_said(write: Write) -> None:
    setup = resolved(write)
    assert isinstance(setup.plan, DeepSpeedPlan)
    assert (setup.plan.autoep_size, setup.model.conversion and setup.model.conversion.size) == (8, 8)
    said = " ".join(setup.assumptions)
    assert "8 neighbouring GPUs share the experts of each layer, 16 of 128 each" in said
    assert "routing is even: each expert gets 8 of 128 tokens" in said


def test_without_experts_it_has_no_effect(write: Write) -> None:
    setup, plain = (resolved(write, model=LLAMA, zero=f"{{stage: 2{more}}}") for more in (", autoep_size: 8", ""))
    assert setup.plan == plain.plan
    assert any("zero.autoep_size has no effect" in note for note in setup.assumptions)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"zero": "{stage: 2, autoep_size: 3}"}, "zero.autoep_size", "3 does not divide the 8 ranks"),
        ({"framework": "{name: deepspeed, version: 0.18.9}"}, "zero.autoep_size", "0.18.9 has no AutoEP"),
        (
            {"framework": "{name: deepspeed, version: 0.19.2}", "zero": "{stage: 3, autoep_size: 8}"},
            "zero.autoep_size",
            "0.19.2 has no AutoEP with stage 3",
        ),
        ({"lora": "{r: 8, targets: [q_proj]}"}, "zero.autoep_size", "adapters"),
    ],
)
def test_refused_where_it_stands(write: Write, fields: dict[str, str], field: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        resolved(write, **fields)
    assert refused.value.field == field


def test_the_configuration_written_for_a_plan_says_it(write: Write) -> None:
    setup = resolved(write, zero="{stage: 2, autoep_size: 4, use_data_before_expert_parallelism: true}")
    assert isinstance(setup.plan, DeepSpeedPlan)
    written = deepspeed(setup, setup.plan)
    assert written["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert written["use_data_before_expert_parallelism"] is True


def test_an_expert_parallelism_that_is_off_refuses_nothing(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    block = {"enabled": False, "comm_backend": "deepep", "top_k": 1}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "expert_parallel": block}))
    setup = resolved(write, zero="", deepspeed_config=str(path))
    assert isinstance(setup.plan, DeepSpeedPlan)
    assert setup.plan.autoep_size == 0


def test_both_ways_to_shard_the_rest_fit_and_travel() -> None:
    """Qwen3-30B-A3B on 8 GPUs: experts are on one of them each, so that stage 3 saves only its share of the rest."""
    shared, sharded = (simulate(str(SCENARIO), [f"zero.stage={stage}"]).to_dict() for stage in (2, 3))
    for result in (shared, sharded):
        assert result["fits"]
        assert result["model"]["params"] == 30_532_122_624
        assert {"all_to_all/forward", "all_to_all/backward"} <= result["time"]["exposed_by"].keys()
    peaks = [result["memory"]["gpu"]["by_category"]["optimizer_states"] for result in (shared, sharded)]
    assert peaks[0] == pytest.approx(8 * 30_532_122_624 / 8, rel=1e-3) == pytest.approx(peaks[1], rel=1e-3)
