"""Tiny models of the families that change a few lines of others."""

from __future__ import annotations

from typing import Any

_SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
_ROUTED = {"moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 32,
}  # fmt: skip
_TOKENS = {"eos_token_id": 1, "bos_token_id": 2}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}

TINY_RELATIVES: dict[str, dict[str, Any]] = {
    "glm4_moe": _SMALL | _ROUTED | {"head_dim": 32, "use_qk_norm": True},
    "llama4_text": _SMALL | _ROPE | {
        "intermediate_size": 96, "intermediate_size_mlp": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_local_experts": 4, "moe_layers": [1, 2, 3],
    },
    "ministral3": _SMALL | {"head_dim": 32},
    "granitemoe": _SMALL | _FOUR | {"intermediate_size": 96, "num_hidden_layers": 2},
    "glm4_moe_lite": _SMALL | _ROUTED | _ROPE | {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 32,
    },
    "deepseek_v3": _SMALL | _ROUTED | {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v2": _SMALL | _ROUTED | _LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v32": _SMALL | _ROUTED | _ROPE | {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 12,
    },
    "dots1": _SMALL | _ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1, "sliding_window": None},
    "solar_open": _SMALL | _ROUTED | {"head_dim": 32},
    "exaone_moe": _SMALL | {
        "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "sliding_window": 16,
    },
    "minimax_m2": _SMALL | _FOUR | {"intermediate_size": 96, "head_dim": 32, "rotary_dim": 16},
    "hunyuan_v1_moe": _SMALL | {"intermediate_size": 96, "head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "ernie4_5_moe": _SMALL | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96},
    "youtu": _SMALL | {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 32,
    },
    "cwm": _SMALL | {"head_dim": 32, "sliding_window": 16},
    "ministral": _SMALL | {"head_dim": 32},
    "helium": _SMALL | {"head_dim": 32},
    "hyperclovax": _SMALL,
    "jais2": _SMALL,
    "apertus": _SMALL,
    "vaultgemma": _SMALL | {"head_dim": 32},
    "modernbert-decoder": {key: size for key, size in _SMALL.items() if "key_value" not in key} | {
        "local_attention": 16,
    },
    "phimoe": _SMALL | {"intermediate_size": 96, "num_local_experts": 4},
    "glm_moe_dsa": _SMALL | _ROUTED | _ROPE | _LATENT | {
        "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "index_n_heads": 2,
        "index_head_dim": 32, "index_topk": 12, "indexer_types": ["full", "full", "shared", "shared"],
    },
    "mistral4": _SMALL | _ROUTED | _LATENT | {
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "axk1": _SMALL | _ROUTED | _LATENT | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "hy_v3": _SMALL | {
        "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "mellum": _SMALL | {
        "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "dbrx": {
        "d_model": 128, "n_heads": 4, "n_layers": 3, "vocab_size": 1000, "max_seq_len": 256,
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere2_moe": _SMALL | _TOKENS | {
        "intermediate_size": 96, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "num_shared_experts": 1,
    },
    "afmoe": _SMALL | {
        "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
    },
    "flex_olmo": _SMALL | {"intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, **_TOKENS},
    "kolibri1": {key: size for key, size in _SMALL.items() if key != "intermediate_size"} | {
        "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "shared_expert_intermediate_size": 96,
    },
    "gemma3n_text": _SMALL | _TOKENS | {
        "head_dim": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 16, "laurel_rank": 8,
        "vocab_size_per_layer_input": 990, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "minicpm3": _SMALL | _LATENT,
    "nanochat": _SMALL,
    "bitnet": _SMALL,
    "codegen": {
        "n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 256, "rotary_dim": 16,
    },
    "granitemoeshared": _SMALL | _FOUR | {"intermediate_size": 96, "shared_intermediate_size": 96},
}  # fmt: skip

_ENCODER = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 130, "pad_token_id": 0,
}  # fmt: skip
# Trained to fill masks.
TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER | {"architectures": ["BertForMaskedLM"]},
    "roberta": _ENCODER | {"architectures": ["RobertaForMaskedLM"]},
    "xlm-roberta": _ENCODER | {"architectures": ["XLMRobertaForMaskedLM"]},
    "electra": _ENCODER | {"architectures": ["ElectraForMaskedLM"], "embedding_size": 64},
    "distilbert": {
        "architectures": ["DistilBertForMaskedLM"],
        "dim": 128,
        "hidden_dim": 256,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 130,
    },
    "esm": _ENCODER
    | {
        "architectures": ["EsmForMaskedLM"],
        "pad_token_id": 1,
        "mask_token_id": 32,
        "token_dropout": True,
        "position_embedding_type": "rotary",
    },
    "modernbert": _ENCODER | {"architectures": ["ModernBertForMaskedLM"], "local_attention": 16},
}
