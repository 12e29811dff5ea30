"""Options that scripts have of their own: taken at their word, or refused, but never passed over where they decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.errors import InputError, NotModeled

BASE = {"model_name_or_path": "m", "per_device_train_batch_size": 1}


def trainer(data: dict[str, Any]):
    return read("trainer", BASE | data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"qlora": True}, "which parameters train"),
        ({"lora": True}, "which parameters train"),
        ({"use_vision_lora": True}, "which parameters train"),
        ({"q_lora": False, "lora_r": 8}, "which parameters train"),  # adapters on whole weights
        ({"train_modules": "fc1 fc2"}, "which parameters train"),
        ({"tune_mlp_adapter": True}, "which parameters train"),
        ({"tune_vision": True, "tune_llm": False}, "which parameters train"),
        ({"spectrum_config_path": "snr.yaml"}, "Spectrum"),
        ({"pre_seq_len": 128}, "P-tuning"),
        ({"moe_enable": True}, "experts in place"),
        ({"medusa_num_heads": 3}, "Medusa"),
        ({"use_peft": True, "lora_target_modules": "all", "lora_task_type": "SEQ_CLS"}, "a head and a loss of its own"),
        ({"loss_type": "cross_entropy"}, "another loss, as the script's own code has it"),
        ({"teacher_model_name_or_path": "t"}, "distillation"),
    ],
)
def test_what_decides_is_refused_and_says_what_is_accepted(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why) as caught:
        trainer(data)
    assert caught.value.accepted or "teacher" in str(data)


@pytest.mark.parametrize(
    "data",
    [
        {"qlora": False, "lora": "none", "use_lora": False, "lora_r": 64},
        {"train_modules": "all"},
        {"tune_vision": True, "tune_llm": True, "tune_mm_mlp": True},
        {"freeze_llm": False, "packing": True, "packing_strategy": "bfd", "padding_free": False, "wandb_project": "x"},
        {"spectrum_config_path": None, "moe_enable": False, "pre_seq_len": None},
        {"merge_lora": True, "task_type": "pt"},
        {"use_peft": False, "lora_r": 64, "lora_target_modules": "all-linear"},  # as trl writes all of its arguments
    ],
)
def test_what_is_off_or_trains_everything(data: dict[str, Any]) -> None:
    reading = trainer(data)
    assert not any(path[0] == "lora" for path in reading.fields)
    assert {name for line in reading.not_read for name in line.split(", ")} <= {"merge_lora"}


def test_adapters_by_other_names_under_trls_switch() -> None:
    reading = trainer({"use_peft": True, "lora_rank": 8, "target_modules": "all", "lora_alpha": 32})
    fields = said(reading)
    assert (fields["lora.r"], fields["lora.targets"]) == (8, "all-linear")
    assert "lora_rank: taken for lora_r: 8, as the script's own code has it" in reading.notes
    assert said(trainer({"use_peft": True, "lora_r": 4, "lora_rank": 8, "lora_target": "q_proj"}))["lora.r"] == 4


@pytest.mark.parametrize(("value", "attention"), [(False, "flash"), (True, "sdpa")])
def test_a_switch_that_turns_flash_attention_off(value: bool, attention: str) -> None:
    assert said(trainer({"disable_flash_attn2": value}))["attention"] == attention
    with pytest.raises(InputError, match="disable_flash_attn2"):
        trainer({"disable_flash_attn2": "perhaps"})


def test_a_program_that_is_named_for_its_adapters(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    options = "--model_name_or_path m --output_dir o --per_device_train_batch_size 1 --learning_rate 1e-5"
    path.write_text(f"deepspeed fastchat/train/train_lora.py {options} --q_lora False\n")
    with pytest.raises(NotModeled, match=r"train_lora\.py: adapters, as the script's own code has it"):
        read_file(path)
    path.write_text(f"deepspeed train_lora.py {options} --use_lora False\n")
    assert said(read_file(path)[1])["micro_batch"] == 1
    path.write_text(f"deepspeed sft_lora.py {options} --use_peft --lora_target_modules q_proj\n")
    assert said(read_file(path)[1])["lora.targets"] == ["q_proj"]


@pytest.mark.parametrize(
    ("stage", "why"), [("rm", "a reward model"), ("kto", "more than one model"), ("cls", "does not know")]
)
def test_stages_of_llama_factory(stage: str, why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        read("llama_factory", {"model_name_or_path": "m", "stage": stage, "do_train": True})


def test_a_chat_of_llama_factory_trains_nothing() -> None:
    data = {"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "llama3", "finetuning_type": "lora"}
    with pytest.raises(InputError, match="a run that does not train"):
        read("llama_factory", data)
    assert said(read("llama_factory", data | {"do_train": True}))["lora.r"] == 8


def test_an_adapters_configuration_that_names_no_base(tmp_path: Path) -> None:
    path = tmp_path / "lora.json"
    path.write_text('{"r": 64, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}')
    kind, reading = read_file(path)
    assert (kind, said(reading)["lora.r"]) == ("peft", 64)


def test_an_adapter_of_a_classifier() -> None:
    data = {"peft_type": "LORA", "base_model_name_or_path": "m", "r": 4, "target_modules": ["q_proj"]}
    with pytest.raises(NotModeled, match="TOKEN_CLS: another task"):
        read("peft", data | {"task_type": "TOKEN_CLS"})
    assert said(read("peft", data | {"task_type": "CAUSAL_LM"}))["lora.r"] == 4
