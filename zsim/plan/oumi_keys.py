"""Keys of an oumi training configuration (0.9, core/configs/params), and the Trainer's arguments that some become."""

from __future__ import annotations

# training_params.py, to_hf: what reaches the Trainer under another name, or the same.
TRAINERS = {
    "enable_gradient_checkpointing": "gradient_checkpointing", "compile": "torch_compile",
    "optimizer": "optim", "empty_device_cache_steps": "torch_empty_cache_steps",
    **{
        name: name
        for name in (
            "gradient_checkpointing_kwargs", "per_device_train_batch_size", "per_device_eval_batch_size",
            "gradient_accumulation_steps", "eval_strategy", "eval_steps", "max_grad_norm", "resume_from_checkpoint",
            "ddp_find_unused_parameters", "save_steps",
        )
    },
}  # fmt: skip
MODEL = (
    "model_name", "adapter_model", "adapter_trainable", "model_max_length", "load_pretrained_weights",
    "torch_dtype_str", "compile", "attn_implementation", "device_map", "model_kwargs", "enable_liger_kernel",
    "freeze_layers", "text_only",
)  # fmt: skip
PEFT = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_exclude_modules", "lora_target_parameters",
    "lora_modules_to_save", "lora_bias", "lora_init_weights", "lora_task_type", "q_lora", "q_lora_bits",
    "bnb_4bit_quant_type", "llm_int8_skip_modules", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
    "bnb_4bit_compute_dtype",
)  # fmt: skip
TRAINING = (
    *TRAINERS, "use_peft", "trainer_type", "save_epoch", "mixed_precision_dtype", "trainer_kwargs", "use_deterministic",
)  # fmt: skip
FSDP = (
    "enable_fsdp", "sharding_strategy", "cpu_offload", "mixed_precision", "backward_prefetch", "forward_prefetch",
    "use_orig_params", "state_dict_type", "auto_wrap_policy", "min_num_params", "transformer_layer_cls",
    "sync_module_states",
)  # fmt: skip
# deepspeed_params.py, to_deepspeed: what stands at the top of DeepSpeed's file, what in its zero_optimization, and in
# which stages; with oumi's defaults, where those are not DeepSpeed's or "auto".
DEEPSPEED_TOP = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": True,
    "steps_per_print": 10, "wall_clock_breakdown": False,
}  # fmt: skip
DEEPSPEED_012 = {
    "allgather_partitions": True, "allgather_bucket_size": 500_000_000, "overlap_comm": False, "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000, "contiguous_gradients": True, "round_robin_gradients": False,
}  # fmt: skip
DEEPSPEED_3 = {
    "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1_000_000_000,
    "reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000, "stage3_gather_16bit_weights_on_model_save": False,
}  # fmt: skip
DEEPSPEED = (
    "enable_deepspeed", "deepspeed_config_path", "zero_stage", "offload_optimizer", "offload_param", "precision",
    "activation_checkpointing", "memory_efficient_linear", *DEEPSPEED_TOP, *DEEPSPEED_012, *DEEPSPEED_3,
)  # fmt: skip
OFFLOAD_NVME = {
    "block_size": 1_048_576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1,
}  # fmt: skip

# What says nothing of memory or of the time of a step.
HARMLESS = {
    "model": (
        "tokenizer_name", "tokenizer_pad_token", "tokenizer_kwargs", "processor_kwargs", "trust_remote_code",
        "chat_template", "chat_template_kwargs", "shard_for_eval", "model_revision", "tool_call_parser",
    ),
    "training": (
        "output_dir", "max_steps", "num_train_epochs", "save_final_model", "seed", "data_seed", "full_determinism",
        "run_name", "metrics_function", "reward_functions", "reward_function_kwargs", "grpo", "gkd", "gold",
        "log_level", "dep_log_level", "log_examples", "enable_wandb", "enable_mlflow", "enable_tensorboard",
        "logging_strategy", "logging_dir", "logging_steps", "logging_first_step", "learning_rate",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "weight_decay", "adam_beta1",
        "adam_beta2", "adam_epsilon", "sgd_momentum", "include_performance_metrics",
        "include_alternative_mfu_metrics", "log_model_summary", "try_resume_from_last_checkpoint",
        "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_main_process_only", "verl_config_overrides", "profiler", "telemetry",
        "nccl_default_timeout_minutes", "label_ignore_index",
    ),
    "peft": ("peft_save_mode",),
    "fsdp": (),
    "deepspeed": (),
}  # fmt: skip
USED = {"model": MODEL, "training": TRAINING, "peft": PEFT, "fsdp": FSDP, "deepspeed": DEEPSPEED}

OTHER_TRAINERS = {
    "TRL_DPO": "preference tuning, which runs more than one model",
    "TRL_KTO": "preference tuning, which runs more than one model",
    "TRL_GRPO": "GRPO, which generates between its steps",
    "VERL_GRPO": "GRPO, which generates between its steps",
    "TRL_GKD": "distillation, which runs a teacher and generates between its steps",
    "TRL_GOLD": "distillation, which runs a teacher and generates between its steps",
}
# utils/torch_utils.py, get_torch_dtype
DTYPES = {
    **dict.fromkeys(("f32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "float16", "half"), "float16"),
}
# What vision-language models of transformers call their parts.
PARTS = {
    **dict.fromkeys(
        ("vision_tower", "vision_model", "visual", "model.visual", "model.vision_tower", "model.vision_embed_tokens"),
        "vision_tower",
    ),
    **dict.fromkeys(("multi_modal_projector", "model.multi_modal_projector"), "multi_modal_projector"),
    **dict.fromkeys(("language_model", "model.language_model"), "language_model"),
}
# builders/optimizers.py: what oumi's own trainer calls torch's AdamW, which it fuses.
FUSED = ("adamw", "adamw_torch", "adamw_torch_fused")
