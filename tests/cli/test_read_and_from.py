"""`zsim read` says what files are, `zsim from` writes a scenario of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
MODEL = str(ROOT / "scenarios/models/qwen2.5-7b/config.json")
TOPOLOGY = str(ROOT / "topologies/hgx_h100_8.yaml")


def test_read_says_what_files_are(capsys) -> None:
    scenario = str(ROOT / "scenarios/qwen7b_8xh100.yaml")
    files = (str(DATA / "ds_config/textbook.json"), MODEL, TOPOLOGY, scenario, str(DATA / "accelerate/zero3.yaml"))
    code, out, _ = run(capsys, "read", *files, "--json")
    described = json.loads(out)
    assert code == 0
    assert [entry["kind"] for entry in described] == [
        "DeepSpeed configuration",
        "Hugging Face model",
        "topology file",
        "scenario",
        "accelerate configuration",
    ]
    assert described[0]["understood"]["zero.stage"] == 3
    assert described[0]["places"]["zero.stage"].endswith("textbook.json:5")
    assert described[1]["understood"]["parameters"] == 7_615_616_512
    assert described[4]["ranks"] == 8
    code, text, _ = run(capsys, "read", *files)
    assert code == 0
    assert "zero.offload_optimizer.device: cpu   (line 6)" in text
    assert "missing:" in text


def test_read_names_the_file_that_a_line_is_of(capsys, tmp_path: Path) -> None:
    """Where it is another one than what is read."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "train.sh").write_text("deepspeed train.py --deepspeed zero.json --per_device_train_batch_size 2\n")
    code, text, _ = run(capsys, "read", str(tmp_path / "train.sh"))
    assert code == 0
    assert "zero.stage: 3   (zero.json, line 1)" in text
    assert "micro_batch: 2   (line 1)" in text


