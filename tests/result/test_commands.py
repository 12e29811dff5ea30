"""zsim compare and zsim explain from the command line, on a model small enough to be quick."""

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zsim.cli.app import main

ROOT = Path(__file__).parents[2]


MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def scenario(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "small.yaml"
    path.write_text(
        f"model: config.json\ncluster: {ROOT}/topologies/hgx_h100_8.yaml\nframework: deepspeed\n"
        "zero: {stage: 3}\nmicro_batch: 1\nseq_len: 512\n"
    )
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return exit_.value.code or 0, capsys.readouterr()


def test_stages_side_by_side(capsys, scenario):
    code, output = run(capsys, "compare", scenario, "--stages", "1,3", "--json")
    assert code == 0
    said = json.loads(output.out)
    assert said["names"] == ["ZeRO-1", "ZeRO-3"]
    inputs = {line["name"]: line["values"] for line in said["inputs"]}
    assert inputs["zero.stage"] == [1, 3]
    gathered = {line["name"]: line["values"] for line in said["programs"]}
    assert gathered["all_gather/forward calls"][0] == 0 < gathered["all_gather/forward calls"][1]
    for result in said["results"]:
        time = result["time"]
        parts = time["compute_s"] + time["exposed_comm_s"] + time["host_s"] + time["idle_s"]
        assert parts == pytest.approx(time["step_s"])


def test_a_stage_that_is_not_possible_says_so_beside_the_others(capsys, scenario):
    offload = ("compare", scenario, "--set", "zero.offload_optimizer=cpu", "--stages")
    code, output = run(capsys, *offload, "0,1,2,3", "--json")
    assert code == 0
    said = json.loads(output.out)
    assert said["names"] == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
    why = "not possible: zero.offload_optimizer: needs stage 1, 2 or 3, not 0"
    assert said["impossible"] == [{"name": "stage 0 (no ZeRO)", "why": why}]
    assert len(said["results"]) == 3
    code, output = run(capsys, *offload, "0,3")
    assert code == 0
    assert f"stage 0 (no ZeRO): {why}" in " ".join(output.out.split())
    assert "(A) ZeRO-3" in output.out
    code, output = run(capsys, *offload, "0")
    assert code == 2
    assert "zero.offload_optimizer: needs stage 1, 2 or 3, not 0" in output.err
    code, output = run(capsys, "compare", scenario, "--set", "zero.offload_param=cpu", "--stages", "2,3", "--json")
    said = json.loads(output.out)
    assert (code, said["names"], [each["name"] for each in said["impossible"]]) == (0, ["ZeRO-3"], ["ZeRO-2"])


def test_a_value_that_is_not_modeled_says_so_and_a_wrong_file_is_refused(capsys, scenario, tmp_path):
    code, output = run(capsys, "compare", scenario, "--vary", "micro_batch=1,none", "--out", tmp_path / "out", "--json")
    assert (code, json.loads(output.out)["names"]) == (0, ["micro_batch=1"])
    (kept,) = json.loads((tmp_path / "out" / "compare.json").read_text())["impossible"]
    assert kept["name"] == "micro_batch=none"
    assert kept["why"].startswith("not possible: micro_batch: ")
    code, output = run(capsys, "compare", scenario, "--set", "lora=8", "--vary", "quantize=null,int8", "--json")
    assert code == 0
    assert json.loads(output.out)["impossible"] == [
        {"name": "quantize=int8", "why": "not modeled: quantize: 8-bit weights in shards"}
    ]
    code, output = run(capsys, "compare", scenario, tmp_path / "absent.yaml")
    assert code == 2
    assert "absent.yaml" in output.err


def test_setups_that_issue_the_same_are_named(capsys, scenario):
    """Stage 2 reduces in every micro-step, stage 1 in the last: without accumulation that is the same."""
    overlap = ("compare", scenario, "--stages", "1,2", "--set", "zero.overlap_comm=true", "--json")
    _, output = run(capsys, *overlap)
    reasons = json.loads(output.out)["reasons"]
    assert reasons[0].startswith("B takes as long as A")
    assert "DeepSpeed all-reduces" in reasons[0]
    _, output = run(capsys, *overlap, "--set", "grad_accum=4")
    assert not any("as long as" in reason for reason in json.loads(output.out)["reasons"])


def test_two_frameworks_differ_in_what_was_chosen(capsys, scenario, tmp_path):
    """What one framework alone has is listed where it is not its default."""
    other = tmp_path / "other.yaml"
    other.write_text(scenario.read_text().replace("deepspeed\nzero: {stage: 3}", "fsdp2\nfsdp: {prefetch: 2}"))
    _, output = run(capsys, "compare", scenario, other, "--json")
    inputs = {line["name"]: line["values"] for line in json.loads(output.out)["inputs"]}
    assert inputs["zero.stage"] == [3, None]
    assert inputs["fsdp.prefetch"] == [None, 2]
    assert not {"zero.sub_group_size", "fsdp.mesh"} & inputs.keys()


def test_any_field_can_vary(capsys, scenario, tmp_path):
    code, output = run(capsys, "compare", scenario, "--vary", "micro_batch=1,2", "--out", tmp_path / "out")
    assert code == 0
    assert "(B) micro_batch=2" in output.out
    assert max(map(len, output.out.splitlines())) <= 80
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.json", "report.html", "comparison.png", "comparison.svg",
    }  # fmt: skip


