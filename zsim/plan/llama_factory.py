"""Reads a LLaMA-Factory training recipe (YAML): Trainer arguments with its own names for model and data."""

from __future__ import annotations

from zsim.document import Document
from zsim.errors import NotModeled
from zsim.plan import evaluation, preference
from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants
from zsim.plan.reading import LOADED_IN, Reading
from zsim.plan.recipe import ULYSSES, Recipe
from zsim.plan.trainer import attention, model_length, name_model, training
from zsim.plan.trainer_keys import HARMLESS

_OWN_HARMLESS = (
    # hparams/data_args.py, evaluation_args.py, generating_args.py and what model_args.py says of loading
    "eval_dataset", "media_dir", "train_on_prompt", "mask_history", "streaming", "buffer_size", "mix_strategy",
    "interleave_probs", "preprocessing_batch_size", "eval_num_beams", "ignore_pad_token_for_loss",
    "eval_on_each_dataset", "neat_packing", "tool_format", "default_system", "enable_thinking", "preserve_thinking",
    "tokenized_path", "data_shared_file_system", "video_maxlen", "evaluation_strategy", "cache_dir",
    "use_fast_tokenizer", "split_special_tokens", "new_special_tokens_config", "init_special_tokens",
    "model_revision", "rope_scaling", "use_reentrant_gc", "train_from_scratch", "infer_backend", "infer_dtype",
    "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status", "loraplus_lr_ratio",
    "loraplus_lr_embedding", "pissa_iter", "pissa_convert", "create_new_adapter", "adapter_folder", "use_swanlab",
    "compute_accuracy", "disable_shuffling", "early_stopping_steps", "include_effective_tokens_per_second",
    "eaft_alpha", "ray_run_name", "ray_storage_path", "ray_num_workers", "ray_init_kwargs", "resources_per_worker",
    "placement_strategy", "offload_folder",
)  # fmt: skip
# Kinds of runs that train nothing: what a file for `export`, `chat`, `api` or `eval` has.
_OTHER_RUNS = ("do_eval", "do_predict", "export_dir", "infer_backend", "vllm_enforce_eager", "task")
_OF_CHAT = {
    "model_name_or_path", "adapter_name_or_path", "template", "finetuning_type", "trust_remote_code", "flash_attn",
    "quantization_bit", "quantization_method", "image_max_pixels", "image_min_pixels",
}  # fmt: skip
_REFUSED = {
    "use_galore": "GaLore's optimizer of projected gradients",
    "use_apollo": "APOLLO's optimizer of projected gradients",
    "use_badam": "BAdam, which trains other blocks in turn",
    "use_adam_mini": "Adam-mini's optimizer",
    "use_muon": "the Muon of LLaMA-Factory's own",
    "use_unsloth": "Unsloth's kernels",
    "use_llama_pro": "LLaMA Pro's added blocks, which train alone",
    "mixture_of_depths": "blocks that leave tokens out",
    "fp8": "float8 by accelerate",
    "use_asft_loss": "a loss that takes a second model's logits",
    "shift_attn": "shifted sparse attention",
}
_OTHER_STAGES = {
    "rm": preference.REWARD,
    "ppo": "which runs more than one model",
    "kto": "which runs more than one model",
}
_LISTED = {
    "use_dft_loss": "another loss",
    "use_eaft_loss": "another loss",
    "upcast_layernorm": "norms in float32",
    "upcast_lmhead_output": "logits widened to float32 by a hook",
    "moe_aux_loss_coef": "the auxiliary loss of routers",
    "resize_vocab": "a vocabulary that grows to the tokenizer's, rounded up to a multiple of 64",
    "add_tokens": "a vocabulary that grows",
    "add_special_tokens": "a vocabulary that grows",
    "use_v1_kernels": "kernels of LLaMA-Factory's own",
    "pissa_init": "PiSSA's start of adapters, which then train as any",
}


