"""Memory of FSDP2 without a GPU: the real fully_shard under fake tensors, followed by torch's own FSDPMemTracker.

    python -m validation.oracles.memory [NAME-PART ...] --out DIR

The device is a fake CPU (a CPU build of torch cannot make fake CUDA tensors). Attention is sent to the CUDA flash op,
whose meta kernel and autograd formula do not depend on the device, so that it saves what it saves on a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from validation.oracles import float8
from validation.oracles.titan import TitanLlama, per_op_checkpointing
from zsim.validation.memory import COMMON, SHAPES

# With so few logits that the peak is of the blocks.
FLOAT8 = [
    *[
        ("llama3.1-8b", "titan", 8, 1, 8192, "none", recipe)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ],
    ("qwen2.5-7b", "hf", 8, 2, 4096, "full", "rowwise"),
]
ADAM_TENSORS = 5  # foreach AdamW at its peak: parameter, gradient, two moments, one temporary


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]


def use_flash_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    torch.nn.functional.scaled_dot_product_attention = flash_attention
    # Under fake tensors transformers cannot see that there is no padding; without any it makes no mask either.
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", lambda *arguments, **settings: None)


def build(config: dict[str, Any]) -> torch.nn.Module:
    import transformers

    shape = {**SHAPES[config["model"]], **COMMON, **config.get("shape", {})}
    if "layers" in config:
        shape["num_hidden_layers"] = config["layers"]
    if config["impl"] == "titan":
        return TitanLlama(shape)
    settings = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    settings.use_cache = False
    settings._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(settings).train()


def shard(model: torch.nn.Module, config: dict[str, Any], mesh: DeviceMesh) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.layers if config["impl"] == "titan" else model.model.layers
    if config["ac"] != "none":
        extra = {"context_fn": per_op_checkpointing} if config["ac"] == "op" else {}
        for index in range(len(layers)):
            layers[index] = checkpoint_wrapper(layers[index], preserve_rng_state=False, **extra)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": config.get("raf", True),
    }
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def track(config: dict[str, Any]) -> dict[str, Any]:
    """One training step of `config`: bytes by category at each moment, and the optimizer's peak."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=config["world"], store=FakeStore())
    mesh = init_device_mesh("cpu", (config["world"],))
    found: dict[str, Any] = {"config": config, "versions": {"torch": torch.__version__}}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config)
        found["params"] = sum(parameter.numel() for parameter in model.parameters())
        if "float8" in config:
            float8.convert(model, config["float8"], all_gather=config.get("gather", False))
            found["versions"]["torchao"] = float8.version()
        shard(model, config, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        tokens = torch.randint(0, 1000, (config["batch"], config["seq"]))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            found["start"] = _snapshot(tracker, "current")
            output = model(tokens, labels=tokens)
            loss = output if config["impl"] == "titan" else output.loss
            del output
            found["after_forward"] = _snapshot(tracker, "current")
            found["peak_forward"] = _snapshot(tracker, "peak")
            loss.backward()
            del loss
            found["after_backward"] = _snapshot(tracker, "current")
            found["peak"] = _snapshot(tracker, "peak")
        # Tracked under fake tensors, DTensor's sharding propagation would count tensors of the global size.
        shards = sum(parameter.to_local().numel() for parameter in model.parameters())
        found["step_peak_formula_bytes"] = 4 * shards * ADAM_TENSORS
    return found


def _snapshot(tracker: FSDPMemTracker, which: str) -> dict[str, int]:
    held = next(iter(tracker.get_tracker_snapshot(which).values()))
    return {str(getattr(key, "value", key)): nbytes for key, nbytes in held.items() if nbytes}


def configurations() -> list[dict[str, Any]]:
    def make(model: str, impl: str, world: int, batch: int, seq: int, ac: str, **more: Any) -> dict[str, Any]:
        name = f"{model}_{impl}_w{world}_b{batch}_s{seq}_ac-{ac}" + "".join(
            f"_{k}{v}" for k, v in more.items() if k != "shape"
        )
        return {
            "name": name,
            "model": model,
            "impl": impl,
            "world": world,
            "batch": batch,
            "seq": seq,
            "ac": ac,
            **more,
        }

    return [
        make("llama3.1-8b", "titan", 8, 2, 8192, "op"),
        make("llama3.1-8b", "titan", 128, 2, 8192, "op"),
        make("llama3.1-8b", "titan", 8, 2, 8192, "full"),
        make("llama3.1-8b", "titan", 8, 2, 8192, "none"),
        make("llama3.1-8b", "titan", 8, 1, 2048, "none"),
        make("llama3.1-8b", "hf", 8, 1, 2048, "none"),
        make("llama3.1-8b", "hf", 8, 1, 2048, "full"),
        make("llama3.1-8b", "hf", 64, 1, 2048, "none"),
        make("llama3.1-8b", "hf", 64, 1, 2048, "full"),
        make("llama3.1-8b", "hf", 8, 1, 8192, "none"),
        make("llama3.1-8b", "hf", 8, 4, 8192, "full"),
        make("llama3.1-8b", "hf", 8, 1, 2048, "none", raf=False),
        make("llama3.1-8b", "hf", 8, 1, 2048, "full", raf=False),
        make("llama3.1-8b", "hf", 8, 1, 2048, "none", layers=2),
        make("qwen2.5-7b", "hf", 8, 1, 4096, "none"),
        make("qwen2.5-7b", "hf", 8, 1, 4096, "full"),
        make("qwen2.5-32b", "hf", 64, 1, 4096, "none"),
        make("qwen2.5-32b", "hf", 8, 1, 4096, "full"),
        make("llama3.1-8b", "titan", 8, 1, 8192, "op", float8="tensorwise"),
        *(make(*few[:6], layers=2, float8=few[6], shape={"vocab_size": 1024}) for few in FLOAT8),
    ]


def main(arguments: list[str] | None = None) -> int:
    import transformers

    parser = argparse.ArgumentParser(prog="python -m validation.oracles.memory", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all configurations if none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "memory")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    use_flash_attention()
    options.out.mkdir(parents=True, exist_ok=True)
    for config in configurations():
        if options.names and not any(name in config["name"] for name in options.names):
            continue
        found = track(config)
        text = json.dumps(found) + "\n"
        (options.out / f"{config['name']}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{config['name']}: peak {found['peak']['Total'] / 2**30:.3f} GiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
