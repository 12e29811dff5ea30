"""Recipes and scripts that train by preference: what is read, by whose trainer, and what stays refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.errors import InputError, NotModeled

BASE = {"model_name_or_path": "m", "per_device_train_batch_size": 2, "bf16": True, "max_length": 1024}
SIZE = "per_device_train_batch_size: 1\n"
FACTORY = {"model_name_or_path": "m", "stage": "dpo", "do_train": True, "template": "llama3", "bf16": True}
AXOLOTL = {"base_model": "m", "micro_batch_size": 1, "sequence_len": 2048, "datasets": [{"path": "p"}]}


def objective(fields: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("objective."): value for name, value in fields.items() if name.startswith("objective")}


def script(tmp_path: Path, command: str) -> dict[str, Any]:
    path = tmp_path / "train.sh"
    path.write_text(command + "\n")
    return objective(said(read_file(path)[1]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "sigmoid", "beta": 0.1}, {"kind": "dpo"}),
        ({"loss_type": "ipo"}, {"kind": "dpo"}),
        ({"loss_type": ["sigmoid", "sft"]}, {"kind": "dpo"}),
        ({"beta": 0.01, "max_prompt_length": 512}, {"kind": "dpo", "version": "0.28"}),
        ({"precompute_ref_log_probs": True}, {"kind": "dpo", "reference": "precomputed"}),
        ({"loss_type": "sigmoid", "rpo_alpha": 1.0}, {"kind": "dpo", "likelihood": True, "version": "0.28"}),
        ({"loss_type": "sigmoid", "rpo_alpha": 0}, {"kind": "dpo", "likelihood": True, "version": "0.28"}),
        ({"loss_type": "simpo", "cpo_alpha": 0}, {"kind": "simpo", "likelihood": False}),
        ({"cpo_alpha": 1.0}, {"kind": "cpo", "likelihood": True}),
        ({}, {}),
    ],
)
def test_arguments_of_trl(options: dict[str, Any], expected: dict[str, Any]) -> None:
    reading = read("trainer", BASE | options)
    assert objective(said(reading)) == expected
    assert said(reading)["seq_len"] == 1024


def test_a_recipe_lies_in_a_folder_of_its_trainer(tmp_path: Path) -> None:
    """As in the alignment handbook, whose arguments of ORPO are those of DPO."""
    for folder, kind in (("orpo", "orpo"), ("dpo", "dpo"), ("recipes", "dpo")):
        path = tmp_path / folder / "config_full.yaml"
        path.parent.mkdir()
        path.write_text(
            "model_name_or_path: m\nbf16: true\nbeta: 0.05\nmax_length: 2048\nmax_prompt_length: 512\n" + SIZE
        )
        assert objective(said(read_file(path)[1])) == {"kind": kind} | ({"version": "0.28"} if kind == "dpo" else {})


@pytest.mark.parametrize("method", ["kto", "grpo", "rloo", "bco", "gkd", "nash_md", "xpo", "prm", "online_dpo"])
def test_what_has_the_same_options_is_not_taken_for_it(tmp_path: Path, method: str) -> None:
    """By the name of the script, of trl's command or of the folder: refused as before."""
    options = "--model_name_or_path m --per_device_train_batch_size 1 --beta 0.1"
    for command in (f"torchrun --nproc_per_node 8 {method}.py {options}", f"trl {method} {options}"):
        with pytest.raises(NotModeled):
            script(tmp_path, command)
    path = tmp_path / method / "config.yaml"
    path.parent.mkdir()
    path.write_text("model_name_or_path: m\nbf16: true\nbeta: 0.05\nmax_prompt_length: 512\n" + SIZE)
    with pytest.raises(NotModeled):
        read_file(path)


def test_another_reference_is_said_and_trls_own_launcher_refused(tmp_path: Path) -> None:
    reading = read("trainer", BASE | {"loss_type": "sigmoid", "ref_model_name_or_path": "other"})
    assert (
        "ref_model_name_or_path: other is taken to have the config.json of the model that is trained" in reading.notes
    )
    with pytest.raises(InputError, match="zero3 names accelerate's configuration"):
        script(tmp_path, "trl dpo --model_name_or_path m --per_device_train_batch_size 1 --accelerate_config zero3")


def test_nothing_is_made_of_a_folder_alone(tmp_path: Path) -> None:
    path = tmp_path / "dpo" / "sft.yaml"
    path.parent.mkdir()
    path.write_text("model_name_or_path: m\nbf16: true\nmax_length: 2048\n" + SIZE)
    assert objective(said(read_file(path)[1])) == {}


