"""The ledger of DeepSpeed's Programs against the allocations of real DeepSpeed runs, byte for byte.

Recorded by validation/oracles/deepspeed_memory.py; one run is recorded anew here.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from zsim.program.lower import lower
from zsim.program.ops import HOST, Alloc, Free, Launch
from zsim.program.partitions import Partitions
from zsim.validation.recording import plan_of, setup

RECORDED = Path(__file__).parents[2] / "validation" / "oracles" / "allocations" / "deepspeed.jsonl.gz"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
SMALLEST = 256  # the recorder counts nothing below
ACTIVATIONS = 200_000  # bytes of two tokens, and scratch of the CPU's matrix products


def moments(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What the recorder notes, from the Program: bytes after init, after each backward, after each step, and peaks."""
    model, tree, workload = setup(run)
    program = lower(model, tree, plan_of(run), workload, steps=3)
    held: dict[str, int] = {}
    total = peak = 0
    found: list[dict[str, Any]] = []

    def close(moment: str) -> None:
        nonlocal peak
        found.append({"moment": moment, "bytes": total, "peak": peak})
        peak = total

    for step, instructions in enumerate((program.init, *program.steps)):
        micro, optimizing = 0, False
        for instruction in instructions:
            if isinstance(instruction, Launch):
                op = instruction.op
                if op.lane == HOST:
                    continue
                begins = op.phase == "optimizer"
                if step and (op.micro != micro or begins) and not optimizing:
                    close("backward")
                    micro, optimizing = op.micro, begins
                if not op.module:  # DeepSpeed's own kernels
                    peak = max(peak, total + op.temp_peak)
            elif isinstance(instruction, Alloc) and instruction.nbytes >= SMALLEST:
                held[instruction.key] = instruction.nbytes
                total += instruction.nbytes
                peak = max(peak, total)
            elif isinstance(instruction, Free):
                total -= held.pop(instruction.key, 0)
        close("step" if step else "init")
    return found


def compare(run: dict[str, Any]) -> None:
    stage = run["config"]["ds"]["zero_optimization"]["stage"]
    ours, theirs = moments(run), run["moments"]
    assert [moment["moment"] for moment in ours] == [moment["moment"] for moment in theirs]
    for mine, real in zip(ours, theirs, strict=True):
        if mine["moment"] == "backward":
            assert abs(real["peak"] - mine["peak"]) <= ACTIVATIONS
        elif mine["moment"] == "step" and stage:  # in stage 0 the CPU's AdamW goes from one small tensor to the next
            assert abs(mine["peak"] - real["peak"]) < SMALLEST  # scalars of the update are in the Program's temporaries
        if mine["moment"] != "backward" or stage < 3:  # stage 3: persistent parameters go before the step's first op
            assert mine["bytes"] == real["bytes"]


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Program is that of the rank that keeps most; recorded is rank 0."""
    monkeypatch.setattr(Partitions, "fullest_rank", 0)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_every_recorded_allocation_is_in_the_ledger(run: dict[str, Any]):
    compare(run)


def test_a_run_recorded_now():
    pytest.importorskip("deepspeed")
    from validation.oracles.deepspeed_memory import configurations, record

    config = next(config for config in configurations() if config["name"] == "z3_regather_w2_ga2_llama")
    compare(record(config))
