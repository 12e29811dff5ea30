"""Adapters, quantized bases and offloaded activations under each tool's names and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.recipes import read, said
from zsim.document import Document, parse_yaml
from zsim.errors import InputError, NotModeled
from zsim.plan import detect

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
        ({"use_dora": True}, "another kind of adapter"),
    ],
)
def test_what_llama_factory_trains_otherwise_is_refused(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        read("llama_factory", {"model_name_or_path": "m", "do_train": True} | data)


@pytest.mark.parametrize("name", ["upcast_layernorm", "resize_vocab", "pissa_init"])
def test_what_llama_factory_computes_otherwise_is_listed(name: str) -> None:
    reading = read("llama_factory", {"model_name_or_path": "m", "do_train": True, name: True})
    assert [text.split(":")[0] for text in reading.not_modeled] == [name]


SAVED = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("axolotl", {"adapter": "lora", "lora_target_linear": True, "lora_modules_to_save": SAVED}),
        ("trainer", {"use_peft": True, "lora_target_modules": "all-linear", "lora_modules_to_save": SAVED}),
        ("llama_factory", {"additional_target": "embed_tokens, lm_head"}),
        ("llama_factory", {"resize_vocab": True}),
        ("peft", {"peft_type": "LORA", "target_modules": "all-linear", "modules_to_save": SAVED}),
    ],
)
def test_modules_that_train_whole(kind: str, data: dict[str, Any]) -> None:
    names = {"axolotl": "base_model", "peft": "base_model_name_or_path"}
    fields = said(read(kind, {names.get(kind, "model_name_or_path"): "x"} | data))
    assert fields["lora.modules_to_save"] == SAVED
    # model/adapter.py casts what is trained, peft does not
    assert fields.get("lora.modules_dtype") == ("float32" if kind == "llama_factory" else None)


def test_llama_factorys_copies_stay_as_they_are_in_pure_bf16_and_under_deepspeed() -> None:
    base = {"model_name_or_path": "m", "additional_target": "lm_head"}
    for more in ({"pure_bf16": True}, {"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}):
        assert "lora.modules_dtype" not in said(read("llama_factory", base | more | {"bf16": True}))


def test_one_copy_of_tied_embeddings() -> None:
    data = {"base_model": "m", "adapter": "lora", "lora_target_linear": True, "lora_modules_to_save": SAVED}
    assert said(read("axolotl", data | {"peft_ensure_weight_tying": True}))["lora.ensure_weight_tying"] is True
    assert "lora.ensure_weight_tying" not in said(read("axolotl", data))


def test_axolotls_fsdp2_has_units_of_its_own() -> None:
    data = {"base_model": "m", "adapter": "lora", "lora_target_linear": True, "lora_modules_to_save": SAVED}
    reading = read("axolotl", data | {"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}})
    assert (said(reading)["fsdp.adapter_units"], said(reading)["fsdp.grouping"]) == (True, "hf")
    assert [text.split(":")[0] for text in reading.not_modeled] == ["lora_modules_to_save"]


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "m/n", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05}


def test_an_adapter_of_peft() -> None:
    """adapter_config.json as peft 0.21 writes it, beside which others say how it is trained."""
    written = {
        "bias": "none", "target_modules": ["v_proj", "q_proj"], "exclude_modules": ["lm_head"], "use_dora": False,
        "ensure_weight_tying": True, "modules_to_save": ["embed_tokens"], "trainable_token_indices": None,
        "target_parameters": None, "rank_pattern": {}, "lora_bias": False, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    document = Document("adapter_config.json", ADAPTER | written)
    assert detect.identify(document) == "peft"
    reading = detect.read(document, "peft")
    assert said(reading) == {
        "lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.targets": ["v_proj", "q_proj"],
        "lora.exclude": ["lm_head"], "lora.modules_to_save": ["embed_tokens"], "lora.ensure_weight_tying": True,
    }  # fmt: skip
    assert "model (the config.json of m/n)" in reading.still_missing()
    assert reading.not_read == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"bias": "all"}, "biases that train"),
        ({"use_dora": True}, "another kind of adapter"),
        ({"trainable_token_indices": [128000]}, "rows of an embedding that train"),
        ({"exclude_modules": ".*lm_head"}, "regular expression"),
    ],
)
def test_adapters_of_peft_that_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(NotModeled, match=says):
        read("peft", ADAPTER | {"target_modules": ["q_proj"]} | more)


@pytest.mark.parametrize(
    ("kind", "key", "more"),
    [
        ("axolotl", "lora_target_parameters", {"base_model": "m", "adapter": "lora"}),
        ("trainer", "lora_target_parameters", {"model_name_or_path": "m", "use_peft": True}),
        ("peft", "target_parameters", ADAPTER),
    ],
)
def test_adapters_on_parameters(kind: str, key: str, more: dict[str, Any]) -> None:
    names = ["experts.gate_up_proj", "experts.down_proj"]
    assert said(read(kind, more | {key: names}))["lora.target_parameters"] == names