@pytest.mark.parametrize(
    ("program", "expected"),
    [("examples/scripts/dpo.py", "dpo"), ("scripts/run_orpo.py", "orpo"), ("cpo.py", "cpo"), ("run_simpo.py", "simpo")],
)
def test_programs_say_it(tmp_path: Path, program: str, expected: str) -> None:
    command = f"torchrun --nproc_per_node 8 {program} --model_name_or_path m --per_device_train_batch_size 1"
    assert script(tmp_path, command) == {"kind": expected}


def test_trls_command(tmp_path: Path) -> None:
    options = "--model_name_or_path m --per_device_train_batch_size 1"
    assert script(tmp_path, f"trl dpo {options}") == {"kind": "dpo"}
    assert script(tmp_path, f"trl sft {options}") == {}
    for other in ("kto", "grpo", "reward"):
        with pytest.raises(NotModeled):
            script(tmp_path, f"trl {other} {options}")


@pytest.mark.parametrize("program", ["kto.py", "run_dpo_online.py", "ppo.py", "internvl_chat_mpo.py"])
def test_other_trainers_stay_refused(tmp_path: Path, program: str) -> None:
    with pytest.raises(NotModeled, match="more than one model"):
        script(tmp_path, f"torchrun {program} --model_name_or_path m --per_device_train_batch_size 1")


def test_arguments_of_other_trainers_stay_refused() -> None:
    for options in ({"loss_type": "kto"}, {"num_generations": 4, "beta": 0.1}, {"loss_type": "grpo"}):
        with pytest.raises(NotModeled):
            read("trainer", BASE | options)


def test_ligers_loss_is_none_of_pairs() -> None:
    reading = read("trainer", BASE | {"loss_type": "sigmoid", "use_liger_kernel": True})
    assert "loss" not in said(reading)
    assert said(reading)["kernels"] == "liger"
    assert any("in chunks (Liger)" in text for text in reading.not_modeled)


@pytest.mark.parametrize(
    ("loss", "kind"), [(None, "dpo"), ("sigmoid", "dpo"), ("ipo", "dpo"), ("orpo", "orpo"), ("simpo", "simpo")]
)
def test_llama_factory(loss: str | None, kind: str) -> None:
    reading = read("llama_factory", FACTORY | ({"pref_loss": loss} if loss else {}) | {"enable_liger_kernel": True})
    assert objective(said(reading)) == {"kind": kind, "trainer": "llama-factory"}
    assert "loss" not in said(reading)  # its fused loss needs labels


def test_llama_factory_refuses() -> None:
    for options, says in (
        ({"pref_loss": "bco"}, "pref_loss bco"),
        ({"ref_model": "m", "ref_model_quantization_bit": 4}, "another kind"),
        ({"stage": "kto"}, "more than one model"),
        ({"stage": "rm"}, "a reward model"),
    ):
        with pytest.raises(NotModeled, match=says):
            read("llama_factory", FACTORY | options)


@pytest.mark.parametrize(("said_there", "kind"), [("dpo", "dpo"), ("ipo", "dpo"), ("orpo", "orpo"), ("simpo", "simpo")])
def test_axolotl(said_there: str, kind: str) -> None:
    reading = read("axolotl", AXOLOTL | {"rl": said_there, "rl_beta": 0.1})
    assert objective(said(reading)) == {"kind": kind}


def test_axolotl_takes_no_packing_with_pairs() -> None:
    packed = AXOLOTL | {"sample_packing": True}
    with pytest.raises(InputError, match="axolotl refuses it with rl"):
        read("axolotl", packed | {"rl": "orpo"})
    assert "sequences are packed to sequence_len" in read("axolotl", packed).notes


def test_axolotl_refuses() -> None:
    for kind in ("kto", "grpo", "gdpo"):
        with pytest.raises(NotModeled, match=f"rl {kind}"):
            read("axolotl", AXOLOTL | {"rl": kind})


def test_a_second_model_beside_adapters() -> None:
    adapters = {"adapter": "lora", "lora_target_linear": True, "rl": "dpo"}
    assert objective(said(read("axolotl", AXOLOTL | adapters))) == {"kind": "dpo"}
    own = read("axolotl", AXOLOTL | adapters | {"rl_adapter_ref_model": True})
    assert objective(said(own)) == {"kind": "dpo", "reference": "model"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"kind": "dpo"}),
        ("--rlhf_type orpo", {"kind": "orpo"}),
        ("--rlhf_type simpo --cpo_alpha 0", {"kind": "simpo", "likelihood": False}),
        ("--rlhf_type dpo --rpo_alpha 0.1 --loss_type sigmoid", {"kind": "dpo", "likelihood": True}),
    ],
)
def test_swift(tmp_path: Path, options: str, expected: dict[str, Any]) -> None:
    command = f"NPROC_PER_NODE=2 swift rlhf --model m --dataset d --max_length 2048 --deepspeed zero3 {options}"
    assert script(tmp_path, command) == expected
