"""Recipes of the tools around the frameworks: what each says, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.document import parse_yaml
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.spec import LEAF_CLASSES

DATA = Path(__file__).parents[1] / "data"

ACCELERATE_FSDP = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


FILES = {
    "accelerate/zero3.yaml": (
        "accelerate",
        {
            "framework.name": "deepspeed",
            "zero.stage": 3,
            "zero.zero_init": True,
            "zero.offload_optimizer.device": "cpu",
            "omp_num_threads": 1,
            "grad_accum": 4,
            "grad_clip": 1.0,
            "precision": "bf16",
        },
    ),
    "accelerate/fsdp1_hybrid.yaml": (
        "accelerate",
        {
            "framework.name": "fsdp1",
            "fsdp.sharding_strategy": "HYBRID_SHARD",
            "fsdp.mesh": [2, 8],
            "fsdp.backward_prefetch": "BACKWARD_POST",
            "fsdp.forward_prefetch": True,
            "fsdp.use_orig_params": False,
            "checkpointing": "full",
            "precision": "fp16",
        },
    ),
    "accelerate/fsdp2_mesh.yaml": (
        "accelerate",
        {
            "framework.name": "fsdp2",
            "fsdp.reshard_after_forward": False,
            "fsdp.mesh": [2, 4],
            "fsdp.state_dict_type": "SHARDED_STATE_DICT",
            "precision": "bf16",
        },
    ),
    "recipes/trainer.json": (
        "trainer",
        {
            "framework.name": "fsdp1",
            "fsdp.sharding_strategy": "SHARD_GRAD_OP",
            "fsdp.cpu_offload": True,
            "fsdp.backward_prefetch": "BACKWARD_PRE",
            "fsdp.forward_prefetch": False,
            "micro_batch": 2,
            "grad_accum": 8,
            "grad_clip": 1.0,
            "seq_len": 4096,
            "precision": "bf16",
            "checkpointing": "full",
            "attention": "flash",
            "optimizer.name": "adamw",
            "optimizer.impl": "foreach",
        },
    ),
    "recipes/axolotl.yaml": (
        "axolotl",
        {
            "framework.name": "fsdp2",
            "fsdp.grouping": "hf",
            "fsdp.storage_dtype": "bfloat16",
            "fsdp.reshard_after_forward": True,
            "micro_batch": 1,
            "grad_accum": 2,
            "grad_clip": 1.0,
            "seq_len": 8192,
            "precision": "bf16",
            "checkpointing": "full",
            "attention": "flash",
            "loss": "fused",
            "optimizer.name": "adamw",
            "optimizer.impl": "fused",
            "allocator.conf": "expandable_segments:True",
        },
    ),
    "recipes/torchtitan.toml": (
        "torchtitan",
        {
            "framework.name": "fsdp2",
            "fsdp.reshard_after_forward": True,
            "fsdp.mesh": [2, 8],  # of 16 ranks
            "micro_batch": 2,
            "seq_len": 8192,
            "grad_clip": 1.0,
            "precision": "bf16",
            "checkpointing": "selective",
            "compile": True,
            "loss": "compiled",
            "implementation": "torchtitan",
            "attention": "sdpa",
            "optimizer.name": "adamw",
            "optimizer.impl": "fused",
        },
    ),
    "recipes/neox.yml": (
        "neox",
        {
            "framework.name": "deepspeed",
            "zero.stage": 1,
            "zero.overlap_comm": True,
            "zero.reduce_bucket_size": 500_000_000,
            "precision": "fp16",
            "optimizer.name": "adamw",
            "micro_batch": 4,
            "grad_clip": 1.0,
            "seq_len": 2048,
            "checkpointing": "full",
        },
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str) -> None:
    kind, expected = FILES[name]
    found, reading = read_file(DATA / name, ranks=16 if "titan" in name else None)
    assert found == kind
    assert said(reading) == expected


def test_a_recipe_and_its_deepspeed_file() -> None:
    kind, reading = read_file(DATA / "recipes/llama_factory.yaml")
    fields = said(reading)
    assert kind == "llama_factory"
    assert (fields["micro_batch"], fields["grad_accum"], fields["train_batch_size"]) == (2, 4, 64)
    assert fields["zero.stage"] == 3
    assert fields["zero.zero_init"] is True  # from_pretrained under zero.Init
    assert (fields["seq_len"], fields["checkpointing"], fields["loss"]) == (2048, "full", "fused")
    assert reading.still_missing() == ["model (the config.json of Qwen/Qwen2.5-7B)", "cluster"]


def test_accelerate_s_leaf_modules_come_to_those_of_deepspeed() -> None:
    section = {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "OlmoeSparseMoeBlock,DbrxFFN"}
    fields = said(read("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    assert fields["zero.leaf_module.classes"] == [*LEAF_CLASSES, "OlmoeSparseMoeBlock", "DbrxFFN"]


def test_an_accelerate_file_and_its_deepspeed_file() -> None:
    fields = said(read_file(DATA / "accelerate/zero_file.yaml")[1])
    assert (fields["zero.stage"], fields["zero.zero_init"], fields["precision"]) == (3, False, "bf16")


def test_a_mismatch_with_the_deepspeed_file_is_refused(tmp_path: Path) -> None:
    """As the Trainer refuses it."""
    recipe = (DATA / "recipes/llama_factory.yaml").read_text().replace("max_grad_norm: 0.5", "max_grad_norm: 2.0")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "ds_config").mkdir()
    (tmp_path / "recipes/recipe.yaml").write_text(recipe)
    (tmp_path / "ds_config/commented_stage3.json").write_text((DATA / "ds_config/commented_stage3.json").read_text())
    with pytest.raises(InputError, match=r"grad_clip is 0\.5 in .*commented_stage3\.json:16 and 2\.0 in"):
        read_file(tmp_path / "recipes/recipe.yaml")


REFUSED: list[tuple[str, dict[str, Any], type, str]] = [
    ("accelerate", {"distributed_type": "FSDP", "fsdp_confg": {}}, InputError, "did you mean fsdp_config?"),
    ("accelerate", {"distributed_type": "XLA"}, NotModeled, "distributed_type XLA"),
    ("accelerate", {"distributed_type": "MEGATRON_LM"}, NotModeled, "MEGATRON_LM"),
    ("accelerate", ACCELERATE_FSDP | {"mixed_precision": "fp8"}, NotModeled, "fp8"),
    ("accelerate", ACCELERATE_FSDP | {"mixed_precision": "bf17"}, InputError, "'bf17' is not known"),
    ("accelerate", ACCELERATE_FSDP | {"fsdp_config": {"fsdp_version": 3}}, InputError, "3 is not a version"),
    ("accelerate", ACCELERATE_FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "²"}}, InputError, "'²' is not known"),
    (
        "accelerate",
        ACCELERATE_FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHRD"}},
        InputError,
        "'FULL_SHRD' is not known",
    ),
    (
        "accelerate",
        ACCELERATE_FSDP | {"parallelism_config": {"parallelism_config_tp_size": 2}},
        NotModeled,
        "tensor parallelism",
    ),
    (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x.json", "zero_stage": 3}},
        InputError,
        "refuses it next to deepspeed_config_file",
    ),
    ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 7}}, InputError, "not a stage"),
    ("accelerate", {"distributed_type": "NO", "num_processes": 0}, InputError, "0 is not a number greater than 0"),
    ("trainer", {"per_device_train_batch_size": 0}, InputError, "0 is not a number greater than 0"),
    ("trainer", {"bf16": True, "fp16": True}, InputError, "cannot both be true"),
    ("trainer", {"optim": "galore_adamw"}, NotModeled, "optimizer galore_adamw"),
    ("trainer", {"fsdp": "full_shrd"}, InputError, "'full_shrd' is not an option"),
    ("trainer", {"fsdp": "hybrid_shard"}, InputError, "only available with FSDP1"),
    ("trainer", {"attn_implementation": "flex_attention"}, NotModeled, "attention flex_attention"),
    ("llama_factory", {"finetuning_type": "oft"}, NotModeled, "finetuning_type oft"),
    ("llama_factory", {"use_dora": True}, NotModeled, "another kind of adapter"),  # finetuning_type: lora by default
    ("llama_factory", {"quantization_bit": 3}, NotModeled, "3-bit weights"),
    ("trainer", {"load_in_8bit": True}, NotModeled, "8-bit weights without adapters"),
    ("llama_factory", {"finetuning_type": "full", "stage": "kto"}, NotModeled, "stage kto"),
    ("llama_factory", {"finetuning_type": "full", "quantization_bit": 4}, NotModeled, "quantized weights"),
    ("axolotl", {"base_model": "x", "adapter": "loha"}, NotModeled, "adapter loha"),
    ("axolotl", {"base_model": "x", "load_in_4bit": True}, NotModeled, "4-bit weights without adapters"),
    ("trainer", {"load_in_4bit": True}, NotModeled, "4-bit weights without adapters"),
    (
        "axolotl",
        {"base_model": "x", "sequence_parallel_degree": 4},
        NotModeled,
        "context parallelism by ring-flash-attn",
    ),
    ("axolotl", {"base_model": "x", "sequence_len": "long"}, InputError, "'long' is not a number"),
    ("neox", {"pipe_parallel_size": 4}, NotModeled, "pipeline parallelism"),
]


@pytest.mark.parametrize(("kind", "data", "error", "says"), REFUSED, ids=[f"{case[0]} {case[3]}" for case in REFUSED])
def test_refused(kind: str, data: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error) as refused:
        read(kind, data)
    assert says in refused.value.message
    assert refused.value.file == "recipe.yaml"
    assert refused.value.field


def test_defaults_that_differ_between_tools() -> None:
    """accelerate starts FSDP1 without wrapping; the Trainer starts FSDP2 and wraps."""
    accelerate = said(read("accelerate", {"distributed_type": "FSDP"}))
    assert (accelerate["framework.name"], accelerate["fsdp.flat"]) == ("fsdp1", True)
    trainer = said(read("trainer", {"fsdp": True}))
    assert (trainer["framework.name"], trainer["fsdp.reshard_after_forward"]) == ("fsdp2", True)
    assert trainer["micro_batch"] == 8
    factory = said(read("llama_factory", {"finetuning_type": "full", "gradient_checkpointing": False}))
    assert factory["checkpointing"] == "full"  # unless disable_gradient_checkpointing
    assert factory["framework.name"] == "ddp"


def test_keys_nobody_reads_are_listed() -> None:
    reading = read("trainer", {"per_device_train_batch_size": 1, "my_own_key": 3, "learning_rate": 1})
    assert "my_own_key" in reading.not_read
    assert any(text.startswith("learning_rate") for text in reading.without_effect)
    reading = read("accelerate", ACCELERATE_FSDP | {"fsdp_config": {"fsdp_backward_prefech": "BACKWARD_PRE"}})
    assert any("did you mean backward_prefetch?" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "model"),
        ({"framework": "ddp", "cluster": "x"}, "scenario"),
        ({"optimizer": {"type": "Muon", "params": {}}}, "deepspeed"),
        ({"zero_optimization": {"stage": 1}, "hidden_size": 3}, "deepspeed"),
        ({"bf16": {"enabled": True}}, "deepspeed"),
        ({"model_type": "llama", "architectures": ["x"], "per_device_train_batch_size": 2}, "trainer"),  # W&B's
        ({"base_model": "x", "datasets": []}, "axolotl"),
        ({"training": {"seq_len": 1}, "parallelism": {}}, "torchtitan"),
    ],
)
def test_identify(data: dict[str, Any], kind: str) -> None:
    import yaml

    assert detect.identify(parse_yaml(yaml.safe_dump(data), "f")) == kind


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"model": {"model_name": "m"}, "generation": {}}, "is an oumi configuration that does not train"),
        ({"model": {"name": "m"}, "data": {}, "training": {}}, "is no configuration that is known here"),
        ({"model": "m", "dist_config": {"name": "fsdp2"}, "bf16": True}, "is a recipe of LLaMA-Factory's v1 trainer"),
        ({"bf16": True, "b": 2}, "its keys: b, bf16"),
        ({"a": 1, "b": 2}, "its keys: a, b"),
    ],
)
def test_unknown_files_are_named(data: dict[str, Any], says: str) -> None:
    import yaml

    with pytest.raises(InputError, match=says) as refused:
        detect.identify(parse_yaml(yaml.safe_dump(data), "f"))
    assert "DeepSpeed JSON" in (refused.value.accepted or "")


def test_a_file_of_no_known_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,2\n")
    with pytest.raises(InputError, match=r"\.csv: not a file of a kind that is read"):
        detect.parse(path)


def test_parts_of_a_vision_language_model_in_llama_factory(tmp_path: Path):
    recipe = tmp_path / "vlm.yaml"
    recipe.write_text("stage: sft\nfinetuning_type: full\nfreeze_multi_modal_projector: false\ncutoff_len: 2048\n")
    reading = detect.read(detect.parse(recipe), "llama_factory")
    assert reading.vision == {("model", "freeze"): ["vision_tower"], ("checkpointing", "frozen_tower"): False}
    recipe.write_text("stage: sft\nfinetuning_type: lora\ncutoff_len: 2048\ndisable_gradient_checkpointing: true\n")
    reading = detect.read(detect.parse(recipe), "llama_factory")
    assert reading.vision == {("lora", "exclude"): ["vision_tower", "multi_modal_projector"]}


@pytest.mark.parametrize(
    ("switch", "frozen"),
    [
        ("", ["vision_tower"]),
        ("--tune_mm_mlp_adapter True", ["vision_tower", "language_model"]),
        ("--freeze_backbone True", ["vision_tower", "model.language_model.*"]),
    ],
)
def test_what_llavas_scripts_freeze(tmp_path: Path, switch: str, frozen: list[str]):
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "deepspeed train_mem.py --model_name_or_path vicuna --vision_tower openai/clip-vit-large-patch14-336 "
        f"--per_device_train_batch_size 4 --bf16 True --model_max_length 2048 {switch}\n"
    )
    reading = detect.read(detect.parse(script), "trainer")
    assert reading.vision["model", "freeze"] == frozen
