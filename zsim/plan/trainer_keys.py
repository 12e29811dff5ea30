"""Arguments of the Hugging Face Trainer and of trl by what they do to a simulation, where they are not read."""

from __future__ import annotations

from typing import Any

HARMLESS = (
    "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio",
    "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "logging_steps", "logging_dir",
    "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "output_dir", "overwrite_output_dir", "run_name", "report_to", "seed",
    "data_seed", "dataloader_num_workers", "push_to_hub", "hub_model_id", "ddp_timeout", "do_train", "do_eval",
    "dataset", "dataset_name", "dataset_config", "dataset_dir",
    "preprocessing_num_workers", "overwrite_cache", "plot_loss", "template", "max_samples", "val_size",
    "trust_remote_code", "remove_unused_columns", "gradient_checkpointing_kwargs", "torch_dtype", "dtype", "tf32",
    "log_level", "logging_strategy",
    # the rest of training_args.py that says nothing of memory or time of a step
    "evaluation_strategy", "average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "use_cache",
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen",
    "log_level_replica", "disable_tqdm", "project", "eval_delay", "prediction_loss_only", "eval_on_start",
    "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "save_on_each_node", "enable_jit_checkpoint", "hub_strategy", "hub_always_push",
    "hub_token", "hub_private_repo", "hub_revision", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism",
    "dataloader_drop_last", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_in_order",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "train_sampling_strategy", "group_by_length",
    "length_column_name", "label_names", "skip_memory_metrics", "local_rank", "ddp_backend", "fp16_opt_level",
    # trl's SFTConfig, ModelConfig and ScriptArguments, and the arguments of transformers' and accelerate's examples
    "dataset_num_proc", "dataset_text_field", "dataset_kwargs", "dataset_train_split", "dataset_test_split",
    "dataset_streaming", "ignore_bias_buffers", "eos_token", "pad_token", "chat_template", "chat_template_path",
    "truncation_mode", "shuffle_dataset", "lora_task_type", "use_rslora", "tokenizer_name", "tokenizer_name_or_path",
    "config_name", "cache_dir", "use_fast_tokenizer", "train_file", "validation_file", "dataset_config_name",
    "max_train_samples", "max_eval_samples", "validation_split_percentage", "dataset_mixer", "dataset_splits",
    "dataset_configs", "predict_with_generate",
    # of open-r1's and the alignment handbook's scripts
    "wandb_project", "wandb_entity", "wandb_run_group", "system_prompt", "dataset_prompt_column", "dataset_mixture",
    "benchmarks", "callbacks", "hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision",
    "optim_args", "neftune_noise_alpha", "save_safetensors", "jit_mode_eval", "past_index", "model_revision",
)  # fmt: skip

# Arguments of trl's trainers whose steps are not those of supervised training.
_GENERATES = "GRPO, which generates between its steps"
OTHER_TRAINERS = {
    **dict.fromkeys(
        (
            "num_generations",
            "max_completion_length",
            "log_completions",
            "use_vllm",
            "vllm_mode",
            "reward_funcs",
            "reward_weights",
            "num_iterations",
            "scale_rewards",
            "mask_truncated_completions",
        ),
        _GENERATES,
    ),
    **dict.fromkeys(
        ("num_ppo_epochs", "num_mini_batches", "response_length", "kl_coef", "cliprange", "reward_model_path"),
        "PPO, which generates between its steps",
    ),
    "max_prompt_length": "preference tuning, which runs more than one model",
    "beta": "preference tuning, which runs more than one model",
    "precompute_ref_log_probs": "preference tuning, which runs more than one model",
    "center_rewards_coefficient": "a reward model, whose head is no language model's",
}

# What changes what is computed, and is listed as not simulated.
LISTED = {
    "label_smoothing_factor": "a loss over all logits",
    "torch_empty_cache_steps": "memory given back every few steps",
    "config_overrides": "fields of the model's config.json that are set here",
    "router_aux_loss_coef": "the auxiliary loss of routers",
    "bnb_4bit_quant_storage": "4-bit weights stored in another type than that of the run",
}

# What is refused unless it has one of these values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optim_target_modules": ((), "an optimizer of projected gradients"),
    "sharded_ddp": ((False, "", []), "fairscale's sharding, of transformers before 4.35"),
    "half_precision_backend": (("auto", "cuda_amp", "amp"), "Apex in place of torch.autocast"),
    "fp16_backend": (("auto", "cuda_amp", "amp"), "Apex in place of torch.autocast"),
    "use_cpu": ((False,), "training on CPUs"),
    "no_cuda": ((False,), "training on CPUs"),
    "use_mps_device": ((False,), "training on a Mac's GPU"),
}

# Arguments that transformers 5 no longer has: with them it is one of 4, whose fsdp is FSDP1 (training_args.py).
OF_RELEASE_4 = (
    "evaluation_strategy", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "overwrite_output_dir",
    "logging_dir", "save_safetensors", "group_by_length", "warmup_ratio", "half_precision_backend", "no_cuda",
    "fp16_opt_level", "fp16_backend", "adafactor",
)  # fmt: skip
