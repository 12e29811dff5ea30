"""The configurations recorded, each a point where the frameworks' rules differ.

A configuration: name, engine (ds, fsdp2, fsdp1, ddp), world, model (a key of models.TINY), `over` (changes of the
model), `freeze`, `ckpt`, `ga` (accumulation), and the engine's own settings under ds, fsdp or ddp.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# Sizes at which a model of 3.4 million parameters meets every limit.
SMALL_ZERO = {
    "reduce_bucket_size": 300000, "allgather_bucket_size": 300000, "stage3_prefetch_bucket_size": 200000,
    "stage3_param_persistence_threshold": 1000, "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
}  # fmt: skip
OVERSIZE = SMALL_ZERO | {"reduce_bucket_size": 50000}  # parameters larger than a bucket
REGATHER = SMALL_ZERO | {"stage3_max_live_parameters": 500000, "stage3_max_reuse_distance": 0}
ODD_SIZES = {
    "hidden_size": 240, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 642,
    "vocab_size": 1003,
}  # fmt: skip
# Matrices of 252 x 643 elements, which 8 does not divide.
INDIVISIBLE = {
    "hidden_size": 252, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 643,
    "vocab_size": 1004,
}  # fmt: skip
# Where activations weigh as much as weights: 0.3 million parameters.
WIDE = {
    "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
WIDE_GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 300}
TIED = {"tie_word_embeddings": True}
ACCELERATE = {"accelerate": True, "root_reshard": "default"}  # as its fsdp2_prepare_model does since 1.14
# The optimizer that partial offload and master weights in bf16 ask for.
CPU_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_force_ds_cpu_optimizer": True}
ON_NVME = {"device": "nvme", "pin_memory": False, "buffer_count": 80, "buffer_size": 300000, "max_in_cpu": 0}
LORA = {"r": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


def configurations() -> list[Config]:
    return [
        *_ddp(), *_fsdp2(), *_fsdp1(), *_deepspeed(), *_deepspeed_corners(), *_offload(), *_decay_groups(),
        *_zero_plus_plus(), *_leaves(), *_mics(), *_ulysses(), *_muon(), *_precision(),
        *_experts(), *_vision(),
    ]  # fmt: skip


def _make(engine: str, tag: str, world: int = 2, ga: int = 1, model: str = "llama", **settings: Any) -> Config:
    name = f"{engine}_{tag}_w{world}_ga{ga}" + ("" if model == "llama" else f"_{model}")
    return {"name": name, "engine": engine, "world": world, "model": model, "ga": ga, **settings}


def _ddp() -> list[Config]:
    cap = {"bucket_cap_mb": 1}
    return [
        _make("ddp", "default"),
        _make("ddp", "cap1", 4, ddp=cap),
        _make("ddp", "cap1_static", ddp=cap | {"static_graph": True}),
        _make("ddp", "cap1_static_sync", ga=2, ddp=cap | {"static_graph": True}),
        _make("ddp", "cap1_unused", ddp=cap | {"find_unused_parameters": True}),
        _make("ddp", "cap1_unused_nosync", ga=2, ddp=cap | {"find_unused_parameters": True}, no_sync=True),
        _make("ddp", "cap1_view", ddp=cap | {"gradient_as_bucket_view": True}),
        _make("ddp", "cap1_nosync", ga=2, ddp=cap, no_sync=True),
        _make("ddp", "cap1_sync", ga=2, ddp=cap),
        _make("ddp", "cap1_bf16", ddp=cap, dtype="bfloat16"),
        _make("ddp", "cap1_ckpt", ddp=cap, ckpt=True),
        _make("ddp", "autocast", autocast="bfloat16", over=WIDE),
        _make("ddp", "autocast", autocast="bfloat16", model="gpt2", over=WIDE_GPT2),
        _make("ddp", "autocast", autocast="bfloat16", model="qwen2", over=WIDE),
        _make("ddp", "autocast", autocast="bfloat16", model="mixtral", over={"hidden_size": 64, "vocab_size": 300}),
        _make("ddp", "autocast_ckpt", autocast="bfloat16", ckpt=True, over=WIDE),
        _make("ddp", "cap1", model="gpt2", ddp=cap),
        _make("ddp", "cap1", model="qwen2", ddp=cap),
        _make("ddp", "cap1", model="mixtral", ddp=cap | {"find_unused_parameters": True}),
        _make("ddp", "cap1_tied", ddp=cap, over=TIED),
        _make("ddp", "lora", ddp={"bucket_cap_mb": 0.02}, lora=LORA),
        _make("ddp", "cap1_frozen", ddp=cap, freeze=["embed_tokens", "layers.0.", "layers.1."]),
    ]


def _fsdp2() -> list[Config]:
    return [
        _make("fsdp2", "raf_true", 4),
        _make("fsdp2", "raf_false", fsdp={"reshard_after_forward": False}),
        _make("fsdp2", "raf_int2", 4, fsdp={"reshard_after_forward": 2}),
        _make("fsdp2", "root_default", fsdp={"root_reshard": "default"}),
        _make("fsdp2", "reduce_bf16", fsdp={"reduce_dtype": "bfloat16"}),
        _make("fsdp2", "reduce_fp16", fsdp={"param_dtype": "float16", "reduce_dtype": "float16"}),
        _make("fsdp2", "fp32", fsdp={"mp": False}),
        _make("fsdp2", "titan", fsdp={"titan": True}),
        _make("fsdp2", "titan_raf_false", fsdp={"titan": True, "reshard_after_forward": False}),
        _make("fsdp2", "ga_sync_every", ga=2),
        _make("fsdp2", "ga_sync_last", ga=2, fsdp={"sync_only_last": True}),
        _make(
            "fsdp2", "ga_sync_last_noreshard", ga=2, fsdp={"sync_only_last": True, "no_reshard_bwd_until_last": True}
        ),
        _make("fsdp2", "ga_last_backward", ga=3, fsdp={"is_last_backward": True}),
        _make("fsdp2", "ckpt", ckpt=True),
        _make("fsdp2", "prefetch2", fsdp={"prefetch": 2}),
        _make("fsdp2", "prefetch1_titan", fsdp={"prefetch": 1, "titan": True}),
        _make("fsdp2", "noclip", clip=False),
        _make("fsdp2", "bf16", dtype="bfloat16"),
        _make("fsdp2", "hsdp2x2", 4, fsdp={"mesh": [2, 2]}),
        _make("fsdp2", "hsdp2x2_raf_false", 4, fsdp={"mesh": [2, 2], "reshard_after_forward": False}),
        _make("fsdp2", "hsdp2x2_ga_sync_last", 4, 2, fsdp={"mesh": [2, 2], "sync_only_last": True}),
        _make("fsdp2", "hsdp2x2_ga_allreduce_last", 4, 2, fsdp={"mesh": [2, 2], "all_reduce_only_last": True}),
        _make("fsdp2", "hsdp4x1", 4, fsdp={"mesh": [4, 1]}),
        _make("fsdp2", "hsdp1x4", 4, fsdp={"mesh": [1, 4]}),
        _make("fsdp2", "cpuoffload", fsdp={"offload": True}),
        _make("fsdp2", "odd_hidden", 4, over=ODD_SIZES),
        _make("fsdp2", "tied", over=TIED),
        _make("fsdp2", "lora", lora=LORA),
        _make("fsdp2", "lora_ckpt", lora=LORA, ckpt=True),
        _make("fsdp2", "accelerate", fsdp=ACCELERATE),
        _make("fsdp2", "accelerate", 4, ga=2, fsdp=ACCELERATE),
        _make("fsdp2", "accelerate_ckpt", ckpt=True, fsdp=ACCELERATE),
        _make("fsdp2", "accelerate_tied", over=TIED, fsdp=ACCELERATE),
        _make("fsdp2", "accelerate_tied", ga=2, model="qwen2", fsdp=ACCELERATE),
        _make("fsdp2", "accelerate_grad_op", fsdp=ACCELERATE | {"reshard_after_forward": False}),
        _make("fsdp2", "accelerate_offload", fsdp=ACCELERATE | {"offload": True}),
        _make("fsdp2", "raf_true", model="gpt2"),
        _make("fsdp2", "raf_true", model="qwen3"),
        _make("fsdp2", "raf_true", model="mixtral"),
        _make("fsdp2", "frozen", freeze=["embed_tokens", "layers.0.", "layers.1."]),
        _make("fsdp2", "frozen_titan", fsdp={"titan": True}, freeze=["embed_tokens", "layers.0."]),
    ]


def _fsdp1() -> list[Config]:
    return [
        _make("fsdp1", "full_shard", 4),
        _make("fsdp1", "shard_grad_op", fsdp={"strategy": "SHARD_GRAD_OP"}),
        _make("fsdp1", "no_shard", fsdp={"strategy": "NO_SHARD"}),
        _make("fsdp1", "full_shard_bwdpost", fsdp={"backward_prefetch": "BACKWARD_POST"}),
        _make("fsdp1", "full_shard_nobwdprefetch", fsdp={"backward_prefetch": None}),
        _make("fsdp1", "full_shard_fwdprefetch", fsdp={"forward_prefetch": True}),
        _make("fsdp1", "full_shard_reducefp32", fsdp={"reduce_dtype": "float32"}),
        _make("fsdp1", "full_shard_flat", fsdp={"use_orig_params": False}),
        _make("fsdp1", "full_shard", ga=2),
        _make("fsdp1", "full_shard_nosync", ga=2, fsdp={"no_sync": True}),
        _make("fsdp1", "full_shard_ckpt", ckpt=True),
        _make("fsdp1", "hybrid2x2", 4, fsdp={"strategy": "HYBRID_SHARD", "mesh": [2, 2]}),
        _make("fsdp1", "hybrid_zero2_2x2", 4, fsdp={"strategy": "_HYBRID_SHARD_ZERO2", "mesh": [2, 2]}),
        _make("fsdp1", "odd", 4, over=ODD_SIZES),
        _make("fsdp1", "odd_flat", 4, over=ODD_SIZES, fsdp={"use_orig_params": False}),
        _make("fsdp1", "shard_grad_op_nosync", ga=2, fsdp={"strategy": "SHARD_GRAD_OP", "no_sync": True}),
        _make("fsdp1", "no_shard_nosync", ga=2, fsdp={"strategy": "NO_SHARD", "no_sync": True}),
        _make("fsdp1", "fwdprefetch_bwdpost", fsdp={"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"}),
        _make("fsdp1", "fwdprefetch_nosync", ga=2, fsdp={"forward_prefetch": True, "no_sync": True}),
        _make("fsdp1", "full_shard", model="gpt2"),
        _make("fsdp1", "full_shard_tied", over=TIED),
        _make("fsdp1", "lora", lora=LORA),
        *_adapter_units(),
    ]


def _adapter_units() -> list[Config]:
    """Adapters wrapped one by one, as transformers' Trainer has it done for every model of peft's. Without autocast
    FSDP1 needs all in one dtype: peft casts an adapter's input to the dtype of its shard."""
    units = {"adapter_units": True}
    one: Config = {"lora": LORA, "dtype": "bfloat16"}
    return [
        _make("fsdp1", "units_lora", **one, fsdp=units),
        _make("fsdp1", "units_lora_ckpt", ga=2, **one, ckpt=True, fsdp=units),
        _make("fsdp1", "units_lora_offload", **one, fsdp=units | {"offload": True}),
        _make("fsdp1", "units_lora_flat", 4, **one, fsdp=units | {"use_orig_params": False}),
        _make("fsdp1", "units_lora_grad_op", ga=2, **one, fsdp=units | {"strategy": "SHARD_GRAD_OP"}),
        _make("fsdp1", "units_lora_no_shard", **one, fsdp=units | {"strategy": "NO_SHARD"}),
        _make("fsdp1", "units_lora_post", **one, ckpt=True, fsdp=units | {"backward_prefetch": "BACKWARD_POST"}),
        _make("fsdp2", "units_lora", lora=LORA, fsdp=units),
        _make("fsdp2", "units_lora_ckpt", ga=2, lora=LORA, ckpt=True, fsdp=units),
        _make("fsdp2", "units_lora_offload", lora=LORA, fsdp=units | {"offload": True}),
        _make("fsdp2", "units_lora_accelerate", lora=LORA, fsdp=units | ACCELERATE),
        _make("fsdp2", "units_lora_upcast", **one, over=WIDE, fsdp=units | ACCELERATE | {"upcast_trained": True}),
        _make("fsdp2", "lora_upcast", **one, over=WIDE, fsdp=ACCELERATE | {"upcast_trained": True}),
    ]