def test_read_sets_what_nobody_looked_at_apart(capsys, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("torchrun train.py --model_name_or_path m --per_device_train_batch_size 2 --seed 1 --my_own 3\n")
    code, text, _ = run(capsys, "read", str(path))
    assert code == 0
    assert "  not read:\n    my_own\n" in text
    assert "    seed (data, learning rate, saving and logging)\n" in text
    assert json.loads(run(capsys, "read", str(path), "--json")[1])[0]["not_read"] == ["my_own"]


def test_from_names_the_line_of_a_section_by_what_stands_in_it(capsys, tmp_path: Path) -> None:
    """The recipe has a switch where the scenario has a section."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "base_model: m\nsequence_len: 512\nmicro_batch_size: 1\nadapter: lora\nload_in_8bit: true\n"
        "lora_target_linear: true\nfsdp_config: {fsdp_version: 1, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    code, _, err = run(capsys, "from", str(path), MODEL, "--topology", TOPOLOGY)
    assert code == 2
    assert f"{path}:5: quantize: 8-bit weights in shards" in err


def test_read_goes_on_after_a_refusal(capsys) -> None:
    code, out, _ = run(capsys, "read", str(DATA / "ds_config/misspelt.json"), MODEL)
    assert code == 2
    assert "refused" in out
    assert "did you mean stage3_param_persistence_threshold?" in out
    assert "parameters: 7,615,616,512" in out


def test_a_matrix_in_a_page_is_read_or_refused_as_a_machine(capsys, tmp_path: Path) -> None:
    page = tmp_path / "machine.md"
    for name, code, says in (
        ("smi_then_bandwidth.md", 0, "RTX 4090"),
        ("bad_not_in_catalog.txt", 2, "NVIDIA Nonesuch 9000 is not in the catalog"),
    ):
        page.write_text((DATA / "topo" / name).read_text())
        found, text, _ = run(capsys, "read", str(page))
        assert (found, says in text) == (code, True)


def from_arguments(*more: str) -> tuple[str, ...]:
    return ("from", str(DATA / "ds_config/textbook.json"), MODEL, "--topology", TOPOLOGY, *more)


def test_from_writes_a_scenario_that_runs(capsys, tmp_path: Path) -> None:
    from zsim.scenario import load

    path = tmp_path / "scenario.yaml"
    code, out, err = run(
        capsys, *from_arguments("--seq-len", "2048", "--out", str(path), "--set", "checkpointing=full")
    )
    assert (code, out, err) == (0, "", "")
    assert path.read_text().startswith("# From ")
    setup = load(path).resolve()
    plan = setup.plan
    assert (plan.stage, plan.offload_optimizer, plan.overlap_comm, plan.dtype) == (3, "cpu", True, "float16")  # type: ignore[union-attr]
    assert (setup.workload.micro_batch, setup.workload.seq_len, setup.workload.checkpointing) == (1, 2048, "full")
    code, printed, _ = run(capsys, *from_arguments("--seq-len", "2k"))
    assert code == 0
    assert "framework:\n  name: deepspeed" in printed


def test_a_scenario_and_a_machine_are_said_in_plain_words(capsys) -> None:
    _, text, _ = run(capsys, "read", str(ROOT / "scenarios/qwen7b_8xh100.yaml"), TOPOLOGY)
    assert "  zero.stage: 3\n" in text
    assert "  devices: H100-SXM\n" in text
    assert "{" not in text


def test_a_machine_that_names_no_gpu_is_said_to_be_taken_for_one(capsys, tmp_path: Path) -> None:
    """Where no flag can say it: in the scenario that is written, and in what is simulated from it."""
    from zsim.scenario import load

    path, matrix = tmp_path / "scenario.yaml", str(DATA / "topo/smi_blanks.txt")
    arguments = ("from", str(DATA / "ds_config/textbook.json"), MODEL, "--topology", matrix, "--seq-len", "8")
    code, _, err = run(capsys, *arguments, "--out", str(path))
    assert (code, err) == (0, "")
    guess = "the GPUs are RTX 4090: the file does not name them (--gpu)"
    how = "zsim topo smi_blanks.txt takes these flags; with --yaml it writes a topology to name instead"
    assert f"# Assumed: {guess}\n" in path.read_text()
    assert how in path.read_text()
    assumptions = load(path).resolve().assumptions
    assert guess in assumptions
    assert any(text.startswith(how) for text in assumptions)
    code, _, _ = run(capsys, *arguments[:4], str(TOPOLOGY), *arguments[5:], "--out", str(path))
    assert "Assumed" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (from_arguments(), "no file says seq_len"),
        (
            ("from", str(DATA / "ds_config/textbook.json"), "--topology", TOPOLOGY, "--seq-len", "8"),
            "no file says model",
        ),
        (("from", MODEL, "--topology", TOPOLOGY), "none of the files says how training is sharded"),
        (
            ("from", str(DATA / "accelerate/fsdp1_hybrid.yaml"), MODEL, "--topology", TOPOLOGY),
            "is written for 16 GPUs, and the topology has 8\n  --nodes says how many nodes there are",
        ),
        (
            ("from", str(DATA / "accelerate/fsdp1_hybrid.yaml"), MODEL, "--topology", TOPOLOGY, "--nodes", "3"),
            "the topology has 24\n  a scenario S written for 16 runs on others too: zsim S --set cluster.nodes=3",
        ),
        (
            ("from", str(DATA / "accelerate/three_processes.yaml"), MODEL, "--topology", TOPOLOGY),
            "is written for 3 GPUs, and the topology has 8\n  a part of a node is a topology of its own",
        ),
        (("from", str(ROOT / "scenarios/qwen7b_8xh100.yaml"), "--topology", TOPOLOGY), "is a scenario already"),
        (from_arguments("--seq-len", "0"), "seq_len: 0 is out of range"),
        (from_arguments("--seq-len", "4q"), "such as 4096 or 4k (4096)"),
        (from_arguments("--seq-len", "8", "--set", "micro_batch=x"), "'x' is not a count"),
    ],
)
def test_from_never_guesses(capsys, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("recipe", "other", "field"),
    [
        (
            "torchrun --nproc_per_node 8 t.py --deepspeed c/z3.json --per_device_train_batch_size 1 --max_length 512",
            ("z3.json", '{"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}}'),
            ("zero", "stage", 3),
        ),
        (
            "accelerate launch --config_file conf/a.yaml t.py --per_device_train_batch_size 1 --max_length 512 --bf16",
            ("mine.yaml", "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, "
             "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"),
            ("framework", "name", "fsdp2"),
        ),
        (
            "torchrun --nproc_per_node 8 t.py --fsdp full_shard --fsdp_config f.json --per_device_train_batch_size 1 "
            "--max_length 512 --bf16",
            ("f.json", '{"fsdp_version": 1, "fsdp_limit_all_gathers": false}'),
            ("fsdp", "limit_all_gathers", False),
        ),
    ],
)  # fmt: skip
def test_a_file_that_a_script_names_may_be_given_from_elsewhere(capsys, tmp_path, recipe, other, field) -> None:
    import yaml

    script, named = tmp_path / "train.sh", tmp_path / other[0]
    script.write_text(recipe + "\n")
    command = ("from", str(script), MODEL, "--topology", TOPOLOGY)
    named.write_text(other[1])
    for files in ((str(script), str(named)), (str(named), str(script))):
        code, out, err = run(capsys, "from", *files, *command[2:])
        assert code == 0, err
        section, name, value = field
        assert yaml.safe_load(out)[section][name] == value
    named.unlink()
    code, out, err = run(capsys, *command)
    assert code == 2
    assert "that file as one more argument" in err


def test_files_of_gpt_neox_are_one(capsys, tmp_path) -> None:
    import yaml

    sizes, setup = tmp_path / "sizes.yml", tmp_path / "setup.yml"
    sizes.write_text('{"pipe_parallel_size": 0, "seq_length": 512, "checkpoint_activations": true}')
    setup.write_text(
        '{"lr_decay_iters": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, '
        '"precision": "bfloat16", "zero_optimization": {"stage": 1}, '
        '"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}'
    )
    code, out, err = run(capsys, "from", str(sizes), str(setup), MODEL, "--topology", TOPOLOGY)
    assert code == 0, err
    fields = yaml.safe_load(out)
    assert (fields["zero"]["stage"], fields["precision"], fields["checkpointing"]) == (1, "bf16", "full")
    setup.write_text('{"lr_decay_iters": 9, "seq_length": 1024}')
    code, out, err = run(capsys, "from", str(sizes), str(setup), MODEL, "--topology", TOPOLOGY)
    assert code == 2
    assert "setup.yml:1: seq_length: stands in" in err


def test_from_several_files(capsys) -> None:
    files = (str(DATA / "accelerate/zero3.yaml"), str(DATA / "recipes/trainer_batch.json"), MODEL)
    code, out, err = run(capsys, "from", *files, "--topology", TOPOLOGY)
    assert code == 2  # the Trainer's accumulation is another one
    assert "grad_accum is 8 in" in err
    code, out, err = run(
        capsys, "from", files[0], MODEL, "--topology", TOPOLOGY, "--micro-batch", "2", "--seq-len", "512"
    )
    assert (code, err) == (0, "")
    assert "grad_accum: 4" in out


def test_from_deepspeeds_file_and_the_trainers_arguments(capsys, tmp_path: Path) -> None:
    """The Trainer's arguments fill what is auto; what it only has by default yields."""
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": 0.5,
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
            }
        )
    )
    arguments = [str(tmp_path / "ds.json"), str(DATA / "recipes/trainer_batch.json"), MODEL, "--topology", TOPOLOGY]
    for order in (arguments, [arguments[1], arguments[0], *arguments[2:]]):
        code, out, err = run(capsys, "from", *order)
        assert (code, err) == (0, "")
        for line in (
            "name: deepspeed",
            "stage: 2",
            "micro_batch: 2",
            "grad_accum: 8",
            "grad_clip: 0.5",
            "precision: bf16",
        ):
            assert line in out


def test_a_models_name_is_held_against_its_config(capsys, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = (DATA / "recipes" / "axolotl.yaml").read_text()
    llama, machine = str(ROOT / "scenarios/models/llama-3.1-8b/config.json"), str(ROOT / "topologies/hgx_h100_8.yaml")
    for name, why in (
        ("meta-llama/Llama-3.1-70B", "has 8,030,261,248 parameters"),
        ("mistralai/Mistral-7B-v0.1", "is of another family, llama"),
    ):
        recipe.write_text(text.replace("meta-llama/Llama-3.1-8B", name))
        code, out, err = run(capsys, "read", str(recipe), llama)
        assert (code, f"names {name}, but {llama} {why}" in out, err) == (0, True, "")
        code, out, err = run(capsys, "from", str(recipe), llama, "--topology", machine)
        says = f"{recipe} names {name}, but {llama} {why}; that one is simulated"
        assert (code, f"# {says}" in out, err) == (0, True, f"zsim: {says}\n")
    recipe.write_text(text)
    code, out, err = run(capsys, "from", str(recipe), llama, "--topology", machine)
    assert (code, "that one is simulated" in out, err) == (0, False, "")
