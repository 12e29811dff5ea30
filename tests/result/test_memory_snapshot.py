"""memory.pickle read by torch's own viewer, and against the ledger."""

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


def test_torch_reads_it(snapshot):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viewer.segsum(snapshot)  # checks that blocks fill their segments
    assert "3000.0B" in viewer.trace(snapshot) or "2.9KiB" in viewer.trace(snapshot)
    lines = []
    viewer.memory(snapshot, format_flamegraph=lambda text: lines.append(text) or text)
    assert "optimizer_states:0:states 6000" in lines[0]
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
