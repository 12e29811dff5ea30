"""What mixtures of experts do in one step where each expert is a module, as in transformers before 5 (4.57 recorded).

    python -m validation.oracles.expert_modules --out FILE.json.gz

As families.py, but with tensors that are there, on the CPU: which rows an expert gets is a number that fake tensors do
not have. Routers deal tokens out in turn instead of by score, so each expert has its share of the rows. Needs
transformers 4.57 with its huggingface_hub and tokenizers, in a folder before the environment's own on PYTHONPATH.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from validation.oracles.expert_rows import dealt
from validation.oracles.families import RUNS, begin, observe, once, write
from validation.oracles.family_configs import CONFIGS

EXPERTS = 5  # whose shares of the rows are not all the same
GROUPED = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1}
SETTINGS = {
    "mixtral": {"num_local_experts": EXPERTS},
    **{name: {"num_experts": EXPERTS} for name in ("qwen2_moe", "qwen3_moe", "olmoe")},
    "hunyuan_v1_moe": {"num_experts": EXPERTS},
    **dict.fromkeys(("deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "glm4_moe", "dots1"), GROUPED),
}


def record(config: dict[str, Any], batch: int, seq: int, checkpointing: str) -> dict[str, Any]:
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    made._attn_implementation, made.use_cache = "eager", False
    model = transformers.AutoModelForCausalLM.from_config(made, torch_dtype=torch.bfloat16).train()
    for parameter in model.parameters():  # gates that are made in float32, as DeepSpeed and FSDP cast all parameters
        parameter.data = parameter.data.bfloat16()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(batch, seq, dtype=torch.long)
    found = observe(model, {"input_ids": ids, "labels": ids.clone(), "use_cache": False})
    return {"attention": "eager", "batch": batch, "seq": seq, "checkpointing": checkpointing, **found}


def main(arguments: list[str]) -> None:
    options = begin(arguments, __doc__, tuple(SETTINGS))
    torch.topk = dealt
    models = {}
    for name in options.names or SETTINGS:
        config = CONFIGS[name][1] | SETTINGS[name]
        runs = [record(config, *run) for run in RUNS]
        models[name] = {"config": config, **once(name, runs, "parameters", "calls", "ready"), "runs": runs}
    write(options.out, models)


if __name__ == "__main__":
    main(sys.argv[1:])
