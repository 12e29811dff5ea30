"""Peak memory of runs whose GPUs share sequences, as Hugging Face published it (docs/sequence-parallel.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from zsim.cluster.load import load_topology
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.result.need import Need, need

TOPOLOGY = Path(__file__).parents[2] / "topologies" / "hgx_h100_8.yaml"
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
HIDDEN = 2560


@cache
def needed(size: int, tokens: int) -> Need:
    """ZeRO-3 of the Trainer, checkpointing, accumulation; states on the GPU, as the published figures have them."""
    model = from_config(QWEN3_4B, "Qwen3-4B")
    workload = Workload(1, tokens, checkpointing="full", sequence_parallel_size=size)
    plan = DeepSpeedPlan(
        world_size=size,
        stage=3,
        grad_accum=2,
        sequence_parallel_size=size,
        seq_parallel_communication_data_type="bfloat16",
        zero_init=True,
        reduce_bucket_size=HIDDEN**2,
        stage3_prefetch_bucket_size=int(0.9 * HIDDEN**2),
        stage3_param_persistence_threshold=10 * HIDDEN,
    )
    return need(lower(model, trace(model, workload), plan, workload, 2), load_topology(TOPOLOGY))


@pytest.mark.parametrize(
    ("size", "tokens", "published_gb", "error"),
    [(1, 8192, 76.4, 0.060), (4, 8192, 23.4, -0.047), (4, 98304, 66.0, 0.031)],
)
def test_peaks(size: int, tokens: int, published_gb: float, error: float) -> None:
    assert needed(size, tokens).peak_allocated / 1e9 == pytest.approx(published_gb * (1 + error), rel=0.003)


def test_what_ran_out_of_memory_does() -> None:
    assert needed(4, 131072).excluded == "GPU memory"
    assert not needed(4, 98304).excluded
