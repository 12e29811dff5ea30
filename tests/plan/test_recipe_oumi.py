"""oumi's training configurations, with oumi 0.9's own defaults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import parse_document, read, read_file, said
from zsim.cli.app import dispatch
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.reading import Reading
from zsim.scenario import load

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "model": {"model_name": "org/Llama-3.1-8B", "model_max_length": 2048, "torch_dtype_str": "bfloat16"},
    "data": {"train": {"datasets": [{"dataset_name": "org/some"}]}},
    "training": {"trainer_type": "TRL_SFT"},
}
SHARDED: dict[str, Any] = {"enable_fsdp": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
QLORA: dict[str, Any] = {
    "q_lora": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    "lora_target_modules": ["q_proj", "v_proj"],
}  # fmt: skip


def oumi(**sections: dict[str, Any]) -> Reading:
    data = copy.deepcopy(BASE)
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return read("oumi", data, 8)


def test_defaults_are_oumis() -> None:
    """TrainingParams, ModelParams: adamw_torch, no checkpointing, 8 sequences, bfloat16 without mixed precision."""
    assert said(oumi()) == {
        "seq_len": 2048, "checkpointing": "none", "micro_batch": 8, "grad_accum": 1, "grad_clip": 1.0,
        "optimizer.name": "adamw", "optimizer.impl": "foreach", "framework.name": "ddp", "precision": "bf16",
        "ddp.dtype": "bfloat16", "ddp.find_unused_parameters": True, "load": "gpu",
    }  # fmt: skip


def test_what_the_section_training_says() -> None:
    fields = said(
        oumi(
            model={"attn_implementation": "flash_attention_2", "enable_liger_kernel": True},
            training={
                "enable_gradient_checkpointing": True, "per_device_train_batch_size": 2, "max_grad_norm": "1e-3",
                "gradient_accumulation_steps": 4, "optimizer": "paged_adamw_8bit", "compile": True, "save_steps": 50,
                "ddp_find_unused_parameters": False,
            },
        )
    )  # fmt: skip
    wanted = {
        "attention": "flash", "loss": "fused", "kernels": "liger", "checkpointing": "full", "micro_batch": 2,
        "grad_clip": 0.001, "grad_accum": 4, "optimizer.name": "adamw8bit", "optimizer.paged": True, "compile": True,
        "saving.by": "trainer", "ddp.find_unused_parameters": False,
    }  # fmt: skip
    assert wanted.items() <= fields.items()
    assert "saving.by" not in said(oumi(training={"save_steps": 0}))
    assert said(oumi(training={"max_grad_norm": None}))["grad_clip"] == 0.0
    determined = said(oumi(training={"use_deterministic": True, "enable_gradient_checkpointing": True}))
    assert (determined["checkpointing"], determined["ddp.find_unused_parameters"]) == ("none", False)


def test_fsdp_is_accelerates_and_trains_what_was_loaded() -> None:
    """core/distributed.py, get_accelerate_env_vars: FSDP1, and mixed precision where fsdp.mixed_precision says it."""
    sharded = SHARDED | {"transformer_layer_cls": "transformers.models.llama.modeling_llama.LlamaDecoderLayer"}
    fields = said(oumi(fsdp=sharded, training={"enable_gradient_checkpointing": True}))
    wanted = {
        "framework.name": "fsdp1", "fsdp.wrap": ["LlamaDecoderLayer"], "fsdp.sharding_strategy": "FULL_SHARD",
        "fsdp.backward_prefetch": "BACKWARD_PRE", "fsdp.use_orig_params": True, "load": "rank0", "precision": "bf16",
        "fsdp.storage_dtype": "bfloat16", "fsdp.state_dict_type": "FULL_STATE_DICT", "checkpointing": "full",
    }  # fmt: skip
    assert wanted.items() <= fields.items()
    mixed = said(oumi(fsdp=sharded | {"mixed_precision": "bf16"}))
    assert (mixed["precision"], mixed.get("fsdp.storage_dtype")) == ("bf16", None)  # accelerate widens the shards
    assert said(oumi(fsdp={"enable_fsdp": True}))["fsdp.flat"] is True  # NO_WRAP by default
    by_size = said(oumi(fsdp={"enable_fsdp": True, "auto_wrap_policy": "SIZE_BASED_WRAP"}))
    assert by_size["fsdp.min_num_params"] == 100_000
    adapted = oumi(fsdp=sharded, training={"use_peft": True}, peft={"lora_target_modules": ["q_proj"]})
    assert said(adapted)["fsdp.use_orig_params"] is False
    assert any(what.startswith("use_peft: without mixed precision") for what in adapted.not_modeled)


def test_a_float32_model_has_mixed_precision_of_the_trainer() -> None:
    whole = {"torch_dtype_str": "float32"}
    fields = said(oumi(model=whole, training={"mixed_precision_dtype": "BF16"}, fsdp=SHARDED))
    assert (fields["precision"], fields.get("fsdp.storage_dtype")) == ("bf16", None)
    plain = said(oumi(model=whole))
    assert (plain["precision"], plain.get("ddp.dtype")) == ("fp32", None)
    with pytest.raises(InputError, match="oumi refuses mixed precision") as caught:
        oumi(training={"mixed_precision_dtype": "BF16"})
    assert caught.value.field == "training.mixed_precision_dtype"
    assert any("bfloat16 is taken" in note for note in oumi(model={"torch_dtype_str": "auto"}).notes)


def test_oumis_own_trainer() -> None:
    """oumi_trainer.py: FullyShardedDataParallel itself, which widens nothing, and a fused AdamW."""
    own = {"trainer_type": "OUMI"}
    fields = said(oumi(training=own, fsdp=SHARDED | {"mixed_precision": "bf16"}))
    assert fields["fsdp.storage_dtype"] == "bfloat16"
    assert (fields["optimizer.impl"], fields["load"]) == ("fused", "gpu")
    whole = said(oumi(training=own, model={"enable_liger_kernel": True}))
    assert (whole["loss"], whole.get("kernels"), whole["ddp.find_unused_parameters"]) == ("fused", None, False)
    saves = oumi(training=own | {"save_steps": 100})
    assert "saving.by" not in said(saves)
    assert "memory while oumi's own trainer saves" in saves.not_modeled
    with pytest.raises(NotModeled, match="adapters under FSDP"):
        oumi(training=own | {"use_peft": True}, fsdp=SHARDED)
    whole, mixed = {"torch_dtype_str": "float32"}, own | {"mixed_precision_dtype": "BF16"}
    with pytest.raises(NotModeled, match=r"torch\.autocast around FSDP"):
        oumi(model=whole, training=mixed, fsdp=SHARDED)
    with pytest.raises(InputError, match="leaves DeepSpeed out"):
        oumi(training=own, deepspeed={"enable_deepspeed": True})


def test_deepspeed_is_off_for_bf16_where_the_trainers_flag_is() -> None:
    """to_deepspeed has `enabled: auto`, which transformers fills with the Trainer's bf16."""
    section = {"enable_deepspeed": True, "zero_stage": "ZERO_3", "precision": "BF16", "overlap_comm": True}
    reading = oumi(deepspeed=section | {"offload_optimizer": {"device": "CPU"}, "sub_group_size": 10**8})
    fields = said(reading)
    wanted = {
        "framework.name": "deepspeed", "zero.stage": 3, "zero.overlap_comm": True, "zero.zero_init": False,
        "zero.reduce_bucket_size": 500_000_000, "zero.stage3_param_persistence_threshold": 100_000,
        "zero.sub_group_size": 10**8, "zero.offload_optimizer.device": "cpu",
        "zero.offload_optimizer.pin_memory": True, "precision": "bf16", "zero.communication_data_type": "float32",
        "zero.check_grad_overflow": False, "zero.grad_accum_dtype": "float32",
    }  # fmt: skip
    assert wanted.items() <= fields.items()
    assert "load" not in fields
    assert any(note.startswith("deepspeed.precision: DeepSpeed's bf16 and fp16 are off") for note in reading.notes)
    two = said(oumi(deepspeed={"enable_deepspeed": True, "zero_stage": "ZERO_2", "reduce_bucket_size": 10**8}))
    assert (two["zero.reduce_bucket_size"], two["load"]) == (10**8, "gpu")
    whole, mixed = {"torch_dtype_str": "float32"}, {"mixed_precision_dtype": "BF16"}
    on = said(oumi(model=whole, training=mixed, deepspeed=section))
    assert (on["precision"], on.get("zero.communication_data_type")) == ("bf16", None)
    with pytest.raises(InputError, match="DeepSpeed and FSDP together"):
        oumi(deepspeed=section, fsdp=SHARDED)
    with pytest.raises(InputError, match="ZERO_9 is not known") as caught:
        oumi(deepspeed={"enable_deepspeed": True, "zero_stage": "ZERO_9"})
    assert caught.value.field == "deepspeed.zero_stage"


