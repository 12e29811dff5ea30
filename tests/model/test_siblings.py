"""Decoders nearest to Llama, and those that are other families by another name: counts as transformers 5.24 has them on
the meta device, and what their files mean."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError
from zsim.model.huggingface import SAME, from_config

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "EXAONE-3.5-7.8B": (
        7_818_448_896,
        {
            "model_type": "exaone", "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400,
            "activation_function": "silu",
        },
    ),
    "InternLM-7B": (
        7_321_948_160,
        {
            "model_type": "internlm", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 103168, "bias": True,
        },
    ),
    "InternLM3-8B": (
        8_804_241_408,
        {
            "model_type": "internlm3", "hidden_size": 4096, "intermediate_size": 10240,
            "num_hidden_layers": 48, "num_attention_heads": 32, "vocab_size": 128512, "qkv_bias": False,
            "bias": False,
        },
    ),
    "IQuest-Coder-V1-40B": (
        39_794_283_520,
        {
            "model_type": "iquestcoder", "hidden_size": 5120, "intermediate_size": 27648,
            "num_hidden_layers": 80, "num_attention_heads": 40, "vocab_size": 76800,
        },
    ),
    "sarvam-30b": (
        32_152_648_064,
        {
            "model_type": "sarvam_moe", "hidden_size": 4096, "intermediate_size": 8192,
            "num_hidden_layers": 19, "num_attention_heads": 64, "vocab_size": 262144, "num_experts": 128,
            "num_shared_experts": 1, "moe_intermediate_size": 1024,
        },
    ),
    "sarvam-105b": (
        106_031_763_456,
        {
            "model_type": "sarvam_mla", "hidden_size": 4096, "intermediate_size": 16384,
            "num_hidden_layers": 32, "num_attention_heads": 64, "vocab_size": 262144, "num_experts": 128,
            "num_shared_experts": 1, "moe_intermediate_size": 2048, "head_dim": 576,
        },
    ),
    "CWM": (
        32_581_097_472,
        {
            "model_type": "cwm", "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64,
            "num_attention_heads": 48, "vocab_size": 128256,
        },
    ),
    "Ministral-8B-2410": (
        8_019_808_256,
        {
            "model_type": "ministral", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 131072, "sliding_window": 32768,
        },
    ),
    "Helium-1-2B": (
        2_023_868_416,
        {
            "model_type": "helium", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers":
            28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 64000,
        },
    ),
    "HyperCLOVAX-SEED-Think-14B": (
        14_748_112_896,
        {
            "model_type": "hyperclovax", "hidden_size": 6144, "intermediate_size": 14336,
            "num_hidden_layers": 38, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 110592,
        },
    ),
    "Jais-2-8B": (
        8_090_401_280,
        {
            "model_type": "jais2", "hidden_size": 3328, "intermediate_size": 26624, "num_hidden_layers":
            32, "num_attention_heads": 26, "vocab_size": 150272,
        },
    ),
    "VaultGemma-1B": (
        1_038_741_120,
        {
            "model_type": "vaultgemma", "hidden_size": 1152, "intermediate_size": 6912,
            "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 256000,
        },
    ),
    "Youtu-LLM-2B": (
        1_961_560_064,
        {
            "model_type": "youtu", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers":
            32, "num_attention_heads": 16, "vocab_size": 128256,
        },
    ),
    "Apertus-8B": (
        8_053_338_176,
        {
            "model_type": "apertus", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, (_, config) in MODELS.items() if config["model_type"] in SAME])
def test_another_name_is_said(name: str):
    config = MODELS[name][1]
    family = SAME[config["model_type"]].family
    assert from_config(config, "m").notes == (f"m: {config['model_type']} is run as transformers' {family}",)


def test_fields_of_another_name():
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
    exaone = from_config(small | {"model_type": "exaone", "num_layers": 3, "num_key_value_heads": 4}, "x").arch
    assert (exaone.layers, exaone.kv_heads) == (3, 4)
    both = small | {"model_type": "exaone", "num_layers": 3, "num_hidden_layers": 5, "num_key_value_heads": 4}
    assert from_config(both, "x").arch.layers == 5
    biases = small | {"model_type": "internlm3", "num_hidden_layers": 2, "qkv_bias": True, "bias": True}
    intern = from_config(biases, "x").arch
    assert (intern.attention_bias, intern.mlp_bias, intern.kv_heads, intern.head_dim) == (True, True, 2, 128)


def test_windows():
    def sliding(name: str, **changes: Any) -> list[bool]:
        return [kind.sliding for kind in from_config(MODELS[name][1] | changes, name).arch.kinds]

    assert sliding("CWM")[:5] == [False, True, True, True, False]
    assert not any(sliding("CWM", sliding_window=None))
    assert all(sliding("Ministral-8B-2410"))
    assert not any(sliding("Ministral-8B-2410", sliding_window=None))
    assert sliding("VaultGemma-1B")[:2] == [True, False]


def test_apertus_knows_its_own_activation_alone():
    with pytest.raises(InputError, match="xielu"):
        from_config(MODELS["Apertus-8B"][1] | {"hidden_act": "silu"}, "a")


def test_norms_behind_attention_and_mlp_are_optional():
    config = MODELS["HyperCLOVAX-SEED-Think-14B"][1]
    more = from_config(config, "h").numel - from_config(config | {"use_post_norm": False}, "h").numel
    assert more == 2 * 38 * 6144
