"""How fast a CPU's cores issue kernels, by its name; and what follows for a step that waits for them."""

import re
from pathlib import Path

import pytest
import yaml

from zsim.api import simulate
from zsim.cluster.cpus import core_of, known
from zsim.cluster.files import read_machine
from zsim.cluster.load import cluster_from, load_topology
from zsim.cluster.matrix import Hints

DATA = Path("tests/data/topo")


@pytest.mark.parametrize(
    ("model", "core", "avx512"),
    [
        ("AMD EPYC 7742 64-Core Processor", "Zen 2", False),
        ("EPYC 7V12", "Zen 2", False),
        ("AMD EPYC 7R13 Processor", "Zen 3", False),
        ("EPYC 73F3", "Zen 3", False),
        ("AMD EPYC 9R14", "Zen 4", True),
        ("EPYC 9754", "Zen 4c", True),
        ("EPYC 9575F", "Zen 5", True),
        ("Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz", "Skylake", True),
        ("Intel(R) Xeon(R) Platinum 8358P CPU @ 2.60GHz", "Ice Lake", True),
        ("Xeon 8480", "Sapphire Rapids", True),
        ("Intel(R) Xeon(R) w9-3495X", "Sapphire Rapids", True),
        ("INTEL(R) XEON(R) GOLD 6530", "Emerald Rapids", True),
        ("Xeon 6530P", "Granite Rapids", True),
        ("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", "Broadwell", False),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Golden Cove", False),
        ("AMD Ryzen 9 7950X 16-Core Processor", "Zen 4", True),
        ("AMD Ryzen Threadripper PRO 5975WX 32-Cores", "Zen 3", False),
        ("Grace", "Neoverse V2", False),
        ("Neoverse-V2", "Neoverse V2", False),
        ("Neoverse-N1", "Neoverse N1", False),
        ("Intel Xeon Processor (SapphireRapids)", "Sapphire Rapids", True),
        ("Intel Xeon Processor (Icelake)", "Ice Lake", True),
        ("Intel Xeon Processor (Cascadelake)", "Skylake", True),
        ("AMD EPYC-Rome Processor", "Zen 2", False),
        ("AMD EPYC-Milan Processor", "Zen 3", False),
        ("AMD EPYC-Genoa Processor", "Zen 4", True),
        ("Apple M3 Ultra", "Apple", False),
    ],
)
def test_a_cpu_is_known_by_its_name(model: str, core: str, avx512: bool) -> None:
    found = known(model)
    assert found is not None
    assert (found.core, found.avx512) == (core, avx512)


@pytest.mark.parametrize("model", ["", "AMD EPYC", "Intel(R) Xeon(R) CPU @ 2.20GHz", "Pentium 4"])
def test_a_name_that_says_nothing_is_no_cpu(model: str) -> None:
    assert known(model) is None


def test_ratios_are_those_of_python_itself() -> None:
    """PyBench in milliseconds (the table that catalog/cpus.yaml names), by the clock of a core alone: within 13 %."""
    clock = {"EPYC 7K62": 3.3, "EPYC 7K83": 3.5, "EPYC 9754": 3.1, "EPYC 9K84": 3.7, "Xeon 8255C": 3.5}
    python = {"EPYC 7K62": 1629, "EPYC 7K83": 1184, "EPYC 9754": 1159, "EPYC 9K84": 982, "Xeon 8255C": 1400}
    document = yaml.safe_load(Path("zsim/cluster/catalog/cpus.yaml").read_text())
    seconds = {name: document["cores"][known(name).core] / clock[name] for name in clock}  # type: ignore[union-attr]
    for name, taken in python.items():
        assert seconds[name] / seconds["EPYC 9K84"] == pytest.approx(taken / 982, rel=0.13)


def test_every_core_has_a_clock_and_every_topology_a_known_cpu() -> None:
    document = yaml.safe_load(Path("zsim/cluster/catalog/cpus.yaml").read_text())
    assert {core for _, core, _ in document["clocks"]} == set(document["cores"])
    for file in Path("topologies").glob("*.yaml"):
        model = yaml.safe_load(file.read_text())["cpu"].get("model")
        assert known(model or "") is not None or file.stem == "cpu_2_gloo", file


