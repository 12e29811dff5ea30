"""What a scenario may say of saving, and what of it is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError

SCENARIO = Path(__file__).parents[2] / "scenarios" / "qwen7b_8xh100.yaml"
FSDP2 = ["zero=null", "framework=fsdp2"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["saving={by: engine, only_model: true}"], "saving.only_model"),
        ([*FSDP2, "saving={by: async, only_model: true}"], "saving.only_model"),
        ([*FSDP2, "saving=async", "fsdp.state_dict_type=FULL_STATE_DICT"], "fsdp.state_dict_type"),
        (["saving=async"], "saving.by"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], field: str) -> None:
    with pytest.raises(InputError) as error:
        zsim.simulate(SCENARIO, overrides)
    assert error.value.field == field
    assert error.value.accepted


def test_shards_of_groups_are_not_looked_at() -> None:
    mics = ["framework={name: deepspeed, version: 0.18.9}", "zero.mics_shard_size=4", "saving={resume: true}"]
    result = zsim.simulate(SCENARIO, mics)
    assert not result.moments
    assert any("MiCS" in text and "saving" in text for text in result.not_modeled)


def test_resuming_from_an_asynchronous_save_is_not_modeled() -> None:
    said = [zsim.simulate(SCENARIO, [*FSDP2, f"saving={{by: async, resume: {flag}}}"]) for flag in ("false", "true")]
    assert ["resuming from an asynchronous save" in result.not_modeled for result in said] == [False, True]