def test_adapters_and_quantized_weights() -> None:
    """PeftParams: rank and alpha 8, no dropout, fp4 without nested quantization."""
    adapted = {"use_peft": True}
    fields = said(oumi(training=adapted, peft={"lora_target_modules": ["all-linear"]}))
    assert (fields["lora.r"], fields["lora.alpha"], fields["lora.dropout"]) == (8, 8, 0.0)
    assert (fields["lora.targets"], fields["precision"]) == ("all-linear", "bf16")
    low = said(oumi(training=adapted, peft=QLORA))
    assert (low["quantize.type"], low["quantize.double_quant"], low["quantize.prepared"]) == ("nf4", False, True)
    stored = QLORA | {"bnb_4bit_quant_storage": "bfloat16"}
    shards = said(oumi(training=adapted, peft=stored, fsdp=SHARDED))
    assert "quantize.prepared" not in shards
    assert said(oumi(training=adapted, peft=QLORA | {"q_lora_bits": 8}))["quantize.type"] == "int8"
    assert "lora.r" not in said(oumi(peft=QLORA))  # use_peft is false by default
    with pytest.raises(InputError, match="oumi refuses 4-bit weights stored in uint8"):
        oumi(training=adapted, peft=QLORA, fsdp=SHARDED)
    for peft, why in (
        ({"lora_bias": "all"}, "biases that train"),
        ({"lora_task_type": "SEQ_CLS"}, "another head"),
        ({"q_lora": True}, "products of 4-bit weights in float32"),
    ):
        with pytest.raises(NotModeled, match=why):
            oumi(training=adapted, peft=peft)


