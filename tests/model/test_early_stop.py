"""A checkpointed block runs again up to the last tensor that backward needs, or to its end (torchtitan since 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.model.ledger import block, computes, flops
from validation.oracles.titan import Block
from zsim.model.huggingface import from_config
from zsim.model.kernels import Kernel, Memory
from zsim.model.spec import Workload
from zsim.model.trace import trace

TOKENS = 64
SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LAST_PRODUCT = 2 * TOKENS * SHAPE["intermediate_size"] * SHAPE["hidden_size"]  # of the MLP: backward needs its inputs


def recomputed(policy: str, early_stop: bool) -> list[Kernel]:
    workload = Workload(1, TOKENS, checkpointing=policy, implementation="torchtitan", early_stop=early_stop)
    tree = block(trace(from_config(SHAPE, "tiny"), workload))
    return [kernel for each in computes(tree) for kernel in each.recompute]


def really_recomputed(early_stop: bool) -> int:
    layer = Block(SHAPE)
    x = torch.randn(1, TOKENS, SHAPE["hidden_size"], requires_grad=True)
    head = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    angles = torch.polar(torch.ones(TOKENS, head // 2), torch.zeros(TOKENS, head // 2))
    plain, again = (FlopCounterMode(display=False) for _ in range(2))
    with plain:
        layer(x, angles).sum().backward()
    with again:
        checkpoint(layer, x, angles, use_reentrant=False, early_stop=early_stop).sum().backward()
    return int(again.get_total_flops() - plain.get_total_flops())


def test_what_runs_again() -> None:
    short, long = (flops(recomputed("full", stops)) for stops in (True, False))
    assert long - short == LAST_PRODUCT
    assert really_recomputed(False) - really_recomputed(True) == LAST_PRODUCT


def test_products_that_are_kept_are_no_work() -> None:
    """torchtitan's per-op policy keeps the last product: the residual alone is added again."""
    short, long = (recomputed("selective", stops) for stops in (True, False))
    assert flops(short) == flops(long)
    bytes_of = [sum(kernel.bytes for kernel in each if isinstance(kernel, Memory)) for each in (short, long)]
    assert bytes_of[1] - bytes_of[0] == 3 * TOKENS * SHAPE["hidden_size"] * 2
