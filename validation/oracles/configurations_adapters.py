"""Modules that train whole beside adapters: peft's modules_to_save. Recorded with peft 0.21."""

from __future__ import annotations

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

SAVED: Config = LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}
EMBEDDING: Config = LORA | {"modules_to_save": ["embed_tokens"]}
HEAD: Config = {"r": 8, "targets": ["q_proj", "down_proj", "lm_head"]}
NORMS: Config = LORA | {"modules_to_save": ["norm", "lm_head"]}
ONE: Config = SAVED | {"ensure_weight_tying": True}  # of a model that ties them
TIES = "qwen2"
# A base as loaded, and adapters that peft widens: the optimizer has tensors of both dtypes.
LOW: Config = {"dtype": "bfloat16", "autocast": "bfloat16", "over": WIDE, "impl": "fused"}
UNITS = {"adapter_units": True}
# On parameters of stacked experts, which FSDP1 fails on.
EXPERTS: Config = {"r": 4, "targets": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def adapter_configurations() -> list[Config]:
    return [*_ddp(), *_fsdp2(), *_fsdp1(), *_deepspeed(), *_on_experts(), *_on_heads()]


def _on_heads() -> list[Config]:
    low: Config = {"dtype": "bfloat16", "lora": HEAD}
    return [
        config_of("ddp", "head", lora=HEAD, ddp={"bucket_cap_mb": 0.05}),
        config_of("ddp", "head_ckpt", ga=2, model=TIES, lora=HEAD, ckpt=True),
        config_of("fsdp2", "head", lora=HEAD),
        config_of("fsdp2", "head", model=TIES, lora=HEAD),
        config_of("fsdp2", "head_accelerate", lora=HEAD, fsdp=ACCELERATE),
        config_of("fsdp2", "head_accelerate_ckpt", ga=2, model=TIES, lora=HEAD, fsdp=ACCELERATE, ckpt=True),
        config_of("fsdp2", "head_units_accelerate", lora=HEAD, fsdp=UNITS | ACCELERATE),
        config_of("fsdp1", "head_units", **low, fsdp=UNITS),
        config_of("fsdp1", "head_units_ckpt", ga=2, model=TIES, **low, fsdp=UNITS, ckpt=True),
        *(zero_of("head", stage, zero=SMALL_ZERO, lora=HEAD) for stage in (0, 1, 2, 3)),
        zero_of("head_ckpt", 3, ga=2, model=TIES, zero=REGATHER, lora=HEAD, ckpt=True),
        zero_of("head_zeroinit", 3, zero=SMALL_ZERO, zero_init=True, lora=HEAD),
    ]


def _on_experts() -> list[Config]:
    moe: Config = {"model": "mixtral", "lora": EXPERTS}
    no_leaves = SMALL_ZERO | {"leaf_module": {"classes": []}}
    return [
        config_of("ddp", "experts", **moe, ddp={"bucket_cap_mb": 0.02}),
        config_of("ddp", "experts_ckpt", ga=2, **moe, ckpt=True),
        config_of("fsdp2", "experts", **moe),
        config_of("fsdp2", "experts_accelerate", **moe, fsdp=ACCELERATE),
        config_of("fsdp2", "experts_accelerate_ckpt", ga=2, **moe, fsdp=ACCELERATE, ckpt=True),
        *(zero_of("experts", stage, **moe, zero=SMALL_ZERO) for stage in (0, 1, 2, 3)),
        zero_of("experts_ckpt", 2, ga=2, **moe, zero=SMALL_ZERO, ckpt=True),
        zero_of("experts_ckpt", 3, ga=2, **moe, zero=REGATHER, ckpt=True),
        zero_of("experts_zeroinit", 3, **moe, zero=SMALL_ZERO, zero_init=True),
        zero_of("experts_no_leaves", 3, **moe, zero=no_leaves),
        zero_of("experts_no_leaves_ckpt", 3, ga=2, **moe, zero=no_leaves, ckpt=True),
    ]


def _ddp() -> list[Config]:
    cap, widened = {"bucket_cap_mb": 0.5}, {"widened": True}
    last = LORA | widened | {"modules_to_save": ["lm_head", "model.norm"]}
    return [
        config_of("ddp", "saved", ddp=cap, lora=SAVED),
        config_of("ddp", "saved", model=TIES, ddp=cap, lora=SAVED),
        config_of("ddp", "saved_one", model=TIES, lora=ONE),
        config_of("ddp", "saved_embedding", model=TIES, lora=EMBEDDING),
        config_of("ddp", "saved_low", **LOW, ddp={"bucket_cap_mb": 0.05}, lora=SAVED | widened),
        config_of("ddp", "lora_low", **LOW, lora=LORA | widened),
        config_of("ddp", "lora_wide", autocast="bfloat16", over=WIDE, lora=LORA),
        config_of("ddp", "saved_low_rest", **LOW, lora=SAVED | widened),
        config_of("ddp", "saved_low_ckpt", ga=2, **LOW, ckpt=True, lora=last),
    ]


def _fsdp2() -> list[Config]:
    upcast = ACCELERATE | {"upcast_trained": True}
    return [
        config_of("fsdp2", "saved", lora=SAVED),
        config_of("fsdp2", "saved_ckpt", ga=2, lora=SAVED, ckpt=True),
        config_of("fsdp2", "saved", model=TIES, lora=SAVED),
        config_of("fsdp2", "saved_one", model=TIES, lora=ONE),
        config_of("fsdp2", "saved_accelerate", lora=SAVED, fsdp=ACCELERATE),
        config_of("fsdp2", "saved_accelerate_ckpt", ga=2, lora=SAVED, fsdp=ACCELERATE, ckpt=True),
        config_of("fsdp2", "saved_one_accelerate", model=TIES, lora=ONE, fsdp=ACCELERATE),
        config_of("fsdp2", "saved_upcast", dtype="bfloat16", over=WIDE, lora=SAVED, fsdp=upcast),
        config_of("fsdp2", "saved_units", lora=SAVED, fsdp=UNITS),
        config_of("fsdp2", "saved_units_accelerate", lora=SAVED, fsdp=UNITS | ACCELERATE),
        config_of("fsdp2", "saved_units_accelerate_ckpt", ga=2, lora=SAVED, fsdp=UNITS | ACCELERATE, ckpt=True),
        config_of("fsdp2", "saved_units_norms", lora=NORMS, fsdp=UNITS | ACCELERATE),
    ]


def _fsdp1() -> list[Config]:
    one: Config = {"dtype": "bfloat16", "lora": SAVED}
    return [
        config_of("fsdp1", "saved", lora=SAVED),
        config_of("fsdp1", "saved_units", **one, fsdp=UNITS),
        config_of("fsdp1", "saved_units_ckpt", ga=2, **one, fsdp=UNITS, ckpt=True),
        config_of("fsdp1", "saved_units_flat", 4, **one, fsdp=UNITS | {"use_orig_params": False}),
        config_of("fsdp1", "saved_units", model=TIES, **one, fsdp=UNITS),
        config_of("fsdp1", "saved_units_embedding", model=TIES, **one | {"lora": EMBEDDING}, fsdp=UNITS),
    ]


def _deepspeed() -> list[Config]:
    lazily = {"zero": SMALL_ZERO, "zero_init": True}
    return [
        *(zero_of("saved", stage, zero=SMALL_ZERO, lora=SAVED) for stage in (0, 1, 2, 3)),
        zero_of("saved_one", 2, model=TIES, zero=SMALL_ZERO, lora=ONE),
        zero_of("saved", 3, model=TIES, zero=SMALL_ZERO, lora=SAVED),
        zero_of("saved_embedding", 3, model=TIES, zero=SMALL_ZERO, lora=EMBEDDING),
        zero_of("saved_norms", 3, zero=SMALL_ZERO, lora=NORMS),
        zero_of("saved_ckpt", 3, ga=2, zero=REGATHER, lora=SAVED, ckpt=True),
        zero_of("saved_one_ckpt", 3, model=TIES, zero=REGATHER, lora=ONE, ckpt=True),
        zero_of("saved_zeroinit", 3, **lazily, lora=SAVED),
        zero_of("saved_zeroinit", 3, model=TIES, **lazily, lora=SAVED),
        zero_of("saved_one_zeroinit", 3, model=TIES, **lazily, lora=ONE),
    ]
