"""memory.pickle read by torch's own viewer, and against the ledger."""

import dataclasses
import pickle

import pytest

from tests.result import made
from zsim.result.render import memory_snapshot


@pytest.fixture(scope="module")
def result():
    return made.result()


@pytest.fixture(scope="module")
def snapshot(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "memory.pickle"
    memory_snapshot.write(result, path)
    return pickle.loads(path.read_bytes())


def test_trace_holds_what_the_ledger_holds(result, snapshot):
    held = peak = 0
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            held += entry["size"]
        elif entry["action"] == "free_completed":
            held -= entry["size"]
        peak = max(peak, held)
    assert peak == result.gpu.peak_allocated_bytes
    assert held == 1_000 + 6_000  # the states stay
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert reserved == result.gpu.peak_reserved_bytes


def test_no_two_live_tensors_overlap(snapshot):
    live = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            start, end = entry["addr"], entry["addr"] + entry["size"]
            assert all(end <= a or start >= b for a, b in live.values())
            live[entry["addr"]] = start, end
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]


def _reserved(snapshot):
    """What the segments of a snapshot's trace add up to, at most and in the end."""
    reserved = peak = 0
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    for entry in snapshot["device_traces"][0]:
        reserved += signs.get(entry["action"], 0) * entry["size"]
        peak = max(peak, reserved)
    return peak, reserved


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_segments_go_back_where_the_run_is_tight(setting):
    """The flagship gets through only because cached segments, or pages of them, go back to the driver."""
    import zsim

    result = zsim.simulate(made.TOPOLOGIES.parent / "scenarios" / "qwen32b_8xh100.yaml", [f"allocator={setting}"])
    assert result.gpu.allocator_retries > 0
    snapshot = memory_snapshot.snapshot(result)
    peak, in_the_end = _reserved(snapshot)
    assert peak == result.gpu.peak_reserved_bytes
    assert in_the_end == sum(segment["total_size"] for segment in snapshot["segments"])
    assert all(segment["is_expandable"] == setting.endswith("True") for segment in snapshot["segments"])
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viewer.segsum(snapshot)


def test_without_a_limit_where_it_does_not_fit():
    device = dataclasses.replace(made.DEVICE, usable_bytes=2**30)
    result = made.result(device)
    assert not result.fits
    held = [
        entry["size"] for entry in memory_snapshot.snapshot(result)["device_traces"][0] if entry["action"] == "alloc"
    ]
    assert len(held) == sum(1 for event in result.timeline.memory if event.device == "gpu" and event.nbytes > 0)


def test_torch_reads_it(snapshot):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viewer.segsum(snapshot)  # checks that blocks fill their segments
    assert "3000.0B" in viewer.trace(snapshot) or "2.9KiB" in viewer.trace(snapshot)
    lines = []
    viewer.memory(snapshot, format_flamegraph=lambda text: lines.append(text) or text)
    assert "optimizer_states:0:states 6000" in lines[0]
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
