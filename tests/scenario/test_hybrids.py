"""What is said of layers that are not attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger
from tests.model.test_families import recorded
from tests.model.test_hybrids import MODELS
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.scenario.load import load


@pytest.mark.parametrize(
    ("name", "packages"),
    [("LFM2-1.2B", "causal-conv1d"), ("mamba2-2.7b", "mamba-ssm and causal-conv1d"), ("Falcon-H1-7B", "mamba-ssm")],
)
def test_that_kernels_are_taken_as_not_installed_is_said(
    write: Callable[..., Path], tmp_path: Path, name: str, packages: str
):
    config: dict[str, Any] = MODELS[name][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = (
        text for text in load(write(model=str(tmp_path / "config.json"))).resolve().assumptions if "PyTorch" in text
    )
    assert f"where {packages}" in note


@pytest.mark.parametrize(("name", "kernels"), [("qwen3_next", "fla"), ("mamba2", "mamba-ssm")])
def test_what_kernels_are_said_to_save(write: Callable[..., Path], tmp_path: Path, name: str, kernels: str) -> None:
    """Saved tensors where layers are not checkpointed; where they are, none outlives a layer."""
    config = recorded()[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = (
        text for text in load(write(model=str(tmp_path / "config.json"))).resolve().assumptions if "PyTorch" in text
    )
    assert f"(kernels: {kernels} where they are: less time, and without checkpointing much less memory)" in note
    spec = from_config(config, name)
    saved = {
        (checkpointing, each): Ledger(
            spec, trace(spec, Workload(2, 256, checkpointing=checkpointing, kernels=each))
        ).after_forward
        for checkpointing, each in product(("none", "full"), (kernels, "torch"))
    }
    assert saved["none", kernels] < 0.6 * saved["none", "torch"]
    assert saved["full", kernels] == saved["full", "torch"]
