"""Small models of every family, which `families` runs: the attention implementations each has, and its config.json."""

from __future__ import annotations

from typing import Any

from validation.oracles.encoder_configs import BOTH, EAGER, ENCODER_CONFIGS, FLASH, PLAIN, TOKENS
from validation.oracles.tiny_gemma import GEMMA4_CONFIGS

SMALL = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
WINDOWS = {"num_hidden_layers": 5, "sliding_window": 32}  # four layers with one, one without
EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe",
    "glm4_moe_lite", "dots1", "solar_open", "exaone_moe", "minimax_m2", "hunyuan_v1_moe", "granitemoeshared",
    "ernie4_5_moe", "phimoe", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "gemma4_text", "nemotron_h",
    "granitemoehybrid", "deepseek_v32", "glm_moe_dsa", "mistral4", "axk1", "hy_v3", "mellum", "afmoe", "flex_olmo",
    "kolibri1", "cohere2_moe",
)  # fmt: skip
UNLISTED = ("mistral4",)  # text models that AutoModelForImageTextToText knows alone
LATENT = {  # four heads of 24 + 8, values of 16
    **PLAIN, "num_key_value_heads": 4, "intermediate_size": 176, "q_lora_rank": 40, "kv_lora_rank": 32,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
}  # fmt: skip
GEMMA3N = {
    "head_dim": 32, "sliding_window": 96, "vocab_size_per_layer_input": 190, "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "pad_token_id": 0,
}  # fmt: skip

PADDED = ("padded", "sdpa", "eager")


