"""Evaluation after each step: two batches, of a size of their own, without gradients."""

from __future__ import annotations

from validation.oracles.configuration_parts import (
    ACCELERATE,
    LORA,
    REGATHER,
    SMALL_ZERO,
    TIED,
    WIDE,
    Config,
    config_of,
    zero_of,
)


def evaluation_configurations() -> list[Config]:
    return [
        *(zero_of("eval", stage, zero=SMALL_ZERO, over=WIDE, evaluate=4) for stage in (0, 1, 2)),
        zero_of("eval", 3, zero=SMALL_ZERO, evaluate=4),
        zero_of("eval_zeroinit", 3, zero=SMALL_ZERO, zero_init=True, evaluate=2),
        zero_of("eval_ckpt", 3, ga=2, zero=REGATHER, ckpt=True, evaluate=2),
        zero_of("eval_lora", 3, zero=REGATHER, lora=LORA, ckpt=True, evaluate=2),
        config_of("fsdp2", "eval", evaluate=4),
        config_of("fsdp2", "eval_ckpt", 2, 2, evaluate=2, ckpt=True, fsdp=ACCELERATE),
        config_of("fsdp2", "eval_prefetch", evaluate=2, over=TIED, fsdp={"prefetch": 1}),
        config_of("fsdp2", "eval_whole", evaluate=2, fsdp={"reshard_after_forward": False}),
        config_of("fsdp1", "eval", evaluate=20),
        config_of("fsdp1", "eval_ckpt", 2, 2, evaluate=20, ckpt=True),
        config_of(
            "fsdp1", "eval_ahead", 2, 2, evaluate=20, fsdp={"forward_prefetch": True, "strategy": "SHARD_GRAD_OP"}
        ),
        config_of("ddp", "eval", evaluate=4, over=WIDE, ddp={"bucket_cap_mb": 0.5}),
        config_of("ddp", "eval_ckpt", 2, 2, evaluate=4, over=WIDE, ckpt=True, no_sync=True),
        config_of("ddp", "eval_autocast", evaluate=4, over=WIDE, autocast="bfloat16"),
    ]
