"""What `--out DIR` leaves there, and the tables behind a Result."""

import dataclasses
import json

import pytest

from tests.result import made
from zsim.result.render import write_all, write_comparison


@pytest.fixture(scope="module")
def result():
    return made.result()


def test_everything_is_written(result, tmp_path):
    written = write_all(result, tmp_path / "new" / "folder")
    names = {path.name for path in written}
    assert names == {
        "result.json", "timeline.json", "memory.pickle", "report.html", "memory_timeline.png", "memory_timeline.svg",
        "breakdown.png", "breakdown.svg",
    }  # fmt: skip
    assert all(path.stat().st_size > 1000 for path in written)
    folder = written[0].parent
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert (folder / "breakdown.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_is_written(result, tmp_path):
    more = dataclasses.replace(result, headline=dataclasses.replace(result.headline, world_size=4))
    write_comparison([result, more], tmp_path)
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    assert json.loads((tmp_path / "compare.json").read_text())["letters"] == ["A", "B"]
    assert (tmp_path / "comparison.svg").read_text().startswith("<?xml")


def test_tables_agree_with_the_result(result):
    ops, memory, links = result.ops, result.memory, result.links
    steady = ops[(ops.step == 2) & (ops.lane == "compute")]
    assert steady.duration_s.sum() == pytest.approx(result.time.compute_s)
    assert memory[memory.device == "gpu"].allocated_bytes.max() == result.gpu.peak_allocated_bytes
    # 100 GB/s for 0.9 s over a link of 100 GB/s, seen over a step of 1.9 s.
    fullest = links.iloc[0]
    assert fullest.link == "n0/gpu0>n0/nvswitch"
    assert fullest.bytes == pytest.approx(90e9)
    assert fullest.utilization == pytest.approx(0.9 / 1.9)
    assert fullest.peak == pytest.approx(1)


def test_a_notebook_shows_the_verdict(result):
    shown = result._repr_html_()
    assert "FITS: miniature" in shown
    assert f"{result.gpu.nvidia_smi_bytes / 2**30:.2f} GiB" in shown
    assert "1.900 s" in shown  # the step
    assert "500.00 ms" in shown  # exposed communication
