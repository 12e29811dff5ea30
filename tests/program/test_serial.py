"""On CPUs the host runs the kernels: only what a framework starts asynchronously overlaps them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from zsim.api import load_scenario, simulate
from zsim.program.ops import COMPUTE, Collective, Compute
from zsim.program.serial import serial
from zsim.result.spec import Result

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "validation" / "measured" / "gloo_cpu"


def overlapped(result: Result, kind: str) -> float:
    """Seconds in which kernels and collectives of a kind both run."""
    records = [record for record in result.slowest.records if record.step == result.slowest.steady.step]
    kernels = [record for record in records if isinstance(record.op.work, Compute)]
    return sum(
        max(0.0, min(call.end_s, kernel.end_s) - max(call.start_s, kernel.start_s))
        for call in records
        if isinstance(call.op.work, Collective) and call.op.work.kind == kind
        for kernel in kernels
    )


@pytest.mark.parametrize(
    ("run", "kind", "expected"),
    [
        ("ddp_small", "all_reduce", True),
        ("fsdp2_small", "all_gather", False),
        ("fsdp2_small", "reduce_scatter", False),
        ("zero2_small", "all_reduce", False),
        ("zero3_small", "all_gather", True),
        ("zero3_small", "reduce_scatter", False),
    ],
)
def test_only_asynchronous_calls_overlap_kernels(run: str, kind: str, expected: bool) -> None:
    result = simulate(load_scenario(RUNS / f"run_{run}.yaml"))
    assert (overlapped(result, kind) > 0) == expected


def test_host_and_kernels_take_turns() -> None:
    result = simulate(load_scenario(RUNS / "run_fsdp2_tiny.yaml"))
    time = result.time
    assert time.compute_s + time.exposed_comm_s + time.host_s == pytest.approx(time.step_s, rel=1e-6)
    records = [r for r in result.slowest.records if r.step == result.slowest.steady.step and r.op.lane == COMPUTE]
    for before, after in pairwise(records):
        assert after.issued_s >= before.end_s


def test_a_serial_program_stays_as_it_is() -> None:
    result = simulate(load_scenario(RUNS / "run_zero3_tiny.yaml"))
    again = serial(result.program, result.setup.plan)
    assert again.steps == result.program.steps
    assert len({id(step) for step in again.steps}) == len({id(step) for step in result.program.steps})


def test_on_gpus_gathers_run_beside_kernels(tmp_path: Path) -> None:
    document = yaml.safe_load((RUNS / "run_fsdp2_small.yaml").read_text())
    document |= {"cluster": str(ROOT / "topologies" / "hgx_h100_8.yaml"), "model": str(RUNS / "models" / "small.json")}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document | {"seq_len": 2048}))
    assert overlapped(simulate(load_scenario(path)), "all_gather") > 0
