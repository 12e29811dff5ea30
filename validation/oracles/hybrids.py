"""What decoders whose layers are not all attention do in one step, as families.py has it for the others.

    python -m validation.oracles.hybrids [NAME ...] --out FILE.json.gz

Neither mamba_ssm nor causal_conv1d is installed. FLOPs leave out convolutions with one kernel for each channel, which
are bound by memory, and which torch counts as if they had all channels backward.
"""

from __future__ import annotations

import sys
from typing import Any

from validation.oracles.families import main
from validation.oracles.family_configs import BOTH, FLASH, SMALL

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
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1:], __doc__, CONFIGS)
