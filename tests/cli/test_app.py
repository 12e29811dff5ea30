"""The command line from outside: what is printed, where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from zsim.cli import app
from zsim.cli.app import COMMANDS, main
from zsim.errors import InputError

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
MODEL = str(ROOT / "scenarios/models/qwen2.5-7b/config.json")
TOPOLOGY = str(ROOT / "topologies/hgx_h100_8.yaml")


def process(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "zsim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_command(capsys, arguments: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name, (module, _) in COMMANDS.items() if module.startswith("zsim.cli")])
def test_every_command_explains_itself(capsys, name: str) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"Usage: zsim {name}" in out


def test_version(capsys) -> None:
    from zsim import __version__

    assert run(capsys, "--version") == (0, f"zsim {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("memroy",), "did you mean zsim memory?"),
        (("nowhere.yaml",), "nowhere.yaml: no such scenario"),
        (("scenarios/models/llama-3.1-8b/config.json",), "is a model, not a scenario"),
        (("tests/data/ds_config/textbook.json",), "is a configuration of deepspeed, not a scenario"),
        (("run",), "Missing argument"),
        (("run", "x.yaml", "--bogus"), "No such option: --bogus"),
        (("memory", "--params", "8 GB"), "--params: unit 'GB'"),
        (("memory", "--params", "0"), "--params: 0 is out of range"),
        (("memory", "--params", "nan"), "'nan' is not a count"),
        (("memory",), "one of --params and --model"),
        (("memory", "--params", "8e9", "--gpus", "0"), "--gpus: 0 is out of range"),
        (("memory", "--params", "8e9", "--gpus", "four"), "--gpus"),
        (("memory", "--params", "8e9", "--gpus", "1e9"), "--gpus: 1e9 is out of range"),
        (("memory", "--params", "1e30"), "--params: 1e30 is out of range"),
        (("collectives", "--topology", "topologies/h100_1_pcie5.yaml"), "--topology: one GPU has nobody to talk to"),
        (("validate", "collectives", "LICENSE"), "LICENSE: no row of a collective benchmark"),
        (("scenarios/qwen32b_8xh100.yaml", "--set", "zero.stage=7"), "--set zero.stage=7: zero.stage: 7 is not known"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(capsys, monkeypatch, arguments: tuple[str, ...], says: str) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zsim: ")
    assert says in err
    assert "Traceback" not in err


def test_the_textbooks_figures(capsys) -> None:
    """8e9 parameters on 4 GPUs: 128, 56, 44 and 32 GB, to the byte."""
    code, out, _ = run(capsys, "memory", "--params", "8e9", "--gpus", "4", "--json")
    stages = json.loads(out)["stages"]
    assert code == 0
    sizes = {stage: stages[stage]["gpu_bytes"] for stage in ("ddp", "zero1", "zero2", "zero3")}
    assert sizes == {"ddp": 128 * 10**9, "zero1": 56 * 10**9, "zero2": 44 * 10**9, "zero3": 32 * 10**9}
    assert [stages[stage]["formula"] for stage in sizes] == ["16 P", "P (4 + 12/N)", "P (2 + 14/N)", "16 P / N"]
    assert stages["zero2_offload"] == {
        "gpu_bytes": 16 * 10**9,
        "formula": "2 P",
        "host_bytes": 28 * 10**9,
        "host_formula": "14 P / N",
    }
    _, table, _ = run(capsys, "memory", "--params", "8B", "--gpus", "4")
    assert [line.split()[1] for line in table.splitlines()[:4]] == ["128", "56", "44", "32"]


def test_memory_of_a_model(capsys) -> None:
    _, out, _ = run(capsys, "memory", "--model", MODEL, "--gpus", "8", "--json")
    assert json.loads(out)["stages"]["ddp"]["gpu_bytes"] == 16 * 7_615_616_512


def test_only_what_a_command_needs_is_imported() -> None:
    """`memory` and `--help` start without the simulator and rich."""
    code = "import sys; from zsim.cli.app import dispatch; dispatch({}); print(*sys.modules)"
    for arguments in (["--help"], ["memory", "--params", "8e9"]):
        modules = set(process(code=code.format(arguments)).stdout.split())
        assert not {"rich", "simpy", "numpy", "networkx", "zsim.scenario", "zsim.api"} & modules


def test_files_are_written_though_the_reader_of_the_output_has_left(small: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-um", "zsim", str(small), "--json", "--out", str(tmp_path / "out")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    process.stdout.close()
    _, complaint = process.communicate()
    assert complaint == b""
    assert (tmp_path / "out/result.json").is_file()


def test_a_broken_pipe_is_quiet() -> None:
    """The reader may leave before or after all is written, so the exit code is 0 or 1."""
    command = f"{sys.executable} -m zsim schema | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.stdout, ended.stderr) == ("{\n", "")
    assert ended.returncode in (0, 1)


def test_interrupted_quietly(capsys, monkeypatch) -> None:
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "dispatch", interrupt)
    assert run(capsys, "x.yaml") == (130, "", "")


def test_a_bug_keeps_its_traceback(monkeypatch) -> None:
    def bug(arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "dispatch", bug)
    with pytest.raises(ZeroDivisionError):
        main(["x.yaml"])


def test_schema(capsys) -> None:
    code, out, _ = run(capsys, "schema")
    assert code == 0
    assert json.loads(out)["required"] == ["model", "cluster", "framework", "seq_len"]


def test_input_error_text() -> None:
    error = InputError("is wrong", "s.yaml", 3, "zero.stage", "0, 1, 2 or 3", ("a hint",))
    assert str(error) == "s.yaml:3: zero.stage: is wrong\n  accepted: 0, 1, 2 or 3\n  a hint"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A scenario that is quick to simulate."""
    config = json.loads(Path(MODEL).read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "small.yaml"
    path.write_text(
        f"model: config.json\ncluster: {TOPOLOGY}\nframework: deepspeed\n"
        "zero: {stage: 3}\nmicro_batch: 1\nseq_len: 512\n"
    )
    return path


def test_run(capsys, small: Path) -> None:
    code, text, err = run(capsys, str(small))
    assert (code, err) == (0, "")
    assert "FITS" in text
    assert run(capsys, "run", str(small))[0] == 0
    code, out, _ = run(capsys, str(small), "--json", "--set", "zero.stage=2")
    result = json.loads(out)
    assert code == 0
    assert result["fits"] is True
    assert result["memory"]["textbook"]["formula"] == "P (2 + 14/N)"
    code, line, _ = run(capsys, str(small), "--quiet")
    assert len(line.splitlines()) == 1


def test_what_does_not_fit_is_exit_code_3_and_prints_everything(capsys, small: Path) -> None:
    code, out, err = run(capsys, str(small), "--json", "--set", "micro_batch=512")
    result = json.loads(out)
    assert (code, err) == (3, "")
    assert result["fits"] is False
    assert result["time"]["step_s"] > 0


def test_out_writes_files(capsys, small: Path, tmp_path: Path) -> None:
    code, _, _ = run(capsys, str(small), "--quiet", "--out", str(tmp_path / "out"))
    assert code == 0
    assert json.loads((tmp_path / "out/result.json").read_text())["fits"] is True


def test_a_matrix_is_known_whatever_the_files_suffix(capsys, tmp_path) -> None:
    code, out, _ = run(capsys, "read", str(DATA / "topo/smi_two_nodes.md"))
    assert code == 0
    assert "nvidia-smi topo -m" in out
    other = tmp_path / "train.py"
    other.write_text("import torch\n")
    code, out, _ = run(capsys, "read", str(other))
    assert code == 2
    assert ".py: not a file of a kind that is read" in out


def test_what_cannot_be_written_is_no_bug(capsys, tmp_path) -> None:
    matrix = str(DATA / "topo/smi_named_by_banner.txt")
    nowhere = tmp_path / "nowhere" / "x.yaml"
    for option in (f"--yaml={nowhere}", f"--out={nowhere.with_suffix('.svg')}"):
        code, _, err = run(capsys, "topo", matrix, option)
        assert code == 2
        assert "No such file or directory" in err
        assert str(nowhere.parent) in err
    ds = tmp_path / "ds.json"
    ds.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    code, _, err = run(capsys, "from", str(ds), MODEL, "--topology", TOPOLOGY, "--out", str(nowhere))
    assert code == 2
    assert f"{nowhere.parent}: --out: no such folder" in err


@pytest.mark.parametrize("arguments", [("schema",), ("memory", "--params", "8e9")])
def test_a_full_disk_is_no_bug(monkeypatch, arguments: tuple[str, ...]) -> None:
    """Long output meets it at once, short output when the command ends."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, "-m", "zsim", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("zsim: standard output")
    assert done.stderr.endswith(": No space left on device\n")
    assert "Traceback" not in done.stderr


def test_options_that_a_topology_file_leaves_no_room_for(capsys) -> None:
    code, _, err = run(capsys, "topo", TOPOLOGY, "--gpu", "A100")
    assert code == 2
    assert "a topology file says that itself" in err
    code, _, err = run(capsys, "topo", str(DATA / "topo/smi_tagged.txt"), "--gpu", "8xH100")
    assert code == 2
    assert "this would be H100-SXM" in err


def test_two_models_are_one_too_many(capsys, tmp_path) -> None:
    ds, other = tmp_path / "ds.json", tmp_path / "other.json"
    ds.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    other.write_text((Path(MODEL) / "config.json").read_text() if Path(MODEL).is_dir() else Path(MODEL).read_text())
    code, _, err = run(capsys, "from", str(ds), MODEL, str(other), "--topology", TOPOLOGY)
    assert code == 2
    assert "is a second model beside" in err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "{}".encode("utf-16"), "it is UTF-16"),
        ("a.json", b"\x1f\x8b\x08\x00\x8b\x8b", "it is compressed by gzip"),
        ("a.json", b'{"zero_optimization": {"stage": 1e999}}', "a number is too large"),
        ("a.yaml", b"---\na: 1\n---\nb: 2\n", "holds several documents"),
    ],
)
def test_what_is_no_text_of_ours_says_what_it_is(capsys, tmp_path, name, content, says) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, out, _ = run(capsys, "read", str(path))
    assert code == 2
    assert says in out
