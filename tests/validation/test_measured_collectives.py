"""Predicted collectives against measured ones: logs, CSV files, and the figures we hold ourselves to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.errors import InputError
from zsim.validation import nccl_log
from zsim.validation.collectives import compare, machine, override, predict, read_points
from zsim.validation.collectives_report import report, summarize

ROOT = Path(__file__).parents[2]
POINTS = ROOT / "validation" / "measured" / "collectives.csv"
LOGS = Path(__file__).parents[1] / "data" / "nccl_log"
CORPUS = ROOT.parent / "shared" / "reference" / "corpus" / "nccl_log"


def test_median_error_over_the_measured_points() -> None:
    """10 % for 16 MiB and more, 25 % over all sizes."""
    found = summarize(compare(read_points(POINTS)))
    assert found.points == 411
    assert found.points_large == 249
    assert found.median_large <= 0.10
    assert found.median <= 0.25
    same, known = found.algorithms
    assert same / known > 0.75


def test_no_set_is_tuned_by_name() -> None:
    """A machine that is described alike is predicted alike, whatever the set is called."""
    for point in read_points(POINTS)[::40]:
        assert predict(replace(point, set_id="other", line=0)) == predict(point)


HEADER = "set_id,gpu,n_gpus,nodes,intra,net,collective,size_bytes,time_us,quality,note\n"


def write(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(header + "".join(row + "\n" for row in rows))
    return path


def test_a_file_never_seen(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine,H100 80GB HBM3,8,1,NVSwitch,-,all_gather,1073741824,2700,ok,",
        "mine,H100 80GB HBM3,8,1,NVSwitch,-,all_gather,1048576,40,ok,",
        'cards,GeForce RTX 4090,4,1,"PCIe4, no P2P",-,all_reduce,268435456,26000,ok,',
        "pods,MI300X,16,2,xGMI full mesh,RoCE 8x400G,reduce_scatter,1073741824,3100,ok,",
        "odd,Quantum Q1,8,1,NVSwitch,-,all_reduce,1024,10,ok,",
        "odd2,H100,8,3,NVSwitch,IB 8x400G,all_reduce,1024,10,ok,",
        "dubious,A100-SXM,8,1,NVSwitch,-,all_reduce,1073741824,1,suspect,",
    )
    found = report(path)
    assert [line.name for line in found.sets] == ["mine", "cards", "pods"]
    assert [line.name for line in found.other] == ["dubious"]
    assert set(found.skipped) == {"odd", "odd2"}
    assert found.points == 4
    assert found.points_large == 3
    assert found.median < 0.3
    with pytest.raises(InputError, match="nothing in it can be compared"):
        report(write(tmp_path))


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("a,H100,eight,1,NVSwitch,-,all_reduce,1024,10,ok,", 2),
        ("a,H100,8,1,NVSwitch,-,all_reduce,1024,-3,ok,", 2),
        ("a,H100,8,1,NVSwitch,-,all_reduce,1024,nan,ok,", 2),
        ("a,H100,8", 2),
    ],
)
def test_bad_rows_name_the_line(tmp_path: Path, row: str, line: int) -> None:
    with pytest.raises(InputError) as refused:
        read_points(write(tmp_path, row))
    assert refused.value.line == line


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing columns: time_us"):
        read_points(write(tmp_path, header=HEADER.replace("time_us,", "")))


@pytest.mark.parametrize(
    ("intra", "net", "expected"),
    [
        ("NVSwitch", "IB NDR 8x400G", {"nvlink": "switch", "nics": {"gbps": 400}}),
        ("NVSwitch", "EFA 4x100G", {"fabric": {"kind": "rail", "transport": "efa"}}),
        (
            "NVSwitch",
            "TCP 100GbE",
            {"fabric": {"kind": "rail", "transport": "tcp"}, "nics": {"gbps": 100}},
        ),
        ("NVSwitch", "RoCE 1x100G, host staging", {"nics": {"gbps": 100, "gdr": False}}),
        ("NVSwitch", "TCPXO 8x200G", {"fabric": {"kind": "rail", "transport": "tcpx"}}),
        ("PCIe4 x16 direct to dual EPYC 7542, no P2P", "-", {"p2p": "none", "nvlink": "none"}),
        ("PCIe5, patched P2P", "-", {"p2p": "all"}),
    ],
)
def test_machines_from_words(intra: str, net: str, expected: dict[str, object]) -> None:
    document = machine("A100-SXM", 16, 2, intra, net) if net != "-" else machine("RTX 4090", 8, 1, intra, net)
    assert {key: document[key] for key in expected} == expected


def test_an_nvlink_domain_is_one_node() -> None:
    rack = machine("GB200", 144, 36, "NVL72", "IB NDR 4x400G per tray")
    assert (rack["nodes"], rack["gpus"]) == (2, 72)


def test_forced_algorithms() -> None:
    points = {point.set_id: point for point in read_points(POINTS)}
    assert override(points["h100-tree-232"]) == "tree"
    assert override(points["h200-stas-ring"]) == "ring"
    assert override(points["h200-stas-4gpu"]) is None  # its note gives another measurement


LOGGED = {
    # file -> op, ranks, rows, largest, warnings
    "all_reduce_8.txt": [("all_reduce", 8, 2, 1073741824)],
    "mpi_prefix_tail.txt": [("all_reduce", 16, 1, 67108864)],
    "two_tests.txt": [("all_gather", 2, 1, 1048576), ("reduce_scatter", 2, 1, 2097152)],
    "noise.txt": [("all_reduce", 8, 2, 2097152)],
    "old_no_redop.txt": [(None, None, 2, 16777216)],
    "narrow_one_group.txt": [("all_reduce", 8, 1, 34359738368)],
    "markdown.txt": [("all_reduce", 8, 2, 2**30)],
    "comms_logger.txt": [("all_reduce", None, 1, 102400), ("all_gather", None, 1, 1572864)],
    "one_rank_absurd.txt": [(None, 1, 1, 33554432)],
}


@pytest.mark.parametrize("name", LOGGED)
def test_logs(name: str) -> None:
    tables = nccl_log.read(LOGS / name)
    assert [(table.op, table.ranks, len(table.rows), table.rows[-1].nbytes) for table in tables] == LOGGED[name]


@given(st.sampled_from(sorted(LOGGED)), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_logs_do_not_crash(name: str, data: st.DataObject) -> None:
    text = (LOGS / name).read_text()
    start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 80))
    noise = data.draw(st.sampled_from(["", "nan", " 1e999 ", "[3]", "\n", " -1 0 0"]))
    try:
        tables = nccl_log.parse(text[:start] + noise + text[start + length :])
    except InputError:
        return
    assert all(row.seconds > 0 and row.nbytes > 0 for table in tables for row in table.rows)


def test_what_a_log_says_of_itself() -> None:
    table = nccl_log.read(LOGS / "all_reduce_8.txt")[0]
    assert table.version == "2.20.5"
    assert table.gpus_per_process == 8
    assert table.devices == ["NVIDIA A100-SXM4-80GB"] * 8
    assert table.rows[-1].seconds == pytest.approx(8.1e-3)
    assert "one rank" in nccl_log.read(LOGS / "one_rank_absurd.txt")[0].warnings[0]
    assert "negative" in nccl_log.read(LOGS / "comms_logger.txt")[0].warnings[0]
    with pytest.raises(InputError, match="no row"):
        nccl_log.read(LOGS / "not_a_log.txt")


def test_a_log_is_compared_with_a_machine() -> None:
    found = report(LOGS / "all_reduce_8.txt", ROOT / "topologies" / "dgx_a100_8.yaml")
    assert found.points == 2
    assert found.median < 0.1
    with pytest.raises(InputError) as refused:
        report(LOGS / "all_reduce_8.txt")
    assert refused.value.field == "--topology"
    with pytest.raises(InputError) as refused:
        report(LOGS / "old_no_redop.txt", ROOT / "topologies" / "rtx3090_2_nvlink.yaml")
    assert "--op" in refused.value.notes[0]


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*")) if CORPUS.is_dir() else [], ids=lambda path: path.name)
def test_users_logs(path: Path) -> None:
    tables = nccl_log.read(path)
    for table in tables:
        assert table.rows
        for row in table.rows:
            assert row.seconds > 0
            if row.algbw > 1e9 and table.op is not None:
                assert row.nbytes / row.seconds == pytest.approx(row.algbw, rel=0.05)
    if "neg_" in path.name:
        assert all(table.warnings for table in tables)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of users' files is not here")
@pytest.mark.parametrize(
    ("number", "topology", "op"),
    [
        ("N020", "dgx_a100_8", "all_reduce"),
        ("N063", "dgx_a100_8", "all_gather"),
        ("N065", "dgx_a100_8", "all_to_all"),
        ("N066", "dgx_a100_8", "broadcast"),
        ("N068", "dgx_a100_8", "reduce_scatter"),
        ("N048", "hgx_h100_8", "all_reduce"),
        ("N011", "rtx3090_2_nvlink", "all_reduce"),
    ],
)
def test_plateaus_of_logs_that_no_constant_was_fitted_to(number: str, topology: str, op: str) -> None:
    found = report(next(CORPUS.glob(f"{number}_*")), ROOT / "topologies" / f"{topology}.yaml", op)
    assert found.points_large > 0
    assert found.median_large < 0.15
