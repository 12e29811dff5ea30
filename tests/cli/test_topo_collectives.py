"""zsim topo, zsim collectives and zsim validate from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zsim.cli.app import dispatch
from zsim.errors import InputError

ROOT = Path(__file__).parents[2]
TOPOLOGY = str(ROOT / "topologies" / "hgx_h200_8.yaml")
Capture = pytest.CaptureFixture[str]
PASTE = str(ROOT / "tests" / "data" / "topo" / "smi_nvswitch_nics.txt")


def run(capsys: Capture, *arguments: str) -> str:
    assert dispatch(list(arguments)) == 0
    return capsys.readouterr().out


def test_topo_shows_the_machine(capsys: Capture) -> None:
    shown = run(capsys, "topo", TOPOLOGY)
    for part in (
        "H200-SXM",
        "nvswitch  joins gpu0 .. gpu7",
        "450 GB/s",
        "ring bus bandwidth 370.8 GB/s",
        "400 Gb/s",
        "NVL 56",
    ):
        assert part in shown
    assert "check: every GPU reaches every other" in shown


def test_topo_of_a_paste_says_what_it_assumed_and_writes_a_file(capsys: Capture, tmp_path: Path) -> None:
    shown = run(capsys, "topo", PASTE, "--yaml", str(tmp_path / "box.yaml"), "--gpu", "A100")
    assert "assumed: NICs of 100 Gb/s" in shown
    again = json.loads(run(capsys, "topo", str(tmp_path / "box.yaml"), "--json"))
    first = json.loads(run(capsys, "topo", PASTE, "--json", "--gpu", "A100"))
    assert again["links"] == first["links"]
    assert again["rings"] == first["rings"]
    assert first["gpus"] == ["A100-SXM-80GB"] * 4
    assert first["rings"]["bus_bandwidth"] == pytest.approx(240e9)


def test_topo_draws(capsys: Capture, tmp_path: Path) -> None:
    run(capsys, "topo", TOPOLOGY, "--out", str(tmp_path / "box.png"))
    assert (tmp_path / "box.png").read_bytes().startswith(b"\x89PNG")


def test_topo_questions_what_is_odd(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("gpu: RTX 4090\ngpus: 2\npcie: {tree: [[gpu0, gpu1]], slots: {gpu1: [4, 4]}}\n")
    assert "check: gpu1 has a narrower slot than others: 6 GB/s of 24 GB/s" in run(capsys, "topo", str(path))


def test_topo_refuses_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        dispatch(["topo", str(ROOT / "tests" / "data" / "topo" / "bad_glued.txt")])
    assert "bad_glued.txt:2" in str(refused.value)
    with pytest.raises(InputError, match="unknown GPU"):
        dispatch(["topo", PASTE, "--gpu", "B9000"])
    with pytest.raises(InputError, match="cannot read"):
        dispatch(["topo", str(tmp_path / "nothing.txt")])


def test_collectives_print_a_table_like_nccl_tests(capsys: Capture) -> None:
    lines = run(
        capsys, "collectives", "--topology", TOPOLOGY, "--op", "all_gather", "--sizes", "1MiB..8GiB"
    ).splitlines()
    assert "8 ranks" in lines[0]
    last = lines[-1].split()
    assert int(last[0]) == 8 * 2**30
    assert float(last[3]) == pytest.approx(361, rel=0.03)  # measured on such a machine
    assert last[4] == "ring/simple"
    rows = json.loads(run(capsys, "collectives", "--topology", TOPOLOGY, "--sizes", "64KiB,1GiB", "--json"))
    assert [row["algorithm"] for row in rows] == ["ring/ll", "nvls/simple"]
    forced = run(
        capsys, "collectives", "--topology", TOPOLOGY, "--sizes", "1GiB", "--algorithm", "tree", "--ranks", "4"
    )
    assert "tree/simple" in forced
    assert "4 ranks" in forced


@pytest.mark.parametrize(
    "wrong", [["--op", "gather"], ["--ranks", "9"], ["--sizes", "big"], ["--algorithm", "nvls", "--ranks", "1"]]
)
def test_collectives_refuse(wrong: list[str]) -> None:
    with pytest.raises(InputError):
        dispatch(["collectives", "--topology", TOPOLOGY, *wrong])


def test_validate_collectives(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "set_id,gpu,n_gpus,nodes,intra,net,collective,size_bytes,time_us\n"
        "mine,H200,8,1,NVSwitch,-,all_gather,17179869184,41594\n"
    )
    shown = run(capsys, "validate", "collectives", str(path))
    assert "mine" in shown
    assert "over 1 of at least 16 MiB" in shown
    found = json.loads(run(capsys, "validate", "collectives", str(path), "--json"))
    assert found["points"] == 1
    assert found["median"] < 0.05


def test_validate_bandwidth(capsys: Capture) -> None:
    matrix = str(ROOT / "tests" / "data" / "bandwidth" / "p2p.txt")
    assert "Unidirectional" in run(capsys, "validate", "bandwidth", matrix, "--topology", TOPOLOGY)


def test_a_log_without_unicode_gets_a_plain_tree() -> None:
    words = [sys.executable, "-m", "zsim", "topo", str(ROOT / "topologies/rtx4090_8_pcie4.yaml")]
    done = subprocess.run(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert b"|- gpu0" in done.stdout
    assert b"`- gpu3" in done.stdout