def _zero(
    tag: str,
    stage: int,
    world: int = 2,
    ga: int = 1,
    model: str = "llama",
    zero: Config | None = None,
    clip: float = 1.0,
    precision: str = "bf16",
    extra: Config | None = None,
    **settings: Any,
) -> Config:
    ds: Config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ga,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    if precision != "fp32":
        ds[precision] = {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})
    config = _make("ds", f"z{stage}_{tag}", world, ga, model, ds=ds | (extra or {}), **settings)
    del config["ga"]  # DeepSpeed's own setting says it
    return config


def _deepspeed() -> list[Config]:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = [_zero("small", stage, zero=SMALL_ZERO) for stage in (0, 1, 2, 3)]
    found += [_zero("small", stage, model="gpt2", zero=SMALL_ZERO) for stage in (2, 3)]
    found += [_zero("small_overlap", stage, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}) for stage in (1, 2, 3)]
    found += [_zero("fp32", stage, zero=SMALL_ZERO, precision="fp32") for stage in (0, 2, 3)]
    found += [_zero("offload", stage, ga=2, zero=SMALL_ZERO | offload) for stage in (2, 3)]
    found += [_zero("tied", stage, zero=SMALL_ZERO, over=TIED) for stage in (2, 3)]
    found += [_zero("frozen", stage, zero=SMALL_ZERO, freeze=["layers.0.", "layers.1."]) for stage in (2, 3)]
    found += [_zero("lora", stage, zero=SMALL_ZERO, lora=LORA) for stage in (2, 3)]
    found += [_zero("lora_persist0", 3, zero=REGATHER | {"stage3_param_persistence_threshold": 0}, lora=LORA)]
    found += [_zero("lora_ckpt", 3, ga=2, model="qwen2", zero=REGATHER, lora=LORA, ckpt=True)]
    return [
        *found,
        _zero("multirank_rs", 2, 4, zero=SMALL_ZERO | {"use_multi_rank_bucket_allreduce": False}),
        _zero("roundrobin", 2, 4, zero=SMALL_ZERO | {"round_robin_gradients": True}),
        _zero("regather_ckpt", 3, zero=REGATHER, ckpt=True),
        _zero("regather", 3, ga=2, zero=REGATHER),
        _zero("persist0", 3, 4, zero=SMALL_ZERO | {"stage3_param_persistence_threshold": 0}),
        _zero("hpz2_regather", 3, 4, zero=REGATHER | {"zero_hpz_partition_size": 2}),
        _zero("leaf", 3, zero=SMALL_ZERO, leaf=True),
        _zero("zeroinit", 3, zero=SMALL_ZERO, zero_init=True),
        _zero("zeroinit_tied", 3, zero=SMALL_ZERO, zero_init=True, over=TIED),
        _zero("commfp32_oversize", 3, zero=OVERSIZE, extra={"communication_data_type": "fp32"}),
        _zero(
            "commfp32_oversize_zeroinit", 3, zero=OVERSIZE, extra={"communication_data_type": "fp32"}, zero_init=True
        ),
        _zero("mixtral", 3, model="mixtral", zero=SMALL_ZERO),
    ]


