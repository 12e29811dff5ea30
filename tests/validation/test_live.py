"""Records small real runs on two gloo ranks, now, with the frameworks that are installed, and predicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zsim.validation import sequences
from zsim.validation.recording import read

pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 30,
}  # fmt: skip
ZERO2 = {"stage": 2, "reduce_bucket_size": 20000, "overlap_comm": True}
ZERO3 = {
    "stage": 3, "reduce_bucket_size": 20000, "stage3_prefetch_bucket_size": 15000,
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 40000, "stage3_max_reuse_distance": 0,
}  # fmt: skip
LIVE: list[dict[str, Any]] = [
    {"name": "live_ddp", "engine": "ddp", "ga": 2, "ddp": {"bucket_cap_mb": 0.1}, "no_sync": True},
    {"name": "live_fsdp2", "engine": "fsdp2", "ga": 2, "fsdp": {"sync_only_last": True}, "ckpt": True},
    {"name": "live_zero2", "engine": "ds", "ds": ZERO | {"zero_optimization": ZERO2}},
    {"name": "live_zero3", "engine": "ds", "ds": ZERO | {"zero_optimization": ZERO3}, "ckpt": True},
]


@pytest.mark.parametrize("config", LIVE, ids=lambda config: config["name"])
def test_a_live_recording_is_predicted(config: dict[str, Any], tmp_path: Path):
    if config["engine"] == "ds":
        pytest.importorskip("deepspeed")
    from validation.oracles.record import record, write

    lines = record({"world": 2, "model": "llama", "over": TINY, "timeout": 120, **config})
    path = tmp_path / f"{config['name']}.jsonl.gz"
    write(lines, path)
    outcome = sequences.compare(read(path))
    assert outcome.matches, outcome.refused or outcome.difference
    assert outcome.calls >= 15
