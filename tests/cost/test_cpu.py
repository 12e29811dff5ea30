"""Adam on the host: threads, cores and DRAM that the processes of a node share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zsim
from zsim.cluster.load import cluster_from
from zsim.cluster.spec import Host
from zsim.cost.host import cpu_seconds
from zsim.cost.price import Price
from zsim.cost.profile import load_profile
from zsim.program.ops import CpuWork, HostWork
from zsim.result import sensitivity

CPU = load_profile("A100-SXM-80GB").cpu
INTEL = Host(sockets=2, cores=96, dram_bytes=10**12, dram_bandwidth=409.6e9, vendor="intel")


def rate(ranks: int, threads: int | None, host: Host = INTEL) -> float:
    """Parameters/s that all ranks of a node update, at the 28 bytes of Adam."""
    numel = 10**9
    return ranks * numel / cpu_seconds(CpuWork("adam", numel, 28.0 * numel), CPU, host, ranks, threads)


def test_one_process_takes_the_share_of_bandwidth_that_was_measured() -> None:
    """arXiv 2101.06840: 10e9 parameters in 2.57 s on two Xeon 8168 (256 GB/s)."""
    xeon = Host(sockets=2, cores=48, dram_bytes=10**12, dram_bandwidth=256e9, vendor="intel")
    assert rate(1, None, xeon) == pytest.approx(10e9 / 2.57, rel=0.1)


def test_threads_of_eight_processes() -> None:
    """torchrun's one thread each is half of what a twelfth of the cores does (torchtune PR 993: the step becomes twice
    as fast). As many threads as cores in every process take 1.23 and 1.43 times as long on one machine (DeepSpeed
    blogs/zenflow-corebinding, pull request 7474)."""
    one, shared, crowded = rate(8, 1), rate(8, 12), rate(8, None)
    assert shared / one == pytest.approx(2, rel=0.1)
    assert shared / crowded == pytest.approx((1.23 + 1.43) / 2, rel=0.01)
    assert rate(8, 24) == pytest.approx(crowded)  # two threads on each core
    rates = [rate(8, threads) for threads in (12, 13, 18, 23, 24)]
    assert rates == sorted(rates, reverse=True)  # a slope down to there
    assert rates[1] > 0.9 * shared  # 104 threads on 96 cores


DGX = Host(sockets=2, cores=128, dram_bytes=10**12, dram_bandwidth=409.6e9, vendor="amd", numa_nodes=8)


def test_what_a_process_pins_lies_in_one_numa_node() -> None:
    """Two ranks on a DGX A100 (DeepSpeed blogs/zenflow-corebinding, cores bound): 3.09e9 parameters scaled, updated and
    cast, 26 of 42 bytes of each pinned, take 1.73 s by what the step is longer than zsim's GPU part."""
    numel = 3.09e9 / 2
    work = CpuWork("all", round(numel), 42 * numel, pinned=26 * numel)
    pooled = cpu_seconds(work, CPU, replace(DGX, numa_nodes=1), 2, 64)
    assert cpu_seconds(work, CPU, DGX, 2, 64) == pytest.approx(1.73, rel=0.2)
    assert pooled == pytest.approx(0.70, rel=0.01)


@pytest.mark.parametrize("ranks", [8, 16])
def test_as_many_ranks_in_each_node_are_as_fast_wherever_it_lies(ranks: int) -> None:
    pinned, spread = (CpuWork("adam", 10**9, 28e9, pinned=share * 28e9) for share in (1.0, 0.0))
    assert cpu_seconds(pinned, CPU, DGX, ranks, 1) == pytest.approx(cpu_seconds(spread, CPU, DGX, ranks, 1))


def test_ranks_share_the_cores_of_a_small_host() -> None:
    """Eight ranks on two cores, as a batch system may give them: a quarter of a core each, not two."""
    small = replace(INTEL, cores=2)
    assert rate(8, 2, small) == pytest.approx(2 * 12e9 / 28)
    assert rate(1, 2, small) == pytest.approx(2 * 12e9 / 28)


SCENARIO = """
model: {params: 7e9}
cluster: TOPOLOGY
framework: FRAMEWORK
seq_len: 2048
micro_batch: 1
"""


@pytest.fixture
def scenario(tmp_path, request):
    topology = Path(request.config.rootpath) / "topologies" / "aws_p4d_24xlarge.yaml"

    def write(framework: str, more: str):
        path = tmp_path / "scenario.yaml"
        path.write_text(SCENARIO.replace("TOPOLOGY", str(topology)).replace("FRAMEWORK", framework) + more)
        return path

    return write


def test_what_the_launcher_sets_is_said_and_what_is_better_is_found(scenario) -> None:
    result = zsim.simulate(scenario("deepspeed", "zero: {stage: 3, offload_optimizer: cpu}\n"))
    assert any("omp_num_threads" in text and "deepspeed launcher" in text for text in result.assumptions)
    assert result.setup.plan.omp_num_threads is None
    (found,) = [variant for variant in sensitivity.settings(result) if variant.name == "omp_num_threads=6"]
    changed = sensitivity.change(result, found)
    assert changed is not None
    assert changed.gain > 0.05


def test_torchrun_sets_one(scenario) -> None:
    setup = zsim.load_scenario(scenario("fsdp2", "fsdp: {cpu_offload: true}\n")).resolve()
    assert setup.plan.omp_num_threads == 1
    assert "omp_num_threads: 1, as torchrun sets it" in setup.assumptions
    assert zsim.load_scenario(scenario("fsdp2", "")).resolve().plan.omp_num_threads is None
    given = "fsdp: {cpu_offload: true}\nomp_num_threads: 6\n"
    assert zsim.load_scenario(scenario("fsdp2", given)).resolve().plan.omp_num_threads == 6


def test_processes_with_less_than_a_core_each_issue_in_turns() -> None:
    def issue(cores: int) -> float:
        cluster = cluster_from({"gpu": "A100-SXM-80GB", "gpus": 8, "cpu": {"cores": cores}})
        return Price(cluster, load_profile("A100-SXM-80GB")).host_seconds(HostWork("hook"))

    assert [issue(cores) / issue(64) for cores in (2, 4, 8)] == pytest.approx([4, 2, 1])