def _deepspeed_corners() -> list[Config]:
    """Where two rules of DeepSpeed meet, or one is at its limit."""
    tiny = SMALL_ZERO | {"reduce_bucket_size": 40000}  # smaller than most parameters
    apart = SMALL_ZERO | {"contiguous_gradients": False}
    owners = {"use_multi_rank_bucket_allreduce": False}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    tight = SMALL_ZERO | {
        "stage3_max_live_parameters": 300000, "stage3_max_reuse_distance": 300000, "stage3_prefetch_bucket_size": 50000,
    }  # fmt: skip
    leaf_reuse = SMALL_ZERO | {"stage3_max_reuse_distance": 10**6}
    sequential = REGATHER | {"allgather_sequential": True}
    hpz = REGATHER | {"zero_hpz_partition_size": 2}
    low_rank = ["embed", "k_proj", "v_proj", "o_proj", "mlp", "norm", "lm_head"]
    return [
        *[_zero("alone", stage, 1, zero=SMALL_ZERO) for stage in (2, 3)],
        _zero("tiny", 2, 4, zero=tiny),
        _zero("tiny_owners", 1, 3, zero=tiny | owners),
        _zero("owners_noncontiguous", 2, zero=apart | owners),
        _zero(
            "overlap_noncontiguous", 1, ga=2, zero=SMALL_ZERO | {"overlap_comm": True, "contiguous_gradients": False}
        ),
        _zero("noncontiguous_accfp32", 2, ga=2, zero=SMALL_ZERO | {"contiguous_gradients": False}, extra=fp32_sum),
        _zero("ckpt", 2, ga=2, model="mixtral", zero=SMALL_ZERO, ckpt=True),
        _zero("tiny_allreduce", 3, zero=SMALL_ZERO | {"reduce_bucket_size": 100000, "reduce_scatter": False}),
        _zero("sequential_ckpt", 3, zero=sequential, ckpt=True),
        _zero("fetch_allreduce_hpz", 3, 4, zero=hpz | {"use_all_reduce_for_fetch_params": True}),
        _zero("hpz_ckpt", 3, 4, zero=hpz, ckpt=True),
        _zero("leaf_reuse", 3, zero=leaf_reuse, leaf=True),
        _zero("leaf", 3, model="qwen2", zero=REGATHER, leaf=True),
        _zero("tight", 3, model="qwen2", zero=tight),
        _zero("regather_ckpt", 3, ga=2, model="gpt2", zero=REGATHER, ckpt=True),
        _zero("regather_ckpt", 3, ga=2, model="mixtral", zero=REGATHER, ckpt=True),
        _zero("low_rank", 3, zero=REGATHER, freeze=low_rank),
        _zero("frozen_ckpt", 3, ga=2, zero=REGATHER, freeze=["mlp", "norm"], ckpt=True),
    ]


