"""A sweep holds what is in flight, not what it consists of, however it is written down in the end."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from zsim.result.render import sweep_html
from zsim.sweep import plots, runner
from zsim.sweep.evaluate import COLUMNS, Outcome, Task
from zsim.sweep.export import export, records
from zsim.sweep.grid import from_options
from zsim.sweep.runner import run, sweep_id
from zsim.sweep.store import Store

from .test_runs import inline

FEW, MANY = 300, 1500
PER_ROW = 500  # bytes; a row by itself takes some thousands


def answer(task: Task) -> Outcome:
    """Of a scenario that fits; longer sequences are faster and take more memory."""
    length = task.data["seq_len"]
    figures = {"gpus": 8, "step_s": 1.0, "tokens_per_s": length, "tokens_per_s_per_gpu": length / 8}
    return dict.fromkeys(COLUMNS) | figures | {"status": "ok", "fits": True, "needed_bytes": length, "wall_s": 0.001}


def peak(action: Callable[[], object]) -> int:
    """The most bytes allocated at once. What other tests left is set aside: the more there is alive, the longer Python
    waits before it looks for cycles among what has grown old."""
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    action()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.unfreeze()
    return most


def test_memory_does_not_grow_with_the_scenarios(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "evaluate", answer)
    monkeypatch.setattr(sweep_html, "MOST_ROWS", 100)
    peaks: dict[str, list[int]] = {}
    for size in (20, FEW, MANY):  # the first one imports
        sweep = from_options([scenario], ["micro_batch=1..10", f"seq_len=1..{size // 10}"])
        with Store(tmp_path / f"{size}.db", sweep_id(sweep)) as store:
            steps: dict[str, Callable[[], object]] = {
                "run": lambda sweep=sweep, store=store: run(sweep, store, inline),  # type: ignore[misc]
                "resumed": lambda sweep=sweep, store=store: run(sweep, store, inline),  # type: ignore[misc]
                "csv": lambda store=store: export(store, tmp_path / "t.csv"),  # type: ignore[misc]
                "html": lambda store=store: sweep_html.write(records(store), ["seq_len"], "t", tmp_path / "t.html"),  # type: ignore[misc]
                "png": lambda store=store: plots.draw(store, ["micro_batch", "seq_len"], tmp_path / "t.png"),  # type: ignore[misc]
            }
            for name, step in steps.items():
                peaks.setdefault(name, []).append(peak(step))
            assert store.count()["ok"] == size
    grown = {name: (most - before) / (MANY - FEW) for name, (_, before, most) in peaks.items()}
    assert max(grown.values()) < PER_ROW, grown
