"""Mixtures of experts whose experts are modules, as in transformers before 5. Recorded with 4.57.6:

pip install --no-deps --target DIR transformers==4.57.6 huggingface_hub==0.36.0 tokenizers==0.22.1 peft accelerate
PYTHONPATH=DIR python -m validation.oracles.record modules
"""

from __future__ import annotations

from typing import Any

from validation.oracles.configuration_parts import LORA, REGATHER, SMALL_ZERO, Config, config_of, zero_of
from validation.oracles.tiny import TINY_VISION

MODELS = ("mixtral", "qwen2_moe", "qwen3_moe")
GROUPED = ("deepseek_v3", "glm4_moe", "deepseek_v2", "hunyuan_v1_moe", "glm4v_moe")  # whose blocks are no leaves
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
    for name in GROUPED:
        model = {"model": name} | ({"over": {"text_config": _as_published(name)}} if name in TINY_VISION else {})
        found += [
            zero_of("modules", 2, **model, zero=SMALL_ZERO),
            zero_of("modules", 3, **model, zero=SMALL_ZERO),
            zero_of("modules_regather", 3, ga=2, **model, zero=REGATHER),
            zero_of("modules_ckpt", 3, ga=2, **model, zero=REGATHER, ckpt=True),
            zero_of("modules_persist0", 3, 4, **model, zero=persist_0),
            config_of("fsdp1", "modules_ckpt", **model, ckpt=True),
            config_of("fsdp2", "modules_accelerate", **model, fsdp={"accelerate": True}),
        ]
        if name not in TINY_VISION:  # whose tower did not keep its original frequencies
            found.append(config_of("ddp", "modules", **model, ddp={"bucket_cap_mb": 1}))
    return [config | {"experts": "modules"} for config in found]


def _as_published(model: str) -> dict[str, Any]:
    """The text model with its rotary settings as transformers before 5 read them."""
    text = dict(TINY_VISION[model]["text_config"])
    rope = text.pop("rope_parameters")
    names = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in rope.items() if name not in names}
    return text | {name: rope[name] for name in names} | {"rope_scaling": scaling}
