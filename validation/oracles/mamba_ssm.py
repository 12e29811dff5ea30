"""What models with state spaces do in one step with mamba-ssm and causal-conv1d installed, as hybrids.py has it without
them. The packages' own Python runs, their kernels do not: under fake tensors nothing asks for values.

    python -m validation.oracles.mamba_ssm [NAME ...] --out FILE.json.gz

Needs mamba-ssm (2.3.2 as recorded), triton (3.9.0), einops (0.8.2) and causal-conv1d (1.6.1), of the first and the last
the Python alone. Some buffers are cut by the number of multiprocessors: here that of an H100.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface


def launched(*_arguments: Any, **_settings: Any) -> None:
    """A kernel that does nothing."""


KernelInterface.__getitem__ = lambda kernel, grid: launched  # type: ignore[method-assign]
Autotuner.best_config = SimpleNamespace(kwargs={"BLOCK_SIZE": 64, "BLOCK_SIZE_M": 32})  # cuts what is summed
torch.cuda.device = lambda *_: nullcontext()  # type: ignore[assignment, misc]
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
for missing in ("causal_conv1d_cuda", "selective_scan_cuda"):
    sys.modules[missing] = ModuleType(missing)

import causal_conv1d.cpp_functions as convolution  # noqa: E402

package = ModuleType("mamba_ssm")  # whose own __init__ imports models that need more packages
package.__path__ = [f"{folder}/mamba_ssm" for folder in sys.path]
sys.modules["mamba_ssm"] = package

from validation.oracles.families import main  # noqa: E402
from validation.oracles.hybrids import CONFIGS  # noqa: E402

for name in ("_causal_conv1d_fwd_cpp", "_causal_conv1d_bwd_cpp"):
    setattr(convolution, name, launched)

FAMILIES = ("mamba2", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1")

if __name__ == "__main__":
    main(sys.argv[1:], __doc__, {name: found for name, found in CONFIGS.items() if name.startswith(FAMILIES)})
