"""Arguments of ms-swift by what they do to a simulation, the names that they had, and the files that it brings.

Looked up in ms-swift 2.0.5, 2.6.1, 3.0.3, 3.5.3, 3.12.6, 4.0.4 and 4.6.0, in its arguments' dataclasses.
"""

from __future__ import annotations

from typing import Any

from zsim.plan.preference import MORE_MODELS, REWARD

# Of 3 and of 2, by what they are called in 4. A value that is there already by its new name stays.
RENAMED = {
    "train_type": "tuner_type", "sft_type": "tuner_type", "model_id_or_path": "model", "dtype": "torch_dtype",
    "batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
    "lora_target_modules": "target_modules", "lora_target_regex": "target_regex",
    "lora_modules_to_save": "modules_to_save", "lora_dropout_p": "lora_dropout", "lora_bias_trainable": "lora_bias",
    "quantization_bit": "quant_bits", "use_liger": "use_liger_kernel", "deepspeed_config_path": "deepspeed",
    "only_save_model": "save_only_model", "vit_use_gc": "vit_gradient_checkpointing",
    "additional_trainable_parameters": "trainable_parameters", "device_map_config": "device_map",
    "device_map_config_path": "device_map", "loss_name": "loss_type",
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

RLHF = {
    "rm": REWARD,
    "gkd": "distillation, whose loss takes a teacher's logits",
    **dict.fromkeys(("kto", "ppo", "grpo"), MORE_MODELS),
}
_HEAD = "another task than language modelling, with a head and a loss of its own"
_MEGATRON = "training by Megatron, whose optimizer shards otherwise"
_WHICH = "which parameters train, by names or by their share"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "task_type": (("causal_lm",), _HEAD),
    "num_labels": ((), _HEAD),
    "tuner_backend": (("peft", "swift"), "Unsloth's kernels and checkpointing"),
    "train_backend": (("transformers",), _MEGATRON),
    "tensor_model_parallel_size": ((), _MEGATRON),
    "pipeline_model_parallel_size": ((), _MEGATRON),
    "expert_model_parallel_size": ((), _MEGATRON),
    "micro_batch_size": ((), _MEGATRON),
    "freeze_parameters_ratio": ((0,), _WHICH),
    "freeze_parameters_regex": ((), _WHICH),
    "trainable_parameters_regex": ((), _WHICH),
    "lora_bias": (("none",), "biases that train beside the adapters"),
    "optimizer": (("default", "lorap", "multimodal"), "an optimizer of ms-swift's or of the user's own"),
    "use_galore": ((False,), "GaLore's optimizer of projected gradients"),
    "lisa_activated_layers": ((0,), "LISA, which trains other blocks in turn"),
    "deepspeed_autotp_size": ((), "tensor parallelism"),
    "use_ray": ((False,), "processes that Ray starts"),
    "tp_size": ((0, 1), "tensor parallelism"),
    "fsdp_num": ((1,), "TorchAcc's FSDP"),
    "loss_type": (("cross_entropy", "loss_scale", "channel_loss"), "another loss"),
}

# What changes what is computed, and is listed as not simulated.
LISTED = {
    "enable_dft_loss": "another loss",
    "enable_channel_loss": "losses by channel, of a loss that is not fused",
    "new_special_tokens": "a vocabulary that grows",
    "use_flash_ckpt": "checkpoints by way of shared memory (DLRover)",
    "use_tiled_mlp": "MLPs that run piece by piece",
    "experts_impl": "how experts are computed",
    **dict.fromkeys(("external_plugins", "custom_register_path"), "code of the user's own, which may change anything"),
    "ckpt_dir": "adapters or weights that are there already, which count",
    "adapters": "adapters that are there already, whose own rank and targets count",
    "use_swift_lora": "LoRA layers of ms-swift's own",
}

