"""Every key of a DeepSpeed configuration and what it does to a simulation.

Read from DeepSpeed 0.19.8: runtime/config.py, constants.py, precision_config.py, zero/config.py, zero/offload_config.py
and the sections' own config.py. A section of `STRICT` refuses keys it does not know, every other one ignores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

USED = "used"  # becomes a field of the scenario
NONE = "no effect"  # on a simulation
LISTED = "not simulated"  # has an effect in reality: listed, and simulated as if it were not there
REFUSED = "not modeled"  # refused unless it has its harmless default


@dataclass(frozen=True, slots=True)
class Key:
    """`why` says what the key does, where it is not used, and of a used one with what it is refused."""

    kind: type
    effect: str
    default: Any = None
    why: str = ""


def used(kind: type, default: Any = None, why: str = "") -> Key:
    return Key(kind, USED, default, why)


def none(kind: type, why: str) -> Key:
    return Key(kind, NONE, None, why)


def listed(kind: type, default: Any, why: str) -> Key:
    return Key(kind, LISTED, default, why)


def refused(kind: type, default: Any, why: str) -> Key:
    return Key(kind, REFUSED, default, why)


_PRINTS = "printing and logging"
_ALL_AT_ONCE = "all_gather_into_tensor gathers each parameter group at once"
_CHECKPOINTING = "only models that call deepspeed.checkpointing, which Hugging Face's do not"
_SUBMISSION = "how requests are handed to the kernel; no measurement tells the ways apart"
_LOSS_SCALE = "numbers only"
_OPTIMIZER_NUMBER = "a number of the optimizer, not its shape"

ZERO: dict[str, Key] = {
    "stage": used(int, 0),
    "contiguous_gradients": used(bool, True),
    "reduce_scatter": used(bool, True),
    "reduce_bucket_size": used(int, 500_000_000),
    "use_multi_rank_bucket_allreduce": used(bool, True),
    "allgather_partitions": none(bool, _ALL_AT_ONCE),
    "allgather_bucket_size": none(int, _ALL_AT_ONCE),
    "overlap_comm": used(bool, None),
    "compute_grad_norm": refused(bool, True, "a step without the gradient norm"),
    "load_from_fp32_weights": none(bool, "loading checkpoints"),
    "elastic_checkpoint": none(bool, "checkpoints"),
    "offload_param": used(dict),
    "offload_optimizer": used(dict),
    "zenflow": refused(dict, None, "ZenFlow: the CPU updates once in update_interval steps, which so differ"),
    "sub_group_size": used(int, 1_000_000_000),
    "cpu_offload": used(bool),
    "cpu_offload_param": used(bool),
    "cpu_offload_use_pin_memory": none(bool, "deprecated; DeepSpeed does not use it"),
    "stage3_prefetch_bucket_size": used(int, 50_000_000),
    "stage3_param_persistence_threshold": used(int, 100_000),
    "stage3_model_persistence_threshold": used(int, None),
    "stage3_max_live_parameters": used(int, 1_000_000_000),
    "stage3_max_reuse_distance": used(int, 1_000_000_000),
    "stage3_gather_16bit_weights_on_model_save": used(bool, False),
    "stage3_gather_fp16_weights_on_model_save": used(bool, False),
    "stage3_module_granularity_threshold": used(int, 0),
    "stage3_use_all_reduce_for_fetch_params": used(bool, False),
    "stage3_allgather_sequential": used(bool, False),
    "ignore_unused_parameters": none(bool, "an error message about unused parameters"),
    "legacy_stage1": refused(bool, False, "the old stage 1, which DeepSpeed itself no longer runs"),
    "round_robin_gradients": used(bool, False),
    "parameter_alignment": refused(bool, False, "padding between parameters of a flat buffer"),
    "zero_hpz_partition_size": used(int, 1),
    "zero_quantized_weights": used(bool, False),
    "zero_quantized_nontrainable_weights": used(bool, False),
    "zero_quantized_gradients": used(bool, False),
    "memory_efficient_linear": used(bool, True),
    "pipeline_loading_checkpoint": none(bool, "loading checkpoints"),
    "override_module_apply": none(bool, "initialization"),
    "log_trace_cache_warnings": none(bool, _PRINTS),
    "enable_sanity_checks": listed(bool, False, "internal checks, which cost host time"),
    "save_muon_momentum_buffer_in_memory": none(bool, "Muon's momentum under offload, which is refused"),
    "leaf_module": used(dict),
}

# pydantic's populate_by_name: the field's own name is taken as well as its alias.
ALIASES = {
    name: f"stage3_{name}"
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
}

OFFLOAD_PARAM: dict[str, Key] = {
    "device": used(str, "none"),
    "nvme_path": none(str, "a path"),
    "buffer_count": used(int, 5),
    "buffer_size": used(int, 100_000_000),
    "max_in_cpu": used(int, 1_000_000_000),
    "pin_memory": used(bool, True),
}

OFFLOAD_OPTIMIZER: dict[str, Key] = {
    "device": used(str, "none"),
    "nvme_path": none(str, "a path"),
    "buffer_count": used(int, 4),
    "pin_memory": used(bool, True),
    "pipeline_read": used(bool, False),
    "pipeline_write": used(bool, False),
    "fast_init": none(bool, "initialization"),
    "ratio": used(float, 1.0),
    "super_offload": used(bool, False),
    "cpuadam_cores_perc": used(float, 0.8),
}

FP16: dict[str, Key] = {
    "enabled": used(bool, False),
    "auto_cast": none(bool, "casts the inputs"),
    "loss_scale": none(float, _LOSS_SCALE),
    "initial_scale_power": none(int, _LOSS_SCALE),
    "loss_scale_window": none(int, _LOSS_SCALE),
    "hysteresis": none(int, _LOSS_SCALE),
    "consecutive_hysteresis": none(bool, _LOSS_SCALE),
    "min_loss_scale": none(int, _LOSS_SCALE),
    "fp16_master_weights_and_grads": refused(
        bool, False, "master weights and gradients in fp16, which DeepSpeed allows in host memory alone"
    ),
}

BF16: dict[str, Key] = {
    "enabled": used(bool, False),
    "immediate_grad_update": used(bool, False),
    "check_grad_overflow": used(bool, True),
    "bf16_master_weights_and_grads": used(bool, False),
    "bf16_optimizer_states": used(bool, False),
}

OPTIMIZER_PARAMS: dict[str, Key] = {
    "torch_adam": used(bool, False),
    "adam_w_mode": none(bool, _OPTIMIZER_NUMBER),
    "foreach": used(bool),
    "momentum": used(float, 0.0),
    "ns_method": used(str, "gram"),
    "per_head_muon": refused(bool, False, "Muon that orthogonalizes each attention head by itself"),
    "fp32_optimizer_states": used(bool, True, "beside offloaded master weights in bf16; otherwise all are float32"),
    **{
        name: none(kind, _OPTIMIZER_NUMBER)
        for name, kind in {
            "lr": float,
            "betas": list,
            "eps": float,
            "weight_decay": float,
            "bias_correction": bool,
            "amsgrad": bool,
            "muon_lr": float,
            "adam_lr": float,
            "max_coeff": float,
            "min_coeff": float,
            "set_grad_none": bool,
            "adamw_mode": bool,
            "eps_inside_sqrt": bool,
        }.items()
    },
}

_MONITOR = none(dict, _PRINTS)

_OTHER_MODELS = "layers of experts that AutoEP has no preset for"
_ROUTING = "another routing than the model's own"
_DEEPEP = "only with comm_backend deepep"
EXPERT_PARALLEL: dict[str, Key] = {
    "enabled": used(bool, False),
    "autoep_size": used(int, 1),
    "expert_tensor_parallel_size": refused(int, 1, "tensor parallelism within experts, which DeepSpeed refuses too"),
    "validate_folding_routing": none(bool, "only with tensor parallelism"),
    "async_split_plan": listed(bool, False, "counts of rows that come to the host beside other work"),
    "preset_model": none(str, "the preset of the model's own type is simulated"),
    **{
        name: refused(object, None, _OTHER_MODELS)
        for name in (
            "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3",
            "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
            "shared_experts_gate_pattern", "expert_activation",
        )
    },
    "use_grouped_mm": refused(bool, True, "experts one after another"),
    "disable_triton_grouped_mm": none(bool, "which kernel multiplies, of the same shapes"),
    "gate_up_impl": refused(str, "separate", "gate and up projection in one product"),
    "route_norm": refused(bool, None, _ROUTING),
    "route_scale": none(float, "a factor"),
    "routed_scaling_factor": none(object, "a factor"),
    "num_expert_groups": refused(int, None, _ROUTING),
    "num_limited_groups": refused(int, None, _ROUTING),
    "score_func": refused(str, "auto", _ROUTING),
    "top_k": refused(object, "auto", _ROUTING),
    "load_balance_coeff": refused(float, None, "balancing by a bias, which DeepSpeed refuses too"),
    "score_apply": refused(str, "auto", "scores that weigh rows before the experts"),
    "combine_impl": refused(str, "auto", "another way to sum rows"),
    "row_weighting_impl": refused(str, "auto", "a kernel of the DeepEP route"),
    "comm_backend": refused(str, "comm", "DeepEP in place of all-to-alls"),
    "comm_num_sm": none(int, _DEEPEP),
    "comm_qp_margin": none(int, _DEEPEP),
    "comm_max_tokens_per_rank": none(int, _DEEPEP),
}  # fmt: skip

TOP: dict[str, Key] = {
    "train_batch_size": used(int),
    "train_micro_batch_size_per_gpu": used(int),
    "gradient_accumulation_steps": used(int),
    "managed_gradient_accumulation": refused(bool, True, "boundaries of accumulation set by the training script"),
    "optimizer": used(dict),
    "scheduler": none(dict, "the learning rate"),
    "communication_data_type": used(str),
    "seq_parallel_communication_data_type": used(str, "fp32"),
    "prescale_gradients": used(bool, False),
    "gradient_predivide_factor": none(float, "a factor"),
    "gradient_allreduce_op": none(str, "mean or sum"),
    "fp16": used(dict),
    "bf16": used(dict),
    "bfloat16": used(dict),
    "torch_autocast": used(dict),
    "gradient_clipping": used(float, 1.0),
    "zero_optimization": used(dict),
    "zero_allow_untested_optimizer": none(bool, "permission for other optimizers"),
    "zero_force_ds_cpu_optimizer": used(bool, True),
    "allgather_size": none(int, "deprecated"),
    "steps_per_print": none(int, _PRINTS),
    "wall_clock_breakdown": listed(bool, False, "timers that synchronize host and GPU"),
    "memory_breakdown": listed(bool, False, "memory reports that synchronize host and GPU"),
    "dump_state": none(bool, _PRINTS),
    "log_level": none(str, _PRINTS),
    "disable_allgather": none(bool, "nothing in this version"),
    "disable_python_gc": listed(bool, False, "Python's garbage collector switched off"),
    "vocabulary_size": none(int, "a warning"),
    "sequence_parallel_size": used(int, 1),
    "data_parallel_size": refused(
        int, None, "a device mesh (data_parallel_size x sequence_parallel_size), over whose one side alone ZeRO shards"
    ),
    "use_data_before_expert_parallelism": used(bool, False),
    "dataloader_drop_last": none(bool, "the data loader"),
    "activation_checkpointing": used(dict),
    "aio": used(dict),
    "flops_profiler": used(dict),
    "comms_logger": none(dict, _PRINTS),
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "timers": used(dict),
    "autotuning": none(dict, "the launcher's search"),
    "hybrid_engine": used(dict),
    "pipeline": none(dict, "only a PipelineModule"),
    "data_efficiency": used(dict),
    "checkpoint": none(dict, "checkpoints"),
    "data_types": used(dict),
    "datastates": none(dict, "checkpoints"),
    "weight_quantization": none(dict, "inference"),
    "compile": used(dict),
    "tensor_parallel": used(dict),
    "expert_parallel": used(dict),
}

SECTIONS: dict[str, dict[str, Key]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "zero_optimization.leaf_module": {"classes": used(list), "names": used(list), "name_suffixes": used(list)},
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "optimizer": {
        "type": used(str),
        "params": used(dict),
        "legacy_fusion": none(bool, "the wrapper of fp16 without ZeRO"),
    },
    "optimizer.params": OPTIMIZER_PARAMS,
    "activation_checkpointing": {
        "partition_activations": none(bool, _CHECKPOINTING),
        "contiguous_memory_optimization": none(bool, _CHECKPOINTING),
        "cpu_checkpointing": none(bool, _CHECKPOINTING),
        "number_checkpoints": none(int, _CHECKPOINTING),
        "synchronize_checkpoint_boundary": none(bool, _CHECKPOINTING),
        "profile": none(bool, _PRINTS),
    },
    "timers": {"throughput": used(dict)},
    "timers.throughput": {"enabled": used(bool, True), "synchronized": used(bool, True)},
    "aio": {
        "block_size": used(int, 1_048_576),
        "queue_depth": used(int, 8),
        "intra_op_parallelism": used(int, 1),
        "thread_count": none(int, "DeepSpeed reads intra_op_parallelism, as it has come to be called"),
        "single_submit": none(bool, _SUBMISSION),
        "overlap_events": none(bool, _SUBMISSION),
        "use_gds": used(bool, False),
    },
    "torch_autocast": {
        "enabled": used(bool, False),
        "dtype": used(str),
        "lower_precision_safe_modules": none(list, "whose parameters travel in the type that all have anyway"),
    },
    "data_types": {
        "grad_accum_dtype": used(str),
        "param_dtype": refused(str, None, "parameters stored in a type of their own"),
        "buffer_dtype": none(str, "buffers"),
        "keep_in_fp32_modules": none(list, "buffers"),
    },
    "flops_profiler": {
        "enabled": listed(bool, False, "one profiled step"),
        "recompute_fwd_factor": none(float, _PRINTS),
        "profile_step": none(int, _PRINTS),
        "module_depth": none(int, _PRINTS),
        "top_modules": none(int, _PRINTS),
        "detailed": none(bool, _PRINTS),
        "output_file": none(str, _PRINTS),
    },
    "hybrid_engine": {
        "enabled": refused(bool, False, "the hybrid engine, which generates between steps"),
        "max_out_tokens": none(int, "generation"),
        "inference_tp_size": none(int, "generation"),
        "release_inference_cache": none(bool, "generation"),
        "pin_parameters": none(bool, "generation"),
        "tp_gather_partition_size": none(int, "generation"),
        "enable_cuda_graph": none(bool, "generation"),
    },
    "data_efficiency": {
        "enabled": refused(bool, False, "data efficiency: curriculum learning and random layer token drop"),
        "seed": none(int, "data"),
        "data_sampling": none(dict, "data"),
        "data_routing": none(dict, "data"),
    },
    "compile": {
        "deepcompile": refused(bool, False, "DeepCompile"),
        **{
            name: none(kind, "DeepCompile")
            for name, kind in {
                "autoep_non_moe": bool,
                "free_activation": bool,
                "free_activation_threshold": int,
                "offload_activation": bool,
                "offload_activation_pin_memory": bool,
                "offload_opt_states": bool,
                "double_buffer": bool,
                "symmetric_memory": bool,
                "debug_log": bool,
                "offload_parameters": bool,
                "sync_before_reduce": bool,
                "sync_after_reduce": bool,
                "sync_before_allgather": bool,
                "sync_after_allgather": bool,
                "keep_int_input_tensors": bool,
                "keep_all_input_tensors": bool,
                "passes": list,
            }.items()
        },
    },
    "tensor_parallel": {
        "autotp_size": refused(int, 0, "tensor parallelism (AutoTP)"),
        "tensor_parallel": refused(dict, {}, "tensor parallelism"),
        "tp": refused(dict, {}, "tensor parallelism"),
        **{
            name: none(kind, "tensor parallelism")
            for name, kind in {
                "dtype": str,
                "tp_overlap_comm": bool,
                "vocab_parallel_lm_head": bool,
                "vocab_parallel_ce_backend": str,
                "injection_policy_tuple": list,
                "partition_config": dict,
                "preset_model": str,
                "keep_module_on_host": bool,
                "replace_with_kernel_inject": bool,
                "kernel_inject": bool,
            }.items()
        },
    },
    "expert_parallel": EXPERT_PARALLEL,
}

# Sections that pydantic checks with extra="forbid". What stands inside the others is looked up by name.
STRICT = {
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "zero_optimization.leaf_module",
    "fp16",
    "bf16",
    "bfloat16",
    "hybrid_engine",
    "compile",
    "tensor_parallel",
    "optimizer.params",  # an unexpected keyword argument of the optimizer
}

# Of the sections that are pydantic models, the keys that may be null; in all others pydantic refuses it.
MODELS = STRICT - {"optimizer.params"}
NULLABLE = {
    "zero_optimization.overlap_comm",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.zenflow",
    "zero_optimization.leaf_module",
    "compile.passes",
    "tensor_parallel.vocab_parallel_lm_head",
    "tensor_parallel.injection_policy_tuple",
    "tensor_parallel.partition_config",
    "tensor_parallel.preset_model",
}

# DeepSpeed raises on these from 0.19.8 on, on some from 0.19.7 on (they still worked in 0.19.6). What they were:
REMOVED: dict[str, str] = {
    "nebula": "Nebula checkpointing",
    "compression_training": "the compression library",
    "amp": "Apex AMP",
    "quantize_training": "mixture of quantization",
    "sparse_gradients": "sparse reduction of embedding gradients",
    "eigenvalue": "eigenvalue-based quantization",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the old curriculum learning",
    "progressive_layer_drop": "progressive layer drop",
    "zero_optimization.mics_shard_size": "MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zeropp_loco_param": "LoCo-Zero++",
}
GONE_IN_0_19_7 = {
    "nebula", "compression_training", "quantize_training", "sparse_attention", "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather",
}  # fmt: skip
# Of these, what an older DeepSpeed is simulated with.
OLDER: dict[str, Key] = {
    "zero_optimization.mics_shard_size": used(int, -1),
    "zero_optimization.mics_hierarchical_params_gather": used(bool, False),
}
