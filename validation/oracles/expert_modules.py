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
from validation.oracles.vision_models import TEXT

EXPERTS = 5  # whose shares of the rows are not all the same
GROUPED = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1}
SETTINGS = {
    "mixtral": {"num_local_experts": EXPERTS},
    **{name: {"num_experts": EXPERTS} for name in ("qwen2_moe", "qwen3_moe", "olmoe")},
    "hunyuan_v1_moe": {"num_experts": EXPERTS},
    "glm4v_moe": {},
    **dict.fromkeys(("deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "glm4_moe", "dots1"), GROUPED),
}
SEEING = {
    "model_type": "glm4v_moe", "image_token_id": 5, "text_config": {
        "model_type": "glm4v_moe_text", **TEXT, "pad_token_id": 0, **GROUPED, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "model_type": "glm4v_moe_vision", "depth": 4, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 64,
        "intermediate_size": 100, "image_size": 56,
    },
}  # fmt: skip
SIDES = (168, 196)  # of an image: 12 x 14 patches, 42 tokens


def record_seeing(batch: int, seq: int, checkpointing: str) -> dict[str, Any]:
    """GLM-4.5V with its tower frozen, whose parts were others, too; a mask, without which 4.57 fails."""
    fields = dict(SEEING)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    for part in (made, made.text_config, made.vision_config):
        part._attn_implementation, part.use_cache = "eager", False
    model = transformers.AutoModelForImageTextToText.from_config(made, torch_dtype=torch.bfloat16).train()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.bfloat16()
        parameter.requires_grad = "visual" not in name
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(batch, seq, dtype=torch.long)
    ids[:, :42] = SEEING["image_token_id"]
    given = {
        "input_ids": ids, "labels": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids), "use_cache": False,
        "position_ids": torch.zeros(3, batch, seq, dtype=torch.long),
        "pixel_values": torch.zeros(168 * batch, 1176), "image_grid_thw": torch.tensor([[1, 12, 14]] * batch),
    }  # fmt: skip
    found = observe(model, given)
    return {"attention": "eager", "batch": batch, "seq": seq, "checkpointing": checkpointing, "size": SIDES, **found}


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
        seeing = name == SEEING["model_type"]
        config = SEEING if seeing else CONFIGS[name][1] | SETTINGS[name]
        runs = [record_seeing(*run) if seeing else record(config, *run) for run in RUNS]
        models[name] = {"config": config, **once(name, runs, "parameters", "calls", "ready"), "runs": runs}
    write(options.out, models)


if __name__ == "__main__":
    main(sys.argv[1:])
