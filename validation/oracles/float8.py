"""Linear modules in float8, for recordings: torchao 0.18, which is no dependency of anything else here.

Under fake tensors its products are `torch._scaled_mm`, whose meta kernel does not depend on the device.
"""

from __future__ import annotations

from typing import Any

import torch

EXCLUDED = ("lm_head", "output")  # as torchtitan's configurations have it


def version() -> str:
    import torchao

    return str(torchao.__version__)


def convert(model: torch.nn.Module, recipe: str, emulate: bool = False, all_gather: bool = False) -> None:
    """In place, all but the output projection. `emulate`: products of float32 on a CPU that computes them."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=emulate, enable_fsdp_float8_all_gather=all_gather)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name not in EXCLUDED)


def of_conversion(config: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration's `float8`, what `convert` takes."""
    return {name: value for name, value in config["float8"].items() if name != "precompute"}


def precompute(model: torch.nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
