"""What peft does to every family that is recorded: which modules `all-linear` adapts; and what models with adapters do
in one step, as families.py has it.

    python -m validation.oracles.adapters --out FILE.json.gz

Needs peft 0.21 (which needs accelerate). Modules are found on the meta device, where each that is adapted is called by
itself, too. A step has parameters, calls, the order of gradients, live bytes and FLOPs, all in bfloat16.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils as masking

from validation.oracles import families, hybrids, models, seq2seq, vision_models
from validation.oracles.encoder_configs import ENCODERS
from validation.oracles.family_configs import UNLISTED

RANK = 4
ROOMS = {
    "families": families.CONFIGS | hybrids.CONFIGS,
    "seq2seq": seq2seq.CONFIGS,
    "vision": vision_models.CONFIGS,
}
NAMED = {"gpt2": ["c_attn", "mlp.c_proj"], "falcon-7b": ["query_key_value"], "llama": ["q_proj", "v_proj", "down_proj"]}
# Two of them tie it to the embedding.
HEADS = {"llama": ["q_proj", "lm_head"], "gpt2": ["c_attn", "lm_head"], "gemma2": ["q_proj", "lm_head"]}
WHOLE = (  # of those with rotary tables, masks, embeddings or layers of several kinds one each
    "gpt2", "falcon-7b", "falcon-40b", "falcon-sequential", "llama", "opt", "gpt_bigcode", "gpt_neo", "xlm-roberta",
    "modernbert", "modernbert-decoder", "phi", "cohere", "glm", "gemma2", "gemma3-windows", "gemma4-layers",
    "gpt_oss", "youtu", "lfm2", "qwen3_5", "bamba",
)  # fmt: skip
STEPS = [
    *((name, "all-linear", 0.0) for name in WHOLE),
    *((name, "all-linear", 0.1) for name in ("gpt2", "llama")),
    *((name, targets, dropout) for name, targets in NAMED.items() for dropout in (0.0, 0.1)),
    *((name, targets, dropout) for name, targets in HEADS.items() for dropout in (0.0, 0.1)),
]


def on_meta(room: str, config: dict[str, Any]) -> Any:
    kind = config["model_type"]
    auto = {
        "families": transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM,
        "vision": transformers.AutoModelForImageTextToText,
        "seq2seq": transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM,
    }[room]
    if families.classifies(config):
        auto = transformers.AutoModelForSequenceClassification
    with torch.device("meta"):
        return (transformers.AutoModelForImageTextToText if kind in UNLISTED else auto).from_config(
            transformers.AutoConfig.for_model(
                kind, **{key: value for key, value in config.items() if key != "model_type"}
            )
        )


def adapted(model: Any) -> dict[str, Any]:
    """Names of modules that `all-linear` adapts, whether parameters of experts are among them, and what is raised: as
    they are adapted, or as one of them is called."""
    try:
        with torch.device("meta"):
            get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"), low_cpu_mem_usage=True)
    except ValueError as error:
        return {"raises": str(error)}
    found = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    names = list(dict.fromkeys(name.replace(".base_layer", "") for name in found))
    if any(isinstance(module, ParamWrapper) for module in found.values()):
        return {"modules": names, "parameters": True}
    try:
        for module in found.values():
            module(torch.empty(2, module.in_features, device="meta"))
    except AttributeError as error:
        return {"modules": names, "raises_called": str(error)}
    return {"modules": names}


def step(
    name: str, targets: Any, dropout: float, batch: int, seq: int, checkpointing: str, parameters: Any = None
) -> dict[str, Any]:
    (attention, *_), config = ROOMS["families"][name]
    torch.nn.functional.scaled_dot_product_attention = partial(families.attend, attention == "padded")
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", families.window_mask)
    model = families.build(config, attention)
    config_of_peft = LoraConfig(r=RANK, target_modules=targets, lora_dropout=dropout, target_parameters=parameters)
    inject_adapter_in_model(config_of_peft, model)
    models.freeze_all_but(model, "lora_")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.bfloat16().train().modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: mode.from_tensor(tensor) for key, tensor in tensors.items() if tensor is not None})
    with mode:
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
        uncached = {} if config["model_type"] in ENCODERS else {"use_cache": False}
        found = families.observe(model, {"input_ids": ids, "labels": labels, **uncached})
    return {"attention": attention, "batch": batch, "seq": seq, "checkpointing": checkpointing, **found}


def main(arguments: list[str]) -> None:
    options = families.begin(arguments, __doc__, ())
    warnings.filterwarnings("ignore")
    modules = {
        f"{room}-{name}": adapted(on_meta(room, entry[1]))
        for room, configurations in ROOMS.items()
        for name, entry in configurations.items()
    }
    steps = []
    for name, targets, dropout in STEPS:
        runs = [step(name, targets, dropout, *run) for run in families.RUNS]
        shared = families.once(name, runs, "parameters", "calls", "ready")
        steps.append({"model": name, "r": RANK, "targets": targets, "dropout": dropout, **shared, "runs": runs})
    from peft import __version__ as peft

    families.write(options.out, {"all-linear": modules, "steps": steps}, peft=peft)


if __name__ == "__main__":
    main(sys.argv[1:])
