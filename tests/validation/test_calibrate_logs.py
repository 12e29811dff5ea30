"""Profiles from logs of nccl-tests and from DeepSpeed's comms log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zsim.api import load_scenario, simulate
from zsim.cli.app import dispatch
from zsim.errors import InputError
from zsim.program.ops import Collective
from zsim.validation.fit_profile import calibrate

ROOT = Path(__file__).parents[2]
LATENCY, BANDWIDTH = 2.4e-5, 3.1e11
SIZES = [2**n for n in range(12, 33, 2)]
TESTS = {
    "all_gather": ("none", 7 / 8),
    "reduce_scatter": ("sum", 7 / 8),
    "all_reduce": ("sum", 7 / 4),
    "broadcast": ("none", 1.0),
}
DEVICE = "NVIDIA H100 80GB HBM3"


def nccl_tests(kinds: list[str], bandwidth: float = BANDWIDTH, layout: str = "new") -> str:
    """What nccl-tests prints on an ideal machine: today, long ago without redop, or with one group of columns."""
    lines = ["# nThread 1 nGpus 1 minBytes 4096 maxBytes 4294967296 step: 4(factor)"]
    for kind in kinds:
        redop, bus = TESTS[kind]
        lines += [f"# Collective test starting: {kind}_perf"]
        lines += [f"#  Rank {n:2} Group  0 Pid {n} on host device {n:2} [0x{n:02}] {DEVICE}" for n in range(8)]
        lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
        for size in SIZES:
            seconds = LATENCY + size / bandwidth
            half = f"{seconds * 1e6:.6g} {size / seconds / 1e9:.5g} {size / seconds * bus / 1e9:.5g}"
            middle = {
                "new": f"float {redop} {0 if kind == 'broadcast' else -1}",
                "old": "float",
                "narrow": "float sum -1",
            }
            ending = {"new": f"{half} 0 {half} N/A", "old": f"{half} 1e-07 {half} 0e+00", "narrow": f"{half} 0"}
            lines.append(f"  {size} {size // 4} {middle[layout]} {ending[layout]}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("layout", "kinds"), [("new", list(TESTS)), ("old", ["all_reduce", "all_gather"]), ("narrow", ["all_reduce"])]
)
def test_constants_behind_a_log_of_nccl_tests_come_back(tmp_path: Path, layout: str, kinds: list[str]) -> None:
    path = tmp_path / "nccl_tests.txt"
    path.write_text(nccl_tests(kinds, layout=layout))
    found = calibrate([path])
    assert found.device.name == "H100-SXM"
    assert set(found.collectives) == set(kinds)
    for ranks, [(_, line)] in found.collectives.values():
        assert ranks == 8
        assert line.latency.value == pytest.approx(LATENCY, rel=0.01)
        assert line.slope.inverse().value == pytest.approx(BANDWIDTH, rel=0.01)


def test_one_command_makes_a_profile_that_a_scenario_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile from the right log gives the collectives of a step the logged times; one of half the rate does not."""
    measured: dict[str, float] = {}
    for name, bandwidth in (("right", BANDWIDTH), ("wrong", BANDWIDTH / 2)):
        log, profile = tmp_path / f"{name}.txt", tmp_path / f"{name}.yaml"
        log.write_text(nccl_tests(list(TESTS), bandwidth))
        assert dispatch(["calibrate", str(log), "--base", "h100_sxm", "--out", str(profile)]) == 0
        assert "left at the base: gemm.efficiency" in capsys.readouterr().out
        view = simulate(load_scenario(ROOT / "scenarios" / "qwen7b_8xh100.yaml", [f"profile={profile}"])).slowest
        # Those that have the links to themselves take what the log says.
        measured[name] = min(
            (record.end_s - record.start_s) / (LATENCY + work.payload_bytes / BANDWIDTH)
            for record in view.records
            if isinstance(work := record.op.work, Collective) and work.kind == "all_gather" and work.payload_bytes > 1e8
        )
    assert measured["right"] == pytest.approx(1.0, rel=0.01)
    assert measured["wrong"] > 1.8


