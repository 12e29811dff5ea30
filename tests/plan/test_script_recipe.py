"""Scripts that hand a recipe to a tool are read as that recipe; of others the refusal says what they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.recipes import read_file, said
from zsim.errors import InputError

LLAMA_FACTORY = """model_name_or_path: some/model
stage: sft
do_train: true
finetuning_type: full
template: llama3
dataset: d
cutoff_len: 1024
per_device_train_batch_size: 2
bf16: true
"""
AXOLOTL = "base_model: some/model\ndatasets: []\nsequence_len: 2048\nmicro_batch_size: 2\n"
TRL = "model_name_or_path: m\nlearning_rate: 1e-5\nper_device_train_batch_size: 4\nmax_length: 4096\nbf16: true\n"
FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 4
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
TITAN = "[model]\nname = 'llama3'\n[training]\nlocal_batch_size = 8\nseq_len = 2048\n[parallelism]\n"


def run(folder: Path, command: str, **files: str):
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    script = folder / "run.sh"
    script.write_text(f"#!/bin/bash\nset -e\n{command}\n")
    return read_file(script)


def test_llama_factory_under_accelerate(tmp_path: Path) -> None:
    command = "accelerate launch --config_file fsdp.yaml src/train.py sft.yaml cutoff_len=512"
    kind, reading = run(tmp_path, command, sft_yaml=LLAMA_FACTORY, fsdp_yaml=FSDP)
    fields = said(reading)
    assert (kind, fields["framework.name"], reading.ranks) == ("llama_factory", "fsdp2", 4)
    assert (fields["micro_batch"], fields["seq_len"]) == (2, 512)
    assert not any("allocator" in name for name in fields)
    assert reading.places["seq_len",] == (tmp_path / "run.sh", 3)
    assert reading.places["micro_batch",] == (tmp_path / "sft.yaml", 8)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 2 -m debugpy --listen 0.0.0.0:5678 --wait-for-client src/train.py sft.yaml",
        "python -m debugpy --connect 5678 -m torch.distributed.run --nproc_per_node 2 src/train.py sft.yaml",
    ],
)
def test_under_a_debugger(tmp_path: Path, command: str) -> None:
    kind, reading = run(tmp_path, command, sft_yaml=LLAMA_FACTORY)
    assert (kind, reading.ranks, said(reading)["seq_len"]) == ("llama_factory", 2, 1024)


def test_llama_factory_whose_accelerate_configuration_is_not_there(tmp_path: Path) -> None:
    """What shards is left open, adapters and embeddings that train whole among them."""
    adapters = LLAMA_FACTORY.replace("full", "lora") + "additional_target: embed_tokens\n"
    command = "accelerate launch --config_file elsewhere.yaml src/train.py sft.yaml"
    reading = run(tmp_path, command, sft_yaml=adapters)[1]
    assert "framework (accelerate's configuration elsewhere.yaml is not there)" in reading.still_missing()
    assert "lora.modules_dtype" not in said(reading)


@pytest.mark.parametrize(("command", "exports"), [("llamafactory-cli train", True), ("torchrun src/train.py", False)])
def test_who_exports_the_allocators_configuration(tmp_path: Path, command: str, exports: bool) -> None:
    """llamafactory's launcher.py, which only its own command runs."""
    text = LLAMA_FACTORY + "deepspeed: ds.json\n"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    given = "--model_name_or_path m --stage sft --finetuning_type full --template x --do_train --deepspeed ds.json"
    for reading in (run(tmp_path, f"{command} sft.yaml", sft_yaml=text)[1], run(tmp_path, f"{command} {given}")[1]):
        assert ("allocator.conf" in said(reading)) is exports


