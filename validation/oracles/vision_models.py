"""The vision-language models of vision.py: small ones of each family."""

from __future__ import annotations

from typing import Any

from validation.oracles.hybrids import DELTA, EXPERTS, SECTIONS
from validation.oracles.tiny_gemma import GEMMA4_VISION

TEXT = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
ROPE3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": 56, "patch_size": 14,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": 112, "patch_size": 14, "hidden_act": "silu",
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl_vision", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": [56, 56], "patch_size": [14, 14],
}  # fmt: skip
DEEP = {
    "depth": 7, "hidden_size": 48, "intermediate_size": 100, "num_heads": 3, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 3, 5],
}  # fmt: skip
PLAIN_TOWER = {name: value for name, value in DEEP.items() if name != "deepstack_visual_indexes"}
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
IDEFICS = {key: value for key, value in SIGLIP.items() if key != "vision_use_head"}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
FLASH, BOTH, EAGER = ("sdpa",), ("sdpa", "eager"), ("eager",)

SOUND = {
    "d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 96, "output_dim": 64,
    "num_mel_bins": 16, "max_source_positions": 100,
}  # fmt: skip

# name -> (attention implementations, config.json, image height and width)
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, int]]] = {
    "qwen2_5_vl": (
        BOTH,
        {
            "model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, **ROPE},
            "vision_config": {
                "model_type": "qwen2_5_vl_vision", "depth": 4, "hidden_size": 48, "intermediate_size": 100,
                "num_heads": 3, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3],
            },
        },
        (168, 196),
    ),
    "qwen2_vl": (
        BOTH,
        {
            "model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", **TEXT, **ROPE},
            "vision_config": {
                "model_type": "qwen2_vl_vision", "depth": 4, "embed_dim": 48, "num_heads": 3, "hidden_size": 64,
            },
        },
        (168, 196),
    ),
    "exaone4_5": (
        FLASH,
        {
            "model_type": "exaone4_5", "text_config": {"model_type": "exaone4", **TEXT, "sliding_window": 128},
            "vision_config": {
                "model_type": "exaone4_5_vision", "depth": 4, "hidden_size": 64, "intermediate_size": 100,
                "num_heads": 4, "num_key_value_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3],
            },
        },
        (168, 196),
    ),
    "qwen2_5_omni": (
        BOTH,
        {
            "model_type": "qwen2_5_omni_thinker", "text_config": {"model_type": "qwen2_5_omni_text", **TEXT, **ROPE},
            "vision_config": {
                "model_type": "qwen2_5_omni_vision_encoder", "depth": 4, "hidden_size": 48, "intermediate_size": 100,
                "num_heads": 3, "out_hidden_size": 64, "fullatt_block_indexes": [1, 3],
            },
            "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", **SOUND},
        },
        (168, 196),
    ),
    "qwen3_omni": (
        BOTH,
        {
            "model_type": "qwen3_omni_moe_thinker", "text_config": {
                "model_type": "qwen3_omni_moe_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, **ROPE3,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            },
            "vision_config": {"model_type": "qwen3_omni_moe_vision_encoder", **DEEP},
            "audio_config": {
                "model_type": "qwen3_omni_moe_audio_encoder", **SOUND, "downsample_hidden_size": 24,
            },
        },
        (160, 192),
    ),
    "qwen3_vl": (
        BOTH,
        {
            "model_type": "qwen3_vl",
            "text_config": {"model_type": "qwen3_vl_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, **ROPE3},
            "vision_config": {"model_type": "qwen3_vl_vision", **DEEP},
        },
        (160, 192),
    ),
    "qwen3_5": (
        BOTH,
        {
            "model_type": "qwen3_5", "tie_word_embeddings": True,
            "text_config": {"model_type": "qwen3_5_text", **TEXT, **DELTA, **SECTIONS},
            "vision_config": {"model_type": "qwen3_5_vision", **PLAIN_TOWER},
        },
        (160, 192),
    ),
    "qwen3_5_moe": (
        FLASH,
        {
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text", **TEXT, **DELTA, **EXPERTS, **SECTIONS},
            "vision_config": {"model_type": "qwen3_5_moe_vision", **PLAIN_TOWER},
        },
        (160, 192),
    ),
    "qwen3_vl_moe": (
        BOTH,
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, **ROPE3,
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [4],
            },
            "vision_config": {"model_type": "qwen3_vl_moe_vision", **DEEP},
        },
        (160, 192),
    ),
    "llava": (
        BOTH,
        {"model_type": "llava", "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP,
         "image_seq_length": 16},
        (56, 56),
    ),
    "llava_next": (
        BOTH,
        {"model_type": "llava_next", "text_config": {"model_type": "mistral", **TEXT}, "vision_config": CLIP,
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        (60, 100),
    ),
    "llava_next_video": (
        FLASH,
        {"model_type": "llava_next_video", "text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP,
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        (60, 100),
    ),
    "aya_vision": (
        FLASH,
        {"model_type": "aya_vision", "text_config": {"model_type": "cohere2", **TEXT, **TOKENS},
         "vision_config": SIGLIP},
        (56, 56),
    ),
    "cohere2_vision": (
        FLASH,
        {"model_type": "cohere2_vision", "text_config": {"model_type": "cohere2", **TEXT, **TOKENS},
         "vision_config": SIGLIP, "alignment_intermediate_size": 96},
        (56, 56),
    ),
    "llava_onevision": (
        BOTH,
        {"model_type": "llava_onevision", "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SIGLIP,
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]], "vision_aspect_ratio": "anyres_max_2"},
        (110, 100),
    ),
    "llava-pixtral": (
        BOTH,
        {"model_type": "llava", "text_config": {"model_type": "mistral", **TEXT, "head_dim": 32},
         "vision_config": PIXTRAL, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        (56, 112),
    ),
    "mistral3": (
        BOTH,
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", **TEXT, "head_dim": 32},
         "vision_config": PIXTRAL, "tie_word_embeddings": False},
        (112, 56),
    ),
    "ministral3": (
        FLASH,
        {"model_type": "mistral3", "vision_config": PIXTRAL, "tie_word_embeddings": False, "text_config":
         {"model_type": "ministral3", **TEXT, "head_dim": 32, "pad_token_id": 0}},
        (112, 56),
    ),
    "mistral4": (
        FLASH,
        {"model_type": "mistral3", "vision_config": PIXTRAL, "tie_word_embeddings": False, "text_config":
         {"model_type": "mistral4", **TEXT, "num_key_value_heads": 4, "pad_token_id": None, "q_lora_rank": 40,
          "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 8,
          "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2, "rope_parameters": {
              "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
              "llama_4_scaling_beta": 0.1}}},
        (112, 56),
    ),
    "lighton_ocr": (
        BOTH,
        {"model_type": "lighton_ocr", "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 32},
         "vision_config": PIXTRAL},
        (112, 56),
    ),
    "internvl": (
        BOTH,
        {"model_type": "internvl", "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": INTERNVL |
         {"attention_bias": True}, "image_seq_length": 4},
        (56, 56),
    ),
    "internvl-rms": (
        FLASH,
        {"model_type": "internvl", "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 32}, "vision_config":
         INTERNVL | {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False,
         "hidden_dropout_prob": 0.1}, "image_seq_length": 4, "tie_word_embeddings": False},
        (56, 56),
    ),
    "idefics3": (
        BOTH,
        {"model_type": "idefics3", "text_config": {"model_type": "llama", **TEXT}, "vision_config": IDEFICS |
         {"model_type": "idefics3_vision"}, "scale_factor": 2},
        (56, 112),
    ),
    "smolvlm": (
        BOTH,
        {"model_type": "smolvlm", "text_config": {"model_type": "llama", **TEXT}, "vision_config": IDEFICS |
         {"model_type": "smolvlm_vision"}, "scale_factor": 4, "tie_word_embeddings": True},
        (56, 56),
    ),
    "glm4v": (
        BOTH,
        {
            "model_type": "glm4v", "text_config": {
                "model_type": "glm4v_text", **TEXT, "pad_token_id": 0, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {
                "model_type": "glm4v_vision", "depth": 4, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 64,
                "intermediate_size": 100, "image_size": 56,
            },
        },
        (168, 196),
    ),
    "glm46v": (
        FLASH,
        {
            "model_type": "glm46v", "text_config": {
                "model_type": "glm4v_text", **TEXT, "pad_token_id": 0, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {
                "model_type": "glm4v_vision", "depth": 4, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 64,
                "intermediate_size": 100, "image_size": 56,
            },
        },
        (168, 196),
    ),
    "glm_ocr": (
        BOTH,
        {
            "model_type": "glm_ocr", "text_config": {
                "model_type": "glm_ocr_text", **TEXT, "head_dim": 24, "pad_token_id": 0, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 5, 5],
                },
            },
            "vision_config": {
                "model_type": "glm_ocr_vision", "depth": 4, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 64,
                "intermediate_size": 100,
            },
        },
        (168, 196),
    ),
    "glm4v_moe": (
        BOTH,
        {
            "model_type": "glm4v_moe", "text_config": {
                "model_type": "glm4v_moe_text", **TEXT, "pad_token_id": 0, "n_routed_experts": 8, "n_group": 2,
                "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {
                "model_type": "glm4v_moe_vision", "depth": 4, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 64,
                "intermediate_size": 100, "image_size": 56,
            },
        },
        (168, 196),
    ),
    "paddleocr_vl": (
        FLASH,
        {
            "model_type": "paddleocr_vl",
            "text_config": {"model_type": "paddleocr_vl_text", **TEXT, "head_dim": 32, "pad_token_id": 0, **ROPE3},
            "vision_config": {
                "model_type": "paddleocr_vl_vision", "hidden_size": 48, "intermediate_size": 100, "image_size": 56,
                "num_hidden_layers": 4, "num_attention_heads": 3,
            },
        },
        (168, 196),
    ),
    "llama4": (
        BOTH,
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text", **TEXT, "num_hidden_layers": 5, "head_dim": 32, "pad_token_id": 0,
                "intermediate_size": 48, "intermediate_size_mlp": 160, "num_local_experts": 4, "moe_layers": [1, 2, 3],
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            },
            "vision_config": {
                "model_type": "llama4_vision_model", "hidden_size": 48, "intermediate_size": 192,
                "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 56, "patch_size": 14,
                "projector_input_dim": 80, "projector_output_dim": 80, "vision_output_dim": 80,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        (56, 112),
    ),
    "mllama": (
        BOTH,
        {
            "model_type": "mllama",
            "text_config": {
                "model_type": "mllama_text_model", **TEXT, "num_hidden_layers": 8, "cross_attention_layers": [1, 3, 5],
                "pad_token_id": 0,
            },
            "vision_config": {
                "model_type": "mllama_vision_model", "hidden_size": 48, "intermediate_size": 96,
                "num_hidden_layers": 4, "num_global_layers": 2, "attention_heads": 3, "image_size": 56,
                "patch_size": 14, "intermediate_layers_indices": [0, 2], "vision_output_dim": 144,
            },
        },
        (56, 56),
    ),
    "paligemma": (
        EAGER,
        {
            "model_type": "paligemma", "text_config": {"model_type": "gemma", **TEXT, "head_dim": 32},
            "vision_config": SIGLIP, "projection_dim": 64, "image_token_index": 198,
        },
        (56, 56),
    ),
    "paligemma2": (
        EAGER,
        {
            "model_type": "paligemma", "text_config": {"model_type": "gemma2", **TEXT, "head_dim": 32,
            "sliding_window": 32}, "vision_config": SIGLIP, "projection_dim": 64, "image_token_index": 198,
        },
        (56, 56),
    ),
    "gemma3": (
        EAGER,
        {
            "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 32,
            "sliding_window": 32, "sliding_window_pattern": 2}, "vision_config": SIGLIP, "mm_tokens_per_image": 4,
            "image_token_index": 198,
        },
        (56, 56),
    ),
    **GEMMA4_VISION,
}  # fmt: skip