def test_a_base_that_is_not_the_device_of_the_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_tests.txt"
    path.write_text(nccl_tests(["all_reduce"]))
    with pytest.raises(InputError, match="measured on NVIDIA H100"):
        calibrate([path], base="a100_sxm")
    with pytest.raises(InputError, match="'no such thing' is neither a software stack nor a device") as refused:
        calibrate([path], base="no such thing")
    assert refused.value.field == "--base"
    assert "default" in (refused.value.accepted or "")


def test_kinds_that_were_not_measured_are_named(tmp_path: Path) -> None:
    path = tmp_path / "nccl_tests.txt"
    path.write_text(nccl_tests(["all_reduce"]))
    assert "all_gather and reduce_scatter: not measured, and predicted as without these data" in calibrate([path]).notes
    path.write_text(nccl_tests(["all_reduce", "all_gather", "reduce_scatter"]))
    assert not any("not measured" in note for note in calibrate([path]).notes)


def test_what_a_log_does_not_say_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    text = re.sub(r"# (Collective|  *Rank).*\n", "", nccl_tests(["all_gather"]))
    path.write_text(text)
    with pytest.raises(InputError, match="--op"):
        calibrate([path], device="H100-SXM")
    with pytest.raises(InputError, match=r"log\.txt does not say on which device it ran"):
        calibrate([path], op="all_gather", ranks=4)
    found = calibrate([path], device="H100-SXM", op="all_gather", ranks=4)
    assert found.collectives["all_gather"][0] == 8  # deduced from the rates, which say it better than the option
    path.write_text("hello\n")
    with pytest.raises(InputError, match="no row"):
        calibrate([path], device="H100-SXM")


def test_a_log_over_several_machines_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(nccl_tests(["all_reduce"]).replace("on host device  7", "on other device  0"))
    with pytest.raises(InputError) as refused:
        calibrate([path])
    assert "over 2 machines" in "".join(refused.value.notes)


def comms_log(ranks: int, bandwidth: float) -> str:
    """DeepSpeed's summary: KB of 1024 bytes, and of an all-gather the part that a rank passes."""
    lines = [
        "    Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     tput"
    ]
    for op in ("all_gather_into_tensor", "all_reduce"):
        lines.append(f"    {op}")
        for size in SIZES[4:]:
            seconds = LATENCY + size / bandwidth
            part = size // ranks if op.startswith("all_gather") else size
            scale = next(s for s in (3, 2, 1) if part >= 1024**s)
            rate = size * (1 if op.startswith("all_gather") else 2) / seconds * 8e-9
            busbw = rate * (ranks - 1) / ranks
            about = f"{part / 1024**scale:.2f} {' KMG'[scale]}B   100   {seconds * 1e5:.2f}   {seconds * 1e3:.4f}"
            lines.append(f"                        {about}   {rate:.2f}   {busbw:.2f}")
    return "\n".join(lines) + "\n"


def test_constants_behind_a_comms_log_come_back(tmp_path: Path) -> None:
    path = tmp_path / "comms.log"
    path.write_text(comms_log(8, BANDWIDTH))
    found = calibrate([path], device="H100-SXM")
    assert set(found.collectives) == {"all_gather", "all_reduce"}
    for ranks, lines in found.collectives.values():
        assert ranks == 8
        assert lines[-1][1].slope.inverse().value == pytest.approx(BANDWIDTH, rel=0.01)


def test_read_says_what_a_log_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, says in ((nccl_tests(["all_reduce"]), DEVICE), (comms_log(8, BANDWIDTH), "all_gather, 8 ranks")):
        path = tmp_path / "log.txt"
        path.write_text(text)
        assert dispatch(["read", str(path)]) == 0
        said = capsys.readouterr().out
        assert "measured collectives" in said
        assert says in said
