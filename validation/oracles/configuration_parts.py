"""What configurations of recordings are made of: settings that several share, and their common shape."""

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
UNTIED = {"tie_word_embeddings": False}
ACCELERATE = {"accelerate": True, "root_reshard": "default"}  # as its fsdp2_prepare_model does since 1.14
# The optimizer that partial offload and master weights in bf16 ask for.
CPU_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_force_ds_cpu_optimizer": True}
ON_NVME = {"device": "nvme", "pin_memory": False, "buffer_count": 80, "buffer_size": 300000, "max_in_cpu": 0}
FLOAT8 = {"recipe": "tensorwise", "all_gather": True}
LORA = {"r": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


def config_of(engine: str, tag: str, world: int = 2, ga: int = 1, model: str = "llama", **settings: Any) -> Config:
    name = f"{engine}_{tag}_w{world}_ga{ga}" + ("" if model == "llama" else f"_{model}")
    return {"name": name, "engine": engine, "world": world, "model": model, "ga": ga, **settings}


def zero_of(
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
    config = config_of("ds", f"z{stage}_{tag}", world, ga, model, ds=ds | (extra or {}), **settings)
    del config["ga"]  # DeepSpeed's own setting says it
    return config
