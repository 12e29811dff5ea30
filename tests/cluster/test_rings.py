"""Rings, routes and NIC affinity: what NCCL's search finds on machines whose answer is known."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.load import cluster_from, load_topology
from zsim.cluster.nics import nic_affinity, nics_of
from zsim.cluster.rings import rings
from zsim.cluster.routes import gpu_host_copy, gpu_to_gpu, gpu_to_nic
from zsim.cluster.spec import Node

TOPOLOGIES = Path(__file__).parents[2] / "topologies"


def node_of(name: str) -> Node:
    return load_topology(TOPOLOGIES / f"{name}.yaml").templates[0]


# Bus bandwidths measured by nccl-tests on such machines, GB/s: validation/measured/collectives.csv (plateaus).
MEASURED = {
    "dgx1_v100_8": 129.1,
    "dgx_a100_8": 234.9,
    "hgx_h200_8": 361.4,
    "rtx4090_8_pcie4": 15.0,
    "rtx4090_8_p2p": 20.6,
    "hgx_b200_8": 739.0,
    "mi300x_8": 315.7,
    "a100_4": 234.7,
}


@pytest.mark.parametrize("name", MEASURED)
def test_ring_bus_bandwidth_falls_out_of_the_graph(name: str) -> None:
    node = node_of(name)
    found = rings(node, tuple(range(len(node.devices))))
    assert found.bandwidth / 1e9 == pytest.approx(MEASURED[name], rel=0.08)


def test_cube_mesh_has_six_rings_of_one_link_each() -> None:
    found = rings(node_of("dgx1_v100_8"), tuple(range(8)))
    assert len(found.orders) == 6
    assert found.type == "NVL"
    assert len(set(found.usage.values())) == 2  # double links carry twice what single ones do


def test_full_mesh_uses_every_link_both_ways() -> None:
    node = node_of("a100_4")
    found = rings(node, (0, 1, 2, 3))
    assert found.bandwidth == pytest.approx(240e9)
    assert {link for link in node.links if node.links[link].kind == "nvlink"} == set(found.usage)


@pytest.mark.parametrize("name", ["dgx1_v100_8", "dgx_a100_8", "rtx4090_8_pcie4", "l40s_8", "mi300x_8", "a100_pcie_8"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_rings_are_hamiltonian_and_fit_the_links(name: str, data: st.DataObject) -> None:
    node = node_of(name)
    gpus = tuple(sorted(data.draw(st.sets(st.integers(0, 7), min_size=2, max_size=8))))
    found = rings(node, gpus)
    for order in found.orders:
        assert sorted(order) == list(gpus)
    for link, times in found.usage.items():
        assert times * found.bandwidth <= node.links[link].bandwidth * 1.001


def test_path_types_and_peer_to_peer() -> None:
    node = node_of("l40s_8")
    assert gpu_to_gpu(node, 0, 1).type == "PIX"
    assert not gpu_to_gpu(node, 0, 1).staged  # below one switch: direct
    assert gpu_to_gpu(node, 0, 4).type == "SYS"
    assert gpu_to_gpu(node, 0, 4).staged  # NCCL's default limit is PXB
    geforce = node_of("rtx4090_8_pcie4")
    assert all(gpu_to_gpu(geforce, 0, other).staged for other in range(1, 8))
    patched = node_of("rtx4090_8_p2p")
    assert not any(gpu_to_gpu(patched, 0, other).staged for other in range(1, 8))


def test_staging_loads_host_memory_twice_and_crosses_sockets_once() -> None:
    usage = gpu_to_gpu(node_of("rtx4090_8_pcie4"), 0, 4).usage
    assert usage["cpu0>dram0"] == 2  # written, then read
    assert usage["cpu0>cpu1"] == 1
    assert usage["gpu0>cpu0"] == usage["cpu1>gpu4"] == 1


def test_nics_are_the_nearest_and_shared_evenly() -> None:
    assert nic_affinity(node_of("dgx_a100_8")) == tuple((f"nic{gpu}",) for gpu in range(8))
    p5 = nic_affinity(node_of("aws_p5_48xlarge"))
    assert [len(nics) for nics in p5] == [4] * 8
    assert len({nic for nics in p5 for nic in nics}) == 32
    p4d = nic_affinity(node_of("aws_p4d_24xlarge"))
    assert p4d == (("nic0",), ("nic0",), ("nic1",), ("nic1",), ("nic2",), ("nic2",), ("nic3",), ("nic3",))
    assert nics_of(node_of("dgx_a100_8"), (2, 3)) == ("nic2", "nic3")


def test_a_storage_nic_is_not_used() -> None:
    tree = [[["gpu0", "nic0"], ["gpu1", "nic1"]], ["nic2"]]
    node = cluster_from({"gpu": "A100", "gpus": 2, "nvlink": "switch", "pcie": {"tree": tree}, "nics": {"gbps": 100},
                         "cpu": {"sockets": 2}}).templates[0]  # fmt: skip
    assert nics_of(node, (0, 1)) == ("nic0", "nic1")


def test_gpudirect_pxn_and_staging() -> None:
    node = node_of("hgx_h100_8")
    assert gpu_to_nic(node, 0, "nic0", outward=True).usage == {"gpu0>plx0": 1, "plx0>nic0": 1}
    across = gpu_to_nic(node, 5, "nic0", outward=True)  # over NVLink to the GPU beside the NIC
    assert not across.staged
    assert across.usage["gpu5>nvswitch"] == across.usage["nvswitch>gpu0"] == 1
    lone = cluster_from(
        {"gpu": "L40S", "gpus": 1, "pcie": {"tree": [["gpu0", "nic0"]]}, "nics": {"gbps": 100}}
    ).templates[0]
    assert gpu_to_nic(lone, 0, "nic0", outward=True).staged  # through the root complex: no GPUDirect by default


def test_host_copies_take_the_pcie_path() -> None:
    node = node_of("dgx_a100_8")
    assert list(gpu_host_copy(node, 3, "d2h")) == ["gpu3>plx1", "plx1>cpu0", "cpu0>dram0"]
    assert list(gpu_host_copy(node, 3, "h2d")) == ["plx1>gpu3", "cpu0>plx1", "cpu0>dram0"]


def test_ring_orders_keep_neighbours_together_over_pcie() -> None:
    order = rings(node_of("a100_pcie_8"), tuple(range(8))).orders[0]
    crossings = sum((a < 4) != (b < 4) for a, b in pairwise([*order, order[0]]))
    assert crossings == 2
