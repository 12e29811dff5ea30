"""Plans and their files where GPUs share sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.plan import detect
from zsim.plan.spec import DeepSpeedPlan
from zsim.scenario.load import load
from zsim.sweep import launch
from zsim.sweep.space import Machine, candidates

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "scenarios" / "qwen7b_8xh100.yaml"
MACHINE = Machine(ROOT / "topologies" / "hgx_h100_8.yaml", None, 8, 8, sharing=4)


@pytest.mark.parametrize(
    ("sharing", "batch", "whole"), [(1, 8, 1), (4, 8, 4), (8, 8, 8), (4, 7, None), (3, 8, None), (4, 2, 1)]
)
def test_a_batch_is_divided_over_groups(sharing: int, batch: int, whole: int | None) -> None:
    assert replace(MACHINE, sharing=sharing).per_group(batch) == whole


def test_candidates_have_the_global_batch() -> None:
    sizes = {(candidate.micro_batch, candidate.grad_accum) for candidate in candidates(MACHINE, 8)}
    assert sizes == {(1, 4), (2, 2), (4, 1)}  # of 2 groups each


def test_deepspeeds_file_is_read_back_as_the_same_plan(tmp_path: Path) -> None:
    overrides = ("sequence_parallel_size=4", "grad_accum=2", "zero.seq_parallel_communication_data_type=bfloat16")
    setup = load(SCENARIO, overrides).resolve()
    assert isinstance(setup.plan, DeepSpeedPlan)
    written = launch.deepspeed(setup, setup.plan)
    assert written["train_batch_size"] == 1 * 2 * 8 // 4
    (tmp_path / "ds.json").write_text(json.dumps(written))
    document = detect.parse(tmp_path / "ds.json")
    fields = detect.read(document, "deepspeed").fields
    assert fields["sequence_parallel_size",] == 4
    assert fields["zero", "seq_parallel_communication_data_type"] == "bfloat16"
    assert fields["train_batch_size",] == 4
