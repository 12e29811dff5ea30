"""ms-swift: scripts, recipes and args.json. The values are those that ms-swift 4.6.0's own argument classes come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read_file, said
from zsim.errors import InputError, NotModeled
from zsim.plan.reading import Reading
from zsim.plan.swift_keys import deepspeed_config

DATA = Path(__file__).parents[1] / "data" / "recipes"
SFT = "NPROC_PER_NODE=8 swift sft --model m --dataset d --max_length 2048 "
ADAPTERS = {"lora.r": 8, "lora.alpha": 32, "lora.dropout": 0.05, "lora.targets": "all-linear"}


def script(folder: Path, command: str, **files: str) -> Reading:
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    (folder / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    kind, reading = read_file(folder / "run.sh")
    assert kind == "swift"
    return reading


def test_a_script() -> None:
    kind, reading = read_file(DATA / "swift.sh")
    assert (kind, reading.ranks) == ("swift", 8)
    assert said(reading) == ADAPTERS | {
        "framework.name": "deepspeed",
        "zero.stage": 2,
        "zero.overlap_comm": False,
        "zero.contiguous_gradients": True,
        "zero.reduce_scatter": True,
        "zero.reduce_bucket_size": 200_000_000,
        "lora.r": 16,
        "micro_batch": 2,
        "grad_accum": 8,
        "grad_clip": 1.0,
        "seq_len": 4096,
        "precision": "bf16",
        "attention": "flash",
        "checkpointing": "full",
        "optimizer.name": "adamw",
        "optimizer.decay_groups": True,
        "saving.by": "trainer",
        "evaluation.micro_batch": 1,
        "load": "gpu",
        "allocator.conf": "expandable_segments:True",
    }
    assert reading.places["lora", "r"] == (DATA / "swift.sh", 18)
    assert reading.places["zero", "stage"] == (DATA / "swift.sh", 24)
    assert reading.still_missing() == ["model (the config.json of some/model)", "cluster"]
    assert [text.split(":")[0] for text in reading.not_modeled] == ["use_logits_to_keep"]
    assert not reading.not_read


def test_a_recipe_that_says_for_how_many_processes_it_is() -> None:
    kind, reading = read_file(DATA / "swift.yaml", ranks=8)
    fields = said(reading)
    assert (kind, reading.ranks, fields["omp_num_threads"]) == ("swift", 8, 4)
    assert (fields["seq_len"], fields["grad_accum"], fields["loss"], fields["kernels"]) == (8192, 2, "fused", "liger")
    assert (fields["zero.offload_param.device"], fields["zero.offload_optimizer.device"]) == ("cpu", "cpu")
    assert "load" not in fields  # ZeRO-3 reads on the host
    assert reading.vision == {
        ("model", "freeze"): ["vision_tower", "multi_modal_projector"],
        ("checkpointing", "frozen_tower"): False,
    }


def test_the_arguments_that_a_run_saved() -> None:
    kind, reading = read_file(DATA / "swift_args.json")
    fields = said(reading)
    assert (kind, reading.ranks) == ("swift", 4)
    assert {name: fields[name] for name in ADAPTERS} == ADAPTERS
    assert (fields["micro_batch"], fields["grad_accum"], fields["grad_clip"]) == (2, 2, 0.5)
    assert (fields["framework.name"], fields["ddp.find_unused_parameters"]) == ("ddp", True)
    assert not reading.not_read


def test_defaults(tmp_path: Path) -> None:
    reading = script(tmp_path, "CUDA_VISIBLE_DEVICES=3 swift sft --model m --dataset d")
    fields = said(reading)
    assert {name: fields[name] for name in ADAPTERS} == ADAPTERS
    assert (fields["micro_batch"], fields["grad_accum"], reading.ranks) == (1, 16, 1)
    assert (fields["precision"], fields["checkpointing"], fields["load"]) == ("bf16", "full", "gpu")
    assert "seq_len (max_length is as long as the model allows by default)" in reading.still_missing()
    assert not any(text.startswith("eval_strategy") for text in reading.not_modeled)


def test_names_and_defaults_of_2(tmp_path: Path) -> None:
    command = (
        "NPROC_PER_NODE=4 swift sft --model_type qwen2-7b --sft_type lora --dataset d --dtype fp16 --batch_size 3 "
        "--lora_target_modules ALL --lora_dropout_p 0.1 --quantization_bit 4 --use_flash_attn true"
    )
    reading = script(tmp_path, f"{command} --deepspeed default-zero2")
    fields = said(reading)
    assert {name: fields[name] for name in ADAPTERS} == ADAPTERS | {"lora.dropout": 0.1}
    assert (fields["micro_batch"], fields["grad_accum"], fields["seq_len"]) == (3, 2, 2048)
    assert (fields["precision"], fields["attention"], fields["quantize.type"]) == ("fp16", "flash", "nf4")
    assert fields["zero.overlap_comm"] is True
    assert "optimizer.decay_groups" not in fields  # its file names an optimizer
    assert "model (the config.json of qwen2-7b)" in reading.still_missing()
    assert not said(script(tmp_path, command))["ddp.find_unused_parameters"]
    whole = "NPROC_PER_NODE=4 swift sft --model_type qwen2-7b --sft_type full --dataset d --dtype {}"
    for dtype, precision, own in (("AUTO", "bf16", "bfloat16"), ("bf16", "bf16", "bfloat16"), ("fp16", "fp16", None)):
        fields = said(script(tmp_path, whole.format(dtype)))
        assert (fields["precision"], fields.get("ddp.dtype")) == (precision, own)
    without = script(tmp_path, command.replace("--lora_target_modules ALL", ""))
    assert any(what.startswith("lora.targets (chosen by model") for what in without.still_missing())


def test_the_offload_of_2_left_the_optimizer_on_the_gpu() -> None:
    for name, device in (("zero3-offload", "none"), ("zero3_offload", "cpu")):
        config = deepspeed_config(name)
        assert config is not None
        assert config["zero_optimization"]["offload_optimizer"]["device"] == device
        assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert deepspeed_config("zero3.json") is deepspeed_config({}) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--tuner_type full --torch_dtype bfloat16", {"precision": "bf16", "ddp.dtype": "bfloat16"}),
        ("--tuner_type full --torch_dtype float32", {"precision": "fp16", "ddp.dtype": None}),
        ("--torch_dtype float16", {"precision": "fp16"}),
        ("--torch_dtype float16 --modules_to_save lm_head", {"lora.modules_dtype": "float32"}),
        ("--tuner_type full --torch_dtype float16 --deepspeed zero2", {"precision": "fp16", "zero.stage": 2}),
        ("--tuner_type full --torch_dtype float32 --fp16 false --bf16 true", {"precision": "bf16"}),
        ("--gradient_checkpointing false", {"checkpointing": "none"}),
        ("--attn_impl flash_attention_3", {"attention": "flash3"}),
        ("--packing true --packing_length 4096 --attn_impl flash_attn", {"seq_len": 4096}),
        ("--target_regex '.*[qv]_proj'", {"lora.targets": ".*[qv]_proj"}),
        ("--target_modules q_proj v_proj", {"lora.targets": ["q_proj", "v_proj"]}),
        ("--modules_to_save all-embedding lm_head", {"lora.modules_to_save": ["embed_tokens", "lm_head"]}),
        ("--quant_method bnb --quant_bits 8", {"quantize.type": "int8"}),
        ("--quant_method bnb --quant_bits 4 --bnb_4bit_quant_type fp4", {"quantize.type": "fp4"}),
        ("--quant_bits 4", {"quantize.type": None}),
        ("--use_liger_kernel true", {"loss": "fused", "kernels": "liger"}),
        ("--use_liger_kernel true --loss_scale default+ignore_empty_think", {"loss": "fused"}),
        ("--use_liger_kernel true --loss_scale react", {"loss": None, "kernels": "liger"}),
        ("--use_liger_kernel true --enable_channel_loss true", {"loss": None}),
        ("--deepspeed zero3 --zero_hpz_partition_size 4", {"zero.stage": 3, "zero.zero_hpz_partition_size": 4}),
        ("--resume_from_checkpoint c --resume_only_model true", {"saving.resume": None}),
        ("--optim adafactor", {"optimizer.name": "adafactor"}),
    ],
)
def test_options(tmp_path: Path, options: str, expected: dict[str, Any]) -> None:
    fields = said(script(tmp_path, SFT + options))
    assert {name: fields.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "vision"),
    [
        ("", {("lora", "exclude"): ["vision_tower", "multi_modal_projector"]}),
        ("--freeze_vit false --freeze_llm true", {("lora", "exclude"): ["multi_modal_projector", "language_model"]}),
        ("--target_modules q_proj", {}),
        ("--tuner_type full", {("model", "freeze"): ["vision_tower", "multi_modal_projector"]}),
        ("--tuner_type full --freeze_vit false --freeze_aligner false", {}),
    ],
)
def test_parts_of_a_vision_language_model(tmp_path: Path, options: str, vision: dict[Any, Any]) -> None:
    found = script(tmp_path, SFT + options).vision
    assert found == vision | ({} if "freeze_vit" in options else {("checkpointing", "frozen_tower"): False})


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("NPROC_PER_NODE=4 NNODES=2 swift pt {}", 8),
        ("NNODES=2 swift sft {}", 2),
        ("NPROC_PER_NODE=2\nswift sft {}", 1),  # not exported
        ("export NPROC_PER_NODE=2\nswift sft {}", 2),
        ("NPROC_PER_NODE=gpu swift sft {}", None),
        ("NPROC_PER_NODE=$N swift sft {}", None),
        ("python -m swift.cli.main sft {}", 1),
        ("python swift/cli/sft.py {}", 1),
        ("torchrun --nproc_per_node 4 swift/cli/sft.py {}", 4),
        ("torchrun --nproc_per_node $N swift/cli/sft.py {}", None),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift sft {}", 4),
        ('SETTINGS=(NPROC_PER_NODE=4 MAX_PIXELS=1003520)\nenv "${{SETTINGS[@]}}" swift sft {}', 4),
    ],
)
def test_processes(tmp_path: Path, command: str, ranks: int | None) -> None:
    reading = script(tmp_path, command.format("--model m --dataset d --max_length 2048"))
    assert reading.ranks == ranks
    if ranks is None:
        assert any(what.startswith("grad_accum (by default") for what in reading.still_missing())


@pytest.mark.parametrize(("devices", "processes"), [("0,1,2,3", ""), ("0,1,2,3", "NPROC_PER_NODE=2")])
def test_layers_spread_over_gpus_are_refused(tmp_path: Path, devices: str, processes: str) -> None:
    with pytest.raises(NotModeled, match="a model whose layers are spread") as caught:
        script(tmp_path, f"{processes} \\\nCUDA_VISIBLE_DEVICES={devices} swift sft --model m --dataset d")
    assert (caught.value.field, caught.value.accepted) == ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE=4")
    single = f"SWIFT_SINGLE_DEVICE_MODE=1 CUDA_VISIBLE_DEVICES={devices} swift sft --model m --dataset d"
    assert script(tmp_path, single).ranks == 1


def test_fsdp2(tmp_path: Path) -> None:
    reading = script(tmp_path, SFT + "--tuner_type full --fsdp fsdp2")
    fields = said(reading)
    assert (fields["framework.name"], fields["fsdp.reshard_after_forward"], fields["load"]) == ("fsdp2", True, "rank0")
    assert (fields["checkpointing"], fields["fsdp.state_dict_type"]) == ("full", "SHARDED_STATE_DICT")
    own = '{"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"reshard_after_forward": false}}'
    fields = said(script(tmp_path, SFT + "--tuner_type full --fsdp own.json", own_json=own))
    assert (fields["fsdp.cpu_offload"], fields["fsdp.reshard_after_forward"]) == (True, False)
    missing = script(tmp_path, SFT + "--fsdp elsewhere.json").still_missing()
    assert "fsdp_config (names elsewhere.json, which is not there)" in missing
    with pytest.raises(NotModeled, match="ms-swift's own callback"):
        script(tmp_path, SFT + "--fsdp own.json", own_json='{"fsdp_config": {"activation_cpu_offload": true}}')


def test_fsdp_checkpoints_where_the_trainer_does_not(tmp_path: Path) -> None:
    """accelerate's fsdp_activation_checkpointing, beside --gradient_checkpointing false, as ms-swift advises."""
    accelerate = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_activation_checkpointing: true\n"
    )
    options = "swift/cli/sft.py --model m --dataset d --max_length 1024 --gradient_checkpointing false"
    reading = script(tmp_path, f"accelerate launch --config_file a.yaml {options}", a_yaml=accelerate)
    assert (said(reading)["checkpointing"], said(reading)["framework.name"], reading.ranks) == ("full", "fsdp2", 2)