# Data, templates, saving, logging, learning rates, generation in evaluation, and how adapters start.
_DATA = (
    "val_dataset", "cached_dataset", "cached_val_dataset", "split_dataset_ratio", "dataset_test_ratio",
    "load_from_cache_file", "dataset_shuffle", "val_dataset_shuffle", "streaming", "interleave_prob",
    "stopping_strategy", "shuffle_buffer_size", "download_mode", "columns", "strict", "disable_auto_column_mapping",
    "model_name", "model_author", "custom_dataset_info", "custom_train_dataset_path", "custom_val_dataset_path",
    "dataset_seed", "check_dataset_strategy", "train_dataset_sample", "val_dataset_sample", "train_dataset_mix_ratio",
    "train_dataset_mix_ds",
    "self_cognition_sample", "streaming_val_size", "streaming_buffer_size", "dataset_enable_cache", "enable_cache",
    "preprocess_num_proc", "lazy_tokenize", "packing_num_proc", "packing_cache", "train_dataloader_shuffle",
    "train_sampler_random", "test_oom_error", "load_dataset_config", "load_data_args", "rescale_image", "channels",
    "data_seed", "truncation_strategy",
)  # fmt: skip
_TEMPLATE = (
    "template", "template_type", "system", "agent_template", "norm_bbox", "use_chat_template",
    "padding_side", "template_backend", "response_prefix", "enable_thinking", "preserve_thinking",
    "add_non_thinking_prefix", "disable_ignore_empty_think", "tools_prompt", "use_loss_scale",
    "loss_scale_config_path", "model_kwargs",
)  # fmt: skip
_OF_MODEL = (
    "model_type", "model_revision", "model_cache_dir", "local_repo_path", "use_hf", "rope_scaling", "max_model_len",
    "init_strategy", "check_model", "check_model_is_latest", "enable_npu_model_patch", "problem_type",
    "bnb_4bit_compute_dtype", "bnb_4bit_comp_dtype", "hqq_axis", "hqq_dynamic_config_path", "max_memory",
    "device_max_memory", "gpu_memory_fraction", "load_args", "is_encoder_decoder",
)  # fmt: skip
_TRAINING = (
    "add_version", "add_output_dir_suffix", "create_checkpoint_symlink", "max_epochs", "aligner_lr", "vit_lr",
    "lorap_lr_ratio", "lora_lr_ratio", "init_weights", "init_lora_weights", "acc_strategy", "acc_steps",
    "metric_warmup_step", "ds3_gather_for_generation", "callbacks", "early_stop_interval", "metric", "eval_metric",
    "mrl_dims", "min_lr", "ignore_args_error", "neftune_alpha", "neftune_backend", "max_shard_size",
    "safe_serialization", "lisa_step_interval", "device_groups", "ray_exp_name", "model_layer_cls_name",
    "include_num_input_tokens_seen", "push_hub_strategy", "tp", "pp", "sequence_parallel", "sampler_seed",
    "llamapro_num_new_blocks", "llamapro_num_groups", "ray_scope", "fp16_backend",
)  # fmt: skip
_GENERATION = (
    "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams", "stream", "stop_words",
    "logprobs", "top_logprobs", "do_sample", "structured_outputs_regex", "eval_use_evalscope", "eval_dataset",
    "eval_datasets", "eval_dataset_args", "eval_datasets_args", "eval_limit", "eval_generation_config",
    "extra_eval_args", "merge_lora",
)  # fmt: skip
# What args.json has besides: what it found out about the model and the processes.
_SAVED = (
    "rank", "global_world_size", "local_world_size", "model_suffix", "model_info", "model_meta", "model_dir", "hub",
    "training_args", "swift_version", "template_meta", "generation_config", "_n_gpu", "mp_parameters", "lora_modules",
    "is_multimodal", "is_vision", "lora_use_embedding", "lora_use_all", "lora_m2s_use_embedding", "lora_m2s_use_ln",
    "load_in_4bit", "load_in_8bit", "world_size", "do_predict", "use_ipex", "tpu_metrics_debug", "adafactor",
    "use_legacy_prediction_loop", "include_inputs_for_metrics", "include_tokens_per_second", "sortish_sampler",
)  # fmt: skip
HARMLESS = (*_DATA, *_TEMPLATE, *_OF_MODEL, *_TRAINING, *_GENERATION, *_SAVED)
# Arguments of what is not on: other kinds of adapters, optimizers and trackers, by how they begin.
OTHERS_OWN = (
    "swanlab_", "galore_", "adalora_", "boft_", "vera_", "fourier_", "reft_", "lora_ga_", "adapter_", "ia3_",
    "decision_", "hub_", "ray_",
)  # fmt: skip

# swift/config of 4.6 (llm/ds_config before 4), and fsdp2.json of it. `overlap_comm` was true up to 3.2.1 (pull
# request 3625); those of 2 name an optimizer and a schedule, too.
_STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2_offload": 2, "zero3_offload": 3}
_OF_2 = {
    "default-zero2": "zero2", "default-zero3": "zero3", "zero2-offload": "zero2_offload",
    "zero3-offload": "zero3_offload",
}  # fmt: skip
FSDP = {
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
        },
    }
}


def deepspeed_config(name: Any) -> dict[str, Any] | None:
    """The DeepSpeed configuration that ms-swift brings by that name; None: it is a file of the user's."""
    own = _OF_2.get(name, name) if isinstance(name, str) else None
    if own not in _STAGES:
        return None
    stage, device, is_of_2 = _STAGES[own], "cpu" if own.endswith("offload") else "none", name in _OF_2
    states = "none" if name == "zero3-offload" else device  # of 2, which kept them on the GPU
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": is_of_2, "contiguous_gradients": True}
    if stage:
        zero["offload_optimizer"] = {"device": states, "pin_memory": True}
    if stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": 200_000_000, "reduce_scatter": True,
                 "reduce_bucket_size": 200_000_000}  # fmt: skip
    else:
        zero["offload_param"] = {"device": device, "pin_memory": True}
        zero |= {"sub_group_size": 10**9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                 "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 10**9,
                 "stage3_max_reuse_distance": 10**9,
                 "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
    config: dict[str, Any] = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    if is_of_2:
        auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": auto}
    return config
