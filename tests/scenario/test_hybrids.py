"""What is said of layers that are not attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model.test_hybrids import MODELS
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
