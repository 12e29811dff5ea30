"""Configurations of DeepSpeed that are recorded, by what they are about."""

from __future__ import annotations

from typing import Any

from validation.oracles.configuration_parts import (
    CPU_ADAM,
    INDIVISIBLE,
    LORA,
    ON_NVME,
    OVERSIZE,
    REGATHER,
    SMALL_ZERO,
    TIED,
    Config,
    config_of,
    zero_of,
)


def deepspeed_configurations() -> list[Config]:
    return [
        *_deepspeed(), *_deepspeed_corners(), *_offload(), *_decay_groups(), *_zero_plus_plus(), *_leaves(), *_mics(),
        *_ulysses(), *_muon(), *_precision(), *_experts(),
    ]  # fmt: skip


def _deepspeed() -> list[Config]:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = [zero_of("small", stage, zero=SMALL_ZERO) for stage in (0, 1, 2, 3)]
    found += [zero_of("small", stage, model="gpt2", zero=SMALL_ZERO) for stage in (2, 3)]
    found += [zero_of("small_overlap", stage, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}) for stage in (1, 2, 3)]
    found += [zero_of("fp32", stage, zero=SMALL_ZERO, precision="fp32") for stage in (0, 2, 3)]
    found += [zero_of("offload", stage, ga=2, zero=SMALL_ZERO | offload) for stage in (2, 3)]
    found += [zero_of("tied", stage, zero=SMALL_ZERO, over=TIED) for stage in (2, 3)]
    found += [zero_of("frozen", stage, zero=SMALL_ZERO, freeze=["layers.0.", "layers.1."]) for stage in (2, 3)]
    found += [zero_of("lora", stage, zero=SMALL_ZERO, lora=LORA) for stage in (2, 3)]
    found += [zero_of("lora_persist0", 3, zero=REGATHER | {"stage3_param_persistence_threshold": 0}, lora=LORA)]
    found += [zero_of("lora_ckpt", 3, ga=2, model="qwen2", zero=REGATHER, lora=LORA, ckpt=True)]
    return [
        *found,
        zero_of("multirank_rs", 2, 4, zero=SMALL_ZERO | {"use_multi_rank_bucket_allreduce": False}),
        zero_of("roundrobin", 2, 4, zero=SMALL_ZERO | {"round_robin_gradients": True}),
        zero_of("regather_ckpt", 3, zero=REGATHER, ckpt=True),
        zero_of("regather", 3, ga=2, zero=REGATHER),
        zero_of("persist0", 3, 4, zero=SMALL_ZERO | {"stage3_param_persistence_threshold": 0}),
        zero_of("hpz2_regather", 3, 4, zero=REGATHER | {"zero_hpz_partition_size": 2}),
        zero_of("leaf", 3, zero=SMALL_ZERO, leaf=True),
        zero_of("zeroinit", 3, zero=SMALL_ZERO, zero_init=True),
        zero_of("zeroinit_tied", 3, zero=SMALL_ZERO, zero_init=True, over=TIED),
        zero_of("commfp32_oversize", 3, zero=OVERSIZE, extra={"communication_data_type": "fp32"}),
        zero_of(
            "commfp32_oversize_zeroinit", 3, zero=OVERSIZE, extra={"communication_data_type": "fp32"}, zero_init=True
        ),
        zero_of("mixtral", 3, model="mixtral", zero=SMALL_ZERO),
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
        *[zero_of("alone", stage, 1, zero=SMALL_ZERO) for stage in (2, 3)],
        zero_of("tiny", 2, 4, zero=tiny),
        zero_of("tiny_owners", 1, 3, zero=tiny | owners),
        zero_of("owners_noncontiguous", 2, zero=apart | owners),
        zero_of(
            "overlap_noncontiguous", 1, ga=2, zero=SMALL_ZERO | {"overlap_comm": True, "contiguous_gradients": False}
        ),
        zero_of("noncontiguous_accfp32", 2, ga=2, zero=SMALL_ZERO | {"contiguous_gradients": False}, extra=fp32_sum),
        zero_of("ckpt", 2, ga=2, model="mixtral", zero=SMALL_ZERO, ckpt=True),
        zero_of("tiny_allreduce", 3, zero=SMALL_ZERO | {"reduce_bucket_size": 100000, "reduce_scatter": False}),
        zero_of("sequential_ckpt", 3, zero=sequential, ckpt=True),
        zero_of("fetch_allreduce_hpz", 3, 4, zero=hpz | {"use_all_reduce_for_fetch_params": True}),
        zero_of("hpz_ckpt", 3, 4, zero=hpz, ckpt=True),
        zero_of("leaf_reuse", 3, zero=leaf_reuse, leaf=True),
        zero_of("leaf", 3, model="qwen2", zero=REGATHER, leaf=True),
        zero_of("tight", 3, model="qwen2", zero=tight),
        zero_of("regather_ckpt", 3, ga=2, model="gpt2", zero=REGATHER, ckpt=True),
        zero_of("regather_ckpt", 3, ga=2, model="mixtral", zero=REGATHER, ckpt=True),
        zero_of("low_rank", 3, zero=REGATHER, freeze=low_rank),
        zero_of("frozen_ckpt", 3, ga=2, zero=REGATHER, freeze=["mlp", "norm"], ckpt=True),
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
        *[zero_of("offload_overlap", stage, ga=2, zero=optimizer | {"overlap_comm": True}) for stage in (1, 2)],
        *[zero_of("offload_noclip", stage, zero=optimizer, clip=0.0) for stage in (2, 3)],
        *[zero_of("offload_accfp32", stage, ga=2, zero=optimizer, extra=fp32_sum) for stage in (1, 2, 3)],
        zero_of("offload_owners", 2, zero=optimizer | {"use_multi_rank_bucket_allreduce": False}),
        zero_of("offload", 2, 4, zero=optimizer),
        zero_of("offload", 3, 4, zero=optimizer),
        zero_of("offload_subgroups", 3, zero=optimizer | parts),
        zero_of("offload_half", 3, zero=half, extra=CPU_ADAM),
        zero_of("offload_half", 3, ga=2, zero=half, extra=CPU_ADAM),
        zero_of("offload_both", 3, ga=2, zero=both),
        zero_of("offload_both_zeroinit", 3, zero=both, zero_init=True),
        zero_of("offload_both_regather_ckpt", 3, ga=2, zero=regather, ckpt=True),
        zero_of("offload_lora", 3, zero=both, lora=LORA),
        zero_of("offload_nvme", 3, ga=2, zero=SMALL_ZERO | {"offload_optimizer": on_nvme}),
        zero_of("offload_nvme_piped", 3, zero=SMALL_ZERO | parts | {"offload_optimizer": on_nvme | piped}),
        zero_of("offload_nvme_both", 3, zero=SMALL_ZERO | {"offload_optimizer": on_nvme, "offload_param": ON_NVME}),
        config_of("fsdp2", "cpuoffload_nosync", ga=2, fsdp={"offload": True, "sync_only_last": True}),
        config_of("fsdp2", "cpuoffload_sync", ga=2, fsdp={"offload": True}),
        config_of("fsdp2", "cpuoffload_alone", 1, fsdp={"offload": True}),
        config_of("fsdp2", "cpuoffload_hsdp2x2", 4, fsdp={"offload": True, "mesh": [2, 2]}),
        config_of("fsdp2", "cpuoffload_bf16_noclip", clip=False, fsdp={"offload": True, "reduce_dtype": "bfloat16"}),
        config_of("fsdp1", "cpuoffload", fsdp={"offload": True}),
        config_of("fsdp1", "cpuoffload_nosync", ga=2, fsdp={"offload": True, "no_sync": True}),
    ]


