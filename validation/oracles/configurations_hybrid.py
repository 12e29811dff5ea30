"""Configurations of models whose layers are not all attention."""

from __future__ import annotations

from validation.oracles.configuration_parts import LORA, REGATHER, SMALL_ZERO, Config, config_of, zero_of
from validation.oracles.tiny_hybrid import TINY_HYBRIDS


def hybrid_configurations() -> list[Config]:
    found = []
    for name in TINY_HYBRIDS:
        model = {"model": name} | ({"attention": "eager"} if name == "mamba2" else {})
        found += [
            config_of("fsdp2", "hybrid", **model),
            config_of("fsdp2", "hybrid_accelerate", **model, fsdp={"accelerate": True}),
            config_of("fsdp1", "hybrid", **model),
            zero_of("hybrid", 2, **model, zero=SMALL_ZERO),
            zero_of("hybrid", 3, **model, zero=SMALL_ZERO),
            zero_of("hybrid_regather", 3, ga=2, **model, zero=REGATHER),
        ]
        if name not in ("qwen3_next", "qwen3_5_moe_text"):
            found.append(zero_of("hybrid_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True))
    return [*found, *_linear_attention()]


def _linear_attention() -> list[Config]:
    """transformers 5.24 cannot initialize its A_log under zero.Init."""
    model, lora = "qwen3_5_text", LORA | {"targets": ["q_proj", "in_proj_qkv", "out_proj"]}
    return [
        config_of("ddp", "hybrid", model=model, ddp={"bucket_cap_mb": 1}),
        config_of("ddp", "hybrid", model="qwen3_next", ddp={"bucket_cap_mb": 1}),
        config_of("ddp", "hybrid_autocast", autocast="bfloat16", model=model, over={"vocab_size": 300}),
        config_of("fsdp2", "hybrid_ckpt", ga=2, model=model, ckpt=True),
        config_of("fsdp1", "hybrid_ckpt", model=model, ckpt=True),
        config_of("fsdp2", "hybrid_lora", model=model, lora=lora),
        zero_of("hybrid", 1, model=model, zero=SMALL_ZERO),
        zero_of("hybrid_lora", 3, model=model, zero=SMALL_ZERO, lora=lora),
        zero_of("hybrid_persistent", 3, model=model, zero=SMALL_ZERO | {"stage3_param_persistence_threshold": 2000}),
    ]
