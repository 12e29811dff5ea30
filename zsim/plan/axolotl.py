"""Reads an axolotl training recipe (YAML)."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants
from zsim.plan.document import Document, subsection
from zsim.plan.float8 import switch_on
from zsim.plan.fsdp_args import read_fsdp
from zsim.plan.reading import NOT_SHARDED, Reading
from zsim.plan.recipe import ULYSSES, Recipe
from zsim.plan.trainer import ATTENTION, checkpointing, legacy_options, name_model, saving

_HARMLESS = (
    "datasets", "dataset_prepared_path", "val_set_size", "output_dir", "hub_model_id", "trust_remote_code",
    "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id", "num_epochs",
    "max_steps", "lr_scheduler", "learning_rate", "warmup_ratio", "warmup_steps", "weight_decay", "evals_per_epoch",
    "logging_steps", "special_tokens", "seed", "chat_template", "tf32",
    "tokenizer_type", "model_type", "debug", "gradient_checkpointing_kwargs", "pad_to_sequence_len",
    "train_on_inputs", "group_by_length", "save_first_step", "early_stopping_patience", "local_rank",
    "xformers_attention", "strict", "eval_sample_packing", "plugins",
)  # fmt: skip
_LORA = {"r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"}
_REFUSED = {
    "rl": "preference tuning, which runs more than one model",
    "tensor_parallel_size": "tensor parallelism",
    "expert_parallel_size": "expert parallelism",
    "unfrozen_parameters": "training of the parameters that match patterns; a scenario's model.freeze names the others",
    "reward_model": "a reward model, whose head is no language model's",
    "process_reward_model": "a reward model, whose head is no language model's",
    "diffusion": "diffusion of text",
    "qat": "quantization-aware training",
    "relora": "ReLoRA",
    "lora_target_parameters": "adapters on parameters, such as those of experts",
    "gptq": "weights quantized by GPTQ",
    "freeze_mm_modules": "a frozen vision tower; a scenario's model.freeze names it",
    "use_onebitllms": "training for weights in few bits",
}
# Kernels, and what else changes what is computed, that are listed as not simulated.
_LISTED = {
    "lora_mlp_kernel": "fused kernels of adapters",
    "lora_qkv_kernel": "fused kernels of adapters",
    "lora_o_kernel": "fused kernels of adapters",
    "flash_attn_cross_entropy": "flash-attn's loss",
    "flash_attn_rms_norm": "flash-attn's norm",
    "flash_attn_fuse_mlp": "flash-attn's MLP",
    "use_kernels": "kernels from the Hub",
    "use_scattermoe": "kernels of experts",
    "use_sonicmoe": "kernels of experts",
    "quantize_moe_experts": "experts in 4 bits",
    "resize_token_embeddings_to_32x": "a vocabulary rounded up to a multiple of 32",
    "model_config": "fields of the model's config.json that are set here",
    "use_eaft": "another loss",
    "fused_attn_kernel": "a fused kernel of attention",
}


def read_axolotl(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in an axolotl recipe. Raises InputError, NotModeled."""
    reading = Reading("axolotl recipe", document, ranks=ranks)
    recipe = Recipe(reading)
    for name, why in _REFUSED.items():
        recipe.refuse(name, (False, "", 1), why)
    recipe.refuse("lisa_n_layers", (), "LISA, which trains other layers in turn")
    for name in ("context_parallel_size", "sequence_parallel_degree"):  # monkeypatch/ring_attn
        recipe.refuse(name, (False, "", 1), "context parallelism by ring-flash-attn", ULYSSES)
    if recipe.flag("tiled_mlp"):
        reading.not_modeled.append(
            "tiled_mlp: the MLP in pieces of the sequence, which needs less memory than said here"
        )
    length = recipe.count("sequence_len") or 512  # axolotl's default
    recipe.set("seq_len", length, "sequence_len")
    if recipe.flag("sample_packing"):
        reading.notes.append("sequences are packed to sequence_len")
    else:
        reading.notes.append("every sequence is taken to be sequence_len long; without packing real ones are shorter")
    recipe.set("micro_batch", recipe.count("micro_batch_size") or 1, "micro_batch_size")
    _accumulation(recipe)
    recipe.set("grad_clip", recipe.get("max_grad_norm", 1.0), "max_grad_norm")
    for name, what in _LISTED.items():
        if recipe.get(name):
            reading.not_modeled.append(f"{name}: {what}")
    _precision(recipe)
    recipe.optimizer("optimizer", "adamw_torch_fused")
    saving(recipe, ("save_strategy", "save_steps", "saves_per_epoch", "save_total_limit"))
    checkpointing(recipe, default=False)
    _attention(recipe)
    if recipe.flag("torch_compile") if recipe.get("torch_compile") != "auto" else False:
        recipe.set("compile", True, "torch_compile")
    liger = [name for name in document.data if str(name).startswith("liger_") and recipe.flag(name)]
    if "liger_fused_linear_cross_entropy" in liger or recipe.flag("cut_cross_entropy"):
        recipe.set("loss", "fused", liger[0] if liger else "cut_cross_entropy")
    others = [name for name in liger if name != "liger_fused_linear_cross_entropy"]
    both = [name for name in others if name in ("liger_rms_norm", "liger_glu_activation", "liger_swiglu")]
    if "liger_rms_norm" in both and len(both) > 1:
        recipe.set("kernels", "liger", "liger_rms_norm")
        others = [name for name in others if name not in (*both, "liger_rope")]  # rotates in place, saves the same
    if others:
        reading.not_modeled.append(f"{', '.join(others)}: fused kernels other than the loss")
    _adapters(recipe)
    _shard(recipe)
    gathers = recipe.flag("fp8_enable_fsdp_float8_all_gather")
    if recipe.flag("fp8"):
        switch_on(reading, ("fp8",), gathers)
    recipe.threads("accelerate launch")
    name_model(recipe, "base_model")
    reading.lacks("cluster")
    recipe.rest(_HARMLESS)
    return reading


