"""Keys of an axolotl recipe by what they do to a simulation, where that is not read from them.

From axolotl of July 2026: utils/schemas/*.py, and args.py of each plugin in integrations/, whose keys count only where
`plugins` names it.
"""

from __future__ import annotations

HARMLESS = (
    "fsdp_final_state_dict_type",  # of the last save
    "datasets", "dataset_prepared_path", "val_set_size", "output_dir", "hub_model_id", "trust_remote_code",
    "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id", "num_epochs",
    "max_steps", "lr_scheduler", "learning_rate", "warmup_ratio", "warmup_steps", "weight_decay", "evals_per_epoch",
    "logging_steps", "special_tokens", "seed", "chat_template", "tf32",
    "tokenizer_type", "model_type", "debug", "gradient_checkpointing_kwargs", "pad_to_sequence_len",
    "train_on_inputs", "group_by_length", "save_first_step", "early_stopping_patience", "local_rank",
    "strict", "eval_sample_packing",
    # data
    "test_datasets", "pretraining_dataset", "skip_prepare_dataset", "dataset_processes", "dataset_num_proc",
    "shuffle_merged_datasets", "shuffle_before_merging_datasets", "push_dataset_to_hub", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "remove_unused_columns", "processor_type", "streaming",
    "streaming_multipack_buffer_size", "pretrain_multipack_attn", "sample_packing_sequentially",
    "sample_packing_eff_est", "sample_packing_seq_len_multiplier", "sample_packing_group_size",
    "sample_packing_bin_size", "total_num_tokens", "max_packed_sequence_len", "eot_tokens",
    "added_tokens_overrides", "tokenizer_config", "tokenizer_legacy", "tokenizer_use_fast",
    "tokenizer_use_mistral_common", "base_model_config", "base_model_ignore_patterns", "revision_of_model",
    "cls_model_config", "hf_use_auth_token", "is_mistral_derived_model", "is_llama_derived_model",
    "is_falcon_derived_model", "is_qwen_derived_model",
    # numbers of the optimizer, the learning rate and the loss
    "adam_beta1", "adam_beta2", "adam_beta3", "adam_epsilon", "adam_epsilon2", "adam_eps", "optim_args", "eta_min",
    "lr_quadratic_warmup", "cosine_min_lr_ratio", "lr_div_factor", "lr_groups", "embedding_lr", "embedding_lr_scale",
    "loraplus_lr_ratio", "loraplus_lr_embedding", "neftune_noise_alpha", "loss_watchdog_threshold",
    "loss_watchdog_patience", "jagged_restart_steps", "jagged_restart_warmup_steps", "jagged_restart_anneal_steps",
    # evaluation, logging, the hub, loading
    "eval_steps", "eval_batch_size", "eval_strategy", "evaluation_strategy", "eval_table_size",
    "eval_max_new_tokens", "eval_table_max_new_tokens", "eval_causal_lm_metrics", "do_causal_lm_eval",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_safetensors", "hub_strategy",
    "use_tensorboard", "use_mlflow", "use_wandb", "use_comet", "use_swanlab", "use_otel_metrics", "use_trackio",
    "include_tokens_per_second", "include_tkps", "low_cpu_mem_usage", "lora_on_cpu", "qlora_sharded_model_loading",
    "lora_fan_in_fan_out", "reinit_weights", "torch_compile_backend", "torch_compile_mode", "ddp_timeout",
    "use_ray", "ray_run_name", "ray_num_workers", "resources_per_worker", "torchdistx_path", "embeddings_skip_upcast",
    "quantization", "dynamic_checkpoint", "gptq_groupsize", "gptq_model_v1",
)  # fmt: skip

# Beginnings of names, of services and of what is measured.
OTHERS_OWN = (
    "wandb_", "mlflow_", "hf_mlflow_", "comet_", "swanlab_", "otel_", "trackio_", "gradio_", "lm_eval_", "bench_",
    "do_bench", "profiler_", "generation_", "generate_", "num_generation_", "vllm", "trl", "dpo_", "kto_", "rl_", "kd_",
    "merge_",
)  # fmt: skip

