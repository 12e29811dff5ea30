"""Small models whose layers are not all attention."""

from __future__ import annotations

from typing import Any

# Four layers of linear attention, each of whose convolutions has 1 024 weights, and one of full attention.
_DELTA: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 256,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
_MIXER = {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_chunk_size": 16}
TINY_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {  # kernels of convolutions are no persistent parameters
        "hidden_size": 416, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256,
        "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 256,
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": _DELTA | {"rope_parameters": _SECTIONS},
    "qwen3_next": _DELTA | _EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"rope_parameters": _SECTIONS},
    "mamba2": {
        "hidden_size": 128, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 2,
        "chunk_size": 16, "vocab_size": 1000,
    },
    "granitemoehybrid": {
        "hidden_size": 128, "intermediate_size": 96, "shared_intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "num_local_experts": 4,
        "num_experts_per_tok": 2, "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope",
        "max_position_embeddings": 256, "pad_token_id": 0, **_MIXER,
    },
    "bamba": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000, "attn_layer_indices": [1], "max_position_embeddings": 256,
        **_MIXER,
    },
    "falcon_h1": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000, "mamba_d_ssm": 256, "mamba_rms_norm": True,
        "max_position_embeddings": 256, **_MIXER,
    },
    "nemotron_h": {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 1000, "hybrid_override_pattern": "M-ME*", "mamba_num_heads": 8,
        "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 16, "use_bias": True,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 160,
    },
}  # fmt: skip
