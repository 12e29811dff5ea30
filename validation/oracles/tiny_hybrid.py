"""Small models whose layers are not all attention."""

from __future__ import annotations

from typing import Any

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
}  # fmt: skip
