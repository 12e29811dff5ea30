"""Copies and the CPU optimizer of a capture on GPUs, as an ideal machine would write it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zsim.api import load_scenario, simulate
from zsim.cluster.classes import rank_classes
from zsim.cluster.load import load_topology
from zsim.cost.bench import seconds_alone
from zsim.cost.price import Price
from zsim.cost.profile import load_profile
from zsim.program.ops import Copy, CpuWork
from zsim.validation.capture import BENCH_COLUMNS
from zsim.validation.fit_profile import Calibration, calibrate

ROOT = Path(__file__).parents[2]
LATENCY, ALONE, TOGETHER = 1.4e-5, {"h2d": 5.5e10, "d2h": 5.1e10}, {"h2d": 3.1e10, "d2h": 2.6e10}
PAGEABLE, THREAD, DRAM_SHARE, WORLD = 0.2, 1.4e10, 0.5, 8


def captured(folder: Path, threads: int = 14) -> Path:
    topology = yaml.safe_load((ROOT / "topologies" / "hgx_h100_8.yaml").read_text())
    folder.mkdir()
    (folder / "topology.yaml").write_text(yaml.safe_dump(topology))
    (folder / "machine.json").write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "backend": "nccl", "world": 8}))
    rows: list[list[Any]] = []

    def add(kind: str, name: str, shape: str, nbytes: int, seconds: float) -> None:
        rows.append([kind, name, "", shape, WORLD, nbytes, 0, 9, seconds, seconds, seconds])

    for way in ALONE:
        for memory, share in (("pinned", 1.0), ("pageable", PAGEABLE)):
            for nbytes in (2**20, 2**24, 2**28):
                add("copy", f"{way} {memory} alone", "", nbytes, LATENCY + nbytes / (ALONE[way] * share))
                add("copy", f"{way} {memory} together", "", nbytes, LATENCY + nbytes / (TOGETHER[way] * share))
    dram = load_topology(folder / "topology.yaml").host.dram_bandwidth
    traffic = 28 << 23
    add("optimizer", "cpu", "1", traffic, traffic / THREAD)
    add("optimizer", "cpu", str(threads), traffic, traffic * WORLD / (dram * DRAM_SHARE))
    with (folder / "microbench.csv").open("w", newline="") as file:
        csv.writer(file).writerows([BENCH_COLUMNS.split(","), *rows])
    return folder


@pytest.fixture
def fitted(tmp_path: Path) -> Calibration:
    return calibrate([captured(tmp_path / "capture")])


def test_copies_and_the_optimizer_are_recovered(fitted: Calibration) -> None:
    assert set(fitted.copies) == {f"{way} {memory}" for way in ALONE for memory in ("pinned", "pageable")}
    for kind, (ranks, alone, together) in fitted.copies.items():
        way, memory = kind.split()
        share = 1.0 if memory == "pinned" else PAGEABLE
        assert ranks == WORLD
        assert alone.slope.inverse().value == pytest.approx(ALONE[way] * share, rel=0.01)
        assert together.slope.inverse().value == pytest.approx(TOGETHER[way] * share, rel=0.01)
        assert alone.latency.value == pytest.approx(LATENCY, rel=0.01)
    thread = next(value for name, value in fitted.determined.items() if name.startswith("cpu.thread_bandwidth"))
    assert thread.value == pytest.approx(THREAD, rel=0.01)
    assert fitted.determined["cpu.dram_efficiency"].value == pytest.approx(DRAM_SHARE, rel=0.01)
    assert not {"copies", "cpu.thread_bandwidth", "cpu.dram_efficiency"} & set(fitted.left)


def test_threads_that_do_not_fill_the_memory_do_not_determine_its_share(tmp_path: Path) -> None:
    folder = captured(tmp_path / "capture", threads=2)
    bench = folder / "microbench.csv"
    lines = bench.read_text().splitlines()
    seconds = (28 << 23) / (2 * THREAD)
    lines[-1] = ",".join([*lines[-1].split(",")[:8], *[str(seconds)] * 3])
    bench.write_text("\n".join(lines) + "\n")
    found = calibrate([folder])
    assert "cpu.dram_efficiency" in found.left
    assert any("DRAM has more" in note for note in found.notes)


def test_the_profile_prices_copies_as_measured(fitted: Calibration, tmp_path: Path) -> None:
    """One rank at the rate alone, all at the rate together, in between what the shared links leave."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fitted.document()))
    cluster = load_topology(tmp_path / "capture" / "topology.yaml")
    price = Price(cluster, load_profile("H100-SXM", str(path)), None)
    for way in ALONE:
        for pinned in (True, False):
            share = 1.0 if pinned else PAGEABLE
            for ranks, rate in ((1, ALONE[way]), (WORLD, TOGETHER[way])):
                transfer = price.transfer(Copy(way, 2**28, pinned), tuple((rank,) for rank in range(ranks)))
                took = seconds_alone(cluster, transfer)
                assert took == pytest.approx(LATENCY + 2**28 / (rate * share), rel=0.01)
    adam, one_thread = (Price(cluster, price.profile, n).cpu_seconds(0, CpuWork("adamw", 10**9, 28e9)) for n in (14, 1))
    assert adam == pytest.approx(28e9 * WORLD / (cluster.host.dram_bandwidth * DRAM_SHARE), rel=0.01)
    assert one_thread == pytest.approx(28e9 / THREAD, rel=0.01)


def test_folded_and_unfolded_runs_agree_with_measured_copies(fitted: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fitted.document()))
    run, offload = ROOT / "scenarios" / "qwen7b_8xh100.yaml", "zero.offload_optimizer=cpu"
    setup = load_scenario(run, [f"profile={path}", offload]).resolve()
    assert len(rank_classes(setup.cluster)) < WORLD
    folded, unfolded = simulate(setup), simulate(setup, fold=False)
    assert folded.time.step_s == pytest.approx(unfolded.time.step_s, rel=1e-6)
    assert folded.time.step_s != pytest.approx(simulate(load_scenario(run, [offload])).time.step_s, rel=1e-3)