# name -> (attention implementations that the family has, config.json)
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama": (BOTH, {"model_type": "llama", **SMALL}),
    "llama-biases": (FLASH, {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True}),
    "mistral": (BOTH, {"model_type": "mistral", **SMALL, "head_dim": 32, "sliding_window": None}),
    "qwen2-tied": (BOTH, {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True}),
    "qwen3": (BOTH, {"model_type": "qwen3", **SMALL, "head_dim": 32}),
    "smollm3": (BOTH, {"model_type": "smollm3", **SMALL, "num_hidden_layers": 5, "pad_token_id": 0}),
    "olmo2": (BOTH, {"model_type": "olmo2", **SMALL, "pad_token_id": 0}),
    "gemma": (BOTH, {"model_type": "gemma", **SMALL, "head_dim": 32}),
    "gemma2": (EAGER, {"model_type": "gemma2", **SMALL, "head_dim": 32}),
    "gemma3": (FLASH, {"model_type": "gemma3_text", **SMALL, "head_dim": 32, "sliding_window_pattern": 2}),
    "mistral-windows": (BOTH, {"model_type": "mistral", **SMALL, "head_dim": 32, "sliding_window": 32}),
    "qwen2-windows": (
        BOTH, {"model_type": "qwen2", **SMALL, **WINDOWS, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma3-windows": (
        FLASH, {"model_type": "gemma3_text", **SMALL, **WINDOWS, "head_dim": 32, "sliding_window_pattern": 2},
    ),
    "phi3-windows": (FLASH, {"model_type": "phi3", **SMALL, "pad_token_id": 0, "sliding_window": 32}),
    "starcoder2-windows": (FLASH, {"model_type": "starcoder2", **SMALL, "sliding_window": 32}),
    "mixtral-windows": (
        FLASH, {
            "model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        },
    ),
    "mixtral": (BOTH, {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        BOTH,
        {
            "model_type": "qwen3_moe", **SMALL, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "mlp_only_layers": [1],
        },
    ),
    "gpt2": (
        BOTH, {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128},
    ),
    "gptj": (
        BOTH,
        {
            "model_type": "gptj", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128,
            "rotary_dim": 8,
        },
    ),
    "gpt_neox": (BOTH, {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 256}),
    "gpt_neox-sequential": (
        FLASH, {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 256, "use_parallel_residual": False},
    ),
    "opt": (BOTH, {"model_type": "opt", **PLAIN, "ffn_dim": 256, "word_embed_proj_dim": 64}),
    "opt-post-norm": (
        FLASH, {"model_type": "opt", **PLAIN, "ffn_dim": 256, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "phi": (BOTH, {"model_type": "phi", **PLAIN, "intermediate_size": 256}),
    "phi-qk-norm": (FLASH, {"model_type": "phi", **PLAIN, "intermediate_size": 256, "qk_layernorm": True}),
    "phi3": (BOTH, {"model_type": "phi3", **SMALL, "pad_token_id": 0}),
    "falcon-7b": (FLASH, {"model_type": "falcon", **PLAIN, "multi_query": True, "parallel_attn": True}),
    "falcon-40b": (FLASH, {"model_type": "falcon", **PLAIN, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-sequential": (
        FLASH, {"model_type": "falcon", **PLAIN, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": (
        EAGER, {"model_type": "mpt", "d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 199, "max_seq_len": 128},
    ),
    "bloom": (EAGER, {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199}),
    "qwen2_moe": (
        BOTH,
        {
            "model_type": "qwen2_moe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96, "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        BOTH,
        {
            "model_type": "olmoe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
            "clip_qkv": 8.0,
        },
    ),
    **ENCODER_CONFIGS,
    "gpt_oss": (
        EAGER,
        {
            "model_type": "gpt_oss", **SMALL, **TOKENS, "head_dim": 32, "num_hidden_layers": 4, "num_local_experts": 4,
            "num_experts_per_tok": 2, "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "olmo": (BOTH, {"model_type": "olmo", **SMALL, "pad_token_id": 0}),
    "olmo-clip": (FLASH, {"model_type": "olmo", **SMALL, "pad_token_id": 0, "clip_qkv": 8.0}),
    "olmo3": (FLASH, {"model_type": "olmo3", **SMALL, "pad_token_id": 0, **WINDOWS}),
    "granite": (BOTH, {"model_type": "granite", **SMALL, "pad_token_id": 0}),
    "cohere": (BOTH, {"model_type": "cohere", **SMALL, **TOKENS}),
    "cohere-qk-norm": (FLASH, {"model_type": "cohere", **SMALL, **TOKENS, "use_qk_norm": True}),
    "cohere2": (FLASH, {"model_type": "cohere2", **SMALL, **TOKENS, **WINDOWS}),
    "glm": (BOTH, {"model_type": "glm", **SMALL, "head_dim": 32, "pad_token_id": 0}),
    "glm4": (BOTH, {"model_type": "glm4", **SMALL, "head_dim": 32, "pad_token_id": 0}),
    "ernie4_5": (BOTH, {"model_type": "ernie4_5", **SMALL, "head_dim": 32}),
    "seed_oss": (
        BOTH, {"model_type": "seed_oss", **SMALL, "head_dim": 32, "residual_dropout": 0.1, "attention_dropout": 0.0},
    ),
    "hunyuan": (BOTH, {"model_type": "hunyuan_v1_dense", **SMALL, "head_dim": 32}),
    "exaone4": (FLASH, {"model_type": "exaone4", **SMALL, **WINDOWS}),
    "arcee": (BOTH, {"model_type": "arcee", **SMALL}),
    "nemotron": (BOTH, {"model_type": "nemotron", **SMALL}),
    "ministral3": (
        BOTH,
        {
            "model_type": "ministral3", **SMALL, **TOKENS, "head_dim": 32, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "stablelm": (BOTH, {"model_type": "stablelm", **SMALL, "use_qkv_bias": True}),
    "stablelm-qk-norm": (
        FLASH, {"model_type": "stablelm", **SMALL, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": (
        BOTH, {"model_type": "starcoder2", **SMALL, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    ),
    "gpt_neo": (
        EAGER,
        {
            "model_type": "gpt_neo", "hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 199,
            "max_position_embeddings": 128, "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gpt_bigcode": (
        BOTH,
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128},
    ),
    "deepseek_v2-lite": (PADDED, {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None}),
    "deepseek_v2": (
        PADDED,
        {
            "model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "attention_bias": True,
        },
    ),
    "deepseek_v3": (PADDED, {"model_type": "deepseek_v3", **LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-halves": (
        FLASH,
        {
            "model_type": "deepseek_v3", **LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
            "rope_interleave": False,
        },
    ),
    "glm4_moe": (
        BOTH,
        {
            "model_type": "glm4_moe", **SMALL, "head_dim": 32, "moe_intermediate_size": 48, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0,
        },
    ),
    "llama4": (
        BOTH,
        {
            "model_type": "llama4_text", **SMALL, "num_hidden_layers": 5, "head_dim": 32, "intermediate_size_mlp": 160,
            "intermediate_size": 48, "num_local_experts": 4, "moe_layers": [1, 2, 3, 4], "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "granitemoe": (
        BOTH,
        {"model_type": "granitemoe", **SMALL, "num_local_experts": 4, "pad_token_id": 0, "num_experts_per_tok": 2},
    ),
    "glm4_moe_lite": (
        PADDED,
        {"model_type": "glm4_moe_lite", **LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6}},
    ),
    "dots1": (BOTH, {"model_type": "dots1", **SMALL, **ROUTED, "head_dim": 32, "first_k_dense_replace": 1}),
    "dots1-windows": (
        FLASH,
        {
            "model_type": "dots1", **SMALL, **ROUTED, **WINDOWS, "max_window_layers": 1, "n_group": 4, "topk_group": 2,
            "norm_topk_prob": True, "attention_bias": True,
        },
    ),
    "solar_open": (BOTH, {"model_type": "solar_open", **SMALL, **ROUTED, "head_dim": 32, "attention_bias": True}),
    "exaone_moe": (
        FLASH,
        {
            "model_type": "exaone_moe", **SMALL, **WINDOWS, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "num_shared_experts": 2,
        },
    ),
    "minimax_m2": (
        BOTH,
        {
            "model_type": "minimax_m2", **SMALL, "head_dim": 32, "rotary_dim": 16, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "hunyuan_v1_moe": (
        BOTH, {"model_type": "hunyuan_v1_moe", **SMALL, "head_dim": 32, "num_experts": 4, "moe_topk": 2},
    ),
    "ernie4_5_moe": (
        BOTH,
        {
            "model_type": "ernie4_5_moe", **SMALL, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
        },
    ),
    "ernie4_5_moe-alone": (
        FLASH,
        {
            "model_type": "ernie4_5_moe", **SMALL, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48,
            "moe_layer_interval": 2, "moe_num_shared_experts": 0, "use_bias": True, "tie_word_embeddings": False,
        },
    ),
    "granitemoeshared": (
        BOTH,
        {
            "model_type": "granitemoeshared", **SMALL, "num_local_experts": 4, "pad_token_id": 0,
            "num_experts_per_tok": 2, "shared_intermediate_size": 96,
        },
    ),
    "deepseek_v32": (
        BOTH,
        {"model_type": "deepseek_v32", **LATENT, "n_group": 4, "topk_group": 2, "index_topk": 24, "index_head_dim": 20,
         "index_n_heads": 2},
    ),
    "deepseek_v32-heads": (
        BOTH,
        {"model_type": "deepseek_v32", **LATENT, "n_group": 1, "topk_group": 1, "index_head_dim": 32,
         "index_n_heads": 16, "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_bias": True},
    ),
    "glm_moe_dsa": (
        BOTH,
        {"model_type": "glm_moe_dsa", **LATENT, "num_hidden_layers": 5, "index_topk": 24, "index_head_dim": 20,
         "index_n_heads": 2, "indexer_types": ["full", "full", "shared", "shared", "full"],
         "pad_token_id": None},
    ),
    "mistral4": (
        PADDED,
        {"model_type": "mistral4", **LATENT, "n_group": 4, "topk_group": 2, "pad_token_id": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
            "llama_4_scaling_beta": 0.1}},
    ),
    "axk1": (PADDED, {"model_type": "axk1", **LATENT, **TOKENS, "n_group": 4, "topk_group": 2}),
    "hy_v3": (
        BOTH, {"model_type": "hy_v3", **SMALL, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 48},
    ),
    "hy_v3-narrow": (
        FLASH, {"model_type": "hy_v3", **SMALL, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 48, "num_shared_experts": 2, "enable_moe_fp32_combine": False,
                "attention_bias": True, "mlp_bias": True},
    ),
    "mellum": (
        BOTH, {"model_type": "mellum", **SMALL, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 48},
    ),
    "mellum-windows": (
        FLASH, {"model_type": "mellum", **SMALL, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 48, "sliding_window": 32, "layer_types": [
                    "full_attention", "sliding_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "afmoe": (
        FLASH, {"model_type": "afmoe", **SMALL, **WINDOWS, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 48, "mup_enabled": True},
    ),
    "flex_olmo": (
        BOTH, {"model_type": "flex_olmo", **SMALL, **TOKENS, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "kolibri1": (
        FLASH, {"model_type": "kolibri1", **SMALL, **WINDOWS, "head_dim": 32, "num_experts": 8,
                "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
                "norm_topk_prob": True},
    ),
    "cohere2_moe": (
        BOTH, {"model_type": "cohere2_moe", **SMALL, **TOKENS, **WINDOWS, "head_dim": 32, "num_experts": 4,
               "num_experts_per_tok": 2, "num_shared_experts": 2},
    ),
    "cohere2_moe-dense": (
        FLASH, {"model_type": "cohere2_moe", **SMALL, **TOKENS, **WINDOWS, "head_dim": 32, "num_experts": 4,
                "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
                "prefix_dense_intermediate_size": 160, "expert_selection_fn": "sigmoid", "attention_bias": True,
                "shared_expert_combination_strategy": "sum"},
    ),
    "dbrx": (
        EAGER, {"model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 199,
                "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 5e5}, "ffn_config": {
                    "ffn_hidden_size": 48, "moe_num_experts": 5, "moe_top_k": 2, "moe_jitter_eps": 0.01}},
    ),
    "minicpm3": (
        PADDED, {"model_type": "minicpm3", **{key: LATENT[key] for key in LATENT if "expert" not in key and key not in (
            "first_k_dense_replace", "moe_intermediate_size")}, "scale_emb": 12.0},  # 12: another 2 bytes, of a cast
    ),
    "nanochat": (BOTH, {"model_type": "nanochat", **SMALL}),
    "bitnet": (BOTH, {"model_type": "bitnet", **SMALL}),
    "codegen": (
        BOTH, {"model_type": "codegen", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128,
               "rotary_dim": 8},
    ),
    "youtu": (
        PADDED, {"model_type": "youtu", **{key: LATENT[key] for key in LATENT if "expert" not in key and key not in (
            "first_k_dense_replace", "moe_intermediate_size")}},
    ),
    "cwm": (FLASH, {"model_type": "cwm", **SMALL, **TOKENS, **WINDOWS, "head_dim": 32}),
    "ministral": (BOTH, {"model_type": "ministral", **SMALL, "head_dim": 32}),
    "ministral-types": (
        FLASH, {"model_type": "ministral", **SMALL, "head_dim": 32, "sliding_window": 32, "layer_types": [
            "full_attention", "sliding_attention", "full_attention"]},
    ),
    "helium": (BOTH, {"model_type": "helium", **SMALL, "head_dim": 16, "pad_token_id": 0}),
    "hyperclovax": (BOTH, {"model_type": "hyperclovax", **SMALL, "pad_token_id": 0}),
    "hyperclovax-pre-norm": (
        FLASH, {"model_type": "hyperclovax", **SMALL, "pad_token_id": 0, "use_post_norm": False, "mlp_bias": True},
    ),
    "jais2": (BOTH, {"model_type": "jais2", **SMALL}),
    "apertus": (BOTH, {"model_type": "apertus", **SMALL, "pad_token_id": 0, "attention_bias": True}),
    "phimoe": (BOTH, {"model_type": "phimoe", **SMALL, "num_local_experts": 4, "lm_head_bias": True}),
    "phimoe-noise": (
        FLASH, {"model_type": "phimoe", **SMALL, "num_local_experts": 4, "input_jitter_noise": 0.01,
                "attention_bias": True},
    ),
    "vaultgemma": (EAGER, {"model_type": "vaultgemma", **SMALL, "head_dim": 32}),
    "gpt_bigcode-heads": (
        FLASH,
        {
            "model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128,
            "multi_query": False,
        },
    ),
    "gemma3n": (
        FLASH,
        {"model_type": "gemma3n_text", **SMALL, **TOKENS, **GEMMA3N, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
         "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
         "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma3n-repeated": (  # layers like the first one behind it
        FLASH,
        {"model_type": "gemma3n_text", **SMALL, **TOKENS, **GEMMA3N, "num_hidden_layers": 8, "num_kv_shared_layers": 0,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2},
    ),
    **GEMMA4_CONFIGS,
}  # fmt: skip
