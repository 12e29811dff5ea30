"""Published vision-language models, and how many parameters transformers 5.24 gives them on the meta device."""

from __future__ import annotations

from typing import Any

_SO400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CLIP = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
_SO400M_LAYERS = {key: _SO400M[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")} | {
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_LLAMA4_TOWER = {
    "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "vision_output_dim": 4096,
}  # fmt: skip
COUNTS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2.5-Omni-7B": (
        8_931_813_888,
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {
                "text_config": {
                    "model_type": "qwen2_5_omni_text", "hidden_size": 3584, "intermediate_size": 18944,
                    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
                },
                "vision_config": {
                    "model_type": "qwen2_5_omni_vision_encoder", "hidden_size": 1280, "intermediate_size": 3420,
                    "out_hidden_size": 3584, "depth": 32, "num_heads": 16,
                },
                "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "d_model": 1280, "output_dim": 3584},
            },
        },
    ),
    "Qwen3-Omni-30B-A3B": (
        31_719_205_488,
        {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {
                "model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "intermediate_size": 768,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "vocab_size": 152064,
            },
            "vision_config": {
                "model_type": "qwen3_omni_moe_vision_encoder", "out_hidden_size": 2048,
            },
            "audio_config": {"model_type": "qwen3_omni_moe_audio_encoder", "d_model": 1280, "output_dim": 2048},
        },
    ),
    "LLaVA-1.5-7B, its text model's sizes left out": (
        7_063_427_072,
        {
            "model_type": "llava", "vision_config": CLIP,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        },
    ),
    "LLaVA-1.6-Mistral-7B, its text model's sizes left out": (
        7_566_747_648,
        {
            "model_type": "llava_next", "vision_config": CLIP,
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
            "text_config": {"model_type": "mistral", "sliding_window": None, "vocab_size": 32064},
        },
    ),
    "Qwen2-VL-2B": (
        2_208_985_600,
        {
            "model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
        },
    ),
    "Qwen3-VL-8B": (
        8_767_123_696,
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
            },
            "vision_config": {"model_type": "qwen3_vl", "out_hidden_size": 4096},
        },
    ),
    "LLaVA-1.5-7B": (
        7_063_427_072,
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
                "num_hidden_layers": 32, "num_attention_heads": 32,
            },
        },
    ),
    "Gemma-3-4B": (
        4_300_079_472,
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
            },
        },
    ),
    "LLaVA-v1.6-Mistral-7B": (
        7_566_747_648,
        {
            "model_type": "llava_next",
            "text_config": {
                "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064, "sliding_window": None,
            },
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
            },
        },
    ),
    "LLaVA-OneVision-7B": (
        8_029_890_080,
        {
            "model_type": "llava_onevision",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152000,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_hidden_layers": 26, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "Pixtral-12B": (
        12_682_739_712,
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
                "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024,
            },
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
    ),
    "Mistral-Small-3.1-24B": (
        24_011_361_280,
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
                "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", "hidden_act": "silu", "image_size": 1540, "patch_size": 14,
            },
            "multimodal_projector_bias": False, "tie_word_embeddings": False,
        },
    ),
    "InternVL3-8B": (
        7_944_373_760,
        {
            "model_type": "internvl",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674,
            },
            "vision_config": {
                "model_type": "internvl_vision", "attention_bias": True,
            },
            "tie_word_embeddings": False,
        },
    ),
    "InternVL3-38B": (
        38_388_164_992,
        {
            "model_type": "internvl",
            "text_config": {
                "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 151674,
            },
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 3200, "intermediate_size": 12800,
                "num_hidden_layers": 45, "num_attention_heads": 25, "norm_type": "rms_norm", "use_qk_norm": True,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-VL-30B-A3B": (
        31_070_754_032,
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48,
                "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
            },
            "vision_config": {
                "model_type": "qwen3_vl_moe", "out_hidden_size": 2048,
            },
        },
    ),
    "PaliGemma-3B": (
        2_923_466_480,
        {
            "model_type": "paligemma", "projection_dim": 2048,
            "text_config": {
                "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
                "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 257216,
            },
            "vision_config": _SO400M,
        },
    ),
    "PaliGemma-2-10B": (
        9_662_638_832,
        {
            "model_type": "paligemma", "projection_dim": 3584,
            "text_config": {
                "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
                "num_hidden_layers": 42, "num_key_value_heads": 8, "vocab_size": 257216,
            },
            "vision_config": _SO400M,
        },
    ),
    "SmolVLM-Instruct": (
        2_246_272_880,
        {
            "model_type": "smolvlm", "scale_factor": 3,
            "text_config": {
                "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49155, "head_dim": 64,
            },
            "vision_config": _SO400M_LAYERS | {"model_type": "smolvlm_vision", "image_size": 384},
        },
    ),
    "Idefics3-8B-Llama3": (
        8_462_086_384,
        {
            "model_type": "idefics3", "scale_factor": 2,
            "text_config": {
                "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128259,
            },
            "vision_config": _SO400M_LAYERS | {"image_size": 364},
        },
    ),
    "Llama-3.2-11B-Vision, its text model's sizes left out": (
        10_670_220_835,
        {
            "model_type": "mllama", "text_config": {"model_type": "mllama_text_model"},
            "vision_config": {"model_type": "mllama_vision_model", "image_size": 560},
        },
    ),
    "Llama-3.2-90B-Vision": (
        88_593_355_323,
        {
            "model_type": "mllama",
            "text_config": {
                "model_type": "mllama_text_model", "hidden_size": 8192, "intermediate_size": 28672,
                "num_hidden_layers": 100, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
                "cross_attention_layers": list(range(3, 100, 5)),
            },
            "vision_config": {"model_type": "mllama_vision_model", "image_size": 560},
        },
    ),
    "Qwen3.5-9B": (
        9_409_813_744,
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
                "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320,
            },
            "vision_config": {"model_type": "qwen3_5", "out_hidden_size": 4096, "deepstack_visual_indexes": []},
        },
    ),
    "Qwen3.5-35B-A3B": (
        35_107_181_936,
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
                "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 248320,
            },
            "vision_config": {"model_type": "qwen3_5_moe", "out_hidden_size": 2048},
        },
    ),
    "GLM-4.1V-9B": (
        10_292_777_472,
        {
            "model_type": "glm4v", "tie_word_embeddings": False, "vision_config": {"model_type": "glm4v"},
            "text_config": {
                "model_type": "glm4v_text", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 2, "vocab_size": 151552,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "GLM-OCR": (
        1_107_405_824,
        {
            "model_type": "glm_ocr", "tie_word_embeddings": False, "vision_config": {"model_type": "glm_ocr_vision"},
            "text_config": {
                "model_type": "glm_ocr_text", "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 59392,
            },
        },
    ),
    "PaddleOCR-VL": (  # the text model's fields at the top, as its own code saves them
        799_695_472,
        {
            "model_type": "paddleocr_vl", "tie_word_embeddings": False, "vision_config": {"model_type": "paddleocr_vl"},
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424,
        },
    ),
    "GLM-4.5V": (
        107_710_927_360,
        {
            "model_type": "glm4v_moe", "tie_word_embeddings": False,
            "vision_config": {"model_type": "glm4v_moe", "intermediate_size": 10944},
            "text_config": {
                "model_type": "glm4v_moe_text", "hidden_size": 4096, "intermediate_size": 10944,
                "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 151552, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "Llama-4-Scout-17B-16E": (
        108_641_793_536,
        {
            "model_type": "llama4", "vision_config": _LLAMA4_TOWER,
            "text_config": {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
                "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 202048, "num_local_experts": 16,
            },
        },
    ),
    "Llama-4-Maverick-17B-128E": (
        401_583_781_376,
        {
            "model_type": "llama4", "vision_config": _LLAMA4_TOWER,
            "text_config": {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
                "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 202048, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False,
            },
        },
    ),
}  # fmt: skip
