"""zsim compare and zsim explain from the command line, on a model small enough to be quick."""

import json
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
    assert inputs["plan.stage"] == [1, 3]
    gathered = {line["name"]: line["values"] for line in said["programs"]}
    assert gathered["all_gather/forward calls"][0] == 0 < gathered["all_gather/forward calls"][1]
    for result in said["results"]:
        time = result["time"]
        parts = time["compute_s"] + time["exposed_comm_s"] + time["host_s"] + time["idle_s"]
        assert parts == pytest.approx(time["step_s"])


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