def _offload() -> list[Config]:
    """Optimizer, a part of it, and parameters on the CPU, where it meets other rules."""
    on_cpu = {"device": "cpu", "pin_memory": False}
    on_nvme = {"device": "nvme", "pin_memory": False}
    piped = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    optimizer = SMALL_ZERO | {"offload_optimizer": on_cpu}
    both = optimizer | {"offload_param": on_cpu}
    regather = REGATHER | {"offload_optimizer": on_cpu, "offload_param": on_cpu}
    parts = {"sub_group_size": 300000}
    half = SMALL_ZERO | parts | {"offload_optimizer": on_cpu | {"ratio": 0.5}}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    return [
        *[_zero("offload_overlap", stage, ga=2, zero=optimizer | {"overlap_comm": True}) for stage in (1, 2)],
        *[_zero("offload_noclip", stage, zero=optimizer, clip=0.0) for stage in (2, 3)],
        *[_zero("offload_accfp32", stage, ga=2, zero=optimizer, extra=fp32_sum) for stage in (1, 2, 3)],
        _zero("offload_owners", 2, zero=optimizer | {"use_multi_rank_bucket_allreduce": False}),
        _zero("offload", 2, 4, zero=optimizer),
        _zero("offload", 3, 4, zero=optimizer),
        _zero("offload_subgroups", 3, zero=optimizer | parts),
        _zero("offload_half", 3, zero=half, extra=CPU_ADAM),
        _zero("offload_half", 3, ga=2, zero=half, extra=CPU_ADAM),
        _zero("offload_both", 3, ga=2, zero=both),
        _zero("offload_both_zeroinit", 3, zero=both, zero_init=True),
        _zero("offload_both_regather_ckpt", 3, ga=2, zero=regather, ckpt=True),
        _zero("offload_lora", 3, zero=both, lora=LORA),
        _zero("offload_nvme", 3, ga=2, zero=SMALL_ZERO | {"offload_optimizer": on_nvme}),
        _zero("offload_nvme_piped", 3, zero=SMALL_ZERO | parts | {"offload_optimizer": on_nvme | piped}),
        _zero("offload_nvme_both", 3, zero=SMALL_ZERO | {"offload_optimizer": on_nvme, "offload_param": ON_NVME}),
        _make("fsdp2", "cpuoffload_nosync", ga=2, fsdp={"offload": True, "sync_only_last": True}),
        _make("fsdp2", "cpuoffload_sync", ga=2, fsdp={"offload": True}),
        _make("fsdp2", "cpuoffload_alone", 1, fsdp={"offload": True}),
        _make("fsdp2", "cpuoffload_hsdp2x2", 4, fsdp={"offload": True, "mesh": [2, 2]}),
        _make("fsdp2", "cpuoffload_bf16_noclip", clip=False, fsdp={"offload": True, "reduce_dtype": "bfloat16"}),
        _make("fsdp1", "cpuoffload", fsdp={"offload": True}),
        _make("fsdp1", "cpuoffload_nosync", ga=2, fsdp={"offload": True, "no_sync": True}),
    ]


