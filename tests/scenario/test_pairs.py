"""Scenarios of models with an encoder and a decoder: lengths, what is chosen and printed, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zsim import simulate
from zsim.errors import InputError
from zsim.scenario import Setup, load

ROOT = Path(__file__).parents[2]
FLAN = {
    "model_type": "t5", "feed_forward_proj": "gated-gelu", "vocab_size": 32128, "d_kv": 64, "d_model": 512,
    "d_ff": 1024, "num_heads": 6, "num_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip


def setup(folder: Path, *overrides: str) -> Setup:
    (folder / "config.json").write_text(json.dumps(FLAN))
    scenario = folder / "scenario.yaml"
    scenario.write_text(
        f"model: {folder / 'config.json'}\ncluster: {ROOT / 'topologies' / 'hgx_h100_8.yaml'}\nframework: deepspeed\n"
        "zero: {stage: 3}\nmicro_batch: 2\nseq_len: 512\n"
    )
    return load(scenario, overrides).resolve()


def test_lengths_and_kernels_are_chosen_and_printed(tmp_path: Path):
    found = setup(tmp_path)
    assert (found.workload.target_len, found.workload.attention) == (512, "sdpa")
    assert any("the decoder 512 (target_len: ... says otherwise)" in text for text in found.assumptions)
    assert any(text.startswith("attention: sdpa, as transformers 5.24") for text in found.assumptions)
    short = setup(tmp_path, "target_len=64")
    assert short.workload.target_len == 64
    assert simulate(short).throughput.model_flops < simulate(found).throughput.model_flops
    old = setup(tmp_path, "framework.transformers=4.40.1")
    assert old.workload.attention == "eager"


def test_fsdp2_keeps_the_shared_embedding_in_the_root(tmp_path: Path):
    found = setup(tmp_path, "framework=fsdp2", "zero=null")
    assert found.plan.grouping == "hf"
    with pytest.raises(InputError, match="share an embedding"):
        simulate(setup(tmp_path, "framework=fsdp2", "zero=null", "fsdp.grouping=accelerate"))


def test_adapters_are_on_projections_of_both_stacks(tmp_path: Path):
    found = setup(tmp_path, "lora=8", "lora.targets=[q, v]")
    trained = [parameter.name for parameter in found.model.parameters if parameter.trainable]
    assert len(trained) == 2 * 2 * (3 + 2 * 3)
    assert any(name.startswith("decoder.block.2.layer.1.EncDecAttention.q.lora_A") for name in trained)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [(("attention=flash",), "attention"), (("target_len=0",), "target_len")],
)
def test_what_cannot_be_is_refused_at_its_field(tmp_path: Path, overrides: tuple[str, ...], field: str):
    with pytest.raises(InputError) as refused:
        setup(tmp_path, *overrides)
    assert refused.value.field == field


def test_a_decoder_alone_has_no_target():
    with pytest.raises(InputError, match="has no encoder"):
        load(ROOT / "scenarios" / "qwen7b_8xh100.yaml", ["target_len=64"]).resolve()