def _decay_groups() -> list[Config]:
    """Two parameter groups, as the Trainer makes them: without weight decay are norms and biases."""
    tiny = SMALL_ZERO | {"reduce_bucket_size": 40000}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    offload = SMALL_ZERO | {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = [zero_of("groups", stage, model="qwen2", zero=SMALL_ZERO, decay_groups=True) for stage in (0, 1, 2, 3)]
    found += [
        zero_of("groups_fp32", stage, zero=SMALL_ZERO, precision="fp32", decay_groups=True) for stage in (0, 1, 3)
    ]
    return [
        *found,
        zero_of("groups_overlap", 1, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}, decay_groups=True),
        zero_of(
            "groups_owners",
            2,
            3,
            model="gpt2",
            zero=tiny | {"use_multi_rank_bucket_allreduce": False},
            decay_groups=True,
        ),
        zero_of(
            "groups_roundrobin",
            2,
            3,
            ga=2,
            model="qwen2",
            zero=tiny | {"round_robin_gradients": True, "use_multi_rank_bucket_allreduce": False},
            decay_groups=True,
        ),
        zero_of("groups_accfp32", 1, ga=2, zero=SMALL_ZERO, extra=fp32_sum, decay_groups=True),
        zero_of("groups_frozen", 2, zero=SMALL_ZERO, freeze=["layers.0.", "model.norm"], decay_groups=True),
        zero_of(
            "groups_accfp32",
            2,
            3,
            ga=2,
            model="qwen2",
            zero=tiny | {"use_multi_rank_bucket_allreduce": False},
            extra=fp32_sum,
            decay_groups=True,
        ),
        zero_of("groups_offload", 2, ga=2, model="qwen2", zero=offload, decay_groups=True),
        zero_of("groups_offload", 3, ga=2, zero=offload | {"sub_group_size": 400000}, decay_groups=True),
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
        zero_of("qwz", 3, zero=SMALL_ZERO | weights),
        zero_of("qwz", 3, 4, ga=2, zero=REGATHER | weights),
        zero_of("qwz", 3, model="gpt2", zero=REGATHER | weights),
        zero_of("qwz_sequential", 3, zero=REGATHER | weights | alone, ckpt=True),
        zero_of("qwz_fp32", 3, zero=REGATHER | weights, precision="fp32"),
        zero_of("qwz_zeroinit", 3, zero=SMALL_ZERO | weights, zero_init=True),
        zero_of("qwz_offload", 3, ga=2, zero=REGATHER | weights | offload),
        zero_of("qwz_offload_both", 3, zero=REGATHER | weights | both),
        zero_of("qwz_hpz", 3, 4, ga=2, zero=REGATHER | weights | hpz),
        zero_of("qgz", 3, 4, zero=SMALL_ZERO | gradients, gpus_per_node=2),
        zero_of("qgz", 3, 4, ga=2, model="gpt2", zero=SMALL_ZERO | gradients, gpus_per_node=1),
        zero_of("qgz_one_node", 3, 4, zero=SMALL_ZERO | gradients, gpus_per_node=4),
        zero_of("qgz_odd", 3, 4, zero=SMALL_ZERO | gradients, over=INDIVISIBLE, gpus_per_node=2),
        zero_of("qgz_oversize", 3, 4, ga=2, zero=OVERSIZE | gradients, gpus_per_node=2),
        zero_of("qgz_mixtral", 3, 4, model="mixtral", zero=SMALL_ZERO | gradients, gpus_per_node=2),
        zero_of("zeropp", 3, 4, zero=everything, gpus_per_node=2),
        zero_of("zeropp", 3, 4, ga=2, model="qwen2", zero=everything, ckpt=True, gpus_per_node=2),
        zero_of("zeropp_offload", 3, 4, ga=2, zero=everything | offload, gpus_per_node=2),
        zero_of("qnz_lora_zeroinit", 3, zero=REGATHER | frozen, lora=LORA, zero_init=True),
        # Stored in int8: gathered together, they would reach the model in that type, and it fails.
        zero_of("qnz_lora_sequential", 3, zero=REGATHER | frozen | alone, lora=LORA),
        zero_of("qnz_frozen", 3, 4, ga=2, zero=SMALL_ZERO | frozen | hpz | alone, freeze=["mlp", "embed"]),
        zero_of("qnz_noprefetch", 3, zero=SMALL_ZERO | frozen | unfetched, freeze=["mlp", "norm"]),
        zero_of("qnz_qwz_frozen", 3, zero=REGATHER | frozen | weights | alone, freeze=["mlp", "norm"], ckpt=True),
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
        zero_of("leaf_class", 3, zero=SMALL_ZERO | leaf(classes=["LlamaMLP"])),
        zero_of("leaf_name", 3, ga=2, zero=REGATHER | leaf(names=names)),
        zero_of("leaf_suffix", 3, zero=REGATHER | leaf(name_suffixes=["mlp", "layers.3"]), ckpt=True),
        zero_of("leaf_class", 3, model="mixtral", zero=SMALL_ZERO | leaf(classes=["MixtralDecoderLayer"])),
        zero_of("leaf_none", 3, model="mixtral", zero=REGATHER | leaf(classes=[])),
        zero_of("leaf_lora", 3, zero=REGATHER | leaf(classes=["LlamaMLP"]), lora=LORA),
        zero_of("coarse_attention", 3, model="gpt2", zero=SMALL_ZERO | coarse(87730), over=wide),
        zero_of("coarse_block", 3, ga=2, zero=REGATHER | coarse(61000)),
        zero_of("coarse_block", 3, 4, model="gpt2", zero=REGATHER | coarse(87760), over=wide, ckpt=True),
        zero_of("coarse_tiny", 3, zero=SMALL_ZERO | coarse(10)),
        zero_of("coarse_mixtral", 3, model="mixtral", zero=SMALL_ZERO | coarse(1000)),
        zero_of("held_experts", 3, model="mixtral", zero=REGATHER | {"reduce_scatter": False}),
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
        config_of("ddp", "muon", over=tiny, optimizer="muon"),
        zero_of("muon", 1, zero=zero, **gram),
        zero_of("muon", 2, zero=zero, **gram),
        zero_of("muon", 2, 4, ga=2, zero=zero, **gram),
        zero_of("muon_overlap", 1, ga=2, zero=zero | {"overlap_comm": True}, **gram),
        zero_of("muon_fp32", 2, zero=zero, precision="fp32", **standard),
        zero_of("muon_groups", 2, 3, zero=zero, decay_groups=True, **gram),
        zero_of("muon_owners", 2, 3, zero=zero | {"use_multi_rank_bucket_allreduce": False}, **gram),
        zero_of("muon", 3, zero=whole, **gram),
        zero_of("muon", 3, 4, ga=2, zero=whole, **gram),
        zero_of("muon_fp32", 3, 3, zero=whole, precision="fp32", **standard),
        zero_of("muon_groups", 3, zero=whole | {"sub_group_size": 30000}, decay_groups=True, **gram),
        zero_of("muon_zeroinit", 3, zero=whole, zero_init=True, **gram),
    ]