def _decay_groups() -> list[Config]:
    """Two parameter groups, as the Trainer makes them: without weight decay are norms and biases."""
    tiny = SMALL_ZERO | {"reduce_bucket_size": 40000}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    offload = SMALL_ZERO | {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = [_zero("groups", stage, model="qwen2", zero=SMALL_ZERO, decay_groups=True) for stage in (0, 1, 2, 3)]
    found += [_zero("groups_fp32", stage, zero=SMALL_ZERO, precision="fp32", decay_groups=True) for stage in (0, 1, 3)]
    return [
        *found,
        _zero("groups_overlap", 1, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}, decay_groups=True),
        _zero(
            "groups_owners",
            2,
            3,
            model="gpt2",
            zero=tiny | {"use_multi_rank_bucket_allreduce": False},
            decay_groups=True,
        ),
        _zero(
            "groups_roundrobin",
            2,
            3,
            ga=2,
            model="qwen2",
            zero=tiny | {"round_robin_gradients": True, "use_multi_rank_bucket_allreduce": False},
            decay_groups=True,
        ),
        _zero("groups_accfp32", 1, ga=2, zero=SMALL_ZERO, extra=fp32_sum, decay_groups=True),
        _zero("groups_frozen", 2, zero=SMALL_ZERO, freeze=["layers.0.", "model.norm"], decay_groups=True),
        _zero(
            "groups_accfp32",
            2,
            3,
            ga=2,
            model="qwen2",
            zero=tiny | {"use_multi_rank_bucket_allreduce": False},
            extra=fp32_sum,
            decay_groups=True,
        ),
        _zero("groups_offload", 2, ga=2, model="qwen2", zero=offload, decay_groups=True),
        _zero("groups_offload", 3, ga=2, zero=offload | {"sub_group_size": 400000}, decay_groups=True),
    ]


def _zero_plus_plus() -> list[Config]:
    """Quantized gathers and reductions; `gpus_per_node` is what DeepSpeed takes for the GPUs of a node."""
    weights = {"zero_quantized_weights": True}
    gradients = {"zero_quantized_gradients": True}
    frozen = {"zero_quantized_nontrainable_weights": True}
    hpz = {"zero_hpz_partition_size": 2}
    alone, unfetched = {"allgather_sequential": True}, {"stage3_prefetch_bucket_size": 0}
    on_cpu = {"device": "cpu", "pin_memory": False}
    offload, both = {"offload_optimizer": on_cpu}, {"offload_param": on_cpu, "offload_optimizer": on_cpu}
    everything = REGATHER | weights | gradients | hpz
    return [
        _zero("qwz", 3, zero=SMALL_ZERO | weights),
        _zero("qwz", 3, 4, ga=2, zero=REGATHER | weights),
        _zero("qwz", 3, model="gpt2", zero=REGATHER | weights),
        _zero("qwz_sequential", 3, zero=REGATHER | weights | alone, ckpt=True),
        _zero("qwz_fp32", 3, zero=REGATHER | weights, precision="fp32"),
        _zero("qwz_zeroinit", 3, zero=SMALL_ZERO | weights, zero_init=True),
        _zero("qwz_offload", 3, ga=2, zero=REGATHER | weights | offload),
        _zero("qwz_offload_both", 3, zero=REGATHER | weights | both),
        _zero("qwz_hpz", 3, 4, ga=2, zero=REGATHER | weights | hpz),
        _zero("qgz", 3, 4, zero=SMALL_ZERO | gradients, gpus_per_node=2),
        _zero("qgz", 3, 4, ga=2, model="gpt2", zero=SMALL_ZERO | gradients, gpus_per_node=1),
        _zero("qgz_one_node", 3, 4, zero=SMALL_ZERO | gradients, gpus_per_node=4),
        _zero("qgz_odd", 3, 4, zero=SMALL_ZERO | gradients, over=INDIVISIBLE, gpus_per_node=2),
        _zero("qgz_oversize", 3, 4, ga=2, zero=OVERSIZE | gradients, gpus_per_node=2),
        _zero("qgz_mixtral", 3, 4, model="mixtral", zero=SMALL_ZERO | gradients, gpus_per_node=2),
        _zero("zeropp", 3, 4, zero=everything, gpus_per_node=2),
        _zero("zeropp", 3, 4, ga=2, model="qwen2", zero=everything, ckpt=True, gpus_per_node=2),
        _zero("zeropp_offload", 3, 4, ga=2, zero=everything | offload, gpus_per_node=2),
        _zero("qnz_lora_zeroinit", 3, zero=REGATHER | frozen, lora=LORA, zero_init=True),
        # Stored in int8: gathered together, they would reach the model in that type, and it fails.
        _zero("qnz_lora_sequential", 3, zero=REGATHER | frozen | alone, lora=LORA),
        _zero("qnz_frozen", 3, 4, ga=2, zero=SMALL_ZERO | frozen | hpz | alone, freeze=["mlp", "embed"]),
        _zero("qnz_noprefetch", 3, zero=SMALL_ZERO | frozen | unfetched, freeze=["mlp", "norm"]),
        _zero("qnz_qwz_frozen", 3, zero=REGATHER | frozen | weights | alone, freeze=["mlp", "norm"], ckpt=True),
    ]


