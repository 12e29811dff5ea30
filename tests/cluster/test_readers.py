"""Readers of what machines print: each oddity seen in the wild as a small file of ours, and the wild ones if there."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.files import read_machine, read_query, read_text, write_yaml
from zsim.cluster.load import cluster_from, load_topology
from zsim.cluster.matrix import Hints
from zsim.cluster.rings import rings
from zsim.cluster.spec import Cluster
from zsim.errors import InputError

DATA = Path(__file__).parents[1] / "data" / "topo"
CORPUS = Path(__file__).parents[3] / "shared" / "reference" / "corpus"

READ = {
    # file -> (GPUs, nvlink, tree)
    "smi_nvswitch_nics.txt": (4, "switch", [[["gpu0", "gpu1", "nic0"]], [["gpu2", "gpu3", "nic1"]]]),
    "smi_blanks.txt": (4, None, [[["gpu0", "gpu1"], ["gpu2", "gpu3"]]]),
    "smi_empty_affinity.txt": (2, [[0, 1, 4]], [["gpu0"], ["gpu1"]]),
    "smi_numa_suffix.txt": (2, [[0, 1, 4]], [["gpu0"], ["gpu1"]]),
    "smi_old_soc.txt": (3, None, [["gpu0", "gpu1"], ["gpu2", "nic0"]]),
    "smi_islands.txt": (6, {"switches": [[0, 1, 2], [3, 4, 5]]}, [["gpu0", "gpu1", "gpu2"], ["gpu3", "gpu4", "gpu5"]]),
    "smi_two_level.txt": (4, None, [[[["gpu0", "gpu1"], ["gpu2", "gpu3"]]]]),
    "smi_all_sys.txt": (4, None, [[["gpu0", "nic0"], ["gpu1", "nic1"]], ["gpu2", "gpu3"]]),
    "smi_vm_ranges.txt": (4, [[0, 1, 1], [0, 2, 2], [1, 3, 2], [2, 3, 1]], [["gpu0", "gpu1", "gpu2", "gpu3"]]),
    "smi_one_gpu_na.txt": (1, None, [["gpu0"]]),
    "smi_cube_ragged.txt": (
        4,
        [[0, 1, 1], [0, 2, 2], [0, 3, 1], [1, 2, 1], [1, 3, 2], [2, 3, 2]],
        [["gpu0", "gpu1", "gpu2", "gpu3"]],
    ),
    "smi_named_by_banner.txt": (4, "switch", [["gpu0", "gpu1", "gpu2", "gpu3"]]),
    "smi_named_mig.txt": (2, [[0, 1, 12]], [["gpu0", "gpu1"]]),
    "smi_tagged.txt": (2, [[0, 1, 4]], [["gpu0", "gpu1"]]),
    "smi_environment.txt": (2, [[0, 1, 18]], [["gpu0", "gpu1"]]),
    "smi_then_status.txt": (2, None, [[["gpu0", "gpu1"]]]),
    "smi_mp.txt": (2, None, [["gpu0", "gpu1"]]),
    "smi_then_bandwidth.md": (2, None, [["gpu0", "gpu1"]]),
    "rocm_links_alone.txt": (2, None, [["gpu0", "gpu1"]]),
    "smi_two_nodes.md": (2, None, [["gpu0", "gpu1"]]),
    "rocm_xgmi.txt": (3, [[0, 1, 1], [0, 2, 1], [1, 2, 1]], [["gpu0", "gpu1"], ["gpu2"]]),
    "rocm_pcie_hops.txt": (3, None, [["gpu0", "gpu1"], ["gpu2"]]),
    "rocm_odd_cells.txt": (3, [[0, 1, 1], [0, 2, 1], [1, 2, 1]], [["gpu0", "gpu1", "gpu2"]]),
    "nccl_nvswitch.xml": (2, "switch", [[["gpu0", "nic0"]], [["gpu1", "nic1"]]]),
    "nccl_no_gpu_elements.xml": (2, "switch", [[["gpu0", "nic0", "gpu1"]]]),
    "nccl_odd_targets.xml": (2, [[0, 1, 12]], [["gpu0", "gpu1", "nic0"]]),
    "nccl_gen5_unnamed.xml": (2, "switch", [[["gpu0", "nic0"], ["gpu1", "nic1"]]]),
    "nccl_gcn_908.xml": (2, [[0, 1, 1]], [["gpu0"], ["gpu1"]]),
}


@pytest.mark.parametrize(
    ("name", "gpu", "note"),
    [
        ("nccl_gen5_unnamed.xml", "H100-SXM", "the file does not name them"),
        ("smi_tagged.txt", "RTX A6000", "the file does not name them"),
        ("smi_mp.txt", "RTX 4090", "`topo -mp`, which leaves NVLinks out"),
        ("smi_two_nodes.md", "RTX 4090", "of several matrices the first one is read"),
        ("nccl_gcn_908.xml", "MI250X", "the file has MI100s, which are not in the catalog"),
    ],
)
def test_gpus_that_a_file_does_not_name(name: str, gpu: str, note: str) -> None:
    cluster, reading = read_machine(DATA / name)
    assert cluster.devices[0].name == gpu
    assert any(note in text for text in reading.assumptions)


@pytest.mark.parametrize(
    ("name", "gpu", "note"),
    [
        ("smi_named_by_banner.txt", "H20", "the GPUs are named beside the matrix"),
        ("smi_named_mig.txt", "A100-SXM-40GB", "MIG partitions stand beside the matrix"),
        ("smi_environment.txt", "B200-SXM", "the GPUs are named beside the matrix"),
        ("smi_then_status.txt", "L40S", "the peer-to-peer status below the matrix is not read"),
    ],
)
def test_gpus_that_are_named_beside_the_matrix_are_not_guessed(name: str, gpu: str, note: str) -> None:
    cluster, reading = read_machine(DATA / name)
    assert {device.name for device in cluster.devices} == {gpu}
    assert any(note in text for text in reading.assumptions)
    assert not any("does not name them" in text for text in reading.assumptions)
    assert read_machine(DATA / name, Hints(gpu="H200"))[0].devices[0].name == "H200-SXM"


@pytest.mark.parametrize("name", READ)
def test_what_each_file_says(name: str) -> None:
    gpus, nvlink, tree = READ[name]
    cluster, reading = read_machine(DATA / name)
    assert cluster.world_size == gpus
    assert reading.document.get("nvlink") == nvlink
    assert reading.document["pcie"]["tree"] == tree
    check(cluster)


@pytest.mark.parametrize("variant", ["no_leading_tab", "no_nic_rows", "colours", "banner_crlf", "quoted"])
def test_the_same_matrix_however_it_was_pasted(variant: str) -> None:
    plain = read_machine(DATA / "smi_nvswitch_nics.txt")[1].document
    assert read_machine(DATA / f"smi_{variant}.txt")[1].document == plain


def test_sixteen_gpus_behind_one_switch() -> None:
    cluster, reading = read_machine(DATA / "smi_sixteen.txt")
    assert reading.document["nvlink"] == "switch"
    assert cluster.devices[0].name == "V100-SXM2-32GB"
    assert rings(cluster.templates[0], tuple(range(16))).bandwidth == pytest.approx(135e9)


REFUSED = {
    "bad_glued.txt": (2, "'PXBSYS'"),
    "bad_p2p_status.txt": (None, "topo -p2p"),
    "bad_cut_rows.txt": (None, "no row for GPU2"),
    "bad_cut_cells.txt": (4, "row GPU2 has 3 of 6 cells"),
    "bad_shifted.txt": (3, "where X is due"),
    "bad_asymmetric.txt": (None, "must be symmetric"),
    "bad_metax.txt": (None, "MetaX"),
    "bad_not_in_catalog.txt": (None, "NVIDIA Nonesuch 9000 is not in the catalog"),
    "bad_prose.txt": (None, "no header line"),
    "bad_rocm_cut.txt": (None, "row GPU1 has 2 of 3 cells"),
    "bad_nccl_graph.xml": (None, "NCCL_GRAPH_DUMP_FILE"),
    "bad_nccl_no_gpus.xml": (None, "no GPU in it"),
    "bad_nccl_cut.xml": (3, "not XML"),
    "bad_nccl_debug.txt": (None, "NCCL_DEBUG=INFO"),
    "bad_no_tabs.txt": (None, "the tabs between the columns are lost"),
    "bad_nccl_nic_unit.xml": (None, "NIC hca0 of 200000 Gb/s"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_says_why_and_what_to_run(name: str) -> None:
    line, message = REFUSED[name]
    with pytest.raises(InputError) as refused:
        read_machine(DATA / name)
    assert message in str(refused.value)
    assert refused.value.line == line
    assert refused.value.file == DATA / name


def test_measurements_are_told_from_topologies() -> None:
    with pytest.raises(InputError, match="measurements"):
        read_machine(DATA.parent / "nccl_log" / "mpi_prefix_tail.txt")
    with pytest.raises(InputError, match="empty"):
        read_text("\n")


@pytest.mark.parametrize(
    ("attribute", "field"),
    [('<cpu numaid="{}">', "numaid"), ('<nvlink target="0:1:0" count="true"/>', "count")],
    ids=["numaid", "count"],
)
def test_an_attribute_that_is_no_number_is_refused(attribute: str, field: str) -> None:
    gpu = '<pci busid="0:0:0" class="0x0302" link_speed="16.0.1 GT/s"><gpu dev="0" sm="80"/>{}</pci>'
    inner = gpu.replace("{}", attribute if field == "count" else "")
    text = f"<system>{attribute if field == 'numaid' else '<cpu>'}{inner}</cpu></system>"
    with pytest.raises(InputError, match=f"{field}: <.* has"):
        read_text(text)


@pytest.mark.parametrize(
    ("name", "hints", "field"),
    [
        ("smi_nvswitch_nics.txt", Hints(pcie_gen=0), "pcie.gen"),
        ("smi_nvswitch_nics.txt", Hints(nic_gbps=0.0), "nics.gbps"),
        ("nccl_gcn_908.xml", Hints(pcie_gen=0), "pcie.gen"),
    ],
)
def test_zero_is_no_way_to_say_nothing(name: str, hints: Hints, field: str) -> None:
    with pytest.raises(InputError, match=f"{field}.*: got 0"):
        read_machine(DATA / name, hints)


def test_what_the_file_does_not_say_is_assumed_and_said_or_given() -> None:
    file = DATA / "smi_nvswitch_nics.txt"
    assumed = "\n".join(read_machine(file)[1].assumptions)
    for flag in ("--gpu", "--pcie-gen", "--p2p", "--nic-gbps", "--host-gib", "--cpu"):
        assert flag in assumed
    cluster, reading = read_machine(file, Hints("A800", 3, "none", 200, 1024, "EPYC 7763"))
    assert not reading.assumptions
    assert cluster.devices[0].name == "A800-SXM-80GB"
    assert cluster.links["n0/gpu0>n0/plx0"].bandwidth == 12e9
    assert cluster.links["n0/nic0>fabric/rail0"].raw == 25e9
    assert not cluster.p2p
    assert cluster.templates[0].host.dram_bytes == 1024 << 30


def test_only_sixteen_v100s_have_an_nvswitch() -> None:
    reading = read_machine(DATA / "nccl_v100.xml")[1]
    assert (reading.document["gpu"], reading.document.get("nvlink")) == ("V100-SXM2-32GB", None)
    assert any("NVLinks of V100s" in text for text in reading.assumptions)
    assert read_machine(DATA / "nccl_v100.xml", Hints("A100-SXM-80GB"))[1].document["nvlink"] == "switch"


def test_host_memory_that_nobody_states_is_said() -> None:
    """It decides about runs that offload, and about how a model is loaded."""
    said = "host memory of 512 GiB per node, 256 for each socket"
    assert f"{said} (--host-gib)" in read_machine(DATA / "nccl_nvswitch.xml")[1].assumptions
    document = {"gpu": "A100-SXM-80GB", "gpus": 2, "cpu": {"sockets": 2, "model": "EPYC 7742"}}
    assert cluster_from(document).assumptions == (f"{said} (cpu.dram_gib)",)
    assert not cluster_from(document | {"cpu": {"sockets": 2, "dram_gib": 512, "model": "EPYC 7742"}}).assumptions


@pytest.mark.parametrize(
    ("query", "slots"), [("smi_query.txt", ((4, 8), (4, 16))), ("lspci_vv.txt", ((4, 8), (3, 16)))]
)
def test_gpu_names_and_slots_from_other_tools(query: str, slots: tuple[tuple[int, int], ...]) -> None:
    names, found = read_query(DATA / query)
    assert len(names) == 2
    assert found == slots
    cluster, _ = read_machine(DATA / "smi_empty_affinity.txt", Hints(gpus=names, slots=found))
    assert {device.name for device in cluster.devices} == {"RTX 3090"}
    assert cluster.links["n0/gpu0>n0/cpu0"].bandwidth == 12e9
    with pytest.raises(InputError, match="2 GPUs, the matrix 4"):
        read_machine(DATA / "smi_blanks.txt", Hints(gpus=names, slots=found))


def test_gpus_without_links_cannot_have_a_matrix_of_links() -> None:
    with pytest.raises(InputError, match="no links of its own"):
        read_machine(DATA / "smi_empty_affinity.txt", Hints("RTX 4090"))


@pytest.mark.parametrize("name", ["smi_nvswitch_nics.txt", "smi_islands.txt", "nccl_odd_targets.xml"])
def test_a_reading_becomes_a_topology_file(tmp_path: Path, name: str) -> None:
    cluster, reading = read_machine(DATA / name)
    write_yaml(reading, tmp_path / "machine.yaml")
    again = load_topology(tmp_path / "machine.yaml")
    assert dict(again.links) == dict(cluster.links)
    with pytest.raises(InputError, match="already"):
        write_yaml(read_machine(tmp_path / "machine.yaml")[1], tmp_path / "again.yaml")


def test_a_scenario_may_name_a_paste_directly() -> None:
    assert load_topology(DATA / "smi_nvswitch_nics.txt", nodes=2).world_size == 8


@given(st.sampled_from(sorted([*READ, *REFUSED])), st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_read_soundly_or_refused_never_a_crash(name: str, data: st.DataObject) -> None:
    """Cut, drop and swap lines and words at random."""
    lines = (DATA / name).read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(lines) - 1)))
        what = data.draw(st.sampled_from(["drop", "cut", "word", "twice"]))
        if what == "drop":
            lines = lines[:at] + lines[at + 1 :]
        elif what == "cut":
            lines = lines[: at + 1]
        elif what == "twice":
            lines = lines[:at] + lines[at : at + 1] * 2 + lines[at + 1 :]
        elif lines:
            words = lines[at].split("\t")
            words[data.draw(st.integers(0, len(words) - 1))] = data.draw(
                st.sampled_from(["NV99", "PIX", "", "GPU0", "-1", "1e400"])
            )
            lines[at] = "\t".join(words)
    try:
        cluster = cluster_from(read_text("\n".join(lines)).document)
    except InputError:
        return
    check(cluster)


def check(cluster: Cluster) -> None:
    """What holds of any machine: equal links both ways, every GPU reaches every other."""
    node = cluster.templates[0]
    for link in node.links.values():
        if link.kind in ("nvlink", "pcie", "socket", "nic", "c2c"):
            assert node.links[f"{link.dst}>{link.src}"].bandwidth == link.bandwidth
    wired = networkx.Graph(cluster.graph)
    assert all(networkx.has_path(wired, cluster.gpus[0], gpu) for gpu in cluster.gpus)
    if cluster.world_size > 1:
        assert rings(node, tuple(range(len(node.devices)))).bandwidth > 0


def wild(folder: str) -> list[Path]:
    return sorted((CORPUS / folder).glob("*")) if CORPUS.is_dir() else []


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
@pytest.mark.parametrize("path", wild("topo") + wild("nccl_topo"), ids=lambda path: path.name)
def test_users_files(path: Path) -> None:
    """Read and sound, or refused for a reason: only what the corpus calls invalid, other vendors and graph dumps."""
    try:
        cluster, _ = read_machine(path)
    except InputError as refused:
        assert "neg_" in path.name or "metax" in path.name or "-graph" in path.name, refused  # noqa: PT017
        return
    assert "neg_" not in path.name
    check(cluster)
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".txt" and "rocm" not in path.name:
        header = next(line for line in text.splitlines() if "GPU0" in line.split() or "GPU0\t" in line)
        assert cluster.world_size == sum(token.startswith("GPU") and token[3:].isdigit() for token in header.split())


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
@pytest.mark.parametrize("path", wild("nccl_log") + wild("bandwidth"), ids=lambda path: path.name)
def test_users_measurements_are_not_taken_for_topologies(path: Path) -> None:
    with pytest.raises(InputError):
        read_machine(path)