REFUSED = {
    "tensor_parallel_size": "tensor parallelism",
    "expert_parallel_size": "expert parallelism",
    "unfrozen_parameters": "training of the parameters that match patterns; a scenario's model.freeze names the others",
    "reward_model": "a reward model, whose head is no language model's",
    "process_reward_model": "a reward model, whose head is no language model's",
    "num_labels": "a classifier, whose head is no language model's",
    "diffusion": "diffusion of text",
    "qat": "quantization-aware training",
    "relora": "ReLoRA",
    "gptq": "weights quantized by GPTQ",
    "freeze_mm_modules": "a frozen vision tower; a scenario's model.freeze names it",
    "use_onebitllms": "training for weights in few bits",
    "selective_checkpointing": "checkpointing of chosen operations",
    "layer_offloading": "frozen layers that stay on the host between uses",
    "deepcompile": "DeepCompile",
    "s2_attention": "shifted sparse attention",
    "flash_optimum": "attention by optimum's BetterTransformer",
    "optim_target_modules": "an optimizer of projected gradients",
    "llama4_linearized_experts": "experts as Linear modules, quantized as these",
}

# What else changes what is computed or kept, that is listed as not simulated.
LISTED = {
    "lora_mlp_kernel": "fused kernels of adapters",
    "lora_qkv_kernel": "fused kernels of adapters",
    "lora_o_kernel": "fused kernels of adapters",
    "lora_embedding_kernel": "fused kernels of adapters",
    "flash_attn_cross_entropy": "flash-attn's loss",
    "flash_attn_rms_norm": "flash-attn's norm",
    "flash_attn_fuse_qkv": "flash-attn's projections in one",
    "flash_attn_fuse_mlp": "flash-attn's MLP",
    "use_kernels": "kernels from the Hub",
    "use_scattermoe": "kernels of experts",
    "use_sonicmoe": "kernels of experts",
    "experts_implementation": "kernels of experts",
    "resize_token_embeddings_to_32x": "a vocabulary rounded up to a multiple of 32",
    "tokens": "a vocabulary that grows",
    "shrink_embeddings": "a vocabulary cut to the tokenizer's",
    "model_config": "fields of the model's config.json that are set here",
    "overrides_of_model_config": "fields of the model's config.json that are set here",
    "use_eaft": "another loss",
    "chunked_cross_entropy": "the loss in chunks, whose logits need less memory than said here",
    "fused_attn_kernel": "a fused kernel of attention",
    "gemma4_hybrid_attn_impl": "another attention in layers that see everything",
    "large_head_attention": "another attention where heads are wide",
    "flash_attn_d512": "another attention where heads are wide",
    "sdpa_varlen": "attention within each packed sequence",
    "fp32_norms": "norms in float32",
    "tiled_mlp": "the MLP in pieces of the sequence, which needs less memory than said here",
    "lora_model_dir": "adapters that are there already, whose own rank and targets count",
    "peft": "LoftQ's start of adapters",
    "peft_init_lora_weights": "how adapters start",
    "trainer_cls": "a trainer of its own",
    "gc_steps": "memory given back every few steps",
    "gc_collect_steps": "memory given back every few steps",
    "torch_empty_cache_steps": "memory given back every few steps",
    "batch_flattening": "sequences of a micro-batch without padding between them",
}

# Adapters that are not alike in all layers, or that are not all that trains.
OTHER_ADAPTERS = (
    "peft_use_dora", "relora_steps", "lora_rank_pattern", "peft_layers_to_transform",
    "peft_layers_pattern", "peft_layer_replication", "peft_trainable_token_indices",
)  # fmt: skip

# Plugins by their folder in axolotl.integrations: what the recipe trains otherwise. The key, where there is one, that
# switches it on, and whether it is on where the key is left out.
OTHER_TRAINING: dict[str, tuple[str, str | None, bool]] = {
    "densemixer": ("DenseMixer, whose router learns from all experts", "dense_mixer", True),
    "diffusion": ("diffusion of text", None, True),
    "grokfast": ("Grokfast, which keeps averages of gradients", None, True),
    "hatchery": ("training on the machines of a service", None, True),
    "kd": ("distillation, whose loss takes a teacher's logits", "kd_trainer", False),
    "mora": ("MoRA, another kind of adapter", None, True),
    "nemo_gym": ("GRPO, which generates between its steps", "nemo_gym_enabled", False),
    "spectrum": ("Spectrum, which trains the layers that it chooses", None, True),
}
QUIET = ("cut_cross_entropy", "liger", "kernels", "swanlab", "lm_eval", "expert_parallel")  # what their keys say
LISTED_PLUGINS = {"llm_compressor": "sparse weights, which are kept so after each step"}
