"""Host memory of offload against real runs: recorded ones, and one made now."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.validation import host_memory

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "host"
RUNS = sorted(FOLDER.glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_host_memory_of_a_real_run_is_predicted(path: Path):
    """What offload holds byte for byte, resident peaks of start-up, first and last step within 5 %."""
    outcome = host_memory.compare(path)
    assert outcome.matches, outcome.refused or "\n".join(map(str, outcome.differing))
    exact = [line for line in outcome.lines if line.exact]
    assert len(exact) >= 12
    assert [line.moment for line in outcome.lines if not line.exact] == ["start-up", "first step", "last step"]
    # the states dominate: an error of one of them would show
    assert max(line.recorded for line in outcome.lines) > 0.9e9


def test_runs_cover_the_stages_and_fsdp2():
    names = {path.name.split(".")[0] for path in RUNS}
    assert {"z1", "z2", "z2_pinned", "z3", "z3_parameters", "z3_pinned", "z3_nvme", "fsdp2"} <= names


def test_a_byte_more_is_seen(tmp_path: Path):
    lines = [json.loads(line) for line in gzip.decompress((FOLDER / "z3.jsonl.gz").read_bytes()).splitlines()]
    lines[-1]["held"]["gradients"] += 1
    for row in lines[1:]:
        row["rss_peak"] = int(1.2 * row["rss_peak"])
    path = tmp_path / "z3.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(line.moment, line.category) for line in host_memory.compare(path).differing]
    assert ("before end", "gradients") in found
    assert ("last step", "resident peak") in found


def test_other_files_are_input_errors():
    counted = sorted((FOLDER.parent / "storage").glob("*.jsonl.gz"))[0]
    with pytest.raises(InputError, match="no resident bytes"):
        host_memory.compare(counted)


def test_a_live_run_is_predicted(tmp_path: Path):
    """ZeRO-3 with optimizer and 92 million parameters on the CPU, two gloo ranks, torch's Adam."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    from validation.oracles import host, record

    config = next(config for config in host.configurations() if config["name"] == "z3_parameters")
    config["ds"]["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own may have to be compiled first
    config["ds"] |= {"zero_force_ds_cpu_optimizer": False}
    # so large that some 25 MB, by which resident bytes differ from run to run, stay below 5 %
    small = {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 8, "vocab_size": 8000}
    path = tmp_path / "live.jsonl.gz"
    record.write(host.record(config | {"over": small, "timeout": 120}), path)
    outcome = host_memory.compare(path)
    assert outcome.matches, outcome.refused or "\n".join(map(str, outcome.differing))
