"""Every scenario that ships, through the real path and the real command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zsim

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "zsim", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {path.stem: zsim.simulate(path).to_dict() for path in SCENARIOS}


def test_what_simulate_takes_is_said() -> None:
    for overrides in ((), ("micro_batch=2",)):
        with pytest.raises(TypeError, match=r"takes the path of a scenario file, .* or a Setup, not dict"):
            zsim.simulate({"model": "config.json"}, overrides)


@pytest.mark.parametrize("overrides", ["micro_batch=2", {"micro_batch": 2}, [("micro_batch", 2)]])
def test_overrides_of_another_shape_are_said(overrides: object) -> None:
    with pytest.raises(TypeError, match=r"a list of texts, such as \['micro_batch=2'\]"):
        zsim.simulate(SCENARIOS[0], overrides)  # type: ignore[arg-type]


def test_names_can_be_completed() -> None:
    assert {"simulate", "load_scenario", "Result"} <= set(dir(zsim))


@pytest.mark.parametrize("name", [path.stem for path in SCENARIOS])
def test_every_scenario_has_the_whole_contract(results: dict[str, dict], name: str) -> None:
    result = results[name]
    gpu, time = result["memory"]["gpu"], result["time"]
    assert 0 < gpu["peak_allocated_bytes"] <= gpu["peak_reserved_bytes"]
    held = {name: nbytes for name, nbytes in gpu["by_category"].items() if name != "framework"}
    assert sum(held.values()) == gpu["peak_allocated_bytes"]
    assert gpu["capacity_bytes"] > 0
    assert gpu["peak_at"]
    parts = sum(time[key] for key in ("compute_s", "exposed_comm_s", "host_s", "idle_s"))
    assert parts == pytest.approx(time["step_s"], rel=1e-9)
    assert 0 < result["throughput"]["mfu"] <= result["throughput"]["hfu"] < 1
    assert 0 < result["bottleneck"]["share"] <= 1
    assert result["bottleneck"]["name"]
    assert 0 < result["model"]["trainable_params"] <= result["model"]["params"]
    assert result["memory"]["textbook"]["formula"]
    assert isinstance(result["assumptions"], list)
    assert isinstance(result["not_modeled"], list)
    for key in ("zsim_version", "simulated_ranks", "rank_classes", "events", "wall_s"):
        assert key in result["meta"]


@pytest.mark.parametrize("name", [path.stem for path in SCENARIOS])
def test_readme_says_how_long_a_step_takes(results: dict[str, dict], name: str) -> None:
    (row,) = re.findall(rf"^\| \[{name}\].* \| (.+?) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    result = results[name]
    assert row == f"{'fits' if result['fits'] else 'does not fit'}, {result['time']['step_s']:.3g} s/step"


def test_textbook_ladder(results: dict[str, dict]) -> None:
    """16 P, P (4 + 12/N), P (2 + 14/N), 16 P / N on 4 GPUs, with Llama-3.1-8B's real 8,030,261,248 parameters."""
    expected = {"ddp": 16.0, "zero1": 7.0, "zero2": 5.5, "zero3": 4.0}
    for stage, bytes_per_parameter in expected.items():
        result = results[f"llama31_8b_4xa100_{stage}"]
        assert result["model"]["params"] == 8_030_261_248
        assert result["memory"]["textbook"]["per_gpu_bytes"] == pytest.approx(8_030_261_248 * bytes_per_parameter)
    ladder = [results[f"llama31_8b_4xa100_{stage}"] for stage in expected]
    assert [result["fits"] for result in ladder] == [False, True, True, True]
    peaks = [result["memory"]["gpu"]["peak_allocated_bytes"] for result in ladder]
    assert peaks == sorted(peaks, reverse=True)


def test_memory_command_is_exact_for_round_figures() -> None:
    done = command("memory", "--params", "8e9", "--gpus", "4", "--json")
    stages = json.loads(done.stdout)["stages"]
    assert {name: stages[name]["gpu_bytes"] for name in ("ddp", "zero1", "zero2", "zero3")} == {
        "ddp": 128e9,
        "zero1": 56e9,
        "zero2": 44e9,
        "zero3": 32e9,
    }
    assert all(stages[name]["formula"] for name in stages)


def test_pcie_waits_where_nvlink_hides(results: dict[str, dict]) -> None:
    pcie, nvlink = results["qwen7b_8x4090"], results["qwen7b_8xh100"]
    share = [result["time"]["exposed_comm_s"] / result["time"]["step_s"] for result in (pcie, nvlink)]
    assert share[0] > 0.5
    assert share[1] < 0.2
    # Without peer-to-peer every byte between GPUs is staged in host memory.
    assert "staging" in pcie["bottleneck"]["name"]
    assert "all-gather" in pcie["bottleneck"]["name"]
    assert "staging" not in nvlink["bottleneck"]["name"]


def test_exit_codes_and_output_files(tmp_path: Path) -> None:
    fits = command("scenarios/qwen7b_8xh100.yaml", "--json", "--out", str(tmp_path / "out"))
    assert fits.returncode == 0, fits.stderr
    assert json.loads(fits.stdout)["fits"] is True
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"result.json", "timeline.json"} <= written
    assert any(name.endswith(".png") for name in written)
    too_big = command("scenarios/llama31_8b_4xa100_ddp.yaml")
    assert too_big.returncode == 3
    assert "DOES NOT FIT" in too_big.stdout
    assert "if it fitted" in too_big.stdout
    bad = command("scenarios/qwen32b_8xh100.yaml", "--set", "zero.stagee=2")
    assert bad.returncode == 2
    assert "stage" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama31_8b_4xa100_zero3", ()),
        ("llama31_8b_4xa100_zero2", ()),
        ("qwen7b_8x4090", ()),
        ("llama31_8b_512xh100_fsdp2", ("cluster.nodes=2",)),
    ],
)
def test_folded_equals_unfolded(name: str, overrides: tuple[str, ...]) -> None:
    path = ROOT / "scenarios" / f"{name}.yaml"
    folded, unfolded = (zsim.simulate(path, overrides, fold=fold).to_dict() for fold in (True, False))
    assert unfolded["meta"]["simulated_ranks"] > folded["meta"]["simulated_ranks"]
    assert folded["time"]["step_s"] == pytest.approx(unfolded["time"]["step_s"], rel=1e-9)
    assert folded["memory"]["gpu"]["peak_allocated_bytes"] == unfolded["memory"]["gpu"]["peak_allocated_bytes"]


def test_same_scenario_same_bytes() -> None:
    first, second = (zsim.simulate(ROOT / "scenarios" / "qwen7b_8xh100.yaml").to_dict() for _ in range(2))
    for result in (first, second):
        result["meta"].pop("wall_s")
    assert json.dumps(first) == json.dumps(second)


def test_what_was_sent_at_the_start_gives_the_steps_no_lead() -> None:
    """Micro-steps of one token, issued more slowly than they run, after a second of broadcasts: each takes the same."""
    setup = "framework=ddp", "zero=null", "model={params: 1e9}", "seq_len=1", "precision=fp16", "checkpointing=full"
    times = [
        zsim.simulate(ROOT / "scenarios" / "qwen7b_8x4090.yaml", [*setup, "lora=16", f"grad_accum={count}"]).time
        for count in (2, 3, 4, 12, 13)
    ]
    assert times[0].host_s > 0
    steps = [time.step_s for time in times]
    assert steps[1] - steps[0] == pytest.approx(steps[4] - steps[3], rel=1e-6)
    assert steps[2] - steps[1] == pytest.approx(steps[4] - steps[3], rel=1e-6)
