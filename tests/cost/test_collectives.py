"""Collectives on links: bytes owed, symmetry, contention, and NCCL's choices."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.classes import rank_classes
from zsim.cluster.load import cluster_from, load_topology
from zsim.cluster.spec import Cluster
from zsim.cost import copies
from zsim.cost.bench import bench, bus_factor, parse_sizes, seconds_alone
from zsim.cost.collectives import KINDS, lay, shape_of, transfer
from zsim.cost.layouts import lay_out
from zsim.engine.network import fair_rates
from zsim.errors import InputError, NotModeled
from zsim.program.ops import Collective, Copy

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
MIB = 2**20


def machine(name: str, nodes: int | None = None) -> Cluster:
    return load_topology(TOPOLOGIES / f"{name}.yaml", nodes)


def work(kind: str, payload: int, n: int) -> Collective:
    whole, part = payload // 2, payload // 2 // n
    ins, outs = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(kind, (whole, whole))
    return Collective(kind, "bfloat16", ins, outs)


RING_EDGES = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
    "broadcast": lambda n: n - 1,
    "reduce": lambda n: n - 1,
}


@pytest.mark.parametrize("kind", RING_EDGES)
@pytest.mark.parametrize("name", ["hgx_h100_8", "dgx1_v100_8", "mi300x_8"])
@given(gpus=st.sets(st.integers(0, 7), min_size=2, max_size=8))
@settings(max_examples=6, deadline=None)
def test_bytes_that_leave_the_gpus_are_what_the_ring_owes(kind: str, name: str, gpus: set[int]) -> None:
    """n GPUs send (n-1) payloads in all for a gather, twice that for an all_reduce, on NVLink alone."""
    cluster = machine(name)
    group = tuple(sorted(gpus))
    usage = lay_out(cluster, (group,), "ring", kind).usage
    links = cluster.links
    if any(links[link].kind != "nvlink" for link in usage):
        return  # a subset of the cube mesh that NVLink does not close to a ring
    sent = sum(times for link, times in usage.items() if "/gpu" in links[link].src)
    assert sent == pytest.approx(RING_EDGES[kind](len(group)))


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_every_node_sends_what_a_ring_owes_the_network(nodes: int) -> None:
    cluster = machine("h100_8x64_ib400", nodes).unfolded()
    n = cluster.world_size
    usage = lay_out(cluster, (tuple(range(n)),), "ring", "all_gather").usage
    for node in range(nodes):
        out = sum(times for link, times in usage.items() if link.startswith(f"n{node}/nic") and "fabric" in link)
        assert out == pytest.approx((n - 1) / n)


def test_tree_traffic_between_nodes() -> None:
    cluster = machine("h100_8x64_ib400", 4).unfolded()
    usage = lay_out(cluster, (tuple(range(32)),), "tree", "all_reduce").usage
    out = sum(times for link, times in usage.items() if "/nic" in link.split(">")[0] and "fabric" in link)
    assert out == pytest.approx(2 * 3)  # three edges, up and down


MESHES = {
    "world": lambda n, g: (tuple(range(n)),),
    "shards inside nodes": lambda n, g: tuple(tuple(range(start, start + g)) for start in range(0, n, g)),
    "replicas across nodes": lambda n, g: tuple(tuple(range(local, n, g)) for local in range(g)),
    "pairs": lambda n, g: tuple((start, start + 1) for start in range(0, n, 2)),
    "half nodes": lambda n, g: tuple(tuple(range(start, start + g // 2)) for start in range(0, n, g // 2)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["hgx_h100_8", "dgx_a100_8", "aws_p4d_24xlarge", "l40s_8"])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_folded_is_the_sum_of_unfolded(mesh: str, name: str, kind: str) -> None:
    """The folded usage names one node; there it is exactly what all groups together put on its links."""
    cluster = machine(name, 4)
    groups = MESHES[mesh](cluster.world_size, cluster.gpus_per_node)
    job = work(kind, 64 * MIB, len(groups[0]))
    folded = lay(cluster, job, groups)
    plain = cluster.unfolded()
    singles = [lay(plain, job, (group,)) for group in groups]
    total: dict[str, float] = {}
    for single in singles:
        assert single.algorithm == folded.algorithm
        assert single.latency_s == pytest.approx(folded.latency_s)
        assert single.max_rate == pytest.approx(folded.max_rate)
        for link, times in single.usage.items():
            total[link] = total.get(link, 0.0) + times
    assert set(folded.usage) == {link for link in total if "n0/" in link}
    for link, times in folded.usage.items():
        assert times == pytest.approx(total[link])
    assert max(total[link] / plain.links[link].bandwidth for link in total) == pytest.approx(
        max(folded.usage[link] / cluster.links[link].bandwidth for link in folded.usage)
    )


@pytest.mark.parametrize(
    "name", ["h100_8x64_ib400", "dgx_a100_8", "aws_p4d_24xlarge", "aws_p5_48xlarge", "mi300x_8", "l40s_8"]
)
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_equal_ranks_carry_equal_loads(name: str, algorithm: str) -> None:
    """What a folded run takes for granted: a rank's own links are loaded like those of any rank of its class."""
    cluster = machine(name, 4)
    usage = lay_out(cluster, (tuple(range(cluster.world_size)),), algorithm, "all_reduce").usage
    for ranks in rank_classes(cluster):
        loads = []
        for rank in ranks[: cluster.gpus_per_node]:
            gpu = cluster.gpus[rank]
            # Only the GPUs at a socket's ends stage through host memory, which nothing but collectives loads.
            wires = {link: times for link, times in usage.items() if cluster.links[link].kind != "staging"}
            own = [(link.split(">")[0] == gpu, times) for link, times in wires.items() if gpu in link.split(">")]
            loads.append((sum(t for out, t in own if out), sum(t for out, t in own if not out)))
        assert all(load == pytest.approx(loads[0]) for load in loads)


