"""Memory of saving and resuming against recorded runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from zsim.validation.memory import compare

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "saving"
RUNS = sorted(FOLDER.glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_memory_of_saving_and_resuming_is_predicted_on_every_rank(path: Path):
    """Within 1 % of what a rank holds then."""
    outcome = compare(path)
    assert outcome.matches, outcome.refused or "\n".join(map(str, outcome.differing))
    ranks = {line.moment.split(", ")[1] for line in outcome.lines}
    assert ranks == {"rank 0", "rank 1"} or len(ranks) == 4


def test_runs_cover_what_gathers_and_what_does_not():
    names = {path.name.split(".")[0] for path in RUNS}
    assert {"z0", "z1", "z2", "z3", "z2_offload", "z3_offload_parameters", "z2_frozen", "z3_frozen"} <= names
    assert {f"{engine}_{kind}_w4" for engine in ("fsdp1", "fsdp2") for kind in ("full", "sharded")} <= names


def test_other_bytes_are_seen(tmp_path: Path):
    lines = [json.loads(line) for line in gzip.decompress((FOLDER / "z3.jsonl.gz").read_bytes()).splitlines()]
    gather = next(line for line in lines if line.get("moment") == "gather" and line["rank"] == 0)
    gather["peak"] = [round(1.03 * nbytes) for nbytes in gather["peak"]]
    path = tmp_path / "z3.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(line.moment, line.category) for line in compare(path).differing]
    assert found == [("saving the weights, rank 0", of) for of in ("host peak", "device peak")]