def test_values_with_commas_of_their_own():
    from zsim.cli.compare import _values

    assert _values("[1, 8],[2,4]") == ["[1, 8]", "[2,4]"]
    assert _values("1, 2,") == ["1", "2"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--stages", "1,4"),
        ("--stages", ""),
        ("--vary", "micro_batch"),
        ("--vary", "micro_batch=1,2", "--stages", "1"),
    ],
)
def test_what_compares_with_nothing_is_refused(capsys, scenario, arguments):
    code, output = run(capsys, "compare", scenario, *arguments)
    assert code == 2
    assert "accepted" in output.err


def test_stages_need_a_deepspeed_scenario(capsys):
    fsdp = ROOT / "scenarios" / "llama31_8b_512xh100_fsdp2.yaml"
    code, output = run(capsys, "compare", fsdp, "--stages", "0,1,2,3")
    assert code == 2
    assert "--stages: are ZeRO's stages, and this scenario's framework is fsdp2" in output.err
    assert "accepted: a scenario with framework: deepspeed, or --vary" in output.err


def test_explain_says_what_would_help(capsys, scenario, tmp_path):
    code, output = run(capsys, "explain", scenario, "--json", "--out", tmp_path / "out")
    assert code == 0
    said = json.loads(output.out)
    assert said == json.loads((tmp_path / "out" / "explain.json").read_text())
    gains = {change["name"]: change["gain"] for change in said["changes"]}
    assert gains["matrix units twice as fast"] >= 0
    assert gains["nvlink links twice as fast"] >= 0
    assert {change["kind"] for change in said["changes"]} == {"setting", "hardware"}
    assert sum(line["share"] for line in said["critical_path"]) == pytest.approx(1)
    held = sum(holder["nbytes"] for holder in said["memory"])
    code, output = run(capsys, "run", scenario, "--json")
    assert held == json.loads(output.out)["memory"]["gpu"]["peak_allocated_bytes"]


@pytest.mark.parametrize(
    "sharding",
    [
        "framework: deepspeed\nzero: {stage: 3, offload_optimizer: cpu}\nmicro_batch: 1",
        "framework: deepspeed\nzero: {stage: 1}\nmicro_batch: 2",
        "framework: deepspeed\nzero: {stage: 2}\nmicro_batch: 1\nkernels: flash-attn",  # which stage 3 cannot have
        "framework: fsdp2\nmicro_batch: 1",
        "framework: fsdp1\nmicro_batch: 1",
    ],
)
def test_a_settings_name_is_what_set_takes(scenario, sharding):
    """Each setting that `explain` and the report propose gives the promised step when a user sets it."""
    import zsim
    from zsim.result import sensitivity

    model_and_cluster = scenario.read_text().split("framework:")[0]
    scenario.write_text(f"{model_and_cluster}seq_len: 512\n{sharding}\n")
    result = zsim.simulate(scenario)
    names = []
    for variant in sensitivity.settings(result):
        change = sensitivity.change(result, variant)
        if change is not None:
            again = zsim.simulate(scenario, [change.name])
            assert again.time.step_s == pytest.approx(change.step_s, rel=1e-12), change.name
            assert again.gpu.nvidia_smi_bytes == change.needed_bytes, change.name
            names.append(change.name)
    assert len(names) >= 4


def test_the_report_ends_with_what_would_help(capsys, scenario):
    code, output = run(capsys, "run", scenario, "--changes", "3")
    assert code == 0
    report, _, help_ = output.out.partition("\nWhat would help\n")
    assert report.startswith("FITS")
    code, output = run(capsys, "explain", scenario, "--json")
    gains = {change["name"]: change["gain"] for change in json.loads(output.out)["changes"]}
    lines = re.findall(r"^  ([+-][\d.]+)% tokens/s: ([^(\n]+?)(?: \(|$)", help_, re.M)
    assert 1 <= len(lines) <= 3
    for gain, name in lines:
        assert float(gain) == pytest.approx(100 * gains[name], abs=0.051)
    assert sum(name.endswith("as fast") for _, name in lines) <= 1
    assert shlex.split(help_)[-3:] == ["zsim", "explain", str(scenario)]
    overrides = "checkpointing={every: 2}", "seq_len=512"
    _, output = run(capsys, "run", scenario, "--changes", "1", "--set", overrides[0], "--set", overrides[1])
    command = output.out.partition("All settings and parts: ")[2]  # it explains the run with its overrides
    assert shlex.split(command)[2:] == [str(scenario), *(f"--set={override}" for override in overrides)]


def test_a_terminal_gets_changes_unasked_and_a_pipe_does_not(scenario):
    command = [sys.executable, "-m", "zsim", str(scenario)]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "What would help\n  --changes 3" in piped
    ours, its = pty.openpty()
    process = subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL, env=os.environ | {"TERM": "dumb"})
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(ours, 1 << 16):
            shown += more
    assert process.wait() == 0
    os.close(ours)
    assert re.search(rb"What would help\s+\+[\d.]+% tokens/s: ", shown)


def test_machines_get_changes_only_when_they_ask(capsys, scenario):
    _, output = run(capsys, "run", scenario, "--json")
    assert "changes" not in json.loads(output.out)
    _, output = run(capsys, "run", scenario, "--json", "--changes", "2")
    assert 1 <= len(json.loads(output.out)["changes"]) <= 2
    _, output = run(capsys, "run", scenario, "--quiet")
    assert len(output.out.splitlines()) == 1


def test_what_makes_it_fit_does(capsys, scenario):
    import zsim

    batch = ["micro_batch=128", "seq_len=2048"]
    code, output = run(capsys, "run", scenario, "--json", "--changes", "2", "--set", batch[0], "--set", batch[1])
    assert code == 3
    said = json.loads(output.out)["changes"]
    assert said
    for change in said:
        result = zsim.simulate(scenario, [*batch, *change["name"].split(", ")])
        assert result.fits
        assert result.gpu.headroom_bytes == change["headroom_bytes"]