def read_llama_factory(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in a LLaMA-Factory recipe. Raises InputError, NotModeled."""
    reading = Reading("LLaMA-Factory recipe", document, ranks=ranks)
    recipe = Recipe(reading)
    method = str(recipe.get("finetuning_type", "lora"))  # hparams/finetuning_args.py: lora is the default
    if method not in ("full", "lora"):
        raise document.error(("finetuning_type",), f"finetuning_type {method}", "full, lora", kind=NotModeled)
    stage = str(recipe.get("stage", "sft"))
    if stage not in ("pt", "sft", "dpo"):
        why = _OTHER_STAGES.get(stage, "which LLaMA-Factory does not know")
        raise document.error(("stage",), f"stage {stage}, {why}", "pt, sft, dpo", kind=NotModeled)
    if not recipe.flag("do_train"):
        for name in _OTHER_RUNS:
            if recipe.get(name) not in (None, False, "false"):
                raise document.error((name,), "without do_train: a run that does not train", "do_train: true")
        if {"template"} <= document.data.keys() <= _OF_CHAT:
            why = "only what `llamafactory-cli chat` takes, without do_train: a run that does not train"
            raise document.error((), why, "do_train: true")
    if method == "lora":
        _lora(recipe)
    else:
        recipe.refuse("quantization_bit", (), "quantized weights without adapters")
    for name, why in _REFUSED.items():
        recipe.refuse(name, (False,), why)
    for name in ("use_distributed_optimizer", "overlap_param_gather", "recompute_granularity"):
        recipe.refuse(name, (), "training by Megatron, whose optimizer shards otherwise")
    for name in ("use_mca", "use_megatron_bridge"):
        recipe.refuse(name, (False,), "training by Megatron, whose optimizer shards otherwise")
    recipe.refuse("use_hyper_parallel", (False,), "HyperParallel in place of FSDP")
    for name, what in _LISTED.items():
        if recipe.get(name) not in (None, False, 0, "false"):
            reading.not_modeled.append(f"{name}: {what}")
    recipe.refuse("use_kt", (False,), "KTransformers' experts on the CPU")
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        recipe.refuse(name, (1,), name.replace("_model_parallel_size", " parallelism of Megatron"))
    for name in ("cp_size", "context_parallel_size", "sequence_parallel_size", "hyper_parallel_cp_size"):
        recipe.refuse(name, (1,), "context parallelism of LLaMA-Factory's own, or of Megatron", ULYSSES)
    recipe.refuse("tensor_model_parallel_size", (1,), "tensor parallelism")
    model_length(recipe, ("cutoff_len",))
    if ("seq_len",) not in reading.fields:
        recipe.set("seq_len", 2048, "cutoff_len")
        reading.notes.append("cutoff_len: 2048, LLaMA-Factory's default")
    if recipe.flag("packing") or stage == "pt":
        reading.notes.append("sequences are packed to cutoff_len")
    else:
        reading.notes.append("every sequence is taken to be cutoff_len long; without packing real ones are shorter")
    attention(recipe, "flash_attn")
    # LLaMA-Factory checkpoints unless told not to, whatever gradient_checkpointing says.
    recipe.get("gradient_checkpointing")
    off = recipe.flag("disable_gradient_checkpointing")
    if recipe.flag("use_unsloth_gc") and not off:
        recipe.set("checkpointing.offload", True, "use_unsloth_gc")
    else:
        recipe.set("checkpointing", "none" if off else "full", "disable_gradient_checkpointing")
    if recipe.flag("enable_liger_kernel"):
        if stage != "dpo":  # model/model_utils/liger_kernel.py, require_logits
            recipe.set("loss", "fused", "enable_liger_kernel")
        recipe.set("kernels", "liger", "enable_liger_kernel")
    _parts(recipe, method)
    training(recipe)
    if recipe.flag("enable_liger_kernel"):
        evaluation.with_all_logits(recipe)
    framework = reading.fields.get(("framework", "name"))  # None: accelerate's configuration is not there
    if method == "lora" and framework == "ddp" and not _asks_ddp(recipe):
        reading.fields[("ddp", "find_unused_parameters")] = False  # hparams/parser.py
    if recipe.flag("pure_bf16"):
        _pure_bf16(recipe, method)
    elif framework == "ddp" and ("lora", "modules_to_save") in reading.fields:
        recipe.set("lora.modules_dtype", "float32", "pure_bf16")  # model/adapter.py, cast_trainable_params_to_fp32
    _load(recipe, method)
    recipe.threads("torchrun")
    if "zero" in {to[0] for to in reading.fields} or (ranks or 1) > 1:  # launcher.py, where it starts torchrun
        recipe.allocator("expandable_segments:True", "llamafactory-cli")
    if stage == "dpo":
        preference.of_llama_factory(recipe, method)
    name_model(recipe, "model_name_or_path")
    recipe.rest((*HARMLESS, *_OWN_HARMLESS))
    return reading


def _asks_ddp(recipe: Recipe) -> bool:
    return recipe.document.data.get("ddp_find_unused_parameters") is not None


def _parts(recipe: Recipe, method: str) -> None:
    """Of a vision-language model (model/model_utils/visual.py, checkpointing.py and misc.py): what is frozen or has no
    adapters, and that blocks without a trained parameter are not checkpointed."""
    names = {
        "vision_tower": recipe.flag("freeze_vision_tower", True),
        "multi_modal_projector": recipe.flag("freeze_multi_modal_projector", True),
        "language_model": recipe.flag("freeze_language_model"),
    }
    if recipe.flag("train_mm_proj_only"):  # until freeze_language_model came, finetuning_args.py of 2024
        names = {"vision_tower": True, "multi_modal_projector": False, "language_model": True}
    vision = recipe.reading.vision
    frozen = [name for name, is_frozen in names.items() if is_frozen]
    if method == "lora":
        everywhere = recipe.reading.fields.get(("lora", "targets")) == "all-linear"
        vision["lora", "exclude"] = [n for n in names if n in frozen or (everywhere and n == "multi_modal_projector")]
    elif frozen:
        vision["model", "freeze"] = frozen
    if not recipe.flag("disable_gradient_checkpointing"):
        vision["checkpointing", "frozen_tower"] = False
    sizes = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps")
    for name in (*sizes, "image_resolution", "video_resolution"):  # the latter until the end of 2024
        if recipe.get(name) is not None:
            recipe.reading.notes.append(f"{name}: images.size says how large the images are after that")


def _load(recipe: Recipe, method: str) -> None:
    """Straight to the GPU (hparams/parser.py, device_map; model/patcher.py), where what is trained is widened to
    float32 before DeepSpeed or FSDP get it (model/adapter.py, cast_trainable_params_to_fp32); neither in ZeRO-3, nor
    where rank 0 alone reads for FSDP."""
    fields = recipe.reading.fields
    stage = fields.get(("zero", "stage"), 3 if fields.get(("framework", "name")) == "deepspeed" else 0)
    by_rank_0 = stage == 3 or fields.get(("load",)) == "rank0"
    if by_rank_0 or not recipe.flag("low_cpu_mem_usage", True):
        return
    recipe.set("load", "gpu", "low_cpu_mem_usage")
    if method == "full" and not recipe.flag("pure_bf16"):
        recipe.set("load_dtype", "float32", "pure_bf16")


def _pure_bf16(recipe: Recipe, method: str) -> None:
    """Everything in bfloat16, without master weights and autocast (hparams/parser.py, model/adapter.py). Where mixed
    precision is on all the same, accelerate widens what FSDP shards."""
    reading = recipe.reading
    framework = reading.fields.get(("framework", "name"), "ddp")
    if framework == "deepspeed":
        raise recipe.document.error(("pure_bf16",), "pure bf16 with DeepSpeed", "bf16", kind=NotModeled)
    if framework == "ddp":
        recipe.set("ddp.dtype", "bfloat16", "pure_bf16")
        reading.loaded = "bfloat16" if method == "full" else None
    elif reading.fields.get(("precision",)) == "bf16":
        reading.notes.append("pure_bf16: under bf16's mixed precision accelerate widens the shards to float32")
    elif method == "lora":
        why = "adapters in float32 beside weights in bfloat16, under FSDP without mixed precision"
        raise recipe.document.error(("pure_bf16",), why, "bf16", kind=NotModeled)
    else:
        recipe.set("fsdp.storage_dtype", "bfloat16", "pure_bf16")
        reading.notes.append(LOADED_IN.format("bfloat16"))
    recipe.set("precision", "bf16", "pure_bf16")


def _lora(recipe: Recipe) -> None:
    """hparams/finetuning_args.py LoraArguments: rank 8, alpha twice the rank, all linear modules."""
    names = {
        "r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target",
        "save": "additional_target",
    }  # fmt: skip
    lora(recipe, names, {"r": 8, "targets": "all"})
    refuse_variants(recipe, ("use_dora",))
    if recipe.flag("resize_vocab") and ("lora", "modules_to_save") not in recipe.reading.fields:
        recipe.set("lora.modules_to_save", ["embed_tokens", "lm_head"], "resize_vocab")
        recipe.reading.notes.append("resize_vocab: embedding and output projection train whole (model/adapter.py)")
    if recipe.get("adapter_name_or_path") and not recipe.flag("create_new_adapter"):
        recipe.reading.not_modeled.append(
            "adapter_name_or_path: adapters that are there already, whose own rank and targets count"
        )
    bits = recipe.get("quantization_bit")
    if bits not in (None, 4, 8):
        raise recipe.document.error(("quantization_bit",), f"{bits}-bit weights", "4, 8", kind=NotModeled)
    if bits == 8:
        in_8_bits(recipe, "quantization_bit")
        recipe.refuse("quantization_method", ("bnb", "bitsandbytes"), "quantization by another library")
    if bits == 4:
        quantized(recipe, "quantization_bit", "double_quantization")
        recipe.refuse("quantization_method", ("bnb", "bitsandbytes"), "quantization by another library")
        recipe.refuse("quantization_type", ("nf4", "fp4"), "another 4-bit type")
