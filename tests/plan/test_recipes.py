"""Recipes of the tools around the frameworks: what each says, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.document import Document, parse_yaml
from zsim.plan.reading import Reading
from zsim.plan.spec import LEAF_CLASSES
from zsim.plan.torchtitan import parse_toml

DATA = Path(__file__).parents[1] / "data"

ACCELERATE_FSDP = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


def read_file(path: Path, ranks: int | None = None) -> tuple[str, Reading]:
    document = detect.parse(path)
    kind = detect.identify(document)
    return kind, detect.read(document, kind, ranks)


def read(kind: str, data: dict[str, Any], ranks: int | None = None) -> Reading:
    return detect.read(parse_document(data), kind, ranks)


def parse_document(data: dict[str, Any]) -> Document:
    import yaml

    return parse_yaml(yaml.safe_dump(data), "recipe.yaml")


def said(reading: Reading) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in reading.fields.items()}


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
            "fsdp.limit_all_gathers": True,
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
            "fsdp.limit_all_gathers": True,
            "fsdp.use_orig_params": True,
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
    (
        "accelerate",
        ACCELERATE_FSDP | {"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
        NotModeled,
        "wrapping SIZE_BASED_WRAP",
    ),
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
    ("llama_factory", {"finetuning_type": "full", "stage": "dpo"}, NotModeled, "stage dpo"),
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


TITAN = [
    ("[parallelism]\ntensor_parallel_degree = 2\n", NotModeled, "tensor parallelism"),
    ("[activation_checkpoint]\nselective_ac_option = 'all'\n", InputError, "'all' is not known"),
    ("[training]\nlocal_batch_size = 0\n", InputError, "0 is not greater than 0"),
    ("[model]\nconverters = ['float8']\n", NotModeled, "float8"),
    ("[optimizer]\nimplementation = 'quick'\n", InputError, "'quick' is not known"),
    ("[training\n", InputError, "not TOML"),
]


@pytest.mark.parametrize(("text", "error", "says"), TITAN, ids=[case[2] for case in TITAN])
def test_torchtitan_refused(tmp_path: Path, text: str, error: type, says: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(error, match=says) as refused:
        detect.read(parse_toml(path), "torchtitan")
    assert refused.value.file == path
    assert refused.value.line == (1 if "TOML" in says else 2)


def test_torchtitan_checkpoints_every_second_block_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[activation_checkpoint]\nmode = 'selective'\n")
    assert said(detect.read(parse_toml(path), "torchtitan"))["checkpointing.every"] == 2
    path.write_text("[activation_checkpoint]\nselective_ac_option = 'op'\n")
    assert said(detect.read(parse_toml(path), "torchtitan"))["checkpointing"] == "selective"


def test_torchtitan_ddp(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[training]\nglobal_batch_size = 64\n[activation_checkpoint]\nmode = 'none'\n"
        "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
    )
    fields = said(detect.read(parse_toml(path), "torchtitan"))
    assert (fields["framework.name"], fields["train_batch_size"], fields["checkpointing"]) == ("ddp", 64, "none")
    assert (fields["micro_batch"], fields["seq_len"]) == (8, 2048)  # torchtitan's defaults


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
    assert "my_own_key (not read)" in reading.without_effect
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
        ({"base_model": "x", "datasets": []}, "axolotl"),
        ({"training": {"seq_len": 1}, "parallelism": {}}, "torchtitan"),
    ],
)
def test_identify(data: dict[str, Any], kind: str) -> None:
    import yaml

    assert detect.identify(parse_yaml(yaml.safe_dump(data), "f")) == kind


@pytest.mark.parametrize(
    ("data", "says"),
    [({"model": {}, "data": {}, "training": {}}, "is an oumi recipe"), ({"a": 1, "b": 2}, "its keys: a, b")],
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


@pytest.mark.parametrize(
    ("section", "compiled", "loss"),
    [
        ("enable = true", True, "compiled"),
        ('enable = true\ncomponents = ["model"]', True, None),
        ('enable = true\ncomponents = ["loss"]', None, "compiled"),
        ("enable = false", None, None),
    ],
)
def test_torchtitan_compiles_what_components_name(tmp_path: Path, section: str, compiled, loss) -> None:
    """torchtitan's config: Compile.components, ["model", "loss"] by default."""
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nname = "llama3"\nflavor = "8B"\n[compile]\n{section}\n')
    fields = said(detect.read(parse_toml(path), "torchtitan"))
    assert (fields.get("compile"), fields.get("loss")) == (compiled, loss)


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
