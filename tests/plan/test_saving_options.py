"""What configuration files say of saving, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from zsim.document import Document, parse_yaml
from zsim.errors import InputError
from zsim.plan import detect
from zsim.plan.deepspeed import read_document
from zsim.plan.reading import Reading

GATHERS = ("zero", "stage3_gather_16bit_weights_on_model_save")
TYPE = ("fsdp", "state_dict_type")
TRAINER = {"per_device_train_batch_size": 1, "bf16": True, "max_length": 512, "model_name_or_path": "x"}
AXOLOTL = {"base_model": "x", "sequence_len": 512, "micro_batch_size": 1, "datasets": [], "bf16": True}
LLAMA_FACTORY = {**TRAINER, "stage": "sft", "finetuning_type": "full", "cutoff_len": 512, "do_train": True}


def read(kind: str, data: dict[str, Any]) -> Reading:
    return detect.read(parse_yaml(yaml.safe_dump(data), "recipe.yaml"), kind, None)


def deepspeed(stage: int, **zero: Any) -> Reading:
    return read_document(Document(Path("ds.json"), {"zero_optimization": {"stage": stage, **zero}}))


def test_deepspeed_gathers_in_stage_3_alone():
    assert deepspeed(3, stage3_gather_16bit_weights_on_model_save=True).fields[GATHERS] is True
    assert deepspeed(3, gather_16bit_weights_on_model_save=False).fields[GATHERS] is False
    assert deepspeed(3, stage3_gather_fp16_weights_on_model_save=True).fields[GATHERS] is True
    below = deepspeed(2, stage3_gather_16bit_weights_on_model_save=True)
    assert GATHERS not in below.fields
    assert "saving in stage 3 alone" in " ".join(below.without_effect)


def test_the_new_name_of_the_key_wins():
    both = {"stage3_gather_16bit_weights_on_model_save": False, "stage3_gather_fp16_weights_on_model_save": True}
    assert deepspeed(3, **both).fields[GATHERS] is False


def test_accelerate_names_the_state_dict():
    fsdp = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8}
    wrap = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    for said, kind in (("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"), (1, "FULL_STATE_DICT"), (3, "SHARDED_STATE_DICT")):
        reading = read("accelerate", {**fsdp, "fsdp_config": {**wrap, "fsdp_state_dict_type": said}})
        assert reading.fields[TYPE] == kind
    local = {**wrap, "fsdp_version": 2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}
    with pytest.raises(InputError, match="only available with FSDP1"):
        read("accelerate", {**fsdp, "fsdp_config": local})
    zero = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
    section = {"zero_stage": 3, "zero3_save_16bit_model": True, "zero3_init_flag": True}
    assert read("accelerate", {**zero, "deepspeed_config": section}).fields[GATHERS] is True


@pytest.mark.parametrize(
    ("kind", "data"), [("trainer", TRAINER), ("axolotl", AXOLOTL), ("llama_factory", LLAMA_FACTORY)]
)
def test_recipes_that_say_how_they_save(kind: str, data: dict[str, Any]):
    """The Trainer would save where nothing is said, which is no statement."""
    assert not {path for path in read(kind, data).fields if path[0] == "saving"}
    reading = read(kind, {**data, "save_steps": 500})
    assert reading.fields["saving", "by"] == "trainer"
    assert "save_steps" not in " ".join(reading.without_effect)
    assert ("saving", "by") not in read(kind, {**data, "save_steps": 500, "save_strategy": "no"}).fields
    only = read(kind, {**data, "save_strategy": "epoch", "save_only_model": True})
    assert only.fields["saving", "only_model"] is True
    resumed = read(kind, {**data, "resume_from_checkpoint": "out/checkpoint-500"})
    assert resumed.fields["saving", "resume"] is True
    assert not {path for path in read(kind, {**data, "resume_from_checkpoint": None}).fields if path[0] == "saving"}
    never = read(kind, {**data, "save_strategy": "no", "resume_from_checkpoint": "out/checkpoint-500"})
    assert (never.fields["saving", "by"], never.fields["saving", "resume"]) == ("none", True)


def test_torchtitan_copies_its_shards_where_it_saves_beside_training():
    job = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, "seq_len": 512}}
    plain = read("torchtitan", {**job, "checkpoint": {"enable": True, "interval": 500}})
    assert ("saving", "by") not in plain.fields
    assert "checkpoint" in " ".join(plain.without_effect)
    for enabled, mode in (("enable", "async"), ("enable_checkpoint", "async_with_pinned_mem")):
        beside = read("torchtitan", {**job, "checkpoint": {enabled: True, "async_mode": mode}})
        assert beside.fields["saving", "by"] == "async"
    off = {**job, "checkpoint": {"enable": False, "async_mode": "async"}}
    assert ("saving", "by") not in read("torchtitan", off).fields
    with pytest.raises(InputError, match="is not known"):
        read("torchtitan", {**job, "checkpoint": {"enable": True, "async_mode": "later"}})


def test_the_trainers_fsdp_saves_full_state_dicts_unless_told_otherwise():
    """transformers 5.24 training_args.py, whatever accelerate's default for FSDP2."""
    fsdp = {**TRAINER, "fsdp": "full_shard auto_wrap", "save_steps": 500}
    assert read("trainer", fsdp).fields[TYPE] == "FULL_STATE_DICT"
    sharded = {**fsdp, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    assert read("trainer", sharded).fields[TYPE] == "SHARDED_STATE_DICT"


def test_llama_factory_loads_to_the_gpu_in_float32():
    """model/patcher.py, model/adapter.py: but for ZeRO-3, and where rank 0 alone reads for FSDP."""
    load, dtype = ("load",), ("load_dtype",)
    full = read("llama_factory", LLAMA_FACTORY).fields
    assert (full[load], full[dtype]) == ("gpu", "float32")
    assert dtype not in read("llama_factory", {**LLAMA_FACTORY, "pure_bf16": True}).fields
    assert dtype not in read("llama_factory", {**LLAMA_FACTORY, "finetuning_type": "lora"}).fields
    assert load not in read("llama_factory", {**LLAMA_FACTORY, "low_cpu_mem_usage": False}).fields
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    assert load not in read("llama_factory", {**LLAMA_FACTORY, "deepspeed": zero}).fields
    zero["zero_optimization"]["stage"] = 2
    assert read("llama_factory", {**LLAMA_FACTORY, "deepspeed": zero}).fields[dtype] == "float32"
    assert load not in read("llama_factory", {**LLAMA_FACTORY, "deepspeed": "elsewhere.json"}).fields  # of any stage
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": True}}
    assert read("llama_factory", {**LLAMA_FACTORY, **fsdp}).fields[load] == "rank0"