def test_what_is_frozen() -> None:
    tower = oumi(model={"freeze_layers": ["model.visual"]})
    assert tower.vision == {("model", "freeze"): ["vision_tower"]}
    assert said(oumi(model={"freeze_layers": ["model.embed_tokens"]}))["model.freeze"] == ["model.embed_tokens.*"]
    adapted = {"use_peft": True}
    peft = {"lora_target_modules": ["q_proj"], "lora_exclude_modules": [".*vision_tower.*", ".*audio.*"]}
    reading = oumi(training=adapted, peft=peft)
    assert reading.vision == {("lora", "exclude"): ["vision_tower"]}
    assert "lora_exclude_modules: .*audio.*, of which nothing is left out here" in reading.not_modeled


@pytest.mark.parametrize("kind", ["TRL_DPO", "TRL_KTO", "TRL_GRPO", "VERL_GRPO", "TRL_GKD", "TRL_GOLD"])
def test_other_trainers_are_refused(kind: str) -> None:
    with pytest.raises(NotModeled, match=f"trainer_type {kind}: ") as caught:
        oumi(training={"trainer_type": kind})
    assert caught.value.field == "training.trainer_type"


def test_keys_that_oumi_does_not_have_are_refused() -> None:
    """OmegaConf.structured takes no others."""
    with pytest.raises(InputError, match=r"has no such key .* did you mean per_device_\w+") as caught:
        oumi(training={"per_device_batch_size": 4})
    assert caught.value.field == "training.per_device_batch_size"
    with pytest.raises(InputError, match="did you mean enable_fsdp"):
        oumi(fsdp={"enable_fsdps": True})


def test_other_tools_have_sections_of_these_names_too() -> None:
    data = BASE | {"lora": {"r": 8}, "multigpu": {"backend": "nccl"}}
    with pytest.raises(InputError, match="is no configuration that is known here"):
        detect.identify(parse_document(data))
    assert detect.identify(parse_document(BASE)) == "oumi"


def test_scripts_that_start_it(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(BASE | {"fsdp": SHARDED}))
    script = tmp_path / "run.sh"
    for command, ranks in (
        ("oumi distributed torchrun -m oumi train -c train.yaml", None),
        ("torchrun --nproc-per-node 8 --standalone -m oumi train --config train.yaml", 8),
        ("oumi train -c train.yaml", None),
    ):
        script.write_text(f"{command} --training.per_device_train_batch_size 3\n")
        kind, reading = read_file(script)
        assert (kind, reading.ranks, said(reading)["micro_batch"]) == ("oumi", ranks, 3)
        assert said(reading)["framework.name"] == "fsdp1"
    script.write_text("oumi train -c train.yaml --data.train.datasets.0.dataset_path=x.jsonl --model.model_name=y\n")
    assert read_file(script)[1].model_name == "y"
    script.write_text("oumi train -c train.yaml --data.train.datasets.7.dataset_path=x.jsonl\n")
    with pytest.raises(InputError, match="datasets is a list of 1"):
        read_file(script)
    script.write_text("oumi infer -c train.yaml\n")
    with pytest.raises(InputError, match="starts oumi infer, which does not train"):
        read_file(script)


def test_accelerates_own_configuration_goes_before_the_section_fsdp(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(BASE | {"fsdp": SHARDED}))
    accelerate = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(accelerate))
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file acc.yaml -m oumi train -c train.yaml\n")
    _, reading = read_file(script)
    assert (said(reading)["framework.name"], reading.ranks) == ("ddp", 4)
    assert any("fsdp has no effect where accelerate launches" in note for note in reading.notes)


def test_a_scenario_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    recipe = tmp_path / "train.yaml"
    recipe.write_text(yaml.safe_dump(BASE | {"fsdp": SHARDED | {"sharding_strategy": "HYBRID_SHARD"}}))
    model, machine = ROOT / "scenarios/models/llama-3.1-8b/config.json", ROOT / "topologies/hgx_h100_8.yaml"
    out = tmp_path / "mine.yaml"
    assert dispatch(["from", str(recipe), str(model), "--topology", str(machine), "--out", str(out)]) == 0
    assert dispatch(["read", str(recipe)]) == 0
    assert "oumi recipe" in capsys.readouterr().out
    setup = load(out).resolve()
    assert (setup.plan.mesh, setup.plan.storage_dtype, setup.workload.micro_batch) == ((1, 8), "bfloat16", 8)
