"""Models of several parts that recordings are made of, as models.py has the decoders."""

from __future__ import annotations

from typing import Any

from validation.oracles.tiny_gemma import TINY_GEMMA_VISION
from validation.oracles.tiny_hybrid import TINY_HYBRIDS

# Models with an encoder and a decoder, whose labels are half as long.
_BART = {
    "d_model": 256, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 1000,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 688, "decoder_ffn_dim": 688, "max_position_embeddings": 64,
    "dropout": 0.0, "decoder_start_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY_PAIRS: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 256, "d_kv": 32, "d_ff": 688, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 8,
        "vocab_size": 1000, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    },
    "whisper": {
        "d_model": 256, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 1000,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 688, "decoder_ffn_dim": 688, "num_mel_bins": 20,
        "max_source_positions": 32, "max_target_positions": 48, "decoder_start_token_id": 1, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), _BART),
    "m2m_100": _BART | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "umt5": {
        "d_model": 256, "d_kv": 32, "d_ff": 688, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 8,
        "vocab_size": 1000, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
}  # fmt: skip

_TEXT = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip
_IDEFICS = {
    "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_SECTIONS = {
    "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
}  # fmt: skip
_SOUND = {
    "d_model": 96, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 256, "output_dim": 256,
    "num_mel_bins": 16, "max_source_positions": 100,
}  # fmt: skip
TINY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3_vl": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
        },
    },
    **{
        kind: {
            "image_token_id": 999,
            "tie_word_embeddings": False,
            "text_config": TINY_HYBRIDS[f"{kind}_text"],
            "vision_config": {
                "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 128,
                "num_position_embeddings": 64,
            },
        }
        for kind in ("qwen3_5", "qwen3_5_moe")
    },
    "qwen3_vl_moe": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
           "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [1]},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
        },
    },
    "mistral3": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "hidden_act": "silu",
        },
    },
    "lighton_ocr": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "qwen3", "head_dim": 32},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "hidden_act": "silu",
        },
    },
    "aya_vision": {
        "image_token_index": 999,
        "tie_word_embeddings": True,
        "text_config": _TEXT | {
            "model_type": "cohere2", "head_dim": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
        },
        "vision_config": _IDEFICS | {"model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "exaone4_5": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "exaone4", "head_dim": 32, "sliding_window": 16},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "num_key_value_heads": 2,
            "out_hidden_size": 256, "fullatt_block_indexes": [1, 3],
        },
    },
    "internvl": {
        "image_token_id": 999,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "internvl_vision", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True,
        },
    },
    "idefics3": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _IDEFICS,
    },
    "smolvlm": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _IDEFICS,
    },
    "glm4v": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {
            "pad_token_id": 0, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "depth": 4, "hidden_size": 160, "num_heads": 4, "out_hidden_size": 256, "intermediate_size": 400,
            "image_size": 56,
        },
    },
    "glm_ocr": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {
            "pad_token_id": 0, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6],
            },
        },
        "vision_config": {
            "depth": 4, "hidden_size": 160, "num_heads": 4, "out_hidden_size": 256, "intermediate_size": 400,
        },
    },
    "paddleocr_vl": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | _SECTIONS | {"pad_token_id": 0},
        "vision_config": {
            "num_hidden_layers": 4, "hidden_size": 160, "num_attention_heads": 4, "intermediate_size": 400,
            "image_size": 56,
        },
    },
    "glm4v_moe": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {
            "pad_token_id": 0, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
            "first_k_dense_replace": 1, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "depth": 4, "hidden_size": 160, "num_heads": 4, "out_hidden_size": 256, "intermediate_size": 400,
            "image_size": 56,
        },
    },
    "glm46v": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {
            "model_type": "glm4v_text", "pad_token_id": 0, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "model_type": "glm4v_vision", "depth": 4, "hidden_size": 160, "num_heads": 4, "out_hidden_size": 256,
            "intermediate_size": 400, "image_size": 56,
        },
    },
    "qwen2_5_omni_thinker": {
        "image_token_id": 999, "video_token_id": 998, "audio_token_id": 997,
        "tie_word_embeddings": False,
        "text_config": _TEXT | _SECTIONS,
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 400, "num_heads": 4, "out_hidden_size": 256,
            "fullatt_block_indexes": [1, 3],
        },
        "audio_config": _SOUND,
    },
    "qwen3_omni_moe_thinker": {
        "image_token_id": 999, "video_token_id": 998, "audio_token_id": 997,
        "tie_word_embeddings": False,
        "text_config": _TEXT | _SECTIONS | {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        },
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 400, "num_heads": 4, "out_hidden_size": 256,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
        },
        "audio_config": _SOUND | {"downsample_hidden_size": 24},
    },
    "llama4": {
        "image_token_index": 999,
        "text_config": _TEXT | {
            "head_dim": 32, "intermediate_size": 96, "intermediate_size_mlp": 256, "num_local_experts": 4,
            "moe_layers": [1, 2], "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "vision_config": {
            "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
            "image_size": 56, "patch_size": 14, "projector_input_dim": 112, "projector_output_dim": 112,
            "vision_output_dim": 112, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "mllama": {
        "image_token_index": 1000,
        "text_config": _TEXT | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": 0},
        "vision_config": {
            "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4, "num_global_layers": 2,
            "attention_heads": 4, "image_size": 56, "patch_size": 14, "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 480,
        },
    },
    "paligemma": {
        "image_token_index": 999,
        "projection_dim": 256,
        "text_config": _TEXT | {"model_type": "gemma", "head_dim": 32},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 28, "vision_use_head": False,
        },
    },
    "llava_onevision": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[56, 56], [28, 56]],
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_use_head": False,
        },
    },
    "llava_next": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[56, 56], [28, 56]],
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
        },
    },
    "llava": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 28,
        },
    },
    **TINY_GEMMA_VISION,
}  # fmt: skip