def _leaves() -> list[Config]:
    """Modules gathered whole: by class, name, end of a name, and by how few parameters a module has for its parts."""

    def leaf(**chosen: list[str]) -> Config:
        return {"leaf_module": chosen}

    def coarse(threshold: int) -> Config:
        return {"stage3_module_granularity_threshold": threshold}

    names = ["model.layers.1", "model.layers.2.mlp", "lm_head"]
    wide = {"vocab_size": 2000}  # so that the model as a whole is less coarse than its blocks
    return [
        _zero("leaf_class", 3, zero=SMALL_ZERO | leaf(classes=["LlamaMLP"])),
        _zero("leaf_name", 3, ga=2, zero=REGATHER | leaf(names=names)),
        _zero("leaf_suffix", 3, zero=REGATHER | leaf(name_suffixes=["mlp", "layers.3"]), ckpt=True),
        _zero("leaf_class", 3, model="mixtral", zero=SMALL_ZERO | leaf(classes=["MixtralDecoderLayer"])),
        _zero("leaf_none", 3, model="mixtral", zero=REGATHER | leaf(classes=[])),
        _zero("leaf_lora", 3, zero=REGATHER | leaf(classes=["LlamaMLP"]), lora=LORA),
        _zero("coarse_attention", 3, model="gpt2", zero=SMALL_ZERO | coarse(87730), over=wide),
        _zero("coarse_block", 3, ga=2, zero=REGATHER | coarse(61000)),
        _zero("coarse_block", 3, 4, model="gpt2", zero=REGATHER | coarse(87760), over=wide, ckpt=True),
        _zero("coarse_tiny", 3, zero=SMALL_ZERO | coarse(10)),
        _zero("coarse_mixtral", 3, model="mixtral", zero=SMALL_ZERO | coarse(1000)),
        _zero("held_experts", 3, model="mixtral", zero=REGATHER | {"reduce_scatter": False}),
    ]


def _muon() -> list[Config]:
    """Muon: on whole matrices, and what ZeRO makes of it. Iterations are slow here: a tiny model."""
    tiny = {
        "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    zero = SMALL_ZERO | {"reduce_bucket_size": 20000}
    whole = zero | {"reduce_scatter": False}

    def optimizer(**params: Any) -> Config:
        return {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False} | params}}

    gram, standard = {"extra": optimizer(), "over": tiny}, {"extra": optimizer(ns_method="standard"), "over": tiny}
    return [
        _make("ddp", "muon", over=tiny, optimizer="muon"),
        _zero("muon", 1, zero=zero, **gram),
        _zero("muon", 2, zero=zero, **gram),
        _zero("muon", 2, 4, ga=2, zero=zero, **gram),
        _zero("muon_overlap", 1, ga=2, zero=zero | {"overlap_comm": True}, **gram),
        _zero("muon_fp32", 2, zero=zero, precision="fp32", **standard),
        _zero("muon_groups", 2, 3, zero=zero, decay_groups=True, **gram),
        _zero("muon_owners", 2, 3, zero=zero | {"use_multi_rank_bucket_allreduce": False}, **gram),
        _zero("muon", 3, zero=whole, **gram),
        _zero("muon", 3, 4, ga=2, zero=whole, **gram),
        _zero("muon_fp32", 3, 3, zero=whole, precision="fp32", **standard),
        _zero("muon_groups", 3, zero=whole | {"sub_group_size": 30000}, decay_groups=True, **gram),
        _zero("muon_zeroinit", 3, zero=whole, zero_init=True, **gram),
    ]


def _precision() -> list[Config]:
    """Master weights, gradients and optimizer states all in bf16; torch.autocast over a model in bf16."""
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    found = [_zero("bf16master", stage, ga=2, zero=SMALL_ZERO, extra={"bf16": low}) for stage in (1, 2, 3)]
    found += [
        _zero("bf16master_accfp32", stage, ga=2, zero=SMALL_ZERO, extra={"bf16": low} | fp32_sum) for stage in (1, 2, 3)
    ]
    found += _low_precision_offload()
    found += [_zero("autocast_bf16", stage, zero=SMALL_ZERO, extra=autocast) for stage in (0, 1, 2, 3)]
    return [*found, _zero("autocast_bf16master", 3, zero=SMALL_ZERO, extra=autocast | {"bf16": low})]


def _low_precision_offload() -> list[Config]:
    """Master weights and gradients in bf16 on the CPU, Adam's states there in float32 or in bf16 too."""
    on_cpu = {"device": "cpu", "pin_memory": False}
    optimizer = SMALL_ZERO | {"offload_optimizer": on_cpu}
    both = REGATHER | {"offload_optimizer": on_cpu, "offload_param": on_cpu}
    on_nvme = SMALL_ZERO | {"offload_optimizer": on_cpu, "offload_param": ON_NVME}
    half = SMALL_ZERO | {"sub_group_size": 300000, "offload_optimizer": on_cpu | {"ratio": 0.5}}
    master = {"enabled": True, "bf16_master_weights_and_grads": True}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}

    def run(
        tag: str, stage: int, zero: Config, states: str = "float32", extra: Config | None = None, **more: Any
    ) -> Config:
        section = master | ({"bf16_optimizer_states": True} if states == "bfloat16" else {})
        return _zero(
            f"offload_bf16master{tag}", stage, zero=zero, extra=CPU_ADAM | {"bf16": section} | (extra or {}), **more
        )

    return [
        *[run("", stage, optimizer, ga=2) for stage in (1, 2, 3)],
        *[run("_states", stage, optimizer, "bfloat16") for stage in (1, 2, 3)],
        *[run("_accfp32", stage, optimizer, extra=fp32_sum, ga=2) for stage in (1, 2, 3)],
        run("_overlap", 2, optimizer | {"overlap_comm": True}, ga=2),
        run("_groups", 2, optimizer, world=4, decay_groups=True),
        run("_both_regather_ckpt", 3, both, ga=2, ckpt=True),
        run("_parameters_nvme", 3, on_nvme),
        run("_half", 3, half),
    ]


