"""What one block of a real model computes and keeps: every tensor that autograd saves, and the FLOPs of its products.

    python -m validation.oracles.layers [NAME ...] --out DIR

Runs under fake tensors, with attention sent to the CUDA flash op (see memory.py); `eager` is transformers' own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from validation.oracles.memory import use_flash_attention
from validation.oracles.models import blocks

MODELS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_positions": 2048},
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip


class Flops(TorchDispatchMode):
    """Sums what torch's own counter knows, and the grouped products that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += int(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
        elif func._opname == "_grouped_mm":
            rows, inner = args[0].shape
            self.total += 2 * rows * inner * args[1].shape[-1]
        return out


def saved_tensors(
    output: torch.Tensor, parameters: Iterable[tuple[str, torch.Tensor]], inputs: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[dict[str, Any]]:
    """The tensors that the graph of `output` saves, each storage once, in the order of a breadth-first walk."""
    known = {_storage(t): ("param", name) for name, t in parameters} | {_storage(t): ("input", n) for n, t in inputs}
    seen: set[Any] = set()
    storages: set[int] = set()
    queue = [output.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        for attribute, tensor in _attributes(node):
            storage = _storage(tensor)
            if storage in storages:
                continue
            storages.add(storage)
            kind, name = known.get(storage, ("act", None))
            yield {
                "node": node.name(), "attr": attribute, "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape), "storage_bytes": tensor.untyped_storage().nbytes(), "kind": kind,
                "name": name,
            }  # fmt: skip
        queue += [function for function, _ in node.next_functions]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attributes(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            value = getattr(node, attribute)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    yield attribute.removeprefix("_saved_"), tensor
    for tensor in getattr(node, "saved_tensors", ()):  # of a Python autograd.Function
        yield "saved_tensors", tensor


def measure(name: str, attention: str, batch: int, sequence: int) -> dict[str, Any]:
    """One block in bf16: its saved tensors, their bytes by kind, and FLOPs forward and backward."""
    import transformers

    shape = dict(MODELS[name])
    kind = shape.pop("model_type")
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    config = transformers.AutoConfig.for_model(kind, **shape, **{layers: 1})
    config.use_cache, config._attn_implementation = False, attention
    if kind == "mixtral":
        config._experts_implementation = "grouped_mm"
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        torch.set_default_dtype(torch.float32)
        block = blocks(model)[0]
        hidden = torch.randn(batch, sequence, config.hidden_size, dtype=torch.bfloat16, requires_grad=True) * 1.0
        inputs, arguments = [("hidden_states", hidden)], {}
        if kind != "gpt2":
            positions = torch.arange(sequence)[None]
            tables = model.model.rotary_emb(hidden, position_ids=positions)
            inputs += zip(("cos", "sin"), tables, strict=True)
            arguments = {"position_ids": positions, "position_embeddings": tables, "attention_mask": None}
            if attention == "eager":
                arguments["attention_mask"] = torch.zeros(1, 1, sequence, sequence, dtype=torch.bfloat16)
                inputs.append(("attention_mask", arguments["attention_mask"]))
        with Flops() as flops:
            output = block(hidden, **arguments)
            output = output[0] if isinstance(output, tuple) else output
            saved = list(saved_tensors(output, block.named_parameters(), inputs))
            forward = flops.total
            output.backward(torch.empty_like(output))
    sums = {
        kind: sum(row["storage_bytes"] for row in saved if row["kind"] == kind) for kind in ("act", "input", "param")
    }
    return {
        "model": name, "attn": attention, "batch": batch, "seq": sequence, "config": MODELS[name],
        "layer_params": sum(p.numel() for p in block.parameters()), "saved_bytes": sums,
        "act_bytes_per_token": sums["act"] / (batch * sequence), "flops_forward": forward,
        "flops_backward": flops.total - forward, "saved": saved,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.oracles.layers", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; all if none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "layers")
    options = parser.parse_args(arguments)
    use_flash_attention()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or MODELS:
        for attention in ("sdpa", "eager"):
            found = measure(name, attention, 1, 2048)
            text = json.dumps(found) + "\n"
            path = options.out / f"{name}_{attention}_b1_s2048.json.gz"
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{name} {attention}: {found['act_bytes_per_token']:,.0f} saved bytes per token", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