def test_cost_does_not_grow_with_nodes() -> None:
    small, large = machine("h100_8x64_ib400", 2), machine("h100_8x64_ib400", 512)
    groups = [(tuple(range(cluster.world_size)),) for cluster in (small, large)]
    usages = [
        lay_out(cluster, group, "ring", "all_gather").usage
        for cluster, group in zip((small, large), groups, strict=True)
    ]
    assert len(usages[0]) == len(usages[1])


def test_two_gathers_on_one_root_take_twice_as_long_on_separate_roots_no_longer() -> None:
    tree = [[["gpu0", "gpu1"], ["gpu2", "gpu3"]], [["gpu4", "gpu5"], ["gpu6", "gpu7"]]]
    cluster = cluster_from({"gpu": "L40S", "gpus": 8, "pcie": {"tree": tree}, "cpu": {"sockets": 2}})
    one = rate(cluster, ((0, 1, 2, 3),))
    same_root = rate(cluster, ((0, 1, 2, 3), (0, 1, 2, 3)))
    other_root = rate(cluster, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert same_root == pytest.approx(one / 2)
    assert other_root == pytest.approx(one)


def test_without_peer_to_peer_neighbours_share_the_way_to_host_memory() -> None:
    """Four GeForce cards behind one switch: two pairs at once have half the uplink each."""
    cluster = cluster_from({"gpu": "RTX 4090", "gpus": 4, "pcie": {"tree": [[["gpu0", "gpu1", "gpu2", "gpu3"]]]}})
    assert rate(cluster, ((0, 1), (2, 3))) == pytest.approx(rate(cluster, ((0, 1),)) / 2)


def rate(cluster: Cluster, groups: tuple[tuple[int, ...], ...]) -> float:
    return lay_out(cluster, groups, "ring", "all_gather").rate


def test_offload_copies_and_collectives_meet_on_pcie() -> None:
    cluster = machine("rtx4090_8_pcie4")
    gather = lay(cluster, work("all_gather", 256 * MIB, 8), (tuple(range(8)),))
    copy = copies.lay(cluster, Copy("d2h", 256 * MIB), tuple(range(8)))
    assert any(cluster.links[link].kind == "pcie" for link in set(gather.usage) & set(copy.usage))


def test_copies() -> None:
    cluster = machine("hgx_h100_8")
    one = copies.lay(cluster, Copy("h2d", 1e9), (0,))
    assert 1e9 / seconds_alone(cluster, one) == pytest.approx(52e9, rel=0.01)  # hardware/host.csv: 51 to 55
    both_gpus_of_a_switch = copies.lay(machine("dgx_a100_8"), Copy("h2d", 1e9), (0, 1))
    alone = copies.lay(machine("dgx_a100_8"), Copy("h2d", 1e9), (0,))
    assert max(both_gpus_of_a_switch.usage.values()) == pytest.approx(2 * max(alone.usage.values()))
    pageable = copies.lay(cluster, Copy("h2d", 1e9, pinned=False), (0,))
    assert 4 < seconds_alone(cluster, pageable) / seconds_alone(cluster, one) < 6
    grace = cluster_from({"gpu": "GH200-96GB", "gpus": 1, "cpu": {"vendor": "arm", "dram_gbps": 500}})
    pinned, pageable = (copies.lay(grace, Copy("h2d", 1e9, pinned=each), (0,)) for each in (True, False))
    assert 1.0 < seconds_alone(grace, pageable) / seconds_alone(grace, pinned) < 1.1
    read, write = (copies.lay(cluster, Copy(way, 1e9), (0,)) for way in ("nvme_read", "nvme_write"))
    assert seconds_alone(cluster, write) > seconds_alone(cluster, read)
    with pytest.raises(NotModeled, match="sideways"):
        copies.lay(cluster, Copy("sideways", 1.0), (0,))
    with pytest.raises(NotModeled, match="NVMe"):
        copies.lay(machine("a100_8x2_ethernet100"), Copy("nvme_read", 1.0), (0,))


def with_nvme_read(rate: float) -> Cluster:
    cluster = machine("rtx4090_1")
    node = cluster.templates[0]
    drive = replace(node.links["nvme0>dram0"], bandwidth=rate)
    node = replace(
        node, host=replace(node.host, nvme_read=rate), links={**node.links, "nvme0>dram0": drive}
    )  # fmt: skip
    return replace(cluster, templates=(node,))


def test_nvme_reads_need_requests_in_flight() -> None:
    """One latency for two drives that differ twofold in theirs: right in the middle, and never out by twice."""
    measured = {  # GB/s by block and depth: GitHub 0xBakeer/deepseek-v41-flash-spark issue 2, nibor1896/Crow issue 30
        6.4e9: {
            (1 << 16, 1): 0.49, (1 << 16, 4): 1.05, (1 << 16, 16): 3.06, (1 << 16, 64): 3.87,
            (1 << 18, 1): 1.06, (1 << 18, 4): 2.35, (1 << 18, 16): 5.22, (1 << 18, 64): 5.84,
        },
        9.0e9: {(68 << 10, 1): 0.777, (68 << 10, 4): 3.174, (68 << 10, 8): 5.862, (68 << 10, 32): 8.421},
    }  # fmt: skip
    ratios = []
    for most, points in measured.items():
        drive = with_nvme_read(most)
        for (block, depth), rate in points.items():
            transfer = copies.lay(drive, Copy("nvme_read", 1e9, in_flight=block * depth), (0,))
            ratios.append(1 / seconds_alone(drive, transfer) / rate)
    assert min(ratios) > 0.5
    assert max(ratios) < 2
    assert median(ratios) == pytest.approx(1, abs=0.1)


def test_nvme_writes_and_short_reads() -> None:
    drive = machine("rtx4090_1")
    few, many = (copies.lay(drive, Copy("nvme_read", 1e9, in_flight=n * MIB), (0,)) for n in (1, 64))
    assert seconds_alone(drive, few) > 1.5 * seconds_alone(drive, many)
    short = copies.lay(drive, Copy("nvme_read", 1 * MIB, in_flight=64 * MIB), (0,))
    assert seconds_alone(drive, short) == pytest.approx(MIB / 7e9 + 120e-6 + 10e-6)
    written = [copies.lay(drive, Copy("nvme_write", 1e9, in_flight=n * MIB), (0,)) for n in (1, 64)]
    assert seconds_alone(drive, written[0]) == seconds_alone(drive, written[1])


def test_gpudirect_storage_takes_the_gpus_wire_and_leaves_host_memory_alone() -> None:
    cluster = machine("rtx4090_1")
    over, direct = (copies.lay(cluster, Copy("nvme_read", 1e9, direct=way), (0,)) for way in (False, True))
    kinds = [{cluster.links[link].kind for link in transfer.usage} for transfer in (over, direct)]
    assert kinds == [{"nvme", "dram"}, {"nvme", "pcie"}]


def test_unified_memory_copies_nothing() -> None:
    mac = machine("mac_studio_m3_ultra")
    copy = copies.lay(mac, Copy("d2h", 1e9), (0,))
    assert copy.payload_bytes == 0
    assert not copy.usage
    assert seconds_alone(mac, copy) == 0


def test_one_rank_needs_no_collective() -> None:
    assert (
        seconds_alone(
            machine("mac_studio_m3_ultra"), lay(machine("mac_studio_m3_ultra"), work("all_gather", MIB, 1), ((0,),))
        )
        == 0
    )


# What NCCL chose: nccl-tests with NCCL_DEBUG and notes of validation/measured/collectives.csv.
CHOICES = [
    ("hgx_h200_8", 1, "all_reduce", 8, 1024 * MIB, "nvls/simple"),
    ("hgx_h200_8", 1, "all_reduce", 5, 1024 * MIB, "nvls/simple"),
    ("hgx_h200_8", 1, "all_reduce", 4, 1024 * MIB, "ring/simple"),  # NVLS from five H200
    ("hgx_b200_8", 1, "all_reduce", 5, 1024 * MIB, "ring/simple"),  # and from six B200
    ("hgx_b200_8", 1, "all_reduce", 6, 1024 * MIB, "nvls/simple"),
    ("hgx_h200_8", 1, "all_gather", 8, 1024 * MIB, "ring/simple"),
    ("hgx_h200_8", 1, "reduce_scatter", 8, 1024 * MIB, "ring/simple"),
    ("dgx_a100_8", 1, "all_reduce", 8, 1024 * MIB, "ring/simple"),
    ("dgx_a100_8", 1, "all_reduce", 8, 4 * MIB, "ring/ll128"),
    ("dgx_a100_8", 1, "all_reduce", 8, 1024, "ring/ll"),
    ("rtx4090_8_pcie4", 1, "all_reduce", 8, 1024 * MIB, "ring/simple"),
    ("azure_nd_h100_v5", 8, "all_reduce", 64, 1024 * MIB, "nvls_tree/simple"),
    ("azure_nd_h100_v5", 32, "all_reduce", 256, 64 * 1024, "tree/ll"),
    ("azure_nd_a100_v4", 2, "all_gather", 16, 1024 * MIB, "ring/simple"),
]


@pytest.mark.parametrize(("name", "nodes", "kind", "ranks", "nbytes", "expected"), CHOICES)
def test_choice_of_algorithm(name: str, nodes: int, kind: str, ranks: int, nbytes: int, expected: str) -> None:
    assert transfer(machine(name, nodes), kind, nbytes, (tuple(range(ranks)),)).algorithm == expected


def test_ll128_only_over_nvlink() -> None:
    for nbytes in (2**power for power in range(10, 30)):
        assert "ll128" not in transfer(machine("l40s_8"), "all_reduce", nbytes, (tuple(range(8)),)).algorithm


def test_pat_only_with_one_gpu_per_node() -> None:
    one_each = machine("azure_nd_h100_v5", 8)
    group = (tuple(range(0, 64, 8)),)
    assert transfer(one_each, "all_gather", MIB, group, "pat").algorithm == "pat/simple"
    with pytest.raises(InputError, match="cannot run"):
        transfer(one_each, "all_gather", MIB, (tuple(range(64)),), "pat")


def test_override() -> None:
    cluster, group = machine("hgx_h200_8"), (tuple(range(8)),)
    assert transfer(cluster, "all_reduce", 1024 * MIB, group, "ring").algorithm == "ring/simple"
    assert transfer(cluster, "all_reduce", 1024 * MIB, group, "tree/ll").algorithm == "tree/ll"
    with pytest.raises(InputError) as refused:
        transfer(cluster, "all_gather", MIB, group, "tree")
    assert refused.value.accepted
    with pytest.raises(NotModeled):
        lay(cluster, Collective("all_to_some", "float32", 1, 1), group)


def test_the_environment_s_choice_binds_where_it_can() -> None:
    document = {"gpu": "H100", "gpus": 8, "nvlink": "switch"}
    cluster = cluster_from({**document, "nccl": {"algo": "tree", "proto": "simple"}})
    group = (tuple(range(8)),)
    assert transfer(cluster, "all_reduce", 1024 * MIB, group).algorithm == "tree/simple"
    assert transfer(cluster, "all_gather", 1024 * MIB, group).algorithm == "ring/simple"
    assert (
        transfer(cluster_from({**document, "nccl": {"proto": "ll"}}), "all_gather", MIB, group).algorithm == "ring/ll"
    )
    with pytest.raises(InputError, match=r"nccl\.algo"):
        cluster_from({**document, "nccl": {"algo": "butterfly"}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hgx_h100_8", "rtx4090_8_pcie4", "dgx1_v100_8"])
def test_no_collective_beats_its_bytes(kind: str, name: str) -> None:
    """Time falls neither below the wire's nor with size, and bus bandwidth grows towards the ring's."""
    cluster = machine(name)
    rows = bench(cluster, kind, parse_sizes("1KiB..8GiB"))
    wire = 576e9 if name == "hgx_h100_8" and kind == "all_reduce" else None  # NVLS sends 1 + 1/n bytes, not 2 (n-1)/n
    fastest = wire or lay_out(cluster, (tuple(range(8)),), "ring", "send_recv").rate
    for row in rows:
        if kind != "all_to_all":
            assert row.busbw < fastest
    assert all(later.time_s >= earlier.time_s for earlier, later in pairwise(rows))


@given(st.integers(2, 8), st.integers(10, 33), st.sampled_from(["all_gather", "all_reduce", "broadcast"]))
@settings(max_examples=40, deadline=None)
def test_a_faster_machine_is_never_slower(ranks: int, power: int, kind: str) -> None:
    h100, b200 = machine("hgx_h100_8"), machine("hgx_b200_8")
    times = [seconds_alone(c, transfer(c, kind, 2**power, (tuple(range(ranks)),), "ring/simple")) for c in (h100, b200)]
    assert times[1] <= times[0]


def test_hierarchy_of_hsdp_uses_both_networks() -> None:
    cluster = machine("azure_nd_h100_v5", 4)
    shards, replicas = MESHES["shards inside nodes"](32, 8), MESHES["replicas across nodes"](32, 8)
    inside = lay(cluster, work("all_gather", 256 * MIB, 8), shards)
    across = lay(cluster, work("all_reduce", 32 * MIB, 4), replicas)
    assert {cluster.links[link].kind for link in inside.usage} == {"nvlink"}
    assert {cluster.links[link].kind for link in across.usage} == {"pcie", "nic"}


def test_parse_sizes() -> None:
    assert parse_sizes("1KiB..8KiB") == [1024, 2048, 4096, 8192]
    assert parse_sizes("1MiB,3MB") == [MIB, 3_000_000]
    for bad in ("8KiB..1KiB", "0..1KiB", "many", "1KiB,-4", ""):
        with pytest.raises(InputError) as refused:
            parse_sizes(bad)
        assert refused.value.field == "--sizes"


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 1.75
    assert bus_factor("all_gather", 8) == bus_factor("all_to_all", 8) == 0.875
    assert bus_factor("broadcast", 8) == 1.0


def test_all_to_all_between_nodes_is_bound_by_the_nic_of_each_gpu() -> None:
    """Two nodes of H100 on EFA: 85 GB/s for 1 GiB (a user's nccl-tests), which no constant was fitted to."""
    pair = bench(machine("aws_p5_48xlarge", 2), "all_to_all", [1024 * MIB])[0]
    assert pair.busbw == pytest.approx(85e9, rel=0.05)
    machines = (machine("azure_nd_h100_v5", nodes) for nodes in (4, 2))
    four, two = (bench(one, "all_to_all", [8192 * MIB])[0] for one in machines)
    assert four.busbw / two.busbw == pytest.approx((4 / 3) / (2 / 1), rel=0.05)  # N / (N-1) of the NIC


def test_gloo_on_cpu_hosts_against_our_own_measurements() -> None:
    """The fastest tenth of calls of two ranks; timings on shared cores repeat within some 30 %."""
    cluster = machine("cpu_2_gloo")
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    with (TOPOLOGIES.parent / "validation" / "measured" / "gloo.csv").open() as file:
        rows = list(csv.DictReader(file))
    errors = []
    for row in rows:
        one = transfer(cluster, names.get(row["name"], row["name"]), float(row["bytes"]), ((0, 1),))
        assert one.algorithm == "gloo"
        errors.append(abs(seconds_alone(cluster, one) / float(row["p10_s"]) - 1))
    assert len(errors) == 72
    assert median(errors) < 0.1
    assert max(errors) < 0.4


def test_gloo_scales_with_ranks_and_refuses_what_was_not_measured() -> None:
    cluster = cluster_from({"gpu": "CPU", "gpus": 4, "backend": "gloo"})
    times = [seconds_alone(cluster, transfer(cluster, "all_reduce", 2**24, (tuple(range(n)),))) for n in (2, 3, 4)]
    assert times == sorted(times)
    both = transfer(cluster, "all_reduce", 2**24, ((0, 1), (2, 3)))
    assert seconds_alone(cluster, both) > 1.5 * times[0]
    assert transfer(cluster, "all_reduce", 2**24, ((0,),)).payload_bytes == 0


def test_the_network_shares_what_the_layouts_load() -> None:
    """Two gathers in flight on one root halve each other's rate; on separate roots neither notices."""
    tree = [[["gpu0", "gpu1"], ["gpu2", "gpu3"]], [["gpu4", "gpu5"], ["gpu6", "gpu7"]]]
    cluster = cluster_from({"gpu": "L40S", "gpus": 8, "pcie": {"tree": tree}, "cpu": {"sockets": 2}})
    capacity = {link: cluster.links[link].bandwidth for link in cluster.links}
    job = work("all_gather", 256 * MIB, 4)
    here, there = lay(cluster, job, ((0, 1, 2, 3),)), lay(cluster, job, ((4, 5, 6, 7),))
    alone = fair_rates([here], capacity)[0]
    assert fair_rates([here, here], capacity) == [pytest.approx(alone / 2)] * 2
    assert fair_rates([here, there], capacity) == [pytest.approx(alone)] * 2
    copy = copies.lay(cluster, Copy("d2h", 256 * MIB), (0, 1, 2, 3))
    both = fair_rates([here, copy], capacity)
    assert both[0] < alone
    assert both[1] < fair_rates([copy], capacity)[0]


def test_only_nvidias_switches_add_up() -> None:
    """A machine stated with AMD GPUs behind a switch has no NVLS."""
    cluster = cluster_from({"gpu": "MI300X", "gpus": 8, "nvlink": "switch"})
    assert not shape_of(cluster, (tuple(range(8)),)).nvswitch
    assert seconds_alone(cluster, lay(cluster, work("all_reduce", 1024 * MIB, 8), (tuple(range(8)),))) > 0
