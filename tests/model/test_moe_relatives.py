"""Mixtures of experts near others: counts as transformers 5.24 has them on the meta device; what files cannot say."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "MiniMax-M2": (
        228_689_748_992,
        {
            "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
            "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size":
            200064, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
    ),
    "ERNIE-4.5-21B-A3B": (
        21_825_437_888,
        {
            "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
            "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size":
            103424, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
        },
    ),
    "dots.llm1": (
        142_774_373_888,
        {
            "model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers":
            62, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 152064,
            "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        },
    ),
    "GLM-4.7-Flash": (
        29_943_390_976,
        {
            "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
            "num_hidden_layers": 47, "num_attention_heads": 20, "vocab_size": 154880,
        },
    ),
    "Solar-Open-100B": (
        102_651_793_408,
        {
            "model_type": "solar_open", "hidden_size": 4096, "num_hidden_layers": 48,
            "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 196608, "n_routed_experts":
            128, "moe_intermediate_size": 1280,
        },
    ),
    "K-EXAONE-236B-A23B": (
        236_571_150_336,
        {
            "model_type": "exaone_moe", "hidden_size": 6144, "intermediate_size": 18432,
            "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 153600, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size":
            2048, "sliding_window": 128,
        },
    ),
    "Hunyuan-A13B": (
        80_393_183_232,
        {
            "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128167, "num_experts": 64, "moe_topk": [8] * 32, "tie_word_embeddings": True,
        },
    ),
    "Granite MoE with a shared expert": (
        3_525_290_496,
        {
            "model_type": "granitemoeshared", "hidden_size": 1536, "intermediate_size": 512,
            "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size":
            49155, "num_local_experts": 40, "num_experts_per_tok": 8, "shared_intermediate_size": 1024,
        },
    ),
    "Phi-3.5-MoE": (
        41_873_153_344,
        {
            "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064, "num_local_experts": 16,
            "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True, "input_jitter_noise": 0.01,
        },
    ),
}  # fmt: skip


def test_layers_with_experts_are_those_that_the_file_says():
    def sparse(name: str, **changes: Any) -> list[int]:
        kinds = from_config(MODELS[name][1] | changes, name).arch.kinds
        return [number for number, kind in enumerate(kinds) if kind.sparse]

    assert sparse("ERNIE-4.5-21B-A3B") == list(range(1, 28))
    assert sparse("ERNIE-4.5-21B-A3B", moe_layer_interval=2, moe_layer_end_index=8) == [1, 3, 5, 7]
    assert sparse("K-EXAONE-236B-A23B", first_k_dense_replace=3) == list(range(3, 48))
    assert sparse("K-EXAONE-236B-A23B", mlp_layer_types=["sparse"] + ["dense"] * 47) == [0]
    assert sparse("GLM-4.7-Flash", first_k_dense_replace=3) == list(range(1, 47))  # which its class does not read
    assert sparse("Solar-Open-100B") == list(range(48))


def test_biases_of_routers_are_buffers_but_ernies():
    """A float32 for each expert and layer that has experts, beside rotary frequencies; ERNIE's are parameters that are
    not trained."""
    assert from_config(MODELS["MiniMax-M2"][1], "m").buffers_bytes == 4 * 62 * 256 + 2 * 32 * 4
    ernie = from_config(MODELS["ERNIE-4.5-21B-A3B"][1], "e")
    assert ernie.buffers_bytes == 2 * 64 * 4
    assert ernie.numel - ernie.trainable_numel == 27 * 64


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("dots.llm1", {"n_group": 3}, "n_group"),
        ("dots.llm1", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("K-EXAONE-236B-A23B", {"mlp_layer_types": ["moe"] * 48}, "mlp_layer_types"),
        ("K-EXAONE-236B-A23B", {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types"),
        ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "moe_topk"),
        ("Hunyuan-A13B", {"moe_topk": 65}, "num_experts_per_tok"),
        ("ERNIE-4.5-21B-A3B", {"moe_k": 65}, "moe_k"),
    ],
)
def test_what_experts_cannot_be(name: str, changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        from_config(MODELS[name][1] | changes, name)
    assert caught.value.field == field


@pytest.mark.parametrize("family", ["minimax_m2", "mixtral"])
def test_noise_on_what_experts_read_is_refused(family: str):
    with pytest.raises(NotModeled, match="noise"):
        from_config(MODELS["MiniMax-M2"][1] | {"model_type": family, "router_jitter_noise": 0.01}, "m")
