"""A small scenario, so that hundreds of them are quick."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCENARIO = f"""
name: small
model: {{params: 3e7}}
cluster: {REPOSITORY / "topologies" / "hgx_h100_8.yaml"}
framework: deepspeed
zero: {{stage: 3}}
micro_batch: 1
seq_len: 256
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path
