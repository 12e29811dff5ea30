"""The allocator's ledger of FSDP2 against torch's own memory tracker, byte by byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from zsim.cli.app import dispatch
from zsim.errors import InputError
from zsim.program.ops import Alloc, Free, Program
from zsim.validation import memory

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "memory"
ORACLES = sorted(FOLDER.glob("*.json.gz"))
COUNTS = sorted((FOLDER.parent / "storage").glob("*.jsonl.gz"))
SMALL = FOLDER / "llama3.1-8b_hf_w8_b1_s2048_ac-full_layers2.json.gz"


def test_there_are_oracles():
    assert len(ORACLES) >= 19


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_tracked_bytes_are_predicted(path: Path):
    outcome = memory.compare(path)
    assert outcome.matches, "\n".join(map(str, outcome.differing))
    moments = {line.moment for line in outcome.lines}
    assert moments == {*memory.MOMENTS, "step"}


@pytest.mark.parametrize("path", COUNTS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_all_tensors_of_a_real_run_are_predicted(path: Path):
    outcome = memory.compare(path)
    assert outcome.matches, outcome.refused or "\n".join(map(str, outcome.differing))
    assert len(outcome.lines) >= 4


def test_counts_cover_every_engine():
    assert {path.name.split("_")[0] for path in COUNTS} == {"ddp", "ds", "fsdp1", "fsdp2"}


@pytest.fixture(scope="module")
def program() -> Program:
    return memory.predict(memory.read(SMALL))


def test_what_is_allocated_is_freed_once_and_steps_repeat(program: Program):
    held = {instruction.key for instruction in program.init if isinstance(instruction, Alloc)}
    after = []
    for step in program.steps:
        for instruction in step:
            if isinstance(instruction, Alloc):
                assert instruction.key not in held
                held.add(instruction.key)
            elif isinstance(instruction, Free):
                held.remove(instruction.key)
        after.append(set(held))
    assert after[0] == after[1]


def test_command_prints_a_line_per_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert dispatch(["validate", "memory", str(SMALL)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 matched of 1"
    oracle = memory.read(SMALL)
    oracle["after_backward"]["Sharded Grad"] += 1
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(oracle))
    assert dispatch(["validate", "memory", str(changed), "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)["files"][0]["lines"]
    assert [(line["moment"], line["category"]) for line in lines if not line["match"]] == [
        ("after_backward", "Sharded Grad")
    ]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"config": {}}', gzip.compress(b"{}", mtime=0)])
def test_unreadable_files_are_input_errors(tmp_path: Path, content: bytes):
    path = tmp_path / ("x.json.gz" if content[:2] == b"\x1f\x8b" else "x.json")
    path.write_bytes(content)
    with pytest.raises(InputError):
        memory.read(path)
