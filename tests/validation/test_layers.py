"""Every tensor that autograd saves in a block, against the graphs of real modules."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from zsim.model.huggingface import from_config
from zsim.model.spec import Module, Saved, Workload
from zsim.model.trace import trace
from zsim.program.walk import modules_in_order

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "layers"
SCALARS = 64  # bytes: seeds and offsets of the random generator


def saved_in(module: Module) -> list[Saved]:
    found: list[Saved] = []
    for item in module.body:
        found += saved_in(item) if isinstance(item, Module) else item.saved
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json.gz")), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_saved_tensors_of_a_block(path: Path):
    oracle: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    layers = "n_layer" if oracle["config"]["model_type"] == "gpt2" else "num_hidden_layers"
    model = from_config(oracle["config"] | {layers: 1}, oracle["model"])
    tree = trace(model, Workload(oracle["batch"], oracle["seq"], attention=oracle["attn"], device="cpu"))
    block = next(module for module in modules_in_order(tree) if module.role == "block")
    ours = Counter((tensor.dtype, tensor.nbytes) for tensor in saved_in(block) if tensor.nbytes > SCALARS)
    # gpt2's LayerNorm keeps the block's input; tables and masks are shared by all blocks
    rows = [row for row in oracle["saved"] if row["kind"] == "act" or row["name"] == "hidden_states"]
    theirs = Counter((row["dtype"], row["storage_bytes"]) for row in rows if row["storage_bytes"] > SCALARS)
    assert ours == theirs
