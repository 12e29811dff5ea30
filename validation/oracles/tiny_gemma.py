"""Small and tiny models of Gemma 4, as `family_configs` and `tiny` have them of others."""

from __future__ import annotations

from typing import Any

_SMALL = {
    "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199, "head_dim": 32, "global_head_dim": 48, "sliding_window": 128,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
# For `family_configs`.
GEMMA4_CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gemma4-dense": (
        ("sdpa", "eager"),
        {
            **_SMALL,
            "num_hidden_layers": 6,
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-layers": (  # E2B and E4B
        ("sdpa", "eager"),
        {
            **_SMALL,
            "num_hidden_layers": 8,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, *[_SLIDING] * 3, _FULL],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 151,
        },
    ),
    "gemma4-wide": (  # heads that FlashAttention does not take, and a window that sequences fill
        ("sdpa",),
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _FULL] * 2,
            "global_head_dim": 512,
            "sliding_window": 32,
        },
    ),
    "gemma4-moe": (  # 26B-A4B
        ("sdpa", "eager"),
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _FULL] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
}

# Embeddings of each layer, and last layers that read keys and values of earlier ones, as in E2B and E4B.
TINY_GEMMA: dict[str, dict[str, Any]] = {"gemma4_text": {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_key_value_heads": 1,
    "head_dim": 32, "global_head_dim": 48, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 24, "vocab_size": 1000, "vocab_size_per_layer_input": 1100, "pad_token_id": 0,
    "final_logit_softcapping": 30.0, "max_position_embeddings": 256,
}}  # fmt: skip
# What makes that one dense, as 31B, or one of experts, as 26B-A4B.
GEMMA4_KEYS = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1,
}  # fmt: skip
GEMMA4_EXPERTS = GEMMA4_KEYS | {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 96,
}  # fmt: skip