def _precision() -> list[Config]:
    """Master weights, gradients and optimizer states all in bf16; torch.autocast over a model in bf16; such a model
    where neither bf16 nor fp16 is on."""
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    fp32_sum = {"data_types": {"grad_accum_dtype": "fp32"}}
    found = [zero_of("bf16master", stage, ga=2, zero=SMALL_ZERO, extra={"bf16": low}) for stage in (1, 2, 3)]
    found += [
        zero_of("bf16master_accfp32", stage, ga=2, zero=SMALL_ZERO, extra={"bf16": low} | fp32_sum)
        for stage in (1, 2, 3)
    ]
    found += _low_precision_offload()
    found += [zero_of("autocast_bf16", stage, zero=SMALL_ZERO, extra=autocast) for stage in (0, 1, 2, 3)]
    plain = {"zero": SMALL_ZERO, "precision": "fp32", "dtype": "bfloat16"}
    found += [zero_of("unmixed", stage, ga=ga, **plain) for stage in (1, 2, 3) for ga in (1, 2)]
    return [*found, zero_of("autocast_bf16master", 3, zero=SMALL_ZERO, extra=autocast | {"bf16": low})]


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
        return zero_of(
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
        zero_of("mics2", 3, 4, zero=SMALL_ZERO | two),
        zero_of("mics2", 3, 4, ga=2, zero=REGATHER | two),
        zero_of("mics2", 3, 4, model="gpt2", zero=REGATHER | two, ckpt=True),
        zero_of("mics2_accfp32", 3, 4, ga=2, zero=SMALL_ZERO | two, extra=fp32_sum),
        zero_of("mics2_fp32", 3, 4, zero=SMALL_ZERO | two, precision="fp32"),
        zero_of("mics2_sequential", 3, 4, zero=REGATHER | two | {"stage3_allgather_sequential": True}),
        zero_of("mics2_allreduce", 3, 4, zero=SMALL_ZERO | two | {"reduce_scatter": False}),
        zero_of("mics4", 3, 4, zero=SMALL_ZERO | four),
    ]