def test_a_recipe_and_what_stands_beside_it(tmp_path: Path) -> None:
    """Options go before a recipe that is the first argument; `--config` of 3 went before the options."""
    recipe = "model: m\ndataset: d\ntrain_type: full\nmax_length: 1024\ndeepspeed: zero2\n"
    options = "--max_length 512 --attn_impl sdpa"
    first = said(script(tmp_path, f"NPROC_PER_NODE=2 swift sft r.yaml {options}", r_yaml=recipe))
    assert (first["seq_len"], first["attention"], first["zero.stage"]) == (512, "sdpa", 2)
    second = script(tmp_path, f"NPROC_PER_NODE=2 swift sft --config r.yaml {options}", r_yaml=recipe)
    assert (said(second)["seq_len"], said(second)["attention"], second.ranks) == (1024, "sdpa", 2)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ("--tuner_type adalora", "tuner_type", "tuner_type adalora"),
        ("--train_type longlora", "train_type", "train_type longlora"),
        ("--use_dora true", "use_dora", "another kind of adapter"),
        ("--task_type seq_cls --num_labels 2", "task_type", "another task"),
        ("--tuner_backend unsloth", "tuner_backend", "Unsloth"),
        ("--sequence_parallel_size 4", "sequence_parallel_size", "of ms-swift's own"),
        ("--quant_method hqq --quant_bits 4", "quant_method", "quantized by hqq"),
        ("--tuner_type full --quant_method bnb --quant_bits 4", "quant_method", "without adapters"),
        ("--torch_dtype float32", "torch_dtype", "frozen float32 weights"),
        ("--freeze_parameters_ratio 0.5 --tuner_type full", "freeze_parameters_ratio", "which parameters train"),
        ("--freeze_parameters model.layers.0 --tuner_type full", "freeze_parameters", "which parameters train"),
        ("--optimizer muon", "optimizer", "an optimizer of ms-swift's"),
        ("--loss_type infonce", "loss_type", "another loss"),
        ("--target_modules all-linear all-embedding", "target_modules", "adapters on embeddings"),
        ("--modules_to_save all-norm", "modules_to_save", "norms that train whole"),
        ("--deepspeed zero2 --deepspeed_autotp_size 2", "deepspeed_autotp_size", "tensor parallelism"),
        ("--device_map auto", "device_map", "spread over GPUs"),
        ("--attn_impl flex_attention", "attn_impl", "attention flex_attention"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: str, field: str, says: str) -> None:
    with pytest.raises(NotModeled, match=says) as caught:
        script(tmp_path, SFT + options)
    error = caught.value
    assert (error.file, error.line, error.field) == (tmp_path / "run.sh", 2, field)
    assert error.accepted


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("swift rlhf --rlhf_type grpo --model m --dataset d", "rlhf_type grpo: preference tuning or reinforcement"),
        ("swift rlhf --rlhf_type kto --model m --dataset d", "rlhf_type kto"),
        ("swift sft --rlhf_type gkd --model m --dataset d", "a teacher's logits"),
        ("megatron sft --load m --micro_batch_size 1", "Megatron-SWIFT"),
    ],
)
def test_other_training_is_refused(tmp_path: Path, command: str, says: str) -> None:
    with pytest.raises(NotModeled, match=says) as caught:
        script(tmp_path, f"NPROC_PER_NODE=2 {command}")
    assert caught.value.line == 2


