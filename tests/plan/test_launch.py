"""`accelerate launch` in a script: its configuration file and its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.test_recipes import read_file, said
from tests.plan.test_script import script
from zsim.errors import InputError, NotModeled
from zsim.plan.reading import NOT_SHARDED, Reading

ZERO3 = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
parallelism_config:
  parallelism_config_sp_size: 4
  parallelism_config_dp_shard_size: 2
"""
FSDP = """\
distributed_type: FSDP
mixed_precision: fp16
num_processes: 4
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
TRAIN = "train.py --per_device_train_batch_size 2"


def launched(folder: Path, options: str, arguments: str = "", file: str = "") -> Reading:
    if file:
        (folder / "acc.yaml").write_text(file)
    return script(folder, f"accelerate launch {options} {TRAIN} {arguments}\n")


def test_its_file_with_deepspeed_is_followed(tmp_path: Path):
    reading = launched(tmp_path, "--config_file acc.yaml", "--gradient_accumulation_steps 2", ZERO3)
    fields = said(reading)
    assert (fields["framework.name"], fields["zero.stage"], fields["zero.zero_init"]) == ("deepspeed", 3, True)
    assert (fields["zero.offload_optimizer.device"], fields["sequence_parallel_size"]) == ("cpu", 4)
    assert (fields["micro_batch"], fields["grad_accum"], fields["precision"]) == (2, 2, "bf16")
    assert fields["optimizer.decay_groups"] is True  # as with --deepspeed
    assert reading.ranks == 8
    assert reading.places[("zero", "stage")] == (tmp_path / "acc.yaml", 5)
    assert NOT_SHARDED not in reading.notes
    assert not [text for text in reading.without_effect if "config_file" in text]
    assert not any(name.startswith("ddp") for name in fields)


def test_its_file_with_fsdp_and_the_trainers_precision(tmp_path: Path):
    fields = said(launched(tmp_path, "--config-file=acc.yaml", "--bf16", FSDP))
    assert (fields["framework.name"], fields["fsdp.reshard_after_forward"]) == ("fsdp2", False)
    assert fields["precision"] == "bf16"
    assert said(launched(tmp_path, "--config_file acc.yaml"))["precision"] == "fp16"


def test_options_go_before_the_file(tmp_path: Path):
    options = "--config_file acc.yaml --num_processes 16 --mixed_precision bf16 --fsdp_reshard_after_forward true"
    reading = launched(tmp_path, options, "", FSDP)
    fields = said(reading)
    assert (reading.ranks, fields["precision"], fields["fsdp.reshard_after_forward"]) == (16, "bf16", True)
    assert reading.places[("precision",)] == (tmp_path / "train.sh", 1)


def test_a_file_that_is_not_there_is_missing(tmp_path: Path):
    reading = launched(tmp_path, "--config_file acc.yaml")
    assert "framework.name" not in said(reading)
    assert "precision" not in said(reading)
    assert "framework (accelerate's configuration acc.yaml is not there)" in reading.still_missing()
    assert NOT_SHARDED not in reading.notes


def test_a_file_is_found_from_the_folder_that_a_repositorys_commands_run_in(tmp_path: Path):
    """scripts/v1/train.sh names scripts/zero3.json; a name without a folder is not looked for above."""
    (tmp_path / "scripts" / "v1").mkdir(parents=True)
    (tmp_path / "scripts" / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    reading = script(tmp_path / "scripts" / "v1", f"deepspeed {TRAIN} --deepspeed ./scripts/zero3.json\n")
    assert said(reading)["zero.stage"] == 3
    assert reading.places[("zero", "stage")] == (tmp_path / "scripts" / "zero3.json", 1)
    reading = script(tmp_path / "scripts" / "v1", f"deepspeed {TRAIN} --deepspeed zero3.json\n")
    assert "zero.stage" not in said(reading)
    assert "deepspeed_config (names zero3.json, which is not there)" in reading.missing


def test_the_trainers_deepspeed_goes_before_accelerates(tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    fields = said(launched(tmp_path, "--config_file acc.yaml", "--deepspeed ds.json --bf16", ZERO3))
    assert (fields["framework.name"], fields["zero.stage"], fields["precision"]) == ("deepspeed", 1, "bf16")
    with pytest.raises(InputError, match="told to use FSDP"):
        launched(tmp_path, "--config_file acc.yaml", "--deepspeed ds.json", FSDP)


@pytest.mark.parametrize(
    ("options", "arguments", "precision"),
    [
        ("--mixed_precision bf16", "", "bf16"),
        ("--mixed_precision=fp16", "", "fp16"),
        ("--mixed-precision no", "", "fp32"),
        ("--mixed_precision fp16", "--bf16", "bf16"),
        ("--multi_gpu", "--fp16", "fp16"),
        ("", "", "fp32"),
    ],
)
def test_precision(tmp_path: Path, options: str, arguments: str, precision: str):
    fields = said(launched(tmp_path, options, arguments))
    assert (fields["precision"], fields["framework.name"]) == (precision, "ddp")


def test_a_plugin_by_options(tmp_path: Path):
    options = "--use_deepspeed --zero_stage 3 --offload_param_device cpu --gradient_clipping 0.5 --mixed_precision bf16"
    fields = said(launched(tmp_path, options, "--max_grad_norm 0.5"))
    assert (fields["framework.name"], fields["zero.stage"]) == ("deepspeed", 3)
    assert (fields["zero.offload_param.device"], fields["grad_clip"], fields["precision"]) == ("cpu", 0.5, "bf16")
    wrap = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    fields = said(launched(tmp_path, f"--use_fsdp {wrap} --fsdp_sharding_strategy SHARD_GRAD_OP"))
    assert (fields["framework.name"], fields["fsdp.sharding_strategy"]) == ("fsdp1", "SHARD_GRAD_OP")


@pytest.mark.parametrize(
    ("options", "error", "says", "field"),
    [
        ("--zero_stage 3", InputError, "has no effect without DEEPSPEED", "zero_stage"),
        ("--use_deepspeed --use_fsdp", InputError, "next to --use_deepspeed", "use_fsdp"),
        ("--use_megatron_lm", NotModeled, "Megatron-LM", "use_megatron_lm"),
        ("--mixed_precision fp8", NotModeled, "fp8", "mixed_precision"),
        ("--fsdp_version 2", InputError, "has no effect without FSDP", "fsdp_version"),
        ("--mixed_precison bf16", InputError, "did you mean --mixed_precision", "mixed_precison"),
        ("--parallelism_config_sp_size 2", InputError, "use_parallelism_config", "parallelism_config_sp_size"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: str, error: type, says: str, field: str):
    with pytest.raises(error, match=says) as caught:
        launched(tmp_path, options)
    assert (caught.value.file, caught.value.line, caught.value.field) == (tmp_path / "train.sh", 1, field)


def test_options_for_a_configuration_that_is_not_there(tmp_path: Path):
    """Whether they have an effect is that file's to say; a switch on the command says it."""
    options = "--config_file elsewhere.yaml --gradient_accumulation_steps 4"
    reading = launched(tmp_path, options)
    assert "gradient_accumulation_steps: has an effect if elsewhere.yaml, which is not there" in "; ".join(
        reading.notes
    )
    assert any(what.startswith("framework") for what in reading.still_missing())
    assert said(launched(tmp_path, f"{options} --use_deepspeed"))["framework.name"] == "deepspeed"


def test_a_note_on_ddp_goes_where_another_file_shards(tmp_path: Path):
    (tmp_path / "other.yaml").write_text(ZERO3)
    for first, second in (("train.sh", "other.yaml"), ("other.yaml", "train.sh")):
        own = script(tmp_path, f"torchrun --nproc_per_node 8 {TRAIN} --bf16\n")
        assert NOT_SHARDED in own.notes
        both = read_file(tmp_path / first)[1]
        both.include(read_file(tmp_path / second)[1])
        assert said(both)["framework.name"] == "deepspeed"
        assert NOT_SHARDED not in both.notes
