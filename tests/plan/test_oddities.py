"""Oddities of files that people have, each as a small file or recipe of ours, with what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_recipes import read, read_file, said
from zsim.cli.read import describe
from zsim.document import Document
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.torchtitan import parse_toml
from zsim.scenario.load import check

DATA = Path(__file__).parents[1] / "data"


def test_an_unquoted_no_is_no_and_the_last_of_two_counts():
    kind, reading = read_file(DATA / "accelerate/unquoted_no.yaml")
    assert kind == "accelerate"
    assert said(reading) == {"framework.name": "ddp", "precision": "bf16"}
    assert "debug stands here twice: the last one counts" in reading.notes


def test_llama_factory_refuses_a_field_twice(tmp_path: Path):
    """OmegaConf does, PyYAML does not."""
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: m\nstage: sft\ncutoff_len: 1024\ncutoff_len: 2048\n")
    with pytest.raises(InputError, match="cutoff_len: stands here twice") as caught:
        read_file(path)
    assert caught.value.line == 4


def test_what_weights_and_biases_keeps_of_a_run():
    kind, reading = read_file(DATA / "recipes/wandb_config.yaml")
    assert kind == "trainer"
    assert said(reading) == {
        "seq_len": 4096,
        "checkpointing": "full",
        "micro_batch": 2,
        "grad_accum": 8,
        "grad_clip": 1.0,
        "precision": "bf16",
        "optimizer.name": "adamw",
        "framework.name": "ddp",  # fsdp is an empty list, whatever its options say
    }
    assert reading.places[("grad_accum",)][1] == 17


def test_fsdp_options_without_fsdp_do_nothing():
    reading = read("trainer", {"bf16": True, "fsdp_config": {"offload_params": True}})
    assert said(reading)["framework.name"] == "ddp"
    assert "fsdp_config has no effect without fsdp" in reading.notes
    assert said(read("trainer", {"fsdp": "full_shard", "fsdp_config": {}}))["framework.name"] == "fsdp2"


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        ({}, True),
        ({"gradient_checkpointing": True}, None),
        ({"gradient_checkpointing": True, "use_peft": True, "lora_target_modules": "all-linear"}, True),
        ({"ddp_find_unused_parameters": False}, False),
    ],
)
def test_the_trainer_looks_for_unused_parameters_unless_it_checkpoints(recipe: dict[str, Any], found: bool | None):
    assert said(read("trainer", {"bf16": True} | recipe)).get("ddp.find_unused_parameters") is found


def test_options_of_ddp_go_where_another_file_shards():
    arguments = read("trainer", {"bf16": True, "ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 100})
    arguments.include(read("deepspeed", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    assert said(arguments)["framework.name"] == "deepspeed"
    assert not [path for path in arguments.fields if path[0] == "ddp"]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"num_generations": 16}, "GRPO"),
        ({"loss_type": "kto", "beta": 0.1}, "preference tuning"),
        ({"center_rewards_coefficient": 0.01}, "reward model"),
    ],
)
def test_trainers_that_are_not_supervised_are_refused(recipe: dict[str, Any], says: str):
    with pytest.raises(NotModeled, match=says):
        read("trainer", {"bf16": True, "per_device_train_batch_size": 1} | recipe)


def test_arguments_of_trls_command_line():
    kind, reading = read_file(DATA / "recipes/trl_cli.yaml")
    assert kind == "trainer"
    assert said(reading)["micro_batch"] == 8


def test_a_torchtitan_job_of_2024():
    reading = detect.read(parse_toml(DATA / "recipes/torchtitan_2024.toml"), "torchtitan", 16)
    fields = said(reading)
    assert fields["framework.name"] == "fsdp2"
    assert (fields["micro_batch"], fields["seq_len"], fields["checkpointing"]) == (2, 8192, "full")
    assert "fsdp.mesh" not in fields


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 8", "tensor parallelism"),
        ("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2", "pipeline parallelism"),
        ('fp8_linear = ""', 'fp8_linear = "dynamic"', "float8"),
    ],
)
def test_where_degrees_stood_in_2024_they_are_seen(tmp_path: Path, old: str, new: str, says: str):
    path = tmp_path / "job.toml"
    path.write_text((DATA / "recipes/torchtitan_2024.toml").read_text().replace(old, new))
    with pytest.raises(NotModeled, match=says) as caught:
        detect.read(parse_toml(path), "torchtitan")
    assert caught.value.line == path.read_text().splitlines().index(new) + 1


def test_degrees_of_2024_make_a_mesh(tmp_path: Path):
    path = tmp_path / "job.toml"
    text = (DATA / "recipes/torchtitan_2024.toml").read_text()
    new = "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8"
    path.write_text(text.replace("data_parallel_degree = -1", new))
    assert said(detect.read(parse_toml(path), "torchtitan"))["fsdp.mesh"] == [2, 8]
    path.write_text(text.replace("data_parallel_degree = -1", 'data_parallel_type = "ddp"'))
    assert said(detect.read(parse_toml(path), "torchtitan"))["framework.name"] == "ddp"


def test_one_of_several_files_of_gpt_neox():
    kind, reading = read_file(DATA / "recipes/neox_part.yml")
    fields = said(reading)
    assert kind == "neox"
    assert (fields["precision"], fields["zero.stage"], fields["checkpointing"]) == ("fp16", 1, "full")


def test_neox_precision_stands_for_a_section():
    data = {"pipe_parallel_size": 0, "train_micro_batch_size_per_gpu": 1, "precision": "bfloat16"}
    assert said(read("neox", data))["precision"] == "bf16"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, {"precision": "bf16", "grad_accum": 1, "ddp.dtype": "bfloat16", "ddp.find_unused_parameters": False}),
        ({"bf16": None}, {"precision": "fp32"}),
        ({"bf16": "full"}, {"precision": "bf16"}),
        ({"fp16": True}, {"precision": "fp16"}),
        ({"bf16": False, "bfloat16": True}, {"precision": "bf16"}),
        ({"micro_batch_size": 2, "batch_size": 8}, {"grad_accum": 4}),
        ({"micro_batch_size": 2, "batch_size": 8, "gradient_accumulation_steps": 3}, {"grad_accum": 3}),
    ],
)
def test_what_axolotl_takes_where_nothing_is_said(recipe: dict[str, Any], expected: dict[str, Any]):
    fields = said(read("axolotl", {"base_model": "m"} | recipe))
    assert fields | expected == fields


@pytest.mark.parametrize("name", ["reward_model", "diffusion", "relora", "qat"])
def test_axolotls_other_ways_to_train_are_refused(name: str):
    with pytest.raises(NotModeled, match=name):
        read("axolotl", {"base_model": "m", name: True})


def test_axolotls_kernels_are_listed():
    data = {"lora_mlp_kernel": True, "resize_token_embeddings_to_32x": True, "tokens": ["<think>"]}
    reading = read("axolotl", {"base_model": "m", **data})
    assert [what.partition(":")[0] for what in reading.not_modeled] == [
        "lora_mlp_kernel",
        "resize_token_embeddings_to_32x",
        "tokens",
    ]


def test_pure_bf16_of_llama_factory():
    recipe = {"stage": "sft", "model_name_or_path": "m", "finetuning_type": "full", "pure_bf16": True}
    fields = said(read("llama_factory", recipe))
    assert (fields["precision"], fields["ddp.dtype"]) == ("bf16", "bfloat16")
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}}
    fields = said(read("llama_factory", recipe | sharded))
    assert (fields["precision"], fields["fsdp.storage_dtype"]) == ("bf16", "bfloat16")
    mixed = read("llama_factory", recipe | sharded | {"bf16": True})  # accelerate widens it
    assert "fsdp.storage_dtype" not in said(mixed)
    assert any(note.startswith("pure_bf16: under bf16's mixed precision") for note in mixed.notes)
    with pytest.raises(NotModeled, match="adapters in float32"):
        read("llama_factory", recipe | sharded | {"finetuning_type": "lora"})
    with pytest.raises(NotModeled, match="pure bf16 with DeepSpeed"):
        read("llama_factory", recipe | {"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("model", "max_duration", "fsdp_config"), "an llm-foundry configuration"),
        (("with_tracking", "model_name_or_path", "learning_rate"), "a loop of its own on accelerate"),
        (("os", "python", "gpu"), "Weights & Biases"),
        (("mixer_list", "model_name_or_path", "learning_rate"), "an Open-Instruct configuration"),
    ],
)
def test_files_of_other_tools_are_named(keys: tuple[str, ...], says: str):
    with pytest.raises(InputError, match=says):
        detect.identify(Document("file", dict.fromkeys(keys, "x")))


@pytest.mark.parametrize("keys", ["model_type: full\nprovider: p\n", "model_type: m\narchitectures: [M]\n"])
def test_yaml_is_no_model(tmp_path: Path, keys: str):
    path = tmp_path / "deploy.yaml"
    path.write_text(keys)
    with pytest.raises(InputError, match="no configuration that is known"):
        describe(path)


def test_json_with_a_gpu_in_it_is_no_topology(tmp_path: Path):
    path = tmp_path / "wandb-metadata.json"
    path.write_text('{"os": "Linux", "python": "3.11", "gpu": "NVIDIA GH200", "gpu_count": 4}')
    with pytest.raises(InputError, match="Weights & Biases"):
        describe(path)


def test_dots_in_quotes_were_left_out_as_well():
    with pytest.raises(InputError, match="left out") as caught:
        detect.parse(DATA / "ds_config/quoted_dots.json")
    assert caught.value.line == 4


def test_a_sub_group_size_of_zero_is_a_group_for_every_parameter():
    """As axolotl's zero3_bf16.json has it, and DeepSpeed takes it (stage3.py _create_fp16_sub_groups)."""
    from zsim.model.huggingface import read_config
    from zsim.plan.spec import DeepSpeedPlan
    from zsim.program.deepspeed import sub_groups

    data = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    zero = {"stage": 3, "sub_group_size": 0}
    reading = read("deepspeed", data | {"zero_optimization": zero})
    rest = {"model": {"params": 1e9}, "cluster": "x.yaml", "seq_len": 128}
    check(Document("made", reading.nested() | rest), DATA)
    model = read_config(DATA.parents[1] / "scenarios" / "models" / "llama-3.1-8b")
    plan = DeepSpeedPlan(world_size=8, stage=3, sub_group_size=0)
    shard = [parameter.numel // 8 for parameter in model.parameters]
    assert len(sub_groups(model, plan, shard)) == len(model.parameters)


def test_adapters_by_a_regular_expression():
    """axolotl hands text on to peft, which takes it for one; commas part names."""
    recipe = {"base_model": "m", "sequence_len": 512, "micro_batch_size": 1, "adapter": "lora"}
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    for value, targets in ((pattern, pattern), ("q_proj,v_proj", ["q_proj", "v_proj"])):
        reading = detect.read(Document("a.yaml", recipe | {"lora_target_modules": value}), "axolotl")
        assert reading.fields[("lora", "targets")] == targets


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("s.sh", "python t.py --model_name_or_path m --learning_rate 1 --per_gpu_train_batch_size 2", "no argument of"),
        ("s.sh", "python t.py --model_name_or_path m --learning_rate 1 --batch_size 8", "a loop of its own"),
        ("s.sh", "python t.py --model_name_or_path m --output_dir o --do_eval --max_steps 3", "does not train"),
        ("s.sh", "python eval.py --model_name_or_path m --output_dir o --top_p 1", "arguments of its own"),
        ("s.sh", "deepspeed t.py --deepspeed_config=ds.json --model_name_or_path m --learning_rate 1", "of its own"),
        ("c.yaml", "gradient_checkpointing: true\nper_gpu_train_batch_size: 2\n", "a loop of its own"),
        ("c.yaml", "defaults: [a, b]\nnum_train_epochs: 2\n", "a Hydra configuration"),
        ("c.json", '{"log_history": [], "num_train_epochs": 2}', "the log of a run of the Trainer"),
        ("c.yaml", "model_name_or_path: m\nstage: sft\ndo_predict: true\ncutoff_len: 9\n", "does not train"),
        ("c.yaml", "apiVersion: v1\nkind: Job\nspec: {}\n", "a Kubernetes manifest"),
    ],
)
def test_what_is_taken_for_no_training_of_the_trainer(tmp_path: Path, name: str, text: str, says: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_file(path)
    assert caught.value.file == path


def test_a_model_that_names_gradient_checkpointing_is_a_model():
    model = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "gradient_checkpointing": False}
    assert detect.identify(Document("config.json", model)) == "model"
