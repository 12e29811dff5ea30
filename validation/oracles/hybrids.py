"""What decoders whose layers are not all attention do in one step, as families.py has it for the others.

    python -m validation.oracles.hybrids [NAME ...] --out FILE.json.gz

None of flash-linear-attention, mamba_ssm, causal_conv1d is installed. FLOPs leave out convolutions with one kernel
for each channel, which are bound by memory, and which torch counts as if they had all channels backward.
"""

from __future__ import annotations

import sys
from typing import Any

from validation.oracles.families import main
from validation.oracles.family_configs import BOTH, FLASH, SMALL

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
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1:], __doc__, CONFIGS)