def _mics() -> list[Config]:
    """Shards within groups of ranks; of DeepSpeed 0.18.9, see mics.py."""
    two, four = {"mics_shard_size": 2}, {"mics_shard_size": 4}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    return [
        _zero("mics2", 3, 4, zero=SMALL_ZERO | two),
        _zero("mics2", 3, 4, ga=2, zero=REGATHER | two),
        _zero("mics2", 3, 4, model="gpt2", zero=REGATHER | two, ckpt=True),
        _zero("mics2_accfp32", 3, 4, ga=2, zero=SMALL_ZERO | two, extra=fp32_sum),
        _zero("mics2_fp32", 3, 4, zero=SMALL_ZERO | two, precision="fp32"),
        _zero("mics2_sequential", 3, 4, zero=REGATHER | two | {"stage3_allgather_sequential": True}),
        _zero("mics2_allreduce", 3, 4, zero=SMALL_ZERO | two | {"reduce_scatter": False}),
        _zero("mics4", 3, 4, zero=SMALL_ZERO | four),
    ]


def _ulysses() -> list[Config]:
    """Ranks that share sequences: `sequence_parallel` of them, where other rules meet it."""
    two, four = {"sequence_parallel": 2}, {"sequence_parallel": 4}
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    few_heads = {"num_key_value_heads": 2}
    return [
        *[_zero("ulysses2", stage, zero=SMALL_ZERO, **two) for stage in (1, 2, 3)],
        _zero("ulysses2_fp32", 3, zero=SMALL_ZERO, precision="fp32", **two),
        *[_zero("ulysses2", stage, 4, ga=2, zero=SMALL_ZERO, **two) for stage in (2, 3)],
        *[_zero("ulysses4", stage, 4, zero=SMALL_ZERO, **four) for stage in (2, 3)],
        *[_zero("ulysses4_few_heads", stage, 4, zero=SMALL_ZERO, over=few_heads, **four) for stage in (2, 3)],
        _zero("ulysses2_one_head", 3, zero=REGATHER, over={"num_key_value_heads": 1}, **two),
        _zero("ulysses2_overlap", 2, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}, **two),
        _zero("ulysses2_rsfalse", 2, zero=SMALL_ZERO | {"reduce_scatter": False}, **two),
        _zero("ulysses2_noncontiguous", 2, zero=SMALL_ZERO | {"contiguous_gradients": False}, **two),
        _zero("ulysses2_bf16", 3, zero=SMALL_ZERO, extra={"seq_parallel_communication_data_type": "bf16"}, **two),
        _zero("ulysses2_bf16", 2, zero=SMALL_ZERO, extra={"seq_parallel_communication_data_type": "bf16"}, **two),
        _zero("ulysses2_regather_ckpt", 3, ga=2, zero=REGATHER, ckpt=True, **two),
        _zero("ulysses2_ckpt", 2, ga=3, zero=SMALL_ZERO, ckpt=True, **two),
        _zero("ulysses2_zeroinit", 3, model="qwen3", zero=SMALL_ZERO, zero_init=True, **two),
        _zero("ulysses2_groups", 3, model="qwen2", zero=SMALL_ZERO, decay_groups=True, **two),
        _zero("ulysses2_offload", 3, 4, ga=2, zero=REGATHER | offload, **two),
        _zero("ulysses2_offload", 2, ga=2, zero=SMALL_ZERO | offload, **two),
        _zero("ulysses2_frozen", 3, zero=REGATHER, freeze=["mlp", "norm", "embed"], ckpt=True, **two),
        _zero("ulysses2_hpz", 3, 4, zero=REGATHER | {"zero_hpz_partition_size": 2}, **two),
        _zero("ulysses2_qgz", 3, 4, zero=SMALL_ZERO | {"zero_quantized_gradients": True}, gpus_per_node=2, **two),
        # DeepSpeed takes the size of a head from a configuration that has the field, be it empty
        _zero("ulysses2", 3, model="mixtral", zero=SMALL_ZERO, over={"head_dim": 32}, **two),
    ]


