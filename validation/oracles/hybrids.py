"""What decoders whose layers are not all attention do in one step, as families.py has it for the others.

    python -m validation.oracles.hybrids [NAME ...] --out FILE.json.gz

None of flash-linear-attention, mamba_ssm, causal_conv1d is installed. FLOPs leave out convolutions with one kernel
for each channel, which are bound by memory, and which torch counts as if they had all channels backward.
"""

from __future__ import annotations

import sys
from typing import Any

from validation.oracles.encoder_configs import BOTH, EAGER, FLASH
from validation.oracles.families import main
from validation.oracles.family_configs import SMALL

DELTA = {  # three layers of linear attention, one of full attention, and one more
    **SMALL, "num_hidden_layers": 5, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96,
}  # fmt: skip
SECTIONS = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
STATE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 32, "state_size": 24, "n_groups": 2,
    "chunk_size": 16, "vocab_size": 199,
}  # fmt: skip
MIXER = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16}
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "lfm2": (
        BOTH,
        {
            "model_type": "lfm2", **SMALL, "layer_types": ["conv", "conv", "full_attention"], "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.1,
        },
    ),
    "lfm2-biases": (FLASH, {"model_type": "lfm2", **SMALL, "full_attn_idxs": [0, 2], "conv_bias": True}),
    "lfm2_moe": (
        BOTH,
        {
            "model_type": "lfm2_moe", **SMALL, "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        },
    ),
    "qwen3_next": (BOTH, {"model_type": "qwen3_next", **DELTA, **EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": (BOTH, {"model_type": "qwen3_5_text", **DELTA, **SECTIONS}),
    "qwen3_5-heads": (
        FLASH,
        {
            "model_type": "qwen3_5_text", **DELTA, **SECTIONS, "linear_num_key_heads": 4, "attention_bias": True,
            "tie_word_embeddings": True, "hidden_act": "gelu",
            "layer_types": ["full_attention", *["linear_attention"] * 4],
        },
    ),
    "qwen3_5_moe": (BOTH, {"model_type": "qwen3_5_moe_text", **DELTA, **EXPERTS, **SECTIONS}),
    "mamba2": (EAGER, {"model_type": "mamba2", **STATE}),
    "mamba2-narrow": (
        EAGER,
        {"model_type": "mamba2", **STATE, "residual_in_fp32": False, "chunk_size": 48, "use_bias": True, "n_groups": 4},
    ),
    "nemotron_h": (
        BOTH,
        {
            "model_type": "nemotron_h", **SMALL, **NEMOTRON, "hybrid_override_pattern": "M-M*", "head_dim": 32,
            "n_groups": 2, "chunk_size": 16,
        },
    ),
    "nemotron_h-moe": (
        FLASH,
        {
            "model_type": "nemotron_h", **SMALL, **NEMOTRON, "layers_block_type": ["moe", "mamba", "attention", "moe"],
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1,
            "moe_shared_expert_intermediate_size": 80, "n_groups": 4, "chunk_size": 48, "use_bias": True,
        },
    ),
    "nemotron_h-latent": (
        FLASH,
        {
            "model_type": "nemotron_h", **SMALL, **NEMOTRON, "hybrid_override_pattern": "ME*E", "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_latent_size": 40, "mlp_bias": True,
            "moe_shared_expert_intermediate_size": 80, "n_groups": 1, "chunk_size": 64,
        },
    ),
    "granitemoehybrid": (
        BOTH,
        {
            "model_type": "granitemoehybrid", **SMALL, **MIXER, "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 80, "pad_token_id": 0,
            "position_embedding_type": "nope",
        },
    ),
    "granitemoehybrid-dense": (
        FLASH,
        {
            "model_type": "granitemoehybrid", **SMALL, **MIXER, "layer_types": ["attention", "mamba", "mamba"],
            "num_local_experts": 0, "shared_intermediate_size": 176, "pad_token_id": 0, "attention_bias": True,
            "position_embedding_type": "rope", "mamba_proj_bias": True, "tie_word_embeddings": True,
        },
    ),
    "bamba": (BOTH, {"model_type": "bamba", **SMALL, **MIXER, "attn_layer_indices": [1]}),
    "falcon_h1": (BOTH, {"model_type": "falcon_h1", **SMALL, **MIXER, "mamba_d_ssm": 128}),
    "falcon_h1-norm": (
        FLASH,
        {
            "model_type": "falcon_h1", **SMALL, **MIXER, "mamba_d_ssm": 96, "mamba_rms_norm": True,
            "mamba_norm_before_gate": False, "projectors_bias": True, "mamba_chunk_size": 48,
        },
    ),
    "falcon_h1-norm-first": (
        FLASH, {"model_type": "falcon_h1", **SMALL, **MIXER, "mamba_d_ssm": 96, "mamba_rms_norm": True},
    ),
    "mamba2-chunk": (EAGER, {"model_type": "mamba2", **STATE, "chunk_size": 64, "use_conv_bias": False, "n_groups": 1}),
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1:], __doc__, CONFIGS)
