from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a scenario on the shipped model and topology; the given lines replace or add to its fields."""

    def write_scenario(text: str = "", **fields: str) -> Path:
        lines = {
            "model": str(ROOT / "scenarios/models/qwen2.5-7b/config.json"),
            "cluster": str(ROOT / "topologies/hgx_h100_8.yaml"),
            "framework": "deepspeed",
            "micro_batch": "1",
            "seq_len": "1024",
        } | fields
        body = "".join(f"{name}: {value}\n" for name, value in lines.items() if value != "")
        path = tmp_path / "scenario.yaml"
        path.write_text(body + text)
        return path

    return write_scenario
