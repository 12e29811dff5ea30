"""Arguments of the Trainer that say of another task than supervised training of one language model, and their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.errors import InputError, NotModeled
from zsim.plan.reading import FP32_ASSUMED, NOT_ENABLED

BASE = {"model_name_or_path": "m", "per_device_train_batch_size": 1}


def trainer(data: dict[str, Any]):
    return read("trainer", BASE | data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"train_group_size": 8}, "queries with several passages"),
        ({"query_max_len": 32}, "queries with several passages"),
        ({"sigmoid_loss_weight": 0.8}, "preference tuning"),
        ({"loss_type": "sigmoid,bco_pair"}, "preference tuning"),
        ({"knowledge_distillation": True}, "teacher"),
        ({"log_completions": True}, "generates between its steps"),
        ({"reward_funcs": ["accuracy"]}, "generates between its steps"),
        ({"num_ppo_epochs": 4}, "generates between its steps"),
        ({"pooling_method": "mean"}, "queries with several passages"),
        ({"doc_stride": 128}, "a head and a loss of its own"),
        ({"use_peft": True, "peft_lora_r": 8}, "which parameters train"),
        ({"sharded_ddp": "simple"}, "fairscale"),
        ({"half_precision_backend": "apex"}, "Apex"),
        ({"optim_target_modules": ["attn"]}, "projected gradients"),
        ({"accelerator_config": {"split_batches": True}}, "the processes share"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, "every micro-step"),
    ],
)
def test_other_tasks_and_ways_are_refused(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        trainer(data)


@pytest.mark.parametrize(
    "data",
    [
        {"loss_type": "nll"},
        {"knowledge_distillation": False},
        {"half_precision_backend": "auto"},
        {"accelerator_config": {"split_batches": False}},
        {"sharded_ddp": ""},
        {"sharded_ddp": [], "fsdp_min_num_params": 0, "use_cpu": False, "fp16_backend": "auto"},  # as W&B notes them
    ],
)
def test_what_is_off_is_no_other_task(data: dict[str, Any]) -> None:
    assert trainer(data).not_modeled == []


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("run_reward_modeling.py", "a reward model"),
        ("rm_train.py", "a reward model"),
        ("internvl_chat_mpo.py", "preference tuning"),
        ("scripts/kto.py", "preference tuning"),
        ("train_biencoder.py", "queries with several passages"),
        ("run_squad.py", "a head and a loss of its own"),
        ("examples/run_glue.py", "a head and a loss of its own"),
    ],
)
def test_programs_of_other_tasks_are_refused_by_name(tmp_path: Path, program: str, why: str) -> None:
    path = tmp_path / "train.sh"
    options = "--model_name_or_path m --output_dir o --per_device_train_batch_size 1 --learning_rate 1e-5"
    path.write_text(f"torchrun --nproc_per_node 8 {program} {options}\n")
    with pytest.raises(NotModeled, match=why):
        read_file(path)
    path.write_text(f"torchrun --nproc_per_node 8 run_clm.py {options}\n")
    assert said(read_file(path)[1])["micro_batch"] == 1


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_ddp_trains_in_the_type_that_the_model_is_loaded_in(name: str) -> None:
    assert said(trainer({"bf16": True, name: "bfloat16"}))["ddp.dtype"] == "bfloat16"
    bare = said(trainer({name: "bfloat16"}))
    assert (bare["ddp.dtype"], bare["precision"]) == ("bfloat16", "bf16")
    for other in ({"bf16": True, name: "float32"}, {"bf16": True}, {"bf16": True, name: "auto"}):
        assert "ddp.dtype" not in said(trainer(other))
    adapters = {"use_peft": True, "lora_target_modules": "all-linear"}
    assert "ddp.dtype" not in said(trainer({"bf16": True, name: "bfloat16"} | adapters))
    assert "ddp.dtype" not in said(trainer({"bf16": True, name: "bfloat16", "architectures": ["LlamaForCausalLM"]}))
    inside = {"bf16": True, "model_init_kwargs": {name: "bfloat16", "attn_implementation": "flash_attention_2"}}
    assert (said(trainer(inside))["ddp.dtype"], said(trainer(inside))["attention"]) == ("bfloat16", "flash")
    with pytest.raises(InputError, match="GradScaler refuses") as caught:
        trainer({"fp16": True, name: "float16"})
    assert caught.value.field == name
    assert said(trainer({name: "float16"}))["ddp.dtype"] == "float16"  # without a GradScaler
    odd = trainer({"model_init_kwargs": {3: "x"}}).not_modeled  # a key that is no text
    assert "model_init_kwargs: 3, of which nothing is read" in odd


def test_what_shards_widens_it() -> None:
    reading = trainer({"bf16": True, "torch_dtype": "bfloat16"})
    reading.include(read("accelerate", {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {}}))
    assert not any(path[0] == "ddp" for path in reading.fields)
    assert not any("master weights" in note for note in reading.notes)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_keeps_it_without_mixed_precision(version: int) -> None:
    """accelerator.py and fsdp_utils.py of accelerate 1.15 widen it where mixed_precision is not "no"."""
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": version}, "torch_dtype": "bfloat16"}
    fields = said(trainer(sharded))
    assert (fields["fsdp.storage_dtype"], fields["precision"]) == ("bfloat16", "bf16")
    for mixed in ({"bf16": True}, {"fp16": True}):
        assert "fsdp.storage_dtype" not in said(trainer(sharded | mixed))
    assert "fsdp.storage_dtype" not in said(trainer(sharded | {"torch_dtype": "float32"}))


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize(("mixed", "stored"), [("no", "bfloat16"), ("bf16", None)])
def test_another_files_mixed_precision_decides(turn: bool, mixed: str, stored: str | None) -> None:
    launched = {"distributed_type": "FSDP", "mixed_precision": mixed, "fsdp_config": {"fsdp_version": 1}}
    files = [trainer({"torch_dtype": "bfloat16"}), read("accelerate", launched)]
    first, second = reversed(files) if turn else files
    first.include(second)
    fields = said(first)
    assert (fields["precision"], fields.get("fsdp.storage_dtype")) == ("bf16", stored)
    assert any("master weights" in note for note in first.notes) == (stored is not None)
    assert not any(path[0] == "ddp" for path in first.fields)


@pytest.mark.parametrize("turn", [False, True])
def test_the_trainers_flag_goes_before_no_mixed_precision_of_accelerate(turn: bool) -> None:
    """training_args.py: bf16 and fp16 go before ACCELERATE_MIXED_PRECISION."""
    files = [trainer({"bf16": True}), read("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precision": "no"})]
    first, second = reversed(files) if turn else files
    first.include(second)
    assert said(first)["precision"] == "bf16"
    assert FP32_ASSUMED not in first.notes


def test_precision_that_deepspeeds_file_leaves_out_is_the_trainers(tmp_path: Path) -> None:
    """accelerate state.py and dataclasses.py, set_mixed_precision, which adds a section that is not there."""
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    reading = trainer({"bf16": True, "deepspeed": str(file)})
    assert said(reading)["precision"] == "bf16"
    assert NOT_ENABLED not in reading.notes
    without = trainer({"deepspeed": str(file)})
    assert said(without)["precision"] == "fp32"
    assert NOT_ENABLED in without.notes
    file.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}')
    with pytest.raises(InputError, match="precision is fp32"):
        trainer({"bf16": True, "deepspeed": str(file)})


def test_accelerate_and_deepspeeds_file_in_two_types(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    section = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    data = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    assert said(read("accelerate", data | {"mixed_precision": "no"}))["precision"] == "fp16"
    with pytest.raises(InputError, match="bf16 next to fp16"):
        read("accelerate", data | {"mixed_precision": "bf16"})


@pytest.mark.parametrize(
    ("config", "loss", "kernels"),
    [
        (None, "fused", "liger"),
        ({"fused_linear_cross_entropy": False}, None, "liger"),
        ({"rms_norm": False, "swiglu": False}, "fused", None),
        ({"rms_norm": False}, "fused", None),
    ],
)
def test_liger_kernels(config: dict[str, bool] | None, loss: str | None, kernels: str | None) -> None:
    reading = trainer({"use_liger_kernel": True, "liger_kernel_config": config})
    fields = said(reading)
    assert (fields.get("loss"), fields.get("kernels")) == (loss, kernels)
    assert bool(reading.not_modeled) is (config == {"rms_norm": False})


def test_a_tower_that_is_named_is_listed() -> None:
    texts = trainer({"vision_path": "OpenGVLab/InternViT-300M-448px"}).not_modeled
    assert texts == ["vision_tower: vision_path names a tower, unless the config.json is that of the whole model"]


@pytest.mark.parametrize(
    ("data", "framework"),
    [
        ({}, "fsdp2"),
        ({"evaluation_strategy": "no"}, "fsdp1"),
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "fsdp1"),
        ({"warmup_ratio": 0.03, "fsdp_config": {"version": 2}}, "fsdp2"),
    ],
)
def test_arguments_of_transformers_4_are_of_fsdp1(data: dict[str, Any], framework: str) -> None:
    """transformers 5.24 has no such arguments; until 5 the Trainer's fsdp was accelerate's FSDP1."""
    assert said(trainer({"bf16": True, "fsdp": "full_shard auto_wrap"} | data))["framework.name"] == framework


def test_classes_of_units_as_transformers_4_had_them() -> None:
    reading = trainer({"fsdp": "full_shard auto_wrap", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"})
    assert said(reading)["fsdp.wrap"] == ["LlamaDecoderLayer"]
    assert not reading.not_read
    whole = said(trainer({"fsdp": "full_shard", "evaluation_strategy": "no"}))
    assert (whole["fsdp.flat"], whole["framework.name"]) == (True, "fsdp1")
    assert "fsdp.flat" not in said(trainer({"fsdp": "full_shard"}))  # transformers 5 wraps blocks unless told not to


def test_an_older_switch_of_the_optimizer() -> None:
    assert said(trainer({"adafactor": True}))["optimizer.name"] == "adafactor"
    assert said(trainer({"adafactor": True, "optim": "adamw_torch"}))["optimizer.name"] == "adamw"
    assert said(trainer({"adafactor": False}))["optimizer.name"] == "adamw"


@pytest.mark.parametrize(
    ("data", "precision", "checkpointing", "length"),
    [
        ({"packing": True}, "bf16", "full", 1024),
        ({"packing": True, "fp16": True, "gradient_checkpointing": False}, "fp16", "none", 1024),
        ({"dataset_text_field": "text", "bf16": False, "max_length": None}, "fp32", "full", None),
        ({"packing": True, "max_seq_length": 2048}, "fp32", "none", 2048),  # trl before 0.20
        ({"packing": True, "evaluation_strategy": "no"}, "fp32", "none", None),  # of transformers up to 4.45
        ({"packing": True, "block_size": 512}, "bf16", "full", 512),
        ({}, "fp32", "none", None),
    ],
)
def test_trls_own_defaults(data: dict[str, Any], precision: str, checkpointing: str, length: int | None) -> None:
    """trl 1.16 base_config.py and sft_config.py; the Trainer's are no checkpointing and float32."""
    reading = trainer(data)
    fields = said(reading)
    assert (fields["precision"], fields["checkpointing"], fields.get("seq_len")) == (precision, checkpointing, length)
    defaults = any(note.startswith("max_length") for note in reading.notes)
    assert defaults is (length == 1024)
    assert ("gradient_checkpointing: true, trl's default from 0.22 on" in reading.notes) is (
        checkpointing == "full" and "gradient_checkpointing" not in data
    )


@pytest.mark.parametrize(
    ("data", "listed"),
    [
        ({"packing": True, "max_length": 4096}, True),
        ({"packing": True, "max_length": 4096, "loss_type": "nll"}, False),
        ({"packing": True, "max_length": 4096, "use_liger_kernel": True}, False),
        ({"packing": True, "max_seq_length": 4096}, False),  # trl before 0.20
        ({"max_length": 4096}, False),
    ],
)
def test_trls_loss_in_chunks_is_listed(data: dict[str, Any], listed: bool) -> None:
    assert any(text.startswith("loss_type: from trl 1.7") for text in trainer(data).not_modeled) is listed
