"""Evaluation between steps of training, as recipes ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.errors import InputError

TRAINER = {"model_name_or_path": "m", "bf16": True, "per_device_train_batch_size": 1, "num_train_epochs": 1}
AXOLOTL = {"base_model": "m", "micro_batch_size": 2, "bf16": True}
LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
CUT = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}


def asked(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said(read(kind, data)).items() if name.startswith("evaluation")}


@pytest.mark.parametrize("kind", ["trainer", "llama_factory"])
@pytest.mark.parametrize(
    ("data", "size"),
    [
        ({"eval_strategy": "steps"}, 8),  # the Trainer's default
        ({"evaluation_strategy": "epoch", "per_device_eval_batch_size": 2}, 2),
        ({"eval_on_start": True, "per_device_eval_batch_size": 4}, 4),
    ],
)
def test_of_the_trainer(kind: str, data: dict[str, Any], size: int) -> None:
    assert asked(kind, TRAINER | data) == {"evaluation.micro_batch": size}
    reading = read(kind, TRAINER | data)
    assert not [text for text in reading.without_effect if "eval_strategy" in text or "evaluation_strategy" in text]
    notes = [text for text in reading.notes if "evaluates" in text]
    assert bool(notes) == ("per_device_eval_batch_size" not in data)


@pytest.mark.parametrize("data", [{}, {"eval_strategy": "no"}, {"eval_strategy": False}, {"do_eval": True}])
def test_none_of_the_trainer(data: dict[str, Any]) -> None:
    assert asked("trainer", TRAINER | {"do_train": True} | data) == {}


def test_a_size_that_is_none() -> None:
    with pytest.raises(InputError, match="per_device_eval_batch_size: 0 is not a number greater than 0"):
        read("trainer", TRAINER | {"eval_strategy": "steps", "per_device_eval_batch_size": 0})


@pytest.mark.parametrize(
    ("data", "size"),
    [
        ({"val_set_size": 0.1, "evals_per_epoch": 4}, 2),  # as many as in training
        ({"val_set_size": 0.1, "eval_strategy": "epoch", "eval_batch_size": 1}, 1),
        ({"test_datasets": [{"path": "d"}], "eval_steps": 100}, 2),
    ],
)
def test_of_axolotl(data: dict[str, Any], size: int) -> None:
    assert asked("axolotl", AXOLOTL | data) == {"evaluation.micro_batch": size}


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
    assert asked("axolotl", AXOLOTL | data) == {}


def test_a_fused_loss_is_one_of_training_alone_but_where_the_trainer_knows_of_it() -> None:
    held_back = {"val_set_size": 0.1, "evals_per_epoch": 4}
    whole = {"evaluation.micro_batch": 2, "evaluation.loss": "hf"}
    assert asked("axolotl", AXOLOTL | held_back | LIGER) == whole
    assert asked("axolotl", AXOLOTL | held_back | CUT) == {"evaluation.micro_batch": 2}
    asks = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}
    assert asked("llama_factory", TRAINER | asks | {"enable_liger_kernel": True}) == whole
    assert asked("trainer", TRAINER | asks | {"use_liger_kernel": True}) == {"evaluation.micro_batch": 2}


def test_a_size_that_a_script_does_not_tell(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "python train.py --model_name_or_path m --bf16 --num_train_epochs 1 --per_device_train_batch_size 2 "
        "--eval_strategy steps --per_device_eval_batch_size $SIZE\n"
    )
    _, reading = read_file(script)
    assert not [name for name in said(reading) if name.startswith("evaluation")]
    assert [text for text in reading.not_modeled if "as per_device_eval_batch_size is not known" in text]
