"""Evaluation between steps of training: what recipes say of it is listed as not simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file

TRAINER = {"model_name_or_path": "m", "bf16": True, "per_device_train_batch_size": 1, "num_train_epochs": 1}
AXOLOTL = {"base_model": "m", "micro_batch_size": 2, "bf16": True}


def listed(kind: str, data: dict[str, Any]) -> list[str]:
    return [text for text in read(kind, data).not_modeled if "evaluation" in text]


@pytest.mark.parametrize("kind", ["trainer", "llama_factory"])
@pytest.mark.parametrize(
    ("data", "name", "size"),
    [
        ({"eval_strategy": "steps"}, "eval_strategy", 8),  # the Trainer's default
        ({"evaluation_strategy": "epoch", "per_device_eval_batch_size": 2}, "evaluation_strategy", 2),
        ({"eval_on_start": True, "per_device_eval_batch_size": 4}, "eval_on_start", 4),
    ],
)
def test_of_the_trainer(kind: str, data: dict[str, Any], name: str, size: int) -> None:
    (text,) = listed(kind, TRAINER | data)
    assert text.startswith(f"{name}: evaluation between steps, {size} sequences at a time")


@pytest.mark.parametrize("data", [{}, {"eval_strategy": "no"}, {"eval_strategy": False}, {"do_eval": True}])
def test_none_of_the_trainer(data: dict[str, Any]) -> None:
    assert listed("trainer", TRAINER | {"do_train": True} | data) == []


@pytest.mark.parametrize(
    ("data", "name", "size"),
    [
        ({"val_set_size": 0.1, "evals_per_epoch": 4}, "evals_per_epoch", 2),  # as many as in training
        ({"val_set_size": 0.1, "eval_strategy": "epoch", "eval_batch_size": 1}, "eval_strategy", 1),
        ({"test_datasets": [{"path": "d"}], "eval_steps": 100}, "eval_steps", 2),
    ],
)
def test_of_axolotl(data: dict[str, Any], name: str, size: int) -> None:
    (text,) = listed("axolotl", AXOLOTL | data)
    assert text.startswith(f"{name}: evaluation between steps, {size} sequences at a time")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"val_set_size": 0.1},
        {"val_set_size": 0.1, "evals_per_epoch": 0},
        {"val_set_size": 0.0, "evals_per_epoch": 4},
    ],
)
def test_none_of_axolotl(data: dict[str, Any]) -> None:
    assert listed("axolotl", AXOLOTL | data) == []


def test_a_size_that_a_script_does_not_tell(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "python train.py --model_name_or_path m --bf16 --num_train_epochs 1 --per_device_train_batch_size 2 "
        "--eval_strategy steps --per_device_eval_batch_size $SIZE\n"
    )
    _, reading = read_file(script)
    assert [text for text in reading.not_modeled if "evaluation between steps, 8 sequences" in text]
