"""Rows that were predicted before anything was known of them: all are read, and the first errors stay."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

import pytest
import yaml

from zsim.errors import InputError
from zsim.model.lora import Lora, Tuning
from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp2Plan
from zsim.result.reported import NEVER_SEEN
from zsim.validation import stated
from zsim.validation.evidence import setup_of
from zsim.validation.holdout import section
from zsim.validation.rows import Row, read_folder, read_rows, split_of

PUBLISHED = Path(__file__).parents[2] / "validation" / "published"
HOLDOUT = PUBLISHED / "holdout"
ROWS = {row.id: row for row in read_folder(HOLDOUT)}
HOLDOUTS = (
    HOLDOUT,
    *(PUBLISHED / f"{which}_holdout" for which in ("second", "third", "fourth", "fifth", "sixth", "seventh")),
)
AGAIN = {row.id: row for row in read_folder(HOLDOUTS[1])}


def row(**fields: str) -> Row:
    base = {"precision": "bf16", "framework": "HF Trainer + DeepSpeed 0.12.6", "strategy": "zero3", "d_model": "64"}
    return Row("rows.csv", 2, base | fields)


@pytest.mark.parametrize("folder", HOLDOUTS)
def test_no_source_of_theirs_is_among_the_rows_that_shaped_zsim(folder: Path) -> None:
    rows = read_folder(folder)
    assert not {r["source"] for r in rows} & {r["source"] for r in read_folder(PUBLISHED)}
    assert len(rows) >= 25


def test_reports_say_how_far_off_they_were_the_first_time() -> None:
    errors = [
        abs(error["step"])
        for folder in HOLDOUTS
        for error in yaml.safe_load((folder / "blind.yaml").read_text())["errors"].values()
        if "step" in error
    ]
    assert len(errors) == NEVER_SEEN.runs
    assert round(fmean(errors), 1) == NEVER_SEEN.mape
    assert round(median(errors), 1) == NEVER_SEEN.median


@pytest.mark.parametrize("folder", HOLDOUTS)
def test_all_are_test_rows(folder: Path) -> None:
    assert {r.get("split") or split_of(r) for r in read_folder(folder)} == {"test"}


@pytest.mark.parametrize("folder", HOLDOUTS)
def test_the_first_errors_are_on_record_for_every_row(folder: Path) -> None:
    record, rows = yaml.safe_load((folder / "blind.yaml").read_text()), {r.id for r in read_folder(folder)}
    assert set(record["errors"]) == rows
    assert set(record["out_of_memory"]) <= rows
    explained = yaml.safe_load((folder / "explained.yaml").read_text())
    assert {name.removeprefix("memory ") for name in explained} <= rows


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_read(name: str) -> None:
    assert setup_of(ROWS[name]).cluster.world_size == ROWS[name].count("n_gpus")


@pytest.mark.parametrize("name", AGAIN)
def test_rows_are_read_or_refused_for_what_is_not_modeled(name: str) -> None:
    if AGAIN[name]["gpu"] in ("H100-64GB", "A100-64GB") or AGAIN[name]["offload"] != "none":
        with pytest.raises(InputError, match=r"unknown GPU|activations-cpu"):
            setup_of(AGAIN[name])
    else:
        assert setup_of(AGAIN[name]).cluster.world_size == AGAIN[name].count("n_gpus")


def test_what_rows_state_is_what_is_simulated() -> None:
    lora = setup_of(ROWS["qwen-72b-lora-z3-s256"])
    assert isinstance(lora.plan, DeepSpeedPlan)
    assert lora.plan.stage == 3
    adapted = sum(parameter.numel for parameter in lora.model.parameters if parameter.trainable)
    assert 0 < adapted < 0.05 * lora.model.numel
    ddp = setup_of(ROWS["at-gpt2-ddp-b8"])
    assert isinstance(ddp.plan, DdpPlan)
    assert (ddp.plan.autocast, ddp.plan.optimizer.impl, ddp.workload.attention) == ("float16", "loop", "eager")
    some = setup_of(ROWS["why-a100x1"])
    assert (some.workload.kernels, some.workload.loss, some.workload.wide_cache) == ("flash-attn", "hf", True)
    assert isinstance(some.plan, DdpPlan)
    assert (some.plan.dtype, some.plan.autocast) == ("bfloat16", "bfloat16")
    pure = setup_of(ROWS["lt-940-fsdp2-eager"]).plan
    assert isinstance(pure, Fsdp2Plan)
    assert (pure.storage_dtype, pure.reduce_dtype) == ("bfloat16", "bfloat16")


def test_words_of_a_row() -> None:
    assert stated.half(row(precision="fp16 amp")) == "float16"
    assert stated.optimizer(row(notes="AdamW of torch"), "fused") == "foreach"
    assert stated.optimizer(row(notes="AdamW of transformers"), "fused") == "loop"
    assert stated.optimizer(row(notes="fused AdamW"), "foreach") == "fused"
    assert stated.optimizer(row(), "foreach") == "foreach"
    assert stated.adapters(row(precision="bf16, LoRA")) is None
    assert stated.adapters(row(precision="bf16, LoRA r=8 on q_proj, v_proj", notes="LoRA dropout 0.05")) == Tuning(
        Lora(8, ("q_proj", "v_proj"), dropout=0.05)
    )
    assert stated.zero_settings(row()) == {}
    assert stated.zero_settings(row(notes="overlap_comm, sizes auto")) == {
        "overlap_comm": True,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert stated.zero_settings(row(notes="reduce buckets of 2e8")) == {"reduce_bucket_size": 200_000_000}


def test_the_section_has_the_first_error_beside_the_present_one(tmp_path: Path) -> None:
    rows = HOLDOUT / "lightning.csv"
    text = rows.read_text().splitlines()
    chosen = [line for line in text if line.startswith(("id,", "lt-940-fsdp1-compile,", "lt-940-fsdp2-compile,"))]
    (tmp_path / "rows.csv").write_text("\n".join(chosen) + "\n")
    names = [r.id for r in read_rows(tmp_path / "rows.csv")]
    record = {"date": "2026-01-02", "commit": "abc", "errors": {name: {"step": -50.0} for name in names}}
    (tmp_path / "blind.yaml").write_text(yaml.safe_dump(record | {"out_of_memory": [names[0]]}))
    lines = list(section(tmp_path))
    assert "on 2026-01-02, by the code of commit abc" in lines[0]
    assert any(line.startswith("| all | 2 | 50.0 | 50.0 | -50.0 | -50.0 | 2 | ") for line in lines)
    assert f"\nCalled out of memory though they ran, blind: {names[0]}" in lines
    assert "\nCalled out of memory though they ran, now: none" in lines
