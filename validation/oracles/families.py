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

from validation.oracles.memory import flash_attention, use_flash_attention

SMALL = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip
PLAIN = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 199}
WINDOWS = {"num_hidden_layers": 5, "sliding_window": 32}  # four layers with one, one without
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # inside the small vocabulary
EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe",
    "lfm2_moe",
)  # fmt: skip
ENCODERS = ("bert", "roberta")
ENCODER = {"intermediate_size": 256, "max_position_embeddings": 130, "attention_probs_dropout_prob": 0.0}
LATENT = {  # four heads of 24 + 8, values of 16
    **PLAIN, "num_key_value_heads": 4, "intermediate_size": 176, "q_lora_rank": 40, "kv_lora_rank": 32,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
}  # fmt: skip
PADDED = ("padded", "sdpa", "eager")
FLASH, BOTH, EAGER = ("sdpa",), ("sdpa", "eager"), ("eager",)

# name -> (attention implementations that the family has, config.json)
CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama": (BOTH, {"model_type": "llama", **SMALL}),
    "llama-biases": (FLASH, {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True}),
    "mistral": (BOTH, {"model_type": "mistral", **SMALL, "head_dim": 32, "sliding_window": None}),
    "qwen2-tied": (BOTH, {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True}),
    "qwen3": (BOTH, {"model_type": "qwen3", **SMALL, "head_dim": 32}),
    "smollm3": (BOTH, {"model_type": "smollm3", **SMALL, "num_hidden_layers": 5, "pad_token_id": 0}),
    "olmo2": (BOTH, {"model_type": "olmo2", **SMALL, "pad_token_id": 0}),
    "gemma": (BOTH, {"model_type": "gemma", **SMALL, "head_dim": 32}),
    "gemma2": (EAGER, {"model_type": "gemma2", **SMALL, "head_dim": 32}),
    "gemma3": (FLASH, {"model_type": "gemma3_text", **SMALL, "head_dim": 32, "sliding_window_pattern": 2}),
    "mixtral": (BOTH, {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        BOTH,
        {
            "model_type": "qwen3_moe", **SMALL, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "mlp_only_layers": [1],
        },
    ),
    "gpt2": (
        BOTH, {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128},
    ),
    "gptj": (
        BOTH,
        {
            "model_type": "gptj", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128,
            "rotary_dim": 8,
        },
    ),
    "gpt_neox": (BOTH, {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 256}),
    "gpt_neox-sequential": (
        FLASH, {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 256, "use_parallel_residual": False},
    ),
    "opt": (BOTH, {"model_type": "opt", **PLAIN, "ffn_dim": 256, "word_embed_proj_dim": 64}),
    "opt-post-norm": (
        FLASH, {"model_type": "opt", **PLAIN, "ffn_dim": 256, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "phi": (BOTH, {"model_type": "phi", **PLAIN, "intermediate_size": 256}),
    "phi-qk-norm": (FLASH, {"model_type": "phi", **PLAIN, "intermediate_size": 256, "qk_layernorm": True}),
    "phi3": (BOTH, {"model_type": "phi3", **SMALL, "pad_token_id": 0}),
    "falcon-7b": (FLASH, {"model_type": "falcon", **PLAIN, "multi_query": True, "parallel_attn": True}),
    "falcon-40b": (FLASH, {"model_type": "falcon", **PLAIN, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-sequential": (
        FLASH, {"model_type": "falcon", **PLAIN, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": (
        EAGER, {"model_type": "mpt", "d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 199, "max_seq_len": 128},
    ),
    "bloom": (EAGER, {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199}),
    "qwen2_moe": (
        BOTH,
        {
            "model_type": "qwen2_moe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96, "mlp_only_layers": [1],
        },
    ),
    "olmoe": (
        BOTH,
        {
            "model_type": "olmoe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
            "clip_qkv": 8.0,
        },
    ),
    "bert": (BOTH, {"model_type": "bert", "architectures": ["BertForMaskedLM"], **PLAIN, **ENCODER}),
    "roberta": (BOTH, {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **PLAIN, **ENCODER}),
    "gpt_oss": (
        EAGER,
        {
            "model_type": "gpt_oss", **SMALL, **TOKENS, "head_dim": 32, "num_hidden_layers": 4, "num_local_experts": 4,
            "num_experts_per_tok": 2, "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "olmo": (BOTH, {"model_type": "olmo", **SMALL, "pad_token_id": 0}),
    "olmo-clip": (FLASH, {"model_type": "olmo", **SMALL, "pad_token_id": 0, "clip_qkv": 8.0}),
    "olmo3": (FLASH, {"model_type": "olmo3", **SMALL, "pad_token_id": 0, **WINDOWS}),
    "granite": (BOTH, {"model_type": "granite", **SMALL, "pad_token_id": 0}),
    "cohere": (BOTH, {"model_type": "cohere", **SMALL, **TOKENS}),
    "cohere-qk-norm": (FLASH, {"model_type": "cohere", **SMALL, **TOKENS, "use_qk_norm": True}),
    "cohere2": (FLASH, {"model_type": "cohere2", **SMALL, **TOKENS, **WINDOWS}),
    "glm": (BOTH, {"model_type": "glm", **SMALL, "head_dim": 32, "pad_token_id": 0}),
    "glm4": (BOTH, {"model_type": "glm4", **SMALL, "head_dim": 32, "pad_token_id": 0}),
    "ernie4_5": (BOTH, {"model_type": "ernie4_5", **SMALL, "head_dim": 32}),
    "seed_oss": (
        BOTH, {"model_type": "seed_oss", **SMALL, "head_dim": 32, "residual_dropout": 0.1, "attention_dropout": 0.0},
    ),
    "hunyuan": (BOTH, {"model_type": "hunyuan_v1_dense", **SMALL, "head_dim": 32}),
    "exaone4": (FLASH, {"model_type": "exaone4", **SMALL, **WINDOWS}),
    "arcee": (BOTH, {"model_type": "arcee", **SMALL}),
    "nemotron": (BOTH, {"model_type": "nemotron", **SMALL}),
    "ministral3": (
        BOTH,
        {
            "model_type": "ministral3", **SMALL, **TOKENS, "head_dim": 32, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "stablelm": (BOTH, {"model_type": "stablelm", **SMALL, "use_qkv_bias": True}),
    "stablelm-qk-norm": (
        FLASH, {"model_type": "stablelm", **SMALL, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": (
        BOTH, {"model_type": "starcoder2", **SMALL, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    ),
    "gpt_neo": (
        EAGER,
        {
            "model_type": "gpt_neo", "hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 199,
            "max_position_embeddings": 128, "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gpt_bigcode": (
        BOTH,
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128},
    ),
    "deepseek_v2-lite": (PADDED, {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None}),
    "deepseek_v2": (
        PADDED,
        {
            "model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "attention_bias": True,
        },
    ),
    "deepseek_v3": (PADDED, {"model_type": "deepseek_v3", **LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-halves": (
        FLASH,
        {
            "model_type": "deepseek_v3", **LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
            "rope_interleave": False,
        },
    ),
    "glm4_moe": (
        BOTH,
        {
            "model_type": "glm4_moe", **SMALL, "head_dim": 32, "moe_intermediate_size": 48, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0,
        },
    ),
    "llama4": (
        BOTH,
        {
            "model_type": "llama4_text", **SMALL, "num_hidden_layers": 5, "head_dim": 32, "intermediate_size_mlp": 160,
            "intermediate_size": 48, "num_local_experts": 4, "moe_layers": [1, 2, 3, 4], "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "granitemoe": (
        BOTH,
        {"model_type": "granitemoe", **SMALL, "num_local_experts": 4, "pad_token_id": 0, "num_experts_per_tok": 2},
    ),
    "gpt_bigcode-heads": (
        FLASH,
        {
            "model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "n_positions": 128,
            "multi_query": False,
        },
    ),
}  # fmt: skip
KERNELS = {"convolution": 1, "convolution_backward": 2}  # the argument that has them
RUNS = ((1, 64, "none"), (2, 64, "none"), (2, 64, "full"))  # micro-batch, sequence, checkpointing


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
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    made._attn_implementation, made.use_cache = "sdpa" if attention == "padded" else attention, False
    if config["model_type"] in EXPERTS:
        made._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    auto = transformers.AutoModelForMaskedLM if config["model_type"] in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(made).train()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def attend(padded: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What torch's scaled_dot_product_attention runs on a GPU, or transformers' flash_attention_forward if `padded`."""
    if q.shape[-1] == v.shape[-1]:
        return flash_attention(q, k, v, **settings)
    if padded:
        padding = [0, q.shape[-1] - v.shape[-1]]
        return flash_attention(q, k, torch.nn.functional.pad(v, padding), **settings)[..., : v.shape[-1]]
    assert settings.pop("attn_mask", None) is None
    scale, causal = settings["scale"], settings["is_causal"]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, None, True, settings["dropout_p"], causal, scale=scale)[0]


def record(config: dict[str, Any], attention: str, batch: int, seq: int, checkpointing: str) -> dict[str, Any]:
    torch.nn.functional.scaled_dot_product_attention = partial(attend, attention == "padded")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config, attention)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        uncached = {} if config["model_type"] in ENCODERS else {"use_cache": False}
        ids, labels = torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, seq, dtype=torch.long)
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
        runs = [record(config, attention, *run) for attention in attentions for run in RUNS]
        shared = {key: runs[0][key] for key in ("parameters", "calls", "ready")}
        for run in runs:  # the same however it is run
            for key, value in shared.items():
                assert run.pop(key) == value, (name, key)
        models[name] = {"config": config, **shared, "runs": runs}
    write(options.out, models)


if __name__ == "__main__":
    main(sys.argv[1:])
