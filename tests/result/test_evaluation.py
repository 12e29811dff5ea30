"""Whether a run that trains gets through its evaluations, and what the report says of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import zsim
from zsim.result.remedies import remedies
from zsim.result.render import html
from zsim.result.render.page import Page
from zsim.result.render.terminal import render, verdict
from zsim.result.spec import Result

GIB = 2**30
VOCABULARY, LENGTH = 100_000, 512
MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
}  # fmt: skip
FRAMEWORKS = (
    "framework: ddp\n",
    "framework: fsdp1\n",
    "framework: fsdp2\n",
    *(f"framework: deepspeed\nzero: {{stage: {stage}}}\n" for stage in (0, 1, 2, 3)),
    "framework: deepspeed\nzero: {stage: 3, offload_param: cpu, offload_optimizer: cpu}\n",
    "framework: fsdp2\nlora: {r: 8, alpha: 16, targets: all-linear}\n",
)


def simulated(folder: Path, text: str, gpu: str = "A100-SXM-80GB") -> Result:
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "topology.yaml").write_text(f"gpu: {gpu}\ngpus: 2\np2p: none\ncpu: {{sockets: 1, dram_gib: 64}}\n")
    common = f"model: config.json\ncluster: topology.yaml\nseq_len: {LENGTH}\nmicro_batch: 1\nprecision: bf16\n"
    path = folder / "scenario.yaml"
    path.write_text(common + text)
    return zsim.simulate(path)


def printed(result: Result) -> str:
    stream = io.StringIO()
    render(result, Page(stream, 300))
    return stream.getvalue()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_logits_of_a_batch_of_its_own_come_on_top(tmp_path: Path, framework: str):
    assert simulated(tmp_path, framework).moments == ()
    small, large = (simulated(tmp_path, f"{framework}evaluation: {size}\n").moments for size in (16, 32))
    more = large[0].gpu_bytes - small[0].gpu_bytes
    # in 16 bits, cast to float32, and their softmax
    assert more == pytest.approx(16 * LENGTH * VOCABULARY * (2 + 4 + 4), rel=0.02)
    assert large[0].moment == "evaluating 32 sequences at a time"
    assert large[0].fits


def test_it_leaves_the_steps_as_they_are(tmp_path: Path):
    framework = "framework: deepspeed\nzero: {stage: 3}\ngrad_accum: 4\n"
    alone, with_it = simulated(tmp_path, framework), simulated(tmp_path, f"{framework}evaluation: 32\n")
    assert with_it.time == alone.time
    assert with_it.gpu == alone.gpu
    said = f"Beyond training: evaluating 32 sequences at a time takes {with_it.moments[0].gpu_bytes / GIB:.1f} of"
    assert said in printed(with_it)
    assert said in html.document(with_it)
    assert "Beyond training" not in html.document(alone)


def test_one_that_needs_no_more_than_training_is_not_mentioned(tmp_path: Path):
    assert simulated(tmp_path, "framework: fsdp2\nevaluation: 1\n").moments == ()


def test_a_run_that_trains_may_run_out_while_it_evaluates(tmp_path: Path):
    result = simulated(tmp_path, "framework: fsdp2\nevaluation: 128\n", gpu="RTX 4090")
    assert result.trains
    assert not result.fits
    assert result.short_of == "memory beside the steps"
    assert "trains, but runs out while evaluating 128 sequences at a time, for which at least" in verdict(result)
    first = remedies(result, 1)[0]
    assert first.name == "evaluation.micro_batch=1"
    assert first.fits


def test_a_fused_loss_has_no_logits_but_with_a_transformers_before_5(tmp_path: Path):
    text = "framework: fsdp2\nloss: fused\nevaluation: 32\n"
    new = simulated(tmp_path, text).moments[0]
    assert new.gpu_bytes < 16 * LENGTH * VOCABULARY * 10
    assert new.cause.endswith(" of activations")
    old = simulated(tmp_path, text.replace("fsdp2", "{name: fsdp2, transformers: '4.57'}"))
    assert old.moments[0].gpu_bytes > 32 * LENGTH * VOCABULARY * 10
    assert [line for line in old.not_modeled if line.startswith("evaluation: keys and values")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("framework: fsdp2\nobjective: orpo\n", "pairs"),
        ("framework: deepspeed\nzero: {stage: 3}\nsequence_parallel_size: 2\n", "sequences that ranks share"),
    ],
)
def test_what_is_not_looked_at_is_listed(tmp_path: Path, text: str, what: str):
    result = simulated(tmp_path, f"{text}evaluation: 32\n")
    assert result.moments == ()
    assert f"evaluation: of {what}" in result.not_modeled
