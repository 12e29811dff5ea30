"""Mixtures of experts whose experts are modules, as in transformers before 5. Recorded with 4.57.6:

pip install --no-deps --target DIR transformers==4.57.6 huggingface_hub==0.36.0 tokenizers==0.22.1 peft accelerate
PYTHONPATH=DIR python -m validation.oracles.record modules
"""

from __future__ import annotations

from validation.oracles.configuration_parts import LORA, REGATHER, SMALL_ZERO, Config, config_of, zero_of

MODELS = ("mixtral", "qwen2_moe", "qwen3_moe")
GROUPED = ("deepseek_v3", "glm4_moe", "deepseek_v2", "hunyuan_v1_moe")  # whose blocks are no leaves
NO_LEAVES = {"leaf_module": {"classes": []}}  # as before DeepSpeed 0.18, which has these blocks as leaves


def expert_module_configurations() -> list[Config]:
    found = []
    persist_0 = SMALL_ZERO | NO_LEAVES | {"stage3_param_persistence_threshold": 0}
    on_experts = LORA | {"targets": ["q_proj", "w1", "w2"]}
    for model in MODELS:
        found += [
            zero_of("modules", 2, model=model, zero=SMALL_ZERO),
            zero_of("modules", 3, model=model, zero=SMALL_ZERO | NO_LEAVES),
            zero_of("modules_leaf", 3, ga=2, model=model, zero=REGATHER),
            zero_of("modules_regather", 3, ga=2, model=model, zero=REGATHER | NO_LEAVES),
            zero_of("modules_ckpt", 3, ga=2, model=model, zero=REGATHER | NO_LEAVES, ckpt=True),
            zero_of("modules_leaf_ckpt", 3, model=model, zero=SMALL_ZERO, ckpt=True),
            zero_of("modules_persist0", 3, 4, model=model, zero=persist_0),
            config_of("fsdp1", "modules", model=model),
            config_of("fsdp1", "modules_ckpt", model=model, ckpt=True),
            config_of("fsdp2", "modules_ckpt", ga=2, model=model, ckpt=True),
            config_of("fsdp2", "modules_accelerate", model=model, fsdp={"accelerate": True}),
        ]
        if model != "qwen2_moe":  # each of whose layers had rotary frequencies of its own, and used none
            found.append(config_of("ddp", "modules", model=model, ddp={"bucket_cap_mb": 1}))
    found += [
        zero_of("modules_lora", 3, model="mixtral", zero=SMALL_ZERO | NO_LEAVES, lora=on_experts),
        zero_of("modules_lora_leaf", 3, ga=2, model="mixtral", zero=REGATHER, lora=on_experts),
        zero_of("modules_zeroinit", 3, model="mixtral", zero=SMALL_ZERO | NO_LEAVES, zero_init=True),
        config_of("fsdp2", "modules_lora", model="mixtral", lora=on_experts),
    ]
    for model in GROUPED:
        found += [
            zero_of("modules", 2, model=model, zero=SMALL_ZERO),
            zero_of("modules", 3, model=model, zero=SMALL_ZERO),
            zero_of("modules_regather", 3, ga=2, model=model, zero=REGATHER),
            zero_of("modules_ckpt", 3, ga=2, model=model, zero=REGATHER, ckpt=True),
            zero_of("modules_persist0", 3, 4, model=model, zero=persist_0),
            config_of("ddp", "modules", model=model, ddp={"bucket_cap_mb": 1}),
            config_of("fsdp1", "modules_ckpt", model=model, ckpt=True),
            config_of("fsdp2", "modules_accelerate", model=model, fsdp={"accelerate": True}),
        ]
    return [config | {"experts": "modules"} for config in found]