@pytest.mark.parametrize(
    ("vendor", "family", "model", "core"),
    [
        ("amd", 143, 49, "Zen 2"), ("amd", 23, 1, "Zen 1"), ("amd", 175, 1, "Zen 3"), ("amd", 25, 17, "Zen 4"),
        ("amd", 25, 144, "Zen 4"), ("amd", 25, 160, "Zen 4c"), ("amd", 191, 2, "Zen 5"), ("intel", 6, 85, "Skylake"),
        ("intel", 6, 143, "Sapphire Rapids"), ("intel", 6, 1, ""), ("arm", 6, 143, ""), ("", 0, 0, ""),
    ],
)  # fmt: skip
def test_a_core_by_cpuid(vendor: str, family: int, model: int, core: str) -> None:
    assert core_of(vendor, family, model) == core


def test_what_nccl_says_of_the_cpu_is_used() -> None:
    cluster, reading = read_machine(DATA / "nccl_nvswitch.xml")
    assert reading.document["cpu"]["model"] == "Sapphire Rapids"
    assert cluster.host.pace == pytest.approx(709 / 3.0 / (712 / 3.63))
    assert not any("issue kernels" in text for text in cluster.assumptions)


def test_who_states_no_cpu_is_told() -> None:
    cluster, _ = read_machine(DATA / "smi_nvswitch_nics.txt")
    assert [text for text in cluster.assumptions if "issue kernels" in text] == [
        "a CPU whose cores issue kernels as fast as an EPYC's of Zen 4 at 3.6 GHz (--cpu)"
    ]
    cluster, _ = read_machine(DATA / "smi_nvswitch_nics.txt", Hints(cpu="EPYC 7742"))
    assert not any("issue kernels" in text for text in cluster.assumptions)
    cluster = cluster_from({"gpu": "H100", "cpu": {"model": "Pentium 4"}})
    assert any(
        re.search(r"issue kernels .*\(cpu.model: 'Pentium 4' is not known\)", text) for text in cluster.assumptions
    )
    assert not any("issue kernels" in text for text in load_topology("topologies/hgx_h100_8.yaml").assumptions)


def test_a_step_that_waits_for_the_host_is_as_long_as_that_takes(tmp_path: Path) -> None:
    """Adapters under ZeRO-3 with tiny micro-batches: Python alone, all of it 1.48 times as long on Zen 2."""

    def seconds(cpu: str) -> float:
        topology = tmp_path / "one.yaml"
        topology.write_text(f"gpu: H100-SXM\ngpus: 2\nnvlink: switch\ncpu: {{model: {cpu}, dram_gib: 512}}\n")
        scenario = tmp_path / "scenario.yaml"
        model = Path("scenarios/models/qwen2.5-1.5b/config.json").resolve()
        scenario.write_text(
            f"model: {model}\ncluster: {topology}\nframework: deepspeed\nzero: {{stage: 3}}\nlora: {{r: 8}}\n"
            "micro_batch: 1\nseq_len: 16\n"
        )
        return simulate(scenario).time.step_s

    assert seconds("EPYC 7742") / seconds("Sapphire Rapids") == pytest.approx((955 / 3.3) / (709 / 3.0), rel=0.02)


def test_numa_nodes_are_those_of_the_file(tmp_path: Path) -> None:
    """A DGX A100 has eight, and its GPUs hang at every other one."""
    matrix = tmp_path / "topo.txt"
    rows = "\n".join(
        f"GPU{n}\t"
        + "\t".join(" X " if m == n else "NV12" for m in range(4))
        + f"\t{16 * node}-{16 * node + 15}\t{node}"
        for n, node in enumerate((1, 3, 5, 7))
    )
    matrix.write_text(f"\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n{rows}\n")
    cluster, reading = read_machine(matrix, Hints(gpu="A100-SXM-40GB"))
    assert (cluster.host.numa_nodes, cluster.host.dram_bandwidth, cluster.host.dram_bytes) == (8, 400e9, 512 << 30)
    assert "8 NUMA nodes are of 2 sockets with 200 GB/s each (cpu.dram_gbps)" in reading.assumptions
    assert load_topology("topologies/dgx_a100_8.yaml").host.numa_nodes == 8
    assert load_topology("topologies/hgx_h100_8.yaml").host.numa_nodes == 2
    assert read_machine(DATA / "nccl_nvswitch.xml")[0].host.numa_nodes == 2
