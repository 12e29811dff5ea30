"""What Qwen3-Next and Qwen3.5 do in one step with flash-linear-attention and causal-conv1d installed, as hybrids.py has
it without them. The packages' own Python runs, their kernels do not: under fake tensors nothing asks for values.

    python -m validation.oracles.fla [NAME ...] --out FILE.json.gz

Needs fla-core (0.6.0 as recorded), triton (3.9.0) and causal-conv1d (1.6.1), of the last the Python alone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from triton.runtime.jit import KernelInterface


def launched(*_arguments: Any, **_settings: Any) -> None:
    """A kernel that does nothing."""


KernelInterface.__getitem__ = lambda kernel, grid: launched  # type: ignore[method-assign]
sys.modules["causal_conv1d_cuda"] = ModuleType("causal_conv1d_cuda")

import causal_conv1d.cpp_functions as convolution  # noqa: E402
import fla.ops.common.chunk_o as outputs  # noqa: E402
import fla.ops.gated_delta_rule.wy_fast as representation  # noqa: E402

from validation.oracles.families import main  # noqa: E402
from validation.oracles.hybrids import CONFIGS  # noqa: E402

for name in ("_causal_conv1d_fwd_cpp", "_causal_conv1d_bwd_cpp"):
    setattr(convolution, name, launched)
for module in (outputs, representation):
    module.check_shared_mem = lambda *_: True  # as on Hopper

# Where linear attention has more than all else: what its backward allocates makes the peak.
WIDE = {
    "hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "linear_key_head_dim": 64,
    "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
}  # fmt: skip

if __name__ == "__main__":
    silu = {"hidden_act": "silu"}  # alone that the convolution knows
    chosen = {name: (how, config | silu) for name, (how, config) in CONFIGS.items() if name.startswith("qwen3")}
    chosen["qwen3_5-wide"] = (("sdpa",), CONFIGS["qwen3_5"][1] | WIDE)
    chosen["qwen3_5-wider"] = (("sdpa",), CONFIGS["qwen3_5"][1] | WIDE | {"linear_key_head_dim": 256})
    main(sys.argv[1:], __doc__, chosen)
