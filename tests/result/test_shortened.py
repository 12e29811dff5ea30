"""Of many micro-steps a few are simulated: what a report says is what simulating all of them says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zsim.api import simulate
from zsim.document import flat
from zsim.result.compare import compare
from zsim.result.spec import Result

TOPOLOGIES = Path("topologies").absolute()
MANY = 11
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
OFFLOADED = "{stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}"
SETUPS = {
    "ddp": "framework: ddp",
    "zero1": "framework: deepspeed\nzero: {stage: 1}",
    "zero2": "framework: deepspeed\nzero: {stage: 2}",
    "zero2 offload": "framework: deepspeed\nzero: {stage: 2, offload_optimizer: {device: cpu}}",
    "zero3": "framework: deepspeed\nzero: {stage: 3}",
    "zero3 offload": f"framework: deepspeed\nzero: {OFFLOADED}",
    "fsdp1": "framework: fsdp1",
    "fsdp1 no_sync": "framework: fsdp1\nfsdp: {no_sync: true}",
    "fsdp2": "framework: fsdp2",
    "fsdp2 offload": "framework: fsdp2\nfsdp: {cpu_offload: true}",
}


MIXED = """
gpu: [A100-SXM-80GB, A100-SXM-80GB, A100-SXM-40GB, A100-SXM-40GB]
gpus: 4
pcie: {gen: 4, tree: [[gpu0, gpu1, gpu2, gpu3]]}
cpu: {vendor: amd, model: EPYC 7763, avx512: false, sockets: 1, cores: 64, dram_gib: 512, dram_gbps: 204.8}
"""


def scenario(
    folder: Path,
    setup: str,
    grad_accum: int = MANY,
    more: str = "checkpointing: full",
    cluster: Path = TOPOLOGIES / "a100_4.yaml",
) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file = folder / "scenario.yaml"
    file.write_text(f"""
model: config.json
cluster: {cluster}
{setup}
micro_batch: 2
grad_accum: {grad_accum}
seq_len: 2048
precision: bf16
{more}
""")
    return file


def numbers(result: Result) -> dict[str, Any]:
    """All that is said, but for how it was found."""
    told = {name: value for name, value in result.to_dict().items() if name not in ("meta", "assumptions")}
    links = {
        f"{row['link']} {name}": row[name] for row in result.links.to_dict("records") for name in ("bytes", "busy_s")
    }
    calls = {line.name: line.values[0] for line in compare([result, result]).programs}
    return dict(flat(told)) | links | calls


@pytest.mark.parametrize("name", SETUPS)
def test_a_report_is_that_of_all_micro_steps(name: str, tmp_path: Path) -> None:
    path = scenario(tmp_path, SETUPS[name])
    few, whole = simulate(path), simulate(path, fold=False)
    assert few.timeline.left_out is not None
    assert whole.timeline.left_out is None
    same(few, whole)


def same(few: Result, whole: Result) -> None:
    said, expected = numbers(few), numbers(whole)
    assert said.keys() == expected.keys()
    for key, value in expected.items():
        assert said[key] == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value), key


def test_what_is_left_out_is_said_and_numbers_are_those_of_all(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, SETUPS["zero3"], 64))
    (said,) = (text for text in result.assumptions if text.startswith("micro-steps"))
    assert said.startswith("micro-steps 5 to 63 repeat the one before them op by op")
    assert set(result.ops.query("phase == 'forward'")["micro_batch"]) == {0, 1, 2, 3, 63}
    assert result.headline.plan["grad_accum"] == 64
    assert result.throughput.tokens_per_s == pytest.approx(64 * 2 * 2048 * 4 / result.time.step_s)


def test_few_micro_steps_are_all_shown(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, SETUPS["zero3"], 8))
    assert result.timeline.left_out is None
    assert set(result.ops.query("phase == 'forward'")["micro_batch"]) == set(range(8))


def test_where_memory_is_full_each_micro_step_gives_cached_memory_back(tmp_path: Path) -> None:
    tight = "checkpointing: none\nallocator: {per_process_memory_fraction: 0.0305}"
    path = scenario(tmp_path, SETUPS["zero2"], more=tight)
    few, whole = simulate(path), simulate(path, fold=False)
    assert few.fits
    assert few.gpu.allocator_retries > 0
    assert few.timeline.left_out is not None
    same(few, whole)


def test_where_cached_blocks_fall_apart_memory_is_that_of_all(tmp_path: Path) -> None:
    """Of the shown ones alone, 63 MB less would be reserved."""
    more = "loss: hf\nallocator: {expandable_segments: true}\nload: rank0"
    setup = "framework: fsdp2\nfsdp: {cpu_offload: true, reshard_backward_only_last: true}"
    path = scenario(tmp_path, setup, 23, more, TOPOLOGIES / "rtx4090_1.yaml")
    overrides = ["micro_batch=4", "precision=fp16"]
    same(simulate(path, overrides), simulate(path, overrides, fold=False))


def test_a_first_step_of_other_micro_steps_is_that_of_all(tmp_path: Path) -> None:
    more = "checkpointing: {policy: full, offload: true}\nattention: eager"
    setup = "framework: fsdp2\nfsdp: {reduce_dtype: float32}"
    path = scenario(tmp_path, setup, 23, more, TOPOLOGIES / "dgx1_v100_8.yaml")
    overrides = ["micro_batch=1", "seq_len=1024", "precision=fp16"]
    same(simulate(path, overrides), simulate(path, overrides, fold=False))


def test_ranks_as_slow_as_each_other_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    """The GPUs of two kinds wait for one another, so that their steps differ by rounding alone."""
    (tmp_path / "mixed.yaml").write_text(MIXED)
    path = scenario(tmp_path, "framework: fsdp2", 9, "optimizer: lion", tmp_path / "mixed.yaml")
    few, whole = simulate(path), simulate(path, fold=False)
    same(few, whole)
    assert few.slowest.rank == 0
    assert few.temporal.compute_s == pytest.approx(whole.temporal.compute_s)
