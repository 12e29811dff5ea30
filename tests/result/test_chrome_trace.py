"""timeline.json against the figures of result.json, read as tools read it: here by hand, and by HTA where installed."""

import json

import pytest

from tests.result import made
from zsim.result.critical_path import RankView
from zsim.result.render import chrome_trace


@pytest.fixture(scope="module")
def result():
    return made.result()


@pytest.fixture(scope="module")
def events(result):
    said = json.loads(json.dumps(chrome_trace.trace(result, RankView(result.program, result.timeline, 0))))
    return said["traceEvents"]


def busy(events, wanted):
    """Seconds covered by slices that `wanted` accepts."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and wanted(e))
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def test_kernels_take_what_the_result_says(result, events):
    kernels = [e for e in events if e.get("cat") == "kernel"]
    communication = [e for e in kernels if e["name"].startswith("nccl")]
    computation = [e for e in kernels if not e["name"].startswith("nccl")]
    assert busy(computation, bool) == pytest.approx(result.time.compute_s)
    assert busy(communication, bool) == pytest.approx(result.time.comm_s)
    both = busy(kernels, bool)
    assert both == pytest.approx(result.time.compute_s + result.time.comm_s - result.time.overlapped_comm_s)


@pytest.mark.parametrize("name", ["qwen7b_8x4090", "llama31_8b_512xh100_fsdp2"])
def test_slices_of_a_thread_nest(name):
    """Perfetto drops a slice that begins inside another one and ends after it. In its nanoseconds."""
    import zsim

    result = zsim.simulate(made.TOPOLOGIES.parent / "scenarios" / f"{name}.yaml")
    threads = {}
    for event in chrome_trace.trace(result, result.slowest)["traceEvents"]:
        if event["ph"] == "X":
            start = round(1e3 * event["ts"])
            threads.setdefault((event["pid"], event["tid"]), []).append((start, -start - round(1e3 * event["dur"])))
    assert len(threads) > 3
    for slices in threads.values():
        open_ends = []
        for start, minus_end in sorted(slices):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or -minus_end <= open_ends[-1]
            open_ends.append(-minus_end)


def test_every_kernel_has_its_launch(events):
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    kernels = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")}
    assert launches.keys() == kernels.keys()
    for correlation, kernel in kernels.items():
        assert launches[correlation]["ts"] + launches[correlation]["dur"] <= kernel["ts"] + 1e-6
    arrows = {e["id"] for e in events if e["ph"] == "f"}
    assert arrows == kernels.keys()


def test_step_annotations_are_the_hosts(events):
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in steps] == ["ProfilerStep#2", "ProfilerStep#3"]
    launched = [e for e in events if e.get("cat") == "cuda_runtime"]
    assert all(steps[0]["ts"] <= e["ts"] < steps[0]["ts"] + steps[0]["dur"] for e in launched)


def test_a_steady_step_that_nothing_repeats_is_followed_by_a_stub(result):
    view = RankView(result.program, result.timeline, 0)
    records = [record for record in view.records if record.step == view.steady.step]
    steady, stub = chrome_trace._steps(records, view)
    assert (steady["name"], stub["name"]) == ("ProfilerStep#2", "ProfilerStep#3")
    assert stub["dur"] == pytest.approx(5)
    assert stub["ts"] == pytest.approx(steady["ts"] + steady["dur"])
    last = max(record.issued_s for record in records)
    assert stub["ts"] >= 1e6 * last  # nothing is launched in it


def test_hta_agrees(result, tmp_path, monkeypatch):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")  # it would cut every kernel to whole microseconds
    hta = pytest.importorskip("hta.trace_analysis")
    path = tmp_path / "timeline.json"
    chrome_trace.write(result, path)
    analysis = hta.TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(tmp_path))
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    said = result.temporal
    for name in ("compute", "non_compute", "idle", "kernel"):
        assert row[f"{name}_time(us)"] / 1e6 == pytest.approx(getattr(said, f"{name}_s"), abs=1e-6)
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    assert overlap == pytest.approx(100 * said.comm_comp_overlap, abs=0.01)