def _experts() -> list[Config]:
    """AutoEP: ranks that share a model's experts, `size` of them; see experts.py."""

    def shared(tag: str, stage: int, world: int, size: int, *, zero: Config | None = None, **settings: Any) -> Config:
        extra = {"expert_parallel": {"enabled": True, "autoep_size": size}} | settings.pop("extra", {})
        settings = {"model": "mixtral", "zero": SMALL_ZERO | (zero or {}), "extra": extra} | settings
        return _zero(f"experts{size}{tag}", stage, world, **settings)

    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    apart = {"use_data_before_expert_parallelism": True}
    found = [shared("", stage, 4, 2) for stage in (1, 2, 3)]
    found += [shared("_offload", stage, 4, 2, ga=2, zero=offload) for stage in (1, 2, 3)]
    found += [shared("", stage, 2, size) for stage in (2, 3) for size in (1, 2)]
    found += [shared("_fp32", stage, 4, 2, precision="fp32") for stage in (2, 3)]
    found += [shared("_ckpt", stage, 4, 4, ga=2, ckpt=True, zero=REGATHER) for stage in (2, 3)]
    found += [shared("_apart", stage, 4, 2, extra=apart) for stage in (2, 3)]
    found += [shared("", stage, 4, 2, model=model) for stage in (2, 3) for model in ("qwen2_moe", "qwen3_moe")]
    found += [shared("_overlap", stage, 4, 2, ga=2, zero={"overlap_comm": True}) for stage in (1, 2)]
    found += [shared("_frozen", stage, 4, 2, freeze=["layers.0.mlp.experts", "embed"]) for stage in (2, 3)]
    return [
        *found,
        shared("_owners", 2, 4, 2, zero={"use_multi_rank_bucket_allreduce": False}),
        shared("_roundrobin", 2, 4, 2, zero={"round_robin_gradients": True}),
        shared("_oversize", 2, 4, 2, ga=2, zero=OVERSIZE),
        shared("_commfp32", 2, 4, 2, extra={"communication_data_type": "fp32"}),
        shared("_accfp32", 2, 4, 2, ga=2, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
        shared("_regather", 3, 4, 2, ga=2, zero=REGATHER),
        shared("_zeroinit", 3, 4, 2, zero_init=True),
        shared("_zeroinit", 3, 2, 2, model="qwen2_moe", zero=REGATHER, zero_init=True),
        shared("_groups", 3, 4, 2, decay_groups=True),
        shared("_groups_zeroinit", 3, 4, 2, zero=REGATHER, decay_groups=True, zero_init=True, ckpt=True),
        shared("_sequential", 3, 4, 2, zero=REGATHER | {"stage3_allgather_sequential": True}),
        shared("_inorder", 3, 4, 2, zero={"overlap_comm": False, "sub_group_size": 100000}),
        shared("_rsfalse", 3, 4, 2, zero=REGATHER | {"reduce_scatter": False}),
        shared("", 2, 2, 2, model="qwen2_moe"),
        shared("_noncontiguous", 3, 4, 2, zero=OVERSIZE | {"contiguous_gradients": False}),
        shared("_accfp32", 3, 4, 2, ga=2, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    ]


def _vision() -> list[Config]:
    """Vision-language models: a frozen tower, its projector trained or not, or the projector alone."""
    tower = {"qwen2_5_vl": ["visual."], "llava": ["vision_tower."]}
    eyes = {"qwen2_5_vl": ["patch_embed", "visual.blocks"], "llava": ["vision_tower."]}
    rest = {"qwen2_5_vl": ["patch_embed", "visual.blocks", "language_model", "lm_head"],
            "llava": ["vision_tower.", "language_model", "lm_head"]}  # fmt: skip
    deep = ["patch_embed", "pos_embed", "visual.blocks", "deepstack"]
    found = []
    for model in ("qwen2_5_vl", "llava"):
        frozen, aligning, eyed = tower[model], rest[model], eyes[model]
        found += [
            _make("ddp", "vlm_frozen", model=model, ddp={"bucket_cap_mb": 1}, freeze=frozen),
            _make("ddp", "vlm_align", model=model, ddp={"bucket_cap_mb": 1}, freeze=aligning),
            _make("fsdp2", "vlm_frozen", model=model, freeze=frozen),
            _make("fsdp2", "vlm_align", model=model, freeze=aligning),
            _make("fsdp2", "vlm_accelerate", model=model, freeze=frozen, fsdp={"accelerate": True}),
            _make("fsdp2", "vlm_frozen_ckpt", model=model, freeze=eyed, ckpt=True),
            _make("fsdp1", "vlm_frozen", model=model, freeze=frozen),
            _make("fsdp1", "vlm_frozen_ckpt", model=model, freeze=eyed, ckpt=True),
            _make("fsdp1", "vlm_align", model=model, freeze=aligning),
        ]
        for stage in (1, 2, 3):
            found += [
                _zero("vlm_frozen", stage, model=model, zero=SMALL_ZERO, freeze=frozen),
                _zero("vlm_align", stage, model=model, zero=SMALL_ZERO, freeze=aligning),
            ]
        found += [
            _zero("vlm_regather", 3, ga=2, model=model, zero=REGATHER, freeze=frozen),
            _zero("vlm_frozen_ckpt", 2, ga=2, model=model, zero=SMALL_ZERO, freeze=eyed, ckpt=True),
            _zero("vlm_frozen_ckpt", 3, ga=2, model=model, zero=REGATHER, freeze=eyed, ckpt=True),
            _zero("vlm_init", 3, model=model, zero=SMALL_ZERO, freeze=frozen, zero_init=True),
        ]
    return [
        *found,
        _make("ddp", "vlm", model="qwen2_5_vl", ddp={"bucket_cap_mb": 1}),
        _make("fsdp2", "vlm", model="qwen2_5_vl"),
        _make("fsdp1", "vlm", model="qwen2_5_vl"),
        _make("fsdp2", "vlm", model="llava"),
        _zero("vlm", 2, model="qwen2_5_vl", zero=SMALL_ZERO),
        _zero("vlm", 3, model="qwen2_5_vl", zero=SMALL_ZERO),
        _zero("vlm", 3, model="llava", zero=SMALL_ZERO),
        _make("ddp", "vlm_deep", model="qwen3_vl", ddp={"bucket_cap_mb": 1}, freeze=deep),
        _make("fsdp2", "vlm_deep", model="qwen3_vl", freeze=deep),
        _make("fsdp2", "vlm_deep_ckpt", model="qwen3_vl", freeze=deep, ckpt=True),
        _make("fsdp1", "vlm_deep", model="qwen3_vl", freeze=deep),
        _zero("vlm_deep", 2, model="qwen3_vl", zero=SMALL_ZERO, freeze=deep),
        _zero("vlm_deep", 3, ga=2, model="qwen3_vl", zero=REGATHER, freeze=deep),
        _zero("vlm_deep_all", 3, model="qwen3_vl", zero=SMALL_ZERO),
    ]
