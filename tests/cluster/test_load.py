"""Topology files: what they mean, and one clear error for each thing that is wrong with them."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest

from zsim.cluster.classes import rank_classes
from zsim.cluster.load import cluster_from, load_topology
from zsim.errors import InputError

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
ALL = sorted(TOPOLOGIES.glob("*.yaml"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_shipped_topology_is_sound(path: Path) -> None:
    cluster = load_topology(path, 2 if "nics" in path.read_text() and "NVL72" not in path.name else None)
    graph = cluster.graph
    assert [name for name, kind in graph.nodes(data="kind") if kind == "gpu"] == list(cluster.gpus)
    for source, target, link in graph.edges(data="link"):
        assert cluster.links[link.id] is link
        assert link.bandwidth > 0
        assert link.bandwidth <= link.raw * 1.001
        if link.kind in ("nvlink", "pcie", "socket", "nic", "c2c"):
            assert graph.edges[target, source]["link"].bandwidth == link.bandwidth
    wired = networkx.Graph(graph)
    if cluster.world_size > 1:
        assert all(networkx.has_path(wired, cluster.gpus[0], gpu) for gpu in cluster.gpus)


def test_the_machines_people_ask_for_are_there() -> None:
    names = {path.stem for path in ALL}
    assert names >= {
        "dgx1_v100_8", "dgx_a100_8", "hgx_h100_8", "hgx_h200_8", "hgx_b200_8", "gb200_nvl72", "a100_pcie_8",
        "rtx4090_8_pcie4", "rtx4090_8_p2p", "rtx3090_8_nvlink_pairs", "rtx3090_2_nvlink", "rtx6000ada_4", "l40s_8",
        "aws_g5_48xlarge", "aws_p4d_24xlarge", "aws_p5_48xlarge", "azure_nd_a100_v4", "azure_nd_h100_v5",
        "gcp_a3_mega", "mi300x_8", "mac_studio_m3_ultra", "h100_8x64_ib400", "h100_8x16_roce400_fat_tree",
        "a100_8x2_ethernet100", "a100_4",
    }  # fmt: skip


def test_number_of_nodes_is_one_field() -> None:
    assert load_topology(TOPOLOGIES / "h100_8x64_ib400.yaml").world_size == 512
    cluster = load_topology(TOPOLOGIES / "h100_8x64_ib400.yaml", nodes=3)
    assert cluster.world_size == 24
    assert cluster.gpus[-1] == "n2/gpu7"
    assert cluster.links["n2/gpu7>n2/nvswitch"].bandwidth == pytest.approx(370.8e9)


@pytest.mark.parametrize(
    ("name", "own", "nodes", "said"),
    [
        ("64 nodes of 8 H100, InfiniBand", 64, 4, "4 nodes of 8 H100, InfiniBand"),
        ("64 nodes of 8 H100, InfiniBand", 64, 1, "1 node of 8 H100, InfiniBand"),
        ("64 nodes of 8 H100, InfiniBand", 64, None, "64 nodes of 8 H100, InfiniBand"),
        ("64 nodes of 8 H100, InfiniBand", 64, 64, "64 nodes of 8 H100, InfiniBand"),
        ("our 16-node pod", 16, 2, "our 2 nodes pod"),
        ("512x H100", 64, 4, "512x H100: 4 nodes"),
        ("HGX H100, 8 GPUs", 1, 4, "HGX H100, 8 GPUs"),  # a node's own name
    ],
)
def test_a_name_does_not_contradict_the_number_of_nodes(name: str, own: int, nodes: int | None, said: str) -> None:
    machine = {"name": name, "nodes": own, "gpu": "H100-SXM", "gpus": 1, "pcie": {"tree": [["gpu0", "nic0"]]}}
    assert cluster_from(machine | {"nics": {"gbps": 400}}, nodes).name == said


def test_no_shipped_name_says_another_number_of_gpus() -> None:
    cluster = load_topology(TOPOLOGIES / "h100_8x64_ib400.yaml", nodes=4)
    assert (cluster.world_size, cluster.name) == (32, "4 nodes of 8 H100, rail-optimized NDR InfiniBand 400")


def test_equal_ranks_are_one_class() -> None:
    assert rank_classes(load_topology(TOPOLOGIES / "h100_8x64_ib400.yaml")) == (tuple(range(512)),)
    assert rank_classes(load_topology(TOPOLOGIES / "rtx4090_8_pcie4.yaml")) == (tuple(range(8)),)


def test_unequal_ranks_are_not() -> None:
    uneven = cluster_from(
        {"gpu": "RTX 4090", "gpus": 3, "pcie": {"tree": [["gpu0", "gpu1"], ["gpu2"]]}, "cpu": {"sockets": 2}}
    )
    assert rank_classes(uneven) == ((0, 1), (2,))
    narrow = cluster_from(
        {"gpu": "RTX 4090", "gpus": 2, "pcie": {"tree": [["gpu0", "gpu1"]], "slots": {"gpu1": [4, 8]}}}
    )
    assert rank_classes(narrow) == ((0,), (1,))
    mixed = cluster_from({"gpu": ["RTX 4090", "RTX 3090"], "gpus": 2})
    assert rank_classes(mixed) == ((0,), (1,))


BAD = {
    "unknown field": ("gpu: H100\ngpuss: 8\n", "gpuss", 2, "did you mean 'gpus'"),
    "unknown gpu": ("name: x\ngpu: H1000\n", "gpu", 2, "unknown GPU"),
    "no gpu": ("gpus: 8\n", "gpu", None, "missing"),
    "nodes": ("gpu: H100\ngpus: 2\nnodes: 0\n", "nodes", 3, "got 0"),
    "half a node": ("gpu: H100\nnodes: 1.5\n", "nodes", 2, "got 1.5"),
    "nodes without nics": ("gpu: H100\nnodes: 2\n", "nics", None, "need NICs"),
    "tree misses one": ("gpu: H100\ngpus: 2\npcie:\n  tree: [[gpu0]]\n", "pcie.tree", 4, "each once"),
    "nic rate": ("gpu: H100\npcie: {tree: [[gpu0, nic0]]}\n", "nics.gbps", None, "missing"),
    "nic nan": ("gpu: H100\npcie: {tree: [[gpu0, nic0]]}\nnics:\n  gbps: .nan\n", "nics.gbps.nic0", 4, "nan"),
    "fabric": ("gpu: H100\nfabric: {kind: mesh}\n", "fabric.kind", 2, "got 'mesh'"),
    "transport": ("gpu: H100\nfabric: {transport: carrier pigeon}\n", "fabric.transport", 2, "carrier pigeon"),
    "wires": ("gpu: A100\ngpus: 2\nnvlink: [[0, 2, 4]]\n", "nvlink", 3, "with 2 GPUs"),
    "nvlink on a 4090": ("gpu: RTX 4090\ngpus: 2\nnvlink: [[0, 1, 4]]\n", "nvlink", 3, "has no NVLink"),
    "p2p": ("gpu: H100\np2p: maybe\n", "p2p", 2, "maybe"),
    "socket link": ("gpu: H100\ngpus: 2\ncpu: {sockets: 2, socket_link: string}\n", "cpu.socket_link", 3, "string"),
    "avx512": ("gpu: H100\ncpu: {avx512: maybe}\n", "cpu.avx512", 2, "not true or false"),
    "not yaml": ("gpu: [H100\n", None, 2, "not YAML"),
    "a list": ("- H100\n", None, None, "holds no fields"),
    "a section in a list": ("gpu: H100\nfabric: [rail]\n", "fabric", 2, "expected a mapping"),
    "a field twice": ("gpu: H100\ngpus: 8\ngpus: 4\n", "gpus", 3, "stands here twice"),
    "a tree of text": ("gpu: H100\npcie: {tree: gpu0}\n", "pcie.tree", 2, "got 'gpu0'"),
    "a tree without sockets": ("gpu: H100\npcie: {tree: [gpu0]}\n", "pcie.tree", 2, "a list of sockets"),
    "a tree of numbers": ("gpu: H100\npcie: {tree: [[0]]}\n", "pcie.tree", 2, "got 0 in it"),
    "a disk in the tree": ("gpu: H100\npcie: {tree: [[gpu0, nvme0]]}\n", "pcie.tree", 2, "got 'nvme0' in it"),
    "lanes": ("gpu: H100\npcie: {lanes: -1}\n", "pcie.lanes", 2, "got -1"),
    "switches": ("gpu: H100\npcie: {switches: 1000000000000}\n", "pcie.switches", 2, "0 to 256"),
    "slots": ("gpu: H100\npcie: {slots: {gpu0: 4}}\n", "pcie.slots.gpu0", 2, "generation and lanes"),
    "a slot without lanes": ("gpu: H100\npcie: {slots: {gpu0: [4, 0]}}\n", "pcie.slots.gpu0", 2, "got 0"),
    "a slot of nothing": ("gpu: H100\npcie: {slots: {gpu1: [4, 8]}}\n", "pcie.slots.gpu1", 2, "accepted: gpu0"),
    "no memory rate": ("gpu: H100\ncpu: {dram_gbps: 0}\n", "cpu.dram_gbps", 2, "got 0"),
    "memory": ("gpu: H100\ncpu: {dram_gib: .nan}\n", "cpu.dram_gib", 2, "got nan"),
    "more sockets than cores": ("gpu: H100\ncpu: {sockets: 4, cores: 2}\n", "cpu.sockets", 2, "4 sockets of 2 cores"),
    "more NUMA nodes than cores": (
        "gpu: H100\ncpu: {cores: 4, numa_nodes: 8}\n",
        "cpu.numa_nodes",
        2,
        "8 numa_nodes of 4",
    ),
    "cores": ("gpu: H100\ncpu: {cores: many}\n", "cpu.cores", 2, "got 'many'"),
    "a disk's rate": ("gpu: H100\nnvme: {tb: 1, read_gbps: -3}\n", "nvme.read_gbps", 2, "got -3"),
    "number of nics": ("gpu: H100\nnics: {gbps: 100, count: two}\n", "nics.count", 2, "got 'two'"),
    "a nic that is not there": ("gpu: H100\nnics: {gbps: {nic3: 100}, count: 1}\n", "nics.gbps.nic3", 2, "nic0"),
    "gdr": ("gpu: H100\nnics: {gbps: 100, gdr: 1}\n", "nics.gdr", 2, "not true or false"),
    "uplinks": ("gpu: H100\nfabric: {uplink_share: 2}\n", "fabric.uplink_share", 2, "got 2"),
    "notes": ("gpu: H100\nnotes: 5\n", "notes", 2, "a list of texts"),
    "links": ("gpu: A100\ngpus: 2\nnvlink: [[0, 1, 1000]]\n", "nvlink", 3, "got 1000"),
    "islands": ("gpu: A100\ngpus: 2\nnvlink: {switches: [0, 1]}\n", "nvlink", 3, "with 2 GPUs"),
    "a mapping for a gpu": ("gpu: {name: H100}\n", "gpu", 1, "unknown GPU"),
    "a merge of a list": ("gpu: H100\n<<: [1]\n", None, 1, "not plain YAML"),
    "pcie 7": ("gpu: H100\npcie: {gen: 7}\n", "pcie.gen", 2, "got 7"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_file_line_field(tmp_path: Path, case: str) -> None:
    text, field, line, message = BAD[case]
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        load_topology(path)
    assert refused.value.file == path
    assert message in str(refused.value)
    if field:
        assert refused.value.field == field
    if line:
        assert refused.value.line == line


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such topology"):
        load_topology(tmp_path / "nothing.yaml")
