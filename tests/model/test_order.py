"""Calls and gradients in the order that DeepSpeed's and DDP's own hooks saw them."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger
from zsim.model.huggingface import from_config
from zsim.model.spec import Module, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "order" / "order.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def ledger(run: dict[str, Any]) -> Ledger:
    config = {("model_type" if key == "kind" else key): value for key, value in run["model"].items()}
    if config["model_type"] == "gpt2":
        config |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    spec = from_config(config, "tiny")
    assert [parameter.name for parameter in spec.parameters] == run["params"]
    return Ledger(spec, trace(spec, Workload(run["micro_batch"], run["seq"])))


@pytest.mark.parametrize("name", [name for name, run in recorded().items() if "z3_step1" in run])
def test_modules_are_called_as_zero3_saw_them(name: str):
    def calls(module: Module) -> list[str]:
        inside = [call for item in module.body if isinstance(item, Module) for call in calls(item)]
        return [f"F+{module.name}", *inside, f"F-{module.name}"]

    run = recorded()[name]
    theirs = [call for call in run["z3_step1"] if call.startswith("F")]
    assert calls(ledger(run).tree) == theirs


@pytest.mark.parametrize("name", [name for name, run in recorded().items() if "ready" in run])
def test_gradients_are_ready_as_ddp_saw_them(name: str):
    run = recorded()[name]
    assert ledger(run).ready == [run["params"][index] for index in run["ready"]]