@pytest.mark.parametrize("command", ["infer --adapters a", "export --model m", "deploy --model m"])
def test_what_trains_nothing_is_said(tmp_path: Path, command: str) -> None:
    with pytest.raises(InputError, match=f"starts swift {command.split()[0]}, which does not train"):
        script(tmp_path, f"CUDA_VISIBLE_DEVICES=0 swift {command}")


@pytest.mark.parametrize(("kernel", "noted"), [("sdpa", True), ("flash_attn", False), ("flash_attention_3", False)])
def test_packing_without_flash_attention_is_noted(tmp_path: Path, kernel: str, noted: bool) -> None:
    notes = script(tmp_path, SFT + f"--packing true --attn_impl {kernel}").notes
    assert any(text.startswith("packing: ms-swift refuses it") for text in notes) is noted


def test_gradients_that_torch_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Attempting to unscale FP16 gradients") as caught:
        script(tmp_path, SFT + "--tuner_type full --torch_dtype float16")
    assert caught.value.field == "torch_dtype"


def test_code_of_the_users_own_is_listed(tmp_path: Path) -> None:
    listed = script(tmp_path, SFT + "--external_plugins my.py --adapters $(last) --enable_dft_loss true").not_modeled
    assert {"external_plugins", "adapters", "enable_dft_loss"} <= {text.split(":")[0] for text in listed}


def test_diffusion_models_are_not_read_as_language_models(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python animatediff_infer.py --sft_type full --model_id_or_path m --dataset d\n")
    with pytest.raises(InputError, match="no command in it that trains"):
        read_file(tmp_path / "run.sh")


def test_another_scripts_train_type_is_not_ms_swifts(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python t.py --per_device_train_batch_size 1 --train_type lora --model m\n")
    with pytest.raises(NotModeled, match="as the script's own code has it"):
        read_file(tmp_path / "run.sh")


def test_what_bounds_images_is_noted(tmp_path: Path) -> None:
    reading = script(tmp_path, "MAX_PIXELS=1003520 FPS_MAX_FRAMES=12 " + SFT + "--max_pixels 4096")
    said_of = [note.partition(":")[0] for note in reading.notes if "images.size" in note]
    assert said_of == ["MAX_PIXELS", "FPS_MAX_FRAMES", "max_pixels"]
