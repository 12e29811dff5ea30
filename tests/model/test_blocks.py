"""One block at full size against recordings: bytes saved, FLOPs, every memory-bound kernel's bytes; and the loss."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, block, computes, flops, memory_bound, modules
from zsim.model.huggingface import from_config
from zsim.model.spec import Module, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "blocks" / "blocks.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def name(row: dict[str, Any]) -> str:
    return f"{row['model']}-{row.get('attention', 'loss')}-b{row['batch']}-s{row['seq']}"


def traced(row: dict[str, Any]) -> Module:
    attention = "eager" if row["attention"] == "eager" else "flash"
    spec = from_config(row["config"], row["model"])
    tree = trace(spec, Workload(row["batch"], row["seq"], attention=attention, device="cpu"))
    inside = block(tree)
    assert sum(spec.parameters[i].numel for module in modules(inside) for i in module.params) == row["params"]
    return inside


@pytest.mark.parametrize("row", recorded()["blocks"], ids=name)
def test_saved_bytes_and_flops(row: dict[str, Any]):
    work = list(computes(traced(row)))
    assert sum(item.saved_bytes for item in work) == row["saved_bytes"]
    assert flops([kernel for item in work for kernel in item.forward]) == row["flops"]["forward"]
    assert flops([kernel for item in work for kernel in item.backward]) == row["flops"]["backward"]


@pytest.mark.parametrize("row", recorded()["blocks"], ids=name)
def test_memory_bound_kernels(row: dict[str, Any]):
    work = list(computes(traced(row)))
    for phase in ("forward", "backward"):
        launches, moved = memory_bound([kernel for item in work for kernel in getattr(item, phase)])
        # The recorder gave GPT-2 no mask, and counts all rows that an index could read, not those it does.
        extra_launches = extra = 0
        if phase == "forward" and row["model"].startswith("gpt2") and row["attention"] == "eager":
            scores = 2 * row["batch"] * row["config"]["n_head"] * row["seq"] ** 2
            extra_launches, extra = 1, 2 * scores + 2 * row["batch"] * row["seq"] ** 2
        elif phase == "forward" and row["model"].startswith("mixtral"):
            extra = row["batch"] * row["seq"] * row["config"]["hidden_size"] * 2  # two rows read per token, not one
        assert (launches - extra_launches, moved - extra) == tuple(row["memory_bound"][phase])


@pytest.mark.parametrize("row", recorded()["tails"], ids=name)
def test_norm_head_and_loss(row: dict[str, Any]):
    """Final norm, lm_head, ForCausalLMLoss without any block: what is alive at the worst moment of each direction."""
    hidden = {"llama3.1-8b": 4096, "qwen2.5-7b": 3584, "llama2-7b": 4096}[row["model"]]
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "head_dim": 2, "vocab_size": row["vocab"],
    }  # fmt: skip
    spec = from_config(config, "tail")
    tree = trace(spec, Workload(row["batch"], row["seq"], device="cpu"))
    ledger = Ledger(spec, tree)
    # The recorder ran no block and no embedding: leave out what those hold while the loss is computed.
    before = sum(item.saved_bytes for item in computes(tree.body[0]))  # type: ignore[arg-type]
    norm = next(module for module in modules(tree) if module.role == "norm")
    before -= sum(item.saved_bytes for item in computes(norm))
    scalar = 8  # the recorder's 1.0 on the host
    head = 2 * hidden * row["vocab"]  # the recorder took the transposed weight for a new tensor
    assert ledger.peak_forward - before + head == row["forward_peak"]
    tail = sum(item.saved_bytes for item in computes(tree)) - before
    assert tail == row["saved_bytes"]["act"] - scalar
    logits = 2 * row["batch"] * row["seq"] * row["vocab"]  # and held on to the logits, which a trainer lets go
    assert ledger.peak_backward - before + head + logits == row["backward_peak"]
