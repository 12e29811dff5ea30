"""Published models of families near Llama, and how many parameters transformers 5.24 gives them on the meta device."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "StarCoder2-3B": (
        3_030_371_328,
        {
            "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers":
            30, "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
            "max_position_embeddings": 16384, "sliding_window": 4096, "use_bias": True, "hidden_act":
            "gelu_pytorch_tanh",
        },
    ),
    "StableLM-3B-4E1T": (
        2_795_443_200,
        {
            "model_type": "stablelm", "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 50304,
            "max_position_embeddings": 4096,
        },
    ),
    "StableLM-2-12B": (
        12_143_185_920,
        {
            "model_type": "stablelm", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352,
            "max_position_embeddings": 4096, "use_parallel_residual": True, "qk_layernorm": True,
        },
    ),
    "OLMo-7B": (
        6_888_095_744,
        {
            "model_type": "olmo", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 50304,
        },
    ),
    "OLMo-1B": (
        1_176_764_416,
        {
            "model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "tie_word_embeddings":
            True,
        },
    ),
    "OLMo-3-7B": (
        7_298_011_136,
        {
            "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278,
        },
    ),
    "Granite-3.0-8B": (
        8_170_848_256,
        {
            "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155, "tie_word_embeddings":
            True,
        },
    ),
    "Command-R": (
        34_980_831_232,
        {
            "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000, "use_qk_norm": False,
        },
    ),
    "Command-R7B": (
        8_028_033_024,
        {
            "model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256000, "head_dim": 128,
        },
    ),
    "GLM-4-9B-0414": (
        9_400_279_040,
        {
            "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        },
    ),
    "GLM-4-9B-hf": (
        9_399_951_360,
        {
            "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        },
    ),
    "GPT-Neo-1.3B": (
        1_315_575_808,
        {
            "model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size":
            50257, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]],
        },
    ),
    "GPT-Neo-125M": (
        125_198_592,
        {
            "model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50257,
            "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 6]],
        },
    ),
    "StarCoder": (
        15_517_456_384,
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
            "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
        },
    ),
    "Seed-OSS-36B": (
        36_151_104_512,
        {
            "model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
        },
    ),
    "EXAONE-4.0-32B": (
        32_003_216_384,
        {
            "model_type": "exaone4", "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 102400, "sliding_window": 4096,
        },
    ),
    "EXAONE-4.0-1.2B": (
        1_279_391_488,
        {
            "model_type": "exaone4", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 102400, "sliding_window": None,
            "tie_word_embeddings": True, "layer_types": ["full_attention"] * 30,
        },
    ),
    "ERNIE-4.5-0.3B": (
        360_748_032,
        {
            "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424,
        },
    ),
    "Hunyuan-7B": (
        7_504_568_320,
        {
            "model_type": "hunyuan_v1_dense", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128167, "tie_word_embeddings": True,
        },
    ),
    "Nemotron-4-Minitron-4B": (
        4_190_509_056,
        {
            "model_type": "nemotron", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 32,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000,
        },
    ),
    "AFM-4.5B": (
        4_619_179_520,
        {
            "model_type": "arcee", "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 36,
            "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128003,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        {
            "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "OLMoE-1B-7B": (
        6_919_161_856,
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "ESM-2-3B": (
        2_839_005_634,
        {
            "model_type": "esm", "architectures": ["EsmForMaskedLM"], "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 36, "num_attention_heads": 40, "vocab_size": 33, "pad_token_id": 1, "mask_token_id":
            32, "position_embedding_type": "rotary", "token_dropout": True,
        },
    ),
    "distilbert-base-uncased": (
        66_985_530,
        {
            "model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "dim": 768, "hidden_dim": 3072,
            "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
        },
    ),
    "bert-base-uncased": (
        109_514_298,
        {
            "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768,
            "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "vocab_size": 30522,
        },
    ),
    "roberta-base": (
        124_697_433,
        {
            "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 768,
            "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
            "num_local_experts": 32, "experts_per_token": 4, "sliding_window": 128,
        },
    ),
    # The hub counts the bias of V3's router, a buffer in transformers, as well: 58 * 256 more, 671_026_419_200.
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        {
            "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        },
    ),
    "DeepSeek-V2": (
        235_741_434_880,
        {
            "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 102400, "q_lora_rank": 1536,
            "moe_intermediate_size": 1536, "n_shared_experts": 2, "n_routed_experts": 160, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        },
    ),
    "DeepSeek-V3": (
        671_026_404_352,
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
            "topk_method": "noaux_tc", "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        },
    ),
    "DeepSeek-V3.2": (
        671_877_929_216,
        {
            "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
            "topk_method": "noaux_tc", "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "scoring_func": "sigmoid",
        },
    ),
    "Moonlight-16B-A3B": (
        15_960_108_544,
        {
            "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "q_lora_rank": None,
            "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
        },
    ),
    "GLM-4.5-Air": (
        106_852_245_504,
        {
            "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "attention_bias": True,
            "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
    ),
    "Llama-4-Scout (text)": (
        107_769_861_120,
        {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
            "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 202048, "num_local_experts": 16, "interleave_moe_layer_step": 1,
        },
    ),
    "Ministral-3-8B (text)": (
        8_489_553_920,
        {
            "model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "vocab_size": 131072,
        },
    ),
    "granite-3.1-3b-a800m": (
        3_298_793_472,
        {
            "model_type": "granitemoe", "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32,
            "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 49155, "num_local_experts": 40,
            "num_experts_per_tok": 8, "tie_word_embeddings": True,
        },
    ),
    "Kimi-K2": (
        1_026_408_209_408,
        {
            "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384,
            "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
        },
    ),
}  # fmt: skip
