"""What whole models of every family do in one step: parameters, calls, gradient order, live bytes, FLOPs.

    python -m validation.oracles.families [NAME ...] --out FILE.json.gz

Small models of random weights run forward and backward under fake tensors; a dispatch mode follows every storage.
Live bytes leave out parameters, buffers and inputs, and count parameter gradients. `sdpa` goes to the CUDA flash op
without a mask (see memory.py), or to the memory-efficient one where heads of values have another width; `padded` goes
to the flash op all the same, with values padded as transformers' flash attention does. `eager` is transformers' own.
Routers' weights that DeepSeek's classes make in float32 are cast, as DeepSpeed and FSDP cast all parameters.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import masking_utils as masking

from validation.oracles import expert_rows
from validation.oracles.encoder_configs import ENCODERS
from validation.oracles.family_configs import CONFIGS, EXPERTS, UNLISTED
from validation.oracles.memory import flash_attention, use_flash_attention

KERNELS = {"convolution": 1, "convolution_backward": 2}  # the argument that has them
DEALT = ("dbrx",)  # runs with tensors that are there: experts ask which rows are theirs
RUNS = ((1, 64, "none"), (2, 64, "none"), (2, 64, "full"))  # micro-batch, sequence, checkpointing
CHUNKS = (*RUNS, (2, 100, "none"), (2, 192, "none"), (2, 192, "full"))  # where layers go through chunks of 64 tokens


class Follow(TorchDispatchMode):
    """Bytes alive after every operation, and FLOPs, forward and backward."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.ignored, self.phase = ignored, "forward"
        self.live: dict[int, int] = {}
        self.peak = {"forward": 0, "backward": 0}
        self.flops = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live and key not in self.ignored:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak[self.phase] = max(self.peak[self.phase], sum(self.live.values()))
        if func._opname in KERNELS and args[KERNELS[func._opname]].shape[1] == 1:
            pass  # a convolution with a kernel for each channel
        elif func._overloadpacket in flop_registry:
            self.flops[self.phase] += int(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
        elif func._opname == "_grouped_mm":  # not in the registry: all rows once
            self.flops[self.phase] += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        return out


def build(config: dict[str, Any], attention: str) -> Any:
    """The model in bfloat16, in training mode."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    made._attn_implementation, made.use_cache = "sdpa" if attention == "padded" else attention, False
    if config["model_type"] in EXPERTS:
        made._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    auto = transformers.AutoModelForMaskedLM if config["model_type"] in ENCODERS else transformers.AutoModelForCausalLM
    if classifies(config):
        auto = transformers.AutoModelForSequenceClassification
    if config["model_type"] in UNLISTED:
        auto = transformers.AutoModelForImageTextToText
    TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda tensor, **_: tensor  # it would look at numbers
    model = auto.from_config(made).train()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def classifies(config: dict[str, Any]) -> bool:
    return str(config.get("architectures")).endswith("ForSequenceClassification']")


def attend(padded: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What torch's scaled_dot_product_attention runs on a GPU, or transformers' flash_attention_forward if `padded`."""
    widest_flash = 256
    if q.shape[-1] == v.shape[-1] <= widest_flash and settings.get("attn_mask") is None:
        return flash_attention(q, k, v, **settings)
    if padded:
        padding = [0, q.shape[-1] - v.shape[-1]]
        return flash_attention(q, k, torch.nn.functional.pad(v, padding), **settings)[..., : v.shape[-1]]
    mask = settings.pop("attn_mask", None)
    if mask is not None:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=q.dtype))  # convert_boolean_attn_mask
    scale, causal = settings["scale"], settings["is_causal"]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, settings["dropout_p"], causal, scale=scale)[0]


def window_mask(
    *arguments: Any, local_size: int | None = None, always: bool = False, **settings: Any
) -> torch.Tensor | None:
    """transformers' mask for SDPA, which it has for windows alone where nothing is padded or packed, or `always`. Under
    fake tensors it could not see that."""
    if local_size is None and not always:
        return None
    function = masking.causal_mask_function if always else masking.sliding_window_causal_mask_function(local_size)
    settings |= {"allow_is_causal_skip": not always, "attention_mask": None, "mask_function": function}
    return masking.sdpa_mask(*arguments, local_size=local_size, **settings)


def record(config: dict[str, Any], attention: str, batch: int, seq: int, checkpointing: str) -> dict[str, Any]:
    torch.nn.functional.scaled_dot_product_attention = partial(attend, attention == "padded")
    always = config["model_type"] in ("deepseek_v32", "glm_moe_dsa")  # ask for it
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", partial(window_mask, always=always))
    dealing = config["model_type"] in DEALT
    torch.topk = expert_rows.dealt if dealing else expert_rows.by_score
    with nullcontext() if dealing else FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config, attention)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        uncached = {} if config["model_type"] in ENCODERS else {"use_cache": False}
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long) if classifies(config) else labels
        found = observe(model, {"input_ids": ids, "labels": labels, **uncached})
    return {"attention": attention, "batch": batch, "seq": seq, "checkpointing": checkpointing, **found}


def observe(model: Any, inputs: dict[str, Any], following: Callable[[set[int]], Follow] = Follow) -> dict[str, Any]:
    """One step of a model under fake tensors."""
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    follow = following({t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *tensors)})
    calls: list[str] = []
    ready: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _module, _args, name=name: calls.append(name) if follow.phase == "forward" else None
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _parameter, name=name: ready.append(name))
    with follow:
        loss = model(**inputs).loss
        after = sum(follow.live.values())
        follow.phase = "backward"
        loss.backward()
    modules = dict(model.named_modules())
    return {
        "parameters": [
            (name, list(p.shape), type(modules[name.rpartition(".")[0]]).__name__)
            for name, p in model.named_parameters()
        ],
        "calls": [(name, type(modules[name]).__name__) for name in calls],
        "ready": ready,
        "after_forward": after,
        "peak": follow.peak,
        "flops": follow.flops,
    }  # fmt: skip


def once(name: str, runs: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """What is the same however a model is run, taken out of its runs."""
    shared = {key: runs[0][key] for key in keys}
    for run in runs:
        for key, value in shared.items():
            assert run.pop(key) == value, (name, key)
    return shared


def begin(arguments: list[str], about: str | None, known: Iterable[str]) -> argparse.Namespace:
    """`names` of configurations and the file `out` from the command line, and attention as on GPUs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all without any")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    use_flash_attention()
    return options


def write(out: Path, models: dict[str, Any], **others: str) -> None:
    """`others`: versions of what else the results depend on."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, **others}
    text = json.dumps({"versions": versions, "models": models}, separators=(",", ":"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(
    arguments: list[str],
    about: str | None = __doc__,
    configurations: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = CONFIGS,
) -> None:
    options = begin(arguments, about, configurations)
    models = {}
    for name in options.names or configurations:
        attentions, config = configurations[name]
        kinds = CHUNKS if "linear_key_head_dim" in config else RUNS
        runs = [record(config, attention, *run) for attention in attentions for run in kinds]
        models[name] = {"config": config, **once(name, runs, "parameters", "calls", "ready"), "runs": runs}
    write(options.out, models)


if __name__ == "__main__":
    main(sys.argv[1:])
