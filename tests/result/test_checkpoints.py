"""Whether a run that trains gets through its checkpoints, and what the report says of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import zsim
from zsim.result.remedies import remedies
from zsim.result.render.page import Page
from zsim.result.render.terminal import render, verdict
from zsim.result.spec import Result

ROOT = Path(__file__).parents[2]
MODEL = """{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
"num_attention_heads": 16, "vocab_size": 32000, "tie_word_embeddings": false}"""
GIB = 2**30


def simulated(folder: Path, text: str, *, dram_gib: float = 256, gpu: str = "T4") -> Result:
    (folder / "config.json").write_text(MODEL)
    cpu = f"{{sockets: 1, cores: 16, dram_gib: {dram_gib}, dram_gbps: 100}}"
    (folder / "topology.yaml").write_text(f"gpu: {gpu}\ngpus: 4\np2p: none\ncpu: {cpu}\n")
    common = "model: config.json\ncluster: topology.yaml\nseq_len: 128\nmicro_batch: 1\nprecision: fp16\n"
    path = folder / "scenario.yaml"
    path.write_text(common + text)
    return zsim.simulate(path)


def printed(result: Result) -> str:
    stream = io.StringIO()
    render(result, Page(stream, 200))
    return stream.getvalue()


def test_a_scenario_that_says_nothing_of_saving_says_nothing(tmp_path: Path):
    result = simulated(tmp_path, "framework: deepspeed\nzero: {stage: 2}\n")
    assert result.moments == ()
    assert result.to_dict()["memory"]["moments"] == []
    assert "Beyond training" not in printed(result)


def test_the_copies_of_every_rank_lie_on_one_host(tmp_path: Path):
    result = simulated(tmp_path, "framework: deepspeed\nzero: {stage: 2}\nload: meta\nsaving: trainer\n")
    weights = result.moments[0]
    assert weights.moment == "saving the weights"
    assert weights.host_by_category["checkpoint"] == 4 * 2 * result.params
    assert weights.fits
    said = f"Beyond training: saving the weights takes {weights.host_bytes / GIB:.1f} GiB of host RAM per node"
    assert said in printed(result)


def test_a_run_that_trains_may_run_out_of_host_memory_while_it_saves(tmp_path: Path):
    text = "framework: deepspeed\nzero: {stage: 2}\nload: meta\nsaving: trainer\n"
    result = simulated(tmp_path, text, dram_gib=7.4)
    assert result.trains
    assert not result.fits
    assert not result.host_fits
    assert "trains, but runs out while saving the weights, for which at least 9 of 7 GiB of host RAM" in verdict(result)
    assert "every rank copies all weights to its host" in verdict(result)
    assert result.to_dict()["time"]["valid"]
    assert "as if it fitted" not in printed(result)
    assert [change.name for change in remedies(result, 1)] == ["zero.stage=3"]


def test_gathering_can_be_left_to_a_script(tmp_path: Path):
    """Of sub-groups, as on one node whole weights are less than the float32 ones that its ranks write at once."""
    zero = "{stage: 3, sub_group_size: 1e7, stage3_gather_16bit_weights_on_model_save: true}"
    result = simulated(tmp_path, f"framework: deepspeed\nzero: {zero}\nload: meta\n", dram_gib=5.5)
    assert result.trains
    assert not result.fits
    names = [change.name for change in remedies(result, 1)]
    assert names == ["zero.stage3_gather_16bit_weights_on_model_save=false"]


@pytest.mark.parametrize("framework", ["{name: fsdp1, version: 2.0.0, transformers: 4.28.0}", "fsdp2"])
def test_whole_weights_on_every_gpu_are_counted_in_its_allocator(tmp_path: Path, framework: str):
    kind = "state_dict_type: FULL_STATE_DICT, state_dict_offload_to_cpu: false"
    text = f"framework: {framework}\nfsdp: {{{kind}}}\noptimizer: {{name: sgd}}\n"
    result = simulated(tmp_path, text)
    weights = result.moments[0]
    assert weights.gpu_bytes > result.gpu.nvidia_smi_bytes
    assert weights.gpu_bytes > 4 * result.params
    assert weights.fits
    assert f"saving the weights takes {weights.gpu_bytes / GIB:.1f} of" in printed(result)


def test_what_a_gpu_has_not_is_missing_while_it_saves(tmp_path: Path):
    text = (
        "framework: {name: fsdp1, version: 2.0.0, transformers: 4.28.0}\noptimizer: {name: sgd}\nsaving: trainer\n"
        "allocator: {per_process_memory_fraction: 0.17}\n"
    )
    result = simulated(tmp_path, text)
    assert result.trains, verdict(result)
    weights = result.moments[0]
    assert not weights.gpu_fits
    assert result.host_fits
    assert "every GPU gathers all weights" in verdict(result)
    assert [change.name for change in remedies(result, 1)] == ["fsdp.state_dict_offload_to_cpu=true"]


def test_resuming_is_looked_at_where_it_is_asked_for(tmp_path: Path):
    """DeepSpeed's own shards: twelve bytes per parameter of a node's ranks together, before there are states."""
    text = "framework: deepspeed\nzero: {stage: 3}\nload: meta\nsaving: {resume: true}\n"
    result = simulated(tmp_path, text)
    moments = {each.moment: each for each in result.moments}
    assert moments["resuming"].host_by_category["checkpoint"] == pytest.approx(12 * result.params, rel=1e-3)
    without = simulated(tmp_path, text.replace("{resume: true}", "trainer"))
    assert "resuming" not in {each.moment for each in without.moments}


def test_shards_that_do_not_fit_beside_training_are_saved_in_turn(tmp_path: Path):
    result = simulated(tmp_path, "framework: fsdp2\nload: meta\nsaving: async\n", dram_gib=9)
    assert result.trains
    assert not result.fits
    assert [change.name for change in remedies(result, 1)] == ["saving.by=trainer"]


def test_the_optimizers_states_alone_may_be_what_does_not_fit(tmp_path: Path):
    """Full ones with rank 0, twice as many bytes as the weights."""
    text = "framework: fsdp2\nfsdp: {state_dict_type: FULL_STATE_DICT}\nload: meta\nsaving: trainer\n"
    result = simulated(tmp_path, text, dram_gib=7.5)
    assert result.trains
    assert not result.fits
    assert "saving.only_model=true" in [change.name for change in remedies(result, 3)]


@pytest.mark.parametrize("load", ["meta", "gpu"])
def test_a_host_without_room_for_the_states_leaves_them_on_the_gpu(tmp_path: Path, load: str):
    text = f"framework: deepspeed\nzero: {{stage: 2, offload_optimizer: cpu}}\nload: {load}\n"
    result = simulated(tmp_path, text, dram_gib=10)
    assert not result.host.fits
    names = [change.name for change in remedies(result, 9)]
    assert "zero.offload_optimizer=none" in names
    assert load != "gpu" or not any("zero.stage=3" in name for name in names)
