"""What launchers export to torch's allocator: axolotl's utils/__init__.py (set_pytorch_cuda_alloc_conf) of July 2024
and later, LLaMA-Factory's launcher.py of April 2025 and later, where it starts torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.plan.recipes import read, said
from zsim.cli.convert import app

ROOT = Path(__file__).parents[2]
FIELD, EXPANDABLE = "allocator.conf", "expandable_segments:True"
AXOLOTL = {
    "base_model": "m",
    "sequence_len": 512,
    "micro_batch_size": 1,
    "bf16": True,
    "gradient_accumulation_steps": 1,
}
FACTORY = {"model_name_or_path": "m", "finetuning_type": "full", "bf16": True, "per_device_train_batch_size": 1}
MODEL = '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}'


def test_axolotl() -> None:
    reading = read("axolotl", AXOLOTL)
    assert said(reading)[FIELD] == EXPANDABLE
    assert f"allocator: {EXPANDABLE}, as axolotl exports PYTORCH_ALLOC_CONF" in reading.notes


@pytest.mark.parametrize(
    ("more", "ranks", "exported"),
    [
        ({}, None, False),
        ({}, 1, False),
        ({}, 2, True),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 1, True),  # which needs FORCE_TORCHRUN
    ],
)
def test_llama_factory_where_it_starts_torchrun(more: dict[str, Any], ranks: int | None, exported: bool) -> None:
    assert said(read("llama_factory", FACTORY | more, ranks)).get(FIELD) == (EXPANDABLE if exported else None)


def scenario(tmp_path: Path, topology: str, *others: tuple[str, str]) -> dict[str, Any]:
    """What `zsim from` makes of axolotl's recipe and other files, checked and resolved on the way."""
    for name, text in (("config.json", MODEL), ("recipe.yaml", yaml.safe_dump(AXOLOTL)), *others):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("recipe.yaml", "config.json", *(name for name, _ in others))]
    result = CliRunner().invoke(app, [*files, "--topology", str(ROOT / "topologies" / topology)])
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def test_not_where_accelerate_starts_it(tmp_path: Path) -> None:
    assert scenario(tmp_path, "rtx6000ada_4.yaml")["allocator"] == {"expandable_segments": True}
    launcher = (
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"
    )
    assert "allocator" not in scenario(tmp_path, "rtx6000ada_4.yaml", ("accelerate.yaml", launcher))


def test_not_on_a_gpu_without_cuda(tmp_path: Path) -> None:
    found = scenario(tmp_path, "mac_studio_m3_ultra.yaml")
    assert "allocator" not in found