def _ulysses() -> list[Config]:
    """Ranks that share sequences: `sequence_parallel` of them, where other rules meet it."""
    two, four = {"sequence_parallel": 2}, {"sequence_parallel": 4}
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    few_heads = {"num_key_value_heads": 2}
    return [
        *[zero_of("ulysses2", stage, zero=SMALL_ZERO, **two) for stage in (1, 2, 3)],
        zero_of("ulysses2_fp32", 3, zero=SMALL_ZERO, precision="fp32", **two),
        *[zero_of("ulysses2", stage, 4, ga=2, zero=SMALL_ZERO, **two) for stage in (2, 3)],
        *[zero_of("ulysses4", stage, 4, zero=SMALL_ZERO, **four) for stage in (2, 3)],
        *[zero_of("ulysses4_few_heads", stage, 4, zero=SMALL_ZERO, over=few_heads, **four) for stage in (2, 3)],
        zero_of("ulysses2_one_head", 3, zero=REGATHER, over={"num_key_value_heads": 1}, **two),
        zero_of("ulysses2_overlap", 2, ga=2, zero=SMALL_ZERO | {"overlap_comm": True}, **two),
        zero_of("ulysses2_rsfalse", 2, zero=SMALL_ZERO | {"reduce_scatter": False}, **two),
        zero_of("ulysses2_noncontiguous", 2, zero=SMALL_ZERO | {"contiguous_gradients": False}, **two),
        zero_of("ulysses2_bf16", 3, zero=SMALL_ZERO, extra={"seq_parallel_communication_data_type": "bf16"}, **two),
        zero_of("ulysses2_bf16", 2, zero=SMALL_ZERO, extra={"seq_parallel_communication_data_type": "bf16"}, **two),
        zero_of("ulysses2_regather_ckpt", 3, ga=2, zero=REGATHER, ckpt=True, **two),
        zero_of("ulysses2_ckpt", 2, ga=3, zero=SMALL_ZERO, ckpt=True, **two),
        zero_of("ulysses2_zeroinit", 3, model="qwen3", zero=SMALL_ZERO, zero_init=True, **two),
        zero_of("ulysses2_groups", 3, model="qwen2", zero=SMALL_ZERO, decay_groups=True, **two),
        zero_of("ulysses2_offload", 3, 4, ga=2, zero=REGATHER | offload, **two),
        zero_of("ulysses2_offload", 2, ga=2, zero=SMALL_ZERO | offload, **two),
        zero_of("ulysses2_frozen", 3, zero=REGATHER, freeze=["mlp", "norm", "embed"], ckpt=True, **two),
        zero_of("ulysses2_hpz", 3, 4, zero=REGATHER | {"zero_hpz_partition_size": 2}, **two),
        zero_of("ulysses2_qgz", 3, 4, zero=SMALL_ZERO | {"zero_quantized_gradients": True}, gpus_per_node=2, **two),
        # DeepSpeed takes the size of a head from a configuration that has the field, be it empty
        zero_of("ulysses2", 3, model="mixtral", zero=SMALL_ZERO, over={"head_dim": 32}, **two),
    ]


def _experts() -> list[Config]:
    """AutoEP: ranks that share a model's experts, `size` of them; see experts.py."""

    def shared(tag: str, stage: int, world: int, size: int, *, zero: Config | None = None, **settings: Any) -> Config:
        extra = {"expert_parallel": {"enabled": True, "autoep_size": size}} | settings.pop("extra", {})
        settings = {"model": "mixtral", "zero": SMALL_ZERO | (zero or {}), "extra": extra} | settings
        return zero_of(f"experts{size}{tag}", stage, world, **settings)

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
