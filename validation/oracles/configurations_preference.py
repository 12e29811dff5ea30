"""Training by preference: with a second model, without adapters, without a reference. Adapters with peft 0.21."""

from __future__ import annotations

from typing import Any

from validation.oracles.configuration_parts import (
    ACCELERATE,
    LORA,
    REGATHER,
    SMALL_ZERO,
    WIDE,
    Config,
    config_of,
    zero_of,
)


def paired(reference: str, log_probs: str = "log_softmax", metrics: str = "own") -> Config:
    return {"preference": {"reference": reference, "log_probs": log_probs, "metrics": metrics}}


MODEL, ADAPTERS, NONE = paired("model"), paired("adapters"), paired("none")
GATHERED = paired("model", "selective", "gathered")
SHARDED: Config = {"preference": GATHERED["preference"] | {"sharded": True}}


def preference_configurations() -> list[Config]:
    lazily: Any = {"zero": SMALL_ZERO, "zero_init": True}
    return [
        zero_of("pref", 3, zero=SMALL_ZERO, **MODEL),
        zero_of("pref_zeroinit", 3, **lazily, **MODEL),
        zero_of("pref_ckpt", 3, ga=2, zero=REGATHER, ckpt=True, **GATHERED),
        zero_of("pref_float32", 3, zero=SMALL_ZERO, ckpt=True, zero_init=True, **paired("model", "float32")),
        zero_of("pref_shifted", 3, zero=SMALL_ZERO, ckpt=True, **paired("model", "selective_shifted", "gathered")),
        zero_of("pref_none", 3, ga=2, zero=SMALL_ZERO, ckpt=True, **NONE),
        zero_of("pref_lora", 3, zero=SMALL_ZERO, lora=LORA, **ADAPTERS),
        zero_of("pref_lora_ckpt", 3, ga=2, zero=REGATHER, lora=LORA, ckpt=True, **ADAPTERS),
        config_of("fsdp2", "pref", **MODEL, dtype="bfloat16"),
        config_of("fsdp2", "pref_sharded", **SHARDED),
        config_of("fsdp2", "pref_sharded_ckpt", 2, 2, **SHARDED, ckpt=True, fsdp=ACCELERATE),
        config_of("fsdp2", "pref_none", ckpt=True, **NONE, fsdp=ACCELERATE),
        config_of("fsdp2", "pref_lora", lora=LORA, **ADAPTERS),
        config_of("fsdp2", "pref_lora_ckpt", 2, 2, lora=LORA, ckpt=True, **ADAPTERS, fsdp=ACCELERATE),
        config_of("fsdp2", "pref_lora_units", 2, 2, lora=LORA, ckpt=True, **ADAPTERS, fsdp={"adapter_units": True}),
        config_of("fsdp1", "pref", **MODEL),
        config_of("fsdp1", "pref_sharded", **SHARDED),
        config_of("fsdp1", "pref_sharded_ckpt", 2, 2, **SHARDED, ckpt=True),
        config_of("fsdp1", "pref_sharded_ahead", 2, 2, **SHARDED, fsdp={"forward_prefetch": True}),
        config_of("fsdp1", "pref_lora_units", lora=LORA, dtype="bfloat16", **ADAPTERS, fsdp={"adapter_units": True}),
        config_of(
            "fsdp1",
            "pref_lora_units_ckpt",
            2,
            2,
            lora=LORA,
            dtype="bfloat16",
            ckpt=True,
            **ADAPTERS,
            fsdp={"adapter_units": True},
        ),
        config_of("ddp", "pref", ddp={"bucket_cap_mb": 0.5}, **MODEL),
        config_of("ddp", "pref_gathered", ga=2, ddp={"bucket_cap_mb": 0.5}, ckpt=True, no_sync=True, **GATHERED),
        config_of("ddp", "pref_autocast", autocast="bfloat16", over=WIDE, **paired("model", "selective_shifted")),
        config_of("ddp", "pref_lora_low", autocast="bfloat16", over=WIDE, lora=LORA, **ADAPTERS),
        config_of("ddp", "pref_lora", ddp={"bucket_cap_mb": 0.05}, lora=LORA, **ADAPTERS),
        *(zero_of("pref", stage, zero=SMALL_ZERO, **MODEL) for stage in (0, 1, 2)),
        zero_of("pref_float32", 2, zero=SMALL_ZERO, ckpt=True, **paired("model", "float32")),
        zero_of("pref_shifted", 2, zero=SMALL_ZERO, ckpt=True, **paired("model", "selective_shifted")),
        zero_of("pref_selective", 2, zero=SMALL_ZERO, ckpt=True, **paired("model", "selective")),
        zero_of("pref", 3, world=4, ga=2, model="qwen2", zero=SMALL_ZERO, **MODEL),
        zero_of("pref_experts", 3, model="mixtral", zero=SMALL_ZERO, **MODEL),
        zero_of(
            "pref_cpu", 3, ga=2, zero=SMALL_ZERO | {"offload_param": {"device": "cpu", "pin_memory": False}}, **MODEL
        ),
        *(zero_of("pref_lora", stage, ga=2, zero=SMALL_ZERO, lora=LORA, ckpt=True, **ADAPTERS) for stage in (0, 1, 2)),
    ]
