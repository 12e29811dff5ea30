"""Adapters, quantized bases and offloaded activations under each tool's names and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.recipes import read, said
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.document import parse_yaml

LORA = [
    ("llama_factory", {"lora_rank": 16, "lora_target": "q_proj,v_proj", "quantization_bit": 4},
     {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.0, "lora.targets": ["q_proj", "v_proj"],
      "quantize.type": "nf4"}),
    ("llama_factory", {}, {"lora.r": 8, "lora.alpha": 16, "lora.dropout": 0.0, "lora.targets": "all-linear"}),
    ("axolotl", {"adapter": "qlora", "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True},
     {"lora.r": 32, "lora.alpha": 16, "lora.dropout": 0.05, "lora.targets": "all-linear", "quantize.type": "nf4"}),
    ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"], "peft_use_rslora": True},
     {"lora.r": 8, "lora.alpha": 16, "lora.dropout": 0.0, "lora.targets": ["q_proj"]}),
    ("trainer", {"use_peft": True, "lora_target_modules": "all-linear", "load_in_4bit": True},
     {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.targets": "all-linear", "quantize.type": "nf4"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "expected"), LORA, ids=[f"{kind} {n}" for n, (kind, *_) in enumerate(LORA)])
def test_adapters(kind: str, data: dict[str, Any], expected: dict[str, Any]) -> None:
    """peft's settings under each tool's names and defaults."""
    fields = read(kind, {"base_model" if kind == "axolotl" else "model_name_or_path": "x"} | data).fields
    found = {".".join(path): value for path, value in fields.items() if path[0] in ("lora", "quantize")}
    assert found == expected


def test_targets_that_depend_on_the_model_are_missing() -> None:
    assert any("lora.targets" in line for line in read("axolotl", {"base_model": "x", "adapter": "lora"}).missing)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("axolotl", {"base_model": "m", "gradient_checkpointing": "unsloth"}),
        ("axolotl", {"base_model": "m", "gradient_checkpointing": True, "activation_offloading": "legacy"}),
        ("llama_factory", {"model_name_or_path": "m", "stage": "sft", "use_unsloth_gc": True}),
    ],
)
def test_unsloths_checkpointing_offloads_the_inputs_of_blocks(kind: str, data: dict[str, Any]) -> None:
    fields = said(read(kind, data))
    assert fields["checkpointing.offload"] is True
    assert "checkpointing" not in fields


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("axolotl", {"base_model": "m", "gradient_checkpointing": "offload"}),
        ("axolotl", {"base_model": "m", "gradient_checkpointing": True, "activation_offloading": True}),
        ("trainer", {"gradient_checkpointing": True, "activation_offloading": True}),
    ],
)
def test_offload_of_saved_tensors_is_on_a_stream_of_its_own(kind: str, data: dict[str, Any]) -> None:
    fields = said(read(kind, data))
    assert fields["checkpointing.offload"] == "stream"
    assert "checkpointing" not in fields


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("axolotl", {"base_model": "m", "adapter": "lora", "load_in_8bit": True, "lora_target_linear": True}),
        ("llama_factory", {"quantization_bit": 8}),
        ("trainer", {"use_peft": True, "lora_target_modules": "all-linear", "load_in_8bit": True}),
    ],
)
def test_a_base_in_8_bits(kind: str, data: dict[str, Any]) -> None:
    assert said(read(kind, data))["quantize.type"] == "int8"


@pytest.mark.parametrize("name", ["qat", "sequence_parallel_degree", "rl"])
def test_true_is_not_the_harmless_one(name: str) -> None:
    with pytest.raises(NotModeled):
        read("axolotl", {"base_model": "m", "micro_batch_size": 1, name: True})
    for harmless in (False, "", 1, None):
        read("axolotl", {"base_model": "m", "micro_batch_size": 1, name: harmless})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"activation_offloading": True}, "every saved tensor"),
        ({"gradient_checkpointing": True, "activation_offloading": "disk"}, "disk"),
        ({"gradient_checkpointing": "offload_disk"}, "disk"),
    ],
)
def test_offload_that_is_refused(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        read("axolotl", {"base_model": "m", **data})


@pytest.mark.parametrize(
    ("checkpointing", "offloading", "field", "line", "accepted"),
    [
        ("true", "disk", "activation_offloading", 3, "true, false, legacy"),
        ("true", "some", "activation_offloading", 3, "true, false, legacy"),
        ("offload_disk", "false", "gradient_checkpointing", 2, "true, false, offload, unsloth"),
    ],
)
def test_offload_that_is_refused_is_named_at_its_own_key(
    checkpointing: str, offloading: str, field: str, line: int, accepted: str
) -> None:
    text = f"base_model: m\ngradient_checkpointing: {checkpointing}\nactivation_offloading: {offloading}\n"
    with pytest.raises(InputError) as caught:
        detect.read(parse_yaml(text, "recipe.yaml"), "axolotl")
    assert (caught.value.field, caught.value.line, caught.value.accepted) == (field, line, accepted)


def test_llama_factory_looks_for_no_unused_parameters_around_adapters() -> None:
    """hparams/parser.py, where nothing is said; with full training it is the Trainer's own rule."""
    found = "ddp.find_unused_parameters"
    base = {"model_name_or_path": "m", "stage": "sft", "do_train": True}
    assert said(read("llama_factory", base))[found] is False
    assert said(read("llama_factory", base | {"ddp_find_unused_parameters": True}))[found] is True
    full = base | {"finetuning_type": "full"}
    assert said(read("llama_factory", full | {"disable_gradient_checkpointing": True}))[found] is True


@pytest.mark.parametrize("name", ["export_dir", "infer_backend", "task", "do_predict"])
def test_what_llama_factory_does_beside_training_is_refused(name: str) -> None:
    data = {"model_name_or_path": "m", "template": "llama3", name: True}
    with pytest.raises(InputError, match="does not train"):
        read("llama_factory", data)
    read("llama_factory", data | {"do_train": True})


def test_llama_factorys_projector_alone() -> None:
    data = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "train_mm_proj_only": True}
    assert read("llama_factory", data).vision["model", "freeze"] == ["vision_tower", "language_model"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"stage": "rm"}, "a reward model"),
        ({"use_mca": True}, "Megatron"),
        ({"shift_attn": True}, "shift_attn"),
        ({"additional_target": "embed_tokens,lm_head"}, "train whole beside"),
    ],
)
def test_what_llama_factory_trains_otherwise_is_refused(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        read("llama_factory", {"model_name_or_path": "m", "do_train": True} | data)


@pytest.mark.parametrize("name", ["upcast_layernorm", "resize_vocab", "pissa_init"])
def test_what_llama_factory_computes_otherwise_is_listed(name: str) -> None:
    reading = read("llama_factory", {"model_name_or_path": "m", "do_train": True, name: True})
    assert [text.split(":")[0] for text in reading.not_modeled] == [name]