@pytest.mark.parametrize(
    "command",
    [
        "axolotl preprocess r.yml\nsrun --nodes 2 axolotl train r.yml --launcher torchrun -- --nproc_per_node=8",
        "accelerate launch --num_processes 8 -m axolotl.cli.train r.yml",
        "python -m axolotl.cli.train r.yml",
    ],
)
def test_axolotl(tmp_path: Path, command: str) -> None:
    kind, reading = run(tmp_path, command, r_yml=AXOLOTL)
    assert (kind, said(reading)["seq_len"]) == ("axolotl", 2048)
    assert reading.ranks == (8 if "num_processes" in command else None)
    assert ("allocator.conf" in said(reading)) is ("axolotl train" in command)  # cli/main.py


def test_trl_with_options_that_go_before_the_file(tmp_path: Path) -> None:
    command = (
        "export OMP_NUM_THREADS=6\n"
        "torchrun --nproc_per_node 2 sft.py --config r.yaml \\\n  --per_device_train_batch_size 1"
    )
    kind, reading = run(tmp_path, command, r_yaml=TRL)
    assert (kind, reading.ranks) == ("trainer", 2)
    assert (said(reading)["micro_batch"], said(reading)["seq_len"]) == (1, 4096)
    assert said(reading)["omp_num_threads"] == 6
    assert reading.places["micro_batch",] == (tmp_path / "run.sh", 5)
    assert run(tmp_path, "trl sft --config=r.yaml")[0] == "trainer"


def test_torchtitan_with_options_of_its_sections(tmp_path: Path) -> None:
    command = (
        "NGPU=${NGPU:-8}\nCONFIG=${CONFIG:-job.toml}\n"
        "torchrun --nproc_per_node=$NGPU -m torchtitan.train --job.config_file $CONFIG --training.local_batch_size 1 "
        "--parallelism.data_parallel_replicate_degree 2 --compile.enable"
    )
    kind, reading = run(tmp_path, command, job_toml=TITAN)
    assert (kind, reading.ranks) == ("torchtitan", 8)
    fields = said(reading)
    assert (fields["micro_batch"], fields["fsdp.mesh"], fields["compile"]) == (1, [2, 4], True)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("axolotl train other.yml", r"run.sh:3: starts axolotl with other.yml, which is not there"),
        ("torchrun train.py --config $WHICH.yaml", r"run.sh:3: starts train.py with \$WHICH.yaml, which is not known"),
        ("torchrun train.py --config $WHICH", r"run.sh:3: starts train.py with \$WHICH, which is not known"),
        ("swift sft --config $WHICH --model m", r"run.sh:3: starts swift with \$WHICH, which is not known"),
        ("swift sft --config recipe", "run.sh:3: starts swift with recipe, which is not there"),
        ("oumi distributed torchrun -m oumi train -c ${1}", r"starts oumi with \$\{1\}, which is not known"),
        ('llamafactory-cli train "$1"', r"starts llamafactory-cli with \$1, which is not known"),
        (
            "torchrun -m torchtitan.train --module llama3 --config llama3_8b",
            "torchtitan with a configuration in Python",
        ),
        ("axolotl inference r.yml", "starts axolotl inference, which does not train"),
        ("python evaluate.py --config r.yaml", "no command in it that trains"),
        ("python3 -m openrlhf.cli.train_sft --train_batch_size 8", "run.sh:3: starts OpenRLHF, whose options"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.x=1", "run.sh:3: starts verl, whose options"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4",
            "run.sh:3: starts pretrain_gpt.py, with options",
        ),
        ("deepspeed --module $WHAT", r"run.sh:3: starts \$WHAT, which is not known here"),
        ("pip install swift", "no command in it that trains"),
    ],
)
def test_what_is_started_instead(tmp_path: Path, command: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        run(tmp_path, command)
    assert caught.value.accepted


def test_an_option_of_no_section(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run.sh:3: training.seq_len.x: seq_len is no section"):
        run(tmp_path, "torchrun -m torchtitan.train --job.config_file job.toml --training.seq_len.x 1", job_toml=TITAN)
