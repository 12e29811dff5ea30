"""Configurations of FSDP1: strategies and prefetches, a model in bfloat16, units by size."""

from __future__ import annotations

from validation.oracles.configuration_parts import LORA, ODD_SIZES, TIED, UNTIED, Config, config_of


def fsdp1_configurations() -> list[Config]:
    both_prefetch = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"}
    return [
        config_of("fsdp1", "full_shard", 4),
        config_of("fsdp1", "shard_grad_op", fsdp={"strategy": "SHARD_GRAD_OP"}),
        config_of("fsdp1", "no_shard", fsdp={"strategy": "NO_SHARD"}),
        config_of("fsdp1", "full_shard_bwdpost", fsdp={"backward_prefetch": "BACKWARD_POST"}),
        config_of("fsdp1", "full_shard_nobwdprefetch", fsdp={"backward_prefetch": None}),
        config_of("fsdp1", "full_shard_fwdprefetch", fsdp={"forward_prefetch": True}),
        config_of("fsdp1", "full_shard_reducefp32", fsdp={"reduce_dtype": "float32"}),
        config_of("fsdp1", "full_shard_flat", fsdp={"use_orig_params": False}),
        config_of("fsdp1", "full_shard", ga=2),
        config_of("fsdp1", "full_shard_nosync", ga=2, fsdp={"no_sync": True}),
        config_of("fsdp1", "full_shard_ckpt", ckpt=True),
        config_of("fsdp1", "hybrid2x2", 4, fsdp={"strategy": "HYBRID_SHARD", "mesh": [2, 2]}),
        config_of("fsdp1", "hybrid_zero2_2x2", 4, fsdp={"strategy": "_HYBRID_SHARD_ZERO2", "mesh": [2, 2]}),
        config_of("fsdp1", "odd", 4, over=ODD_SIZES),
        config_of("fsdp1", "odd_flat", 4, over=ODD_SIZES, fsdp={"use_orig_params": False}),
        config_of("fsdp1", "shard_grad_op_nosync", ga=2, fsdp={"strategy": "SHARD_GRAD_OP", "no_sync": True}),
        config_of("fsdp1", "no_shard_nosync", ga=2, fsdp={"strategy": "NO_SHARD", "no_sync": True}),
        config_of("fsdp1", "fwdprefetch_bwdpost", fsdp=both_prefetch),
        config_of("fsdp1", "fwdprefetch_nosync", ga=2, fsdp={"forward_prefetch": True, "no_sync": True}),
        config_of("fsdp1", "full_shard", model="gpt2"),
        config_of("fsdp1", "full_shard_tied", over=TIED),
        config_of("fsdp1", "lora", lora=LORA),
        *_in_bfloat16(),
        *_by_size(),
    ]


def _in_bfloat16() -> list[Config]:
    """FSDP1 around a model that is in bfloat16, without mixed precision and with a policy that says bfloat16 again or
    reduces in float32: shards, gradients and Adam's moments are in bfloat16."""
    one: Config = {"dtype": "bfloat16"}
    plain: Config = {"mp": False}
    return [
        config_of("fsdp1", "pure", 4, **one, fsdp=plain),
        config_of("fsdp1", "pure", ga=2, **one, fsdp=plain),
        config_of("fsdp1", "pure_policy", **one),
        config_of("fsdp1", "pure_reducefp32", **one, fsdp={"reduce_dtype": "float32"}),
        config_of("fsdp1", "pure_reducefp32", ga=2, **one, fsdp={"reduce_dtype": "float32"}),
        config_of("fsdp1", "pure_flat", **one, fsdp=plain | {"use_orig_params": False}),
        config_of("fsdp1", "pure_no_shard", ga=2, **one, fsdp=plain | {"strategy": "NO_SHARD"}),
        config_of(
            "fsdp1", "pure_grad_op_nosync", ga=2, **one, fsdp=plain | {"strategy": "SHARD_GRAD_OP", "no_sync": True}
        ),
        config_of("fsdp1", "pure_hybrid2x2", 4, **one, fsdp=plain | {"strategy": "HYBRID_SHARD", "mesh": [2, 2]}),
        config_of("fsdp1", "pure_odd", 4, **one, over=ODD_SIZES, fsdp=plain),
        config_of("fsdp1", "pure_offload", **one, fsdp=plain | {"offload": True}),
        config_of("fsdp1", "pure_ckpt", **one, ckpt=True, impl="foreach", fsdp=plain),
        config_of("fsdp1", "pure_frozen", **one, freeze=["embed_tokens", "layers.0."], fsdp=plain),
        config_of("fsdp1", "pure", model="gpt2", **one, fsdp=plain),
        config_of("fsdp1", "pure_by_size", ga=2, **one, fsdp=plain | {"min_num_params": 300_000}),
    ]


def _by_size() -> list[Config]:
    """Units of Llama by size: from 300,000 on the MLPs, and all the rest but the head together; from 250,000 the
    embedding and the head as well; from 150,000 each projection of an MLP and each attention. GPT-2's from 264,000: an
    MLP within the rest of its block."""
    rest, most = {"min_num_params": 300_000}, {"min_num_params": 150_000}
    return [
        config_of("fsdp1", "by_size", fsdp=rest),
        config_of("fsdp1", "by_size_ckpt", ga=2, ckpt=True, fsdp=rest),
        config_of("fsdp1", "by_size_nosync", 4, ga=2, fsdp=rest | {"no_sync": True}),
        config_of("fsdp1", "by_size_grad_op", fsdp=rest | {"strategy": "SHARD_GRAD_OP"}),
        config_of("fsdp1", "by_size_post", ckpt=True, fsdp=rest | {"backward_prefetch": "BACKWARD_POST"}),
        config_of("fsdp1", "by_size_fwdprefetch", fsdp=rest | {"forward_prefetch": True}),
        config_of("fsdp1", "by_size_offload", fsdp=rest | {"offload": True}),
        config_of("fsdp1", "by_size_ends", ckpt=True, fsdp={"min_num_params": 250_000}),
        config_of("fsdp1", "by_size_most", fsdp=most),
        config_of("fsdp1", "by_size_most_ckpt", ckpt=True, fsdp=most),
        config_of("fsdp1", "by_size_most_flat", 4, ckpt=True, fsdp=most | {"use_orig_params": False}),
        config_of("fsdp1", "by_size_blocks", ckpt=True, model="gpt2", over=UNTIED, fsdp={"min_num_params": 264_000}),
        config_of("fsdp1", "by_size", model="mixtral", fsdp={"min_num_params": 50_000}),
        config_of("fsdp1", "by_size_all_smaller", fsdp={"min_num_params": 10**8}),
    ]
