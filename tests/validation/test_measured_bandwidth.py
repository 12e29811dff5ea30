"""Copy rates that people measured, against the link figures of shipped machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.cluster.load import load_topology
from zsim.cluster.spec import Cluster
from zsim.errors import InputError
from zsim.validation.bandwidth import compare, read

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "bandwidth"
CORPUS = ROOT.parent / "shared" / "reference" / "corpus" / "bandwidth"


def machine(name: str) -> Cluster:
    return load_topology(ROOT / "topologies" / f"{name}.yaml")


def test_matrices_of_p2p_bandwidth_latency_test() -> None:
    found = read(DATA / "p2p.txt")
    assert [one.what for one in found] == ["p2p", "p2p both ways", "other"]
    assert found[0].rows[1] == [371.0, 2510.0, 368.0]
    one_way, both_ways = compare(DATA / "p2p.txt", machine("hgx_h100_8"))
    assert one_way.pairs == both_ways.pairs == 6
    assert abs(one_way.median_error) < 0.01
    assert both_ways.predicted == pytest.approx(2 * one_way.predicted)


def test_nvbandwidth_and_bandwidth_test() -> None:
    assert [one.what for one in read(DATA / "nvbandwidth.txt")] == ["h2d", "other", "p2p"]
    copies = compare(DATA / "nvbandwidth.txt", machine("hgx_h100_8"))
    assert abs(copies[0].median_error) < 0.02
    (sweep,) = compare(DATA / "shmoo.txt", machine("dgx1_v100_8"))
    assert sweep.measured == 13.0
    assert abs(sweep.median_error) < 0.05


def test_refusals() -> None:
    with pytest.raises(InputError, match="no matrix"):
        read(DATA.parent / "nccl_log" / "noise.txt")
    with pytest.raises(InputError, match="more GPUs"):
        compare(DATA / "p2p.txt", machine("rtx3090_2_nvlink"))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
@pytest.mark.parametrize(
    ("number", "name", "bound"),
    [
        ("B003", "dgx1_v100_8", 0.05),
        ("B006", "dgx_a100_8", 0.02),
        ("B010", "rtx4090_8_p2p", 0.08),
        ("B013", "gb200_nvl72", 0.05),
        ("B015", "hgx_h100_8", 0.03),
    ],
)
def test_users_measurements(number: str, name: str, bound: float) -> None:
    lines = compare(next(CORPUS.glob(f"{number}_*")), machine(name))
    assert lines
    assert all(abs(line.median_error) < bound for line in lines), lines


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
def test_every_users_file_is_read_or_refused() -> None:
    for path in CORPUS.glob("*"):
        if path.suffix == ".csv":
            with pytest.raises(InputError, match="no matrix"):
                read(path)
        else:
            assert read(path)