def _adapters(recipe: Recipe) -> None:
    adapter, in_4bit = str(recipe.get("adapter", "")), recipe.flag("load_in_4bit")
    if adapter not in ("", "lora", "qlora"):
        raise recipe.document.error(("adapter",), f"adapter {adapter}", "lora, qlora", kind=NotModeled)
    if not adapter:
        recipe.refuse("load_in_4bit", (False,), "4-bit weights without adapters")
        recipe.refuse("load_in_8bit", (False, ""), "8-bit weights without adapters")
        for name in _LORA.values():
            recipe.get(name)
        return
    if adapter == "qlora" and not in_4bit and recipe.get("load_in_4bit") is not None:
        raise recipe.error(("load_in_4bit",), "qlora needs 4-bit weights", "true")
    linear = recipe.flag("lora_target_linear")
    lora(recipe, _LORA, {"r": 8, "alpha": 16} | ({"targets": "all-linear"} if linear else {}))
    refuse_variants(recipe, ("peft_use_dora", "lora_modules_to_save", "relora_steps"))
    recipe.get("peft_use_rslora")  # another scale
    in_8bit = recipe.flag("load_in_8bit")
    if in_4bit or adapter == "qlora":
        quantized(recipe, "load_in_4bit")
    elif in_8bit:
        in_8_bits(recipe, "load_in_8bit")


def _accumulation(recipe: Recipe) -> None:
    """utils/config, normalize_config: batch_size, of one GPU, stands for the steps that it takes."""
    steps, whole = recipe.count("gradient_accumulation_steps"), recipe.count("batch_size")
    name = "gradient_accumulation_steps" if steps or not whole else "batch_size"
    if not steps and whole:
        steps = whole // (recipe.count("micro_batch_size") or 1)
        if not steps:
            raise recipe.error(("batch_size",), f"{whole} is less than micro_batch_size", "a multiple of it")
    recipe.set("grad_accum", steps or 1, name)


def _precision(recipe: Recipe) -> None:
    """bf16 is auto by default; null is off."""
    on = any(recipe.flag(name) for name in ("bfloat16", "fp16", "float16"))
    if recipe.document.data.get("bf16", "auto") == "full":
        recipe.get("bf16")
        recipe.set("precision", "bf16", "bf16")
    elif recipe.document.data.get("bf16", "auto") == "auto" and not on:
        recipe.set("precision", "bf16", "bf16")
        recipe.reading.notes.append("bf16: auto is bf16 where the GPU has it")
        recipe.get("bf16")
    else:
        bf16 = recipe.get("bf16") != "auto" and recipe.flag("bf16")
        recipe.precision(bf16 or recipe.flag("bfloat16"), recipe.flag("fp16") or recipe.flag("float16"))


def _attention(recipe: Recipe) -> None:
    value = recipe.get("attn_implementation")
    for name, kind in (("flash_attention", "flash"), ("sdp_attention", "sdpa"), ("eager_attention", "eager")):
        if recipe.flag(name):
            recipe.set("attention", kind, name)
    if value is not None:
        if str(value) not in ATTENTION:
            accepted = ", ".join(ATTENTION)
            raise recipe.document.error(("attn_implementation",), f"attention {value}", accepted, kind=NotModeled)
        recipe.set("attention", ATTENTION[str(value)], "attn_implementation")


def _shard(recipe: Recipe) -> None:
    reading, document = recipe.reading, recipe.document
    options, replicate, shard = recipe.get("fsdp"), recipe.count("dp_replicate_size"), recipe.count("dp_shard_size")
    recipe.get("fsdp_config")
    config = subsection(document, document.data, (), "fsdp_config")
    version = recipe.count("fsdp_version")
    if recipe.deepspeed("deepspeed"):
        if options or config:
            raise recipe.error(("fsdp_config",), "deepspeed and fsdp cannot both be used", "one of them")
    elif options or config or version:
        legacy = legacy_options(recipe, options)
        if version:
            legacy["version"] = version
        read_fsdp(reading, legacy | config, ("fsdp_config",), default_version=1)
        if replicate and replicate > 1 and shard:
            recipe.set("fsdp.mesh", [replicate, shard], "dp_replicate_size")
    else:
        recipe.set("framework.name", "ddp", "framework")
        reading.notes.append(NOT_SHARDED)
        found = recipe.flag("ddp_find_unused_parameters")  # core/builders/causal.py: off unless said
        recipe.set("ddp.find_unused_parameters", found, "ddp_find_unused_parameters")
        if reading.fields[("precision",)] == "bf16" and not recipe.get("adapter"):
            reading.fields[("ddp", "dtype")] = "bfloat16"
            reading.notes.append("the model is loaded in bf16 and trained without master weights")
