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
    "gemma4-repeated": (  # layers like the first one behind it
        ("sdpa",),
        {
            **_SMALL,
            "num_hidden_layers": 8,
            "layer_types": [*[_SLIDING] * 3, *[_FULL] * 3, _SLIDING, _FULL],
            "num_kv_shared_layers": 3,
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

# For `vision_models`: E2B and E4B without sound, and the larger ones, whose image tokens see each other.
_TOWER = {
    "model_type": "gemma4_vision", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
    "position_embedding_size": 40, "default_output_length": 12,
}  # fmt: skip
_IMAGES = {"model_type": "gemma4", "image_token_id": 196, "video_token_id": 197, "audio_token_id": 198}
GEMMA4_VISION: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, int]]] = {
    "gemma4-layers": (
        ("sdpa", "eager"),
        {
            **_IMAGES, "text_config": GEMMA4_CONFIGS["gemma4-layers"][1],
            "vision_config": _TOWER | {"use_clipped_linears": True},
        },
        (56, 112),
    ),
    "gemma4-dense": (
        ("sdpa", "eager"),
        {
            **_IMAGES, "text_config": GEMMA4_CONFIGS["gemma4-dense"][1] | {"use_bidirectional_attention": "vision"},
            "vision_config": _TOWER | {"standardize": True},
        },
        (90, 120),
    ),
}  # fmt: skip
TINY_GEMMA_VISION: dict[str, dict[str, Any]] = {
    "gemma4": {
        "image_token_id": 999, "video_token_id": 998, "audio_token_id": 997,
        "text_config": {"model_type": "gemma4_text", **TINY_GEMMA["gemma4_text"]},
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 40, "patch_size": 4,
            "pooling_kernel_size": 3, "position_embedding_size": 40, "default_output_length": 5,
        },
    },
}  # fmt: skip
# What makes that one a larger one.
GEMMA4_LARGE = {
    "text_config": {
        "model_type": "gemma4_text", **TINY_GEMMA["gemma4_text"], **GEMMA4_KEYS,
        "use_bidirectional_attention": "vision",
    },
}  # fmt: skip
# With an audio tower, which is given nothing.
GEMMA4_SOUND = {
    "audio_config": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 48,
        "subsampling_conv_channels": [16, 8],
    },
}  # fmt: skip
