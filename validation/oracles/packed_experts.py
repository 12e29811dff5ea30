"""What models with experts in 4 bits, as axolotl packs them, do in one step, as adapters.py has it.

    python -m validation.oracles.packed_experts --out FILE.json.gz

Adapters are on attention. Needs peft 0.21 and bitsandbytes 0.50, whose parametrization axolotl puts on every stacked
tensor of experts (monkeypatch/moe_quant.py); Linear modules stay in 16 bits here.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils as masking

from validation.oracles import families, models
from validation.oracles.adapters import RANK, ROOMS

NAMES = ("mixtral", "olmoe", "glm4_moe", "glm4_moe_lite", "nemotron_h-moe")


def step(name: str, batch: int, seq: int, checkpointing: str) -> dict[str, Any]:
    (attention, *_), config = ROOMS["families"][name]
    torch.nn.functional.scaled_dot_product_attention = partial(families.attend, attention == "padded")
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", families.window_mask)
    model = families.build(config, attention)
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=["o_proj"]), model)
    models.freeze_all_but(model, "lora_")
    packed = 0
    for path, module in list(model.bfloat16().train().named_modules()):
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.ndim == 3 and "expert" in path:
                replace_parameter_4bit(module, key, compress_statistics=True)
                packed += 1
    assert packed
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: mode.from_tensor(tensor) for key, tensor in tensors.items() if tensor is not None})
    with mode:
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
        found = families.observe(model, {"input_ids": ids, "labels": labels, "use_cache": False})
    return {"attention": attention, "batch": batch, "seq": seq, "checkpointing": checkpointing, **found}


def main(arguments: list[str]) -> None:
    options = families.begin(arguments, __doc__, ())
    warnings.filterwarnings("ignore")
    steps = []
    for name in NAMES:
        runs = [step(name, *run) for run in families.RUNS]
        steps.append({"model": name, **families.once(name, runs, "parameters", "calls", "ready"), "runs": runs})
    from bitsandbytes import __version__ as bitsandbytes
    from peft import __version__ as peft

    families.write(options.out, {"steps": steps}, peft=peft, bitsandbytes=bitsandbytes)


if __name__ == "__main__":
    main(sys.argv[1:])
