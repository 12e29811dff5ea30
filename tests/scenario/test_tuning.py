"""LoRA, 4-bit weights and host memory, from a scenario file to the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError, NotModeled
from zsim.result.remedies import remedies
from zsim.result.render.terminal import verdict
from zsim.scenario.load import load

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LLAMA = SCENARIOS / "llama31_8b_4xa100_zero2.yaml"
QLORA = SCENARIOS / "llama31_8b_4090_qlora.yaml"


def test_qlora_holds_four_bits_a_weight() -> None:
    """6.98e9 weights of Linear modules at half a byte and 1/64 of scales, 1.05e9 at 2 bytes, 42e6 at 4."""
    result = zsim.simulate(QLORA)
    assert result.fits
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    expected = linear / 2 + linear / 64 + 2 * (8_030_261_248 - linear) + 4 * 41_943_040
    assert result.gpu.by_category["parameters"] == pytest.approx(expected, rel=1e-3)
    assert result.params == 8_030_261_248 + 41_943_040
    assert result.trainable_params == 41_943_040


@pytest.mark.parametrize(("release", "before"), [("4.30.2", True), ("4.57", True), ("5.0", False)])
def test_weights_are_quantized_as_the_release_does_it(release: str, before: bool) -> None:
    tuning = load(QLORA, [f"framework.transformers='{release}'"]).resolve().model.tuning
    assert tuning is not None
    assert tuning.before_5 == before


@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_states_of_adapters_only(framework: str) -> None:
    """Everything that training adds to the frozen model is of the size of the adapters."""
    kind = framework if not framework.startswith("zero") else "deepspeed"
    zero = f"zero={{stage: {framework[-1]}, zero_init: {framework == 'zero3'}}}" if kind == "deepspeed" else "zero=null"
    overrides = [f"framework={kind}", zero, "lora={r: 16, targets: [q_proj, v_proj]}", "seq_len=512", "fsdp=null"]
    gpu = zsim.simulate(LLAMA, overrides).gpu
    held = {name: gpu.by_category.get(name, 0) for name in ("optimizer_states", "master_weights", "gradients")}
    assert held["optimizer_states"] > 0
    assert sum(held.values()) <= 16 * 6_815_744 * 1.05


@pytest.mark.parametrize("framework", ["fsdp1", "fsdp2"])
def test_frozen_shards_stay_as_loaded(framework: str) -> None:
    """accelerate 1.15 widens what is trained alone: a quarter of 8.03e9 at 2 bytes, of 41.9e6 at 4."""
    overrides = [f"framework={framework}", "zero=null", "lora={r: 16}", "seq_len=512", "checkpointing=full"]
    result = zsim.simulate(LLAMA, overrides)
    expected = (2 * 8_030_261_248 + 4 * 41_943_040) / 4
    assert result.gpu.by_category["parameters"] == pytest.approx(expected, rel=1e-3)
    as_others = zsim.simulate(LLAMA, [*overrides, "fsdp.frozen_dtype=float32"])
    assert as_others.gpu.by_category["parameters"] == pytest.approx(result.params, rel=1e-3)  # 4 bytes over 4 ranks


@pytest.mark.parametrize("framework", ["fsdp1", "fsdp2"])
def test_qlora_sharded(framework: str) -> None:
    overrides = [f"framework={framework}", "zero=null", "lora={r: 16}", "quantize=nf4", "seq_len=512"]
    result = zsim.simulate(LLAMA, overrides)
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    shards = (linear / 2 + 2 * (8_030_261_248 - linear) + 2 * 41_943_040) / 4
    assert result.gpu.by_category["parameters"] == pytest.approx(shards + linear / 64, rel=2e-3)


@pytest.mark.parametrize("framework", ["ddp", "zero2"])
def test_eight_bit_base(framework: str) -> None:
    """6.98e9 weights of Linear modules at a byte and 4 bytes a row, 1.05e9 at 2 bytes; adapters at 4, with ZeRO at 2.
    torch.autocast makes no copy of weights that its products do not take."""
    kind, zero = ("deepspeed", "zero={stage: 2}") if framework == "zero2" else ("ddp", "zero=null")
    overrides = [f"framework={kind}", zero, "lora={r: 16}", "quantize=int8", "seq_len=512", "checkpointing=full"]
    result = zsim.simulate(LLAMA, overrides)
    linear, rows = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 32 * (3 * 4096 + 2 * 1024 + 2 * 14336)
    expected = linear + 4 * rows + 2 * (8_030_261_248 - linear) + (4 if kind == "ddp" else 2) * 41_943_040
    assert result.gpu.by_category["parameters"] == pytest.approx(expected, rel=1e-3)
    inputs = 32 * 2 * (3 * 4096 + 14336) * 512 * result.setup.workload.micro_batch  # kept in spite of checkpointing
    assert inputs < result.gpu.by_category["activations"] < 1.5 * inputs


@pytest.mark.parametrize("framework", ["fsdp1", "fsdp2", "zero3"])
def test_no_shards_of_an_eight_bit_base(framework: str) -> None:
    kind = "deepspeed" if framework == "zero3" else framework
    zero = "zero={stage: 3}" if kind == "deepspeed" else "zero=null"
    with pytest.raises(NotModeled, match="8-bit weights in shards"):
        zsim.simulate(LLAMA, [f"framework={kind}", zero, "lora={r: 16}", "quantize=int8"])


def test_fsdp1_refuses_mixed_units_of_flat_parameters() -> None:
    overrides = ["framework=fsdp1", "zero=null", "lora={r: 16}", "quantize=nf4"]
    with pytest.raises(InputError, match="frozen and trained parameters in one unit"):
        zsim.simulate(LLAMA, [*overrides, "fsdp={adapter_units: false, use_orig_params: false}"])


def test_no_room_in_host_memory_is_not_fitting() -> None:
    """Every rank of eight reads 65 GB: 524 GB, then nothing is left of it."""
    overrides = ["zero.zero_init=false", "load=every_rank"]
    result = zsim.simulate(SCENARIOS / "qwen32b_8xh100.yaml", overrides)
    assert result.host.by_category.get("checkpoint") == 8 * 2 * result.params
    assert result.host.peak_at == "initialization"
    meta = zsim.simulate(SCENARIOS / "qwen32b_8xh100.yaml", ["load=meta"])
    assert set(meta.host.by_category) == {"processes"}


def test_killed_at_step_0(tmp_path: Path) -> None:
    """Exit code 3, although the GPUs have room; reading on one rank only cures it."""
    from zsim.cli.app import main

    whole = "zero.zero_init=false"
    topology = tmp_path / "small_host.yaml"
    topology.write_text("{gpu: H100-SXM, gpus: 8, nvlink: switch, cpu: {sockets: 2, cores: 64, dram_gib: 64}}")
    with pytest.raises(SystemExit) as ended:
        main([str(SCENARIOS / "qwen7b_8xh100.yaml"), "--quiet", "--set", f"cluster={topology}", "--set", whole])
    assert ended.value.code == 3
    result = zsim.simulate(SCENARIOS / "qwen7b_8xh100.yaml", [f"cluster={topology}", whole])
    assert "killed by the OOM killer at step 0" in verdict(result)
    assert remedies(result, 1)[0].name == "load=rank0"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lora={r: 8, targets: [query]}", "the model has no query"),
        ("lora={r: 0}", "lora.r"),
        ("quantize=nf4", "cannot be trained without adapters"),
        ("quantize=int8", "cannot be trained without adapters"),
        ("quantize=int5", "quantize"),
    ],
)
def test_refused(override: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        zsim.simulate(LLAMA, [override])
    assert says in str(refused.value)


def test_text_books_snippet_ships() -> None:
    result = zsim.simulate(SCENARIOS / "textbook_zero3_offload.yaml")
    plan = result.setup.plan
    assert (plan.stage, plan.offload_optimizer, plan.offload_optimizer_pin_memory) == (3, "cpu", True)
    assert (plan.dtype, plan.overlap_comm, plan.contiguous_gradients) == ("float16", True, True)
    assert result.fits
    assert result.host.by_category["master_weights"] == pytest.approx(4 * result.params, rel=1e-3)


def test_a_copy_to_unified_memory_costs_nothing() -> None:
    """What offload costs there is Adam on the CPU alone; over PCIe 4.0 the copies come on top."""
    base = SCENARIOS / "optimizer_offload.yaml"
    copies = {}
    for machine in ("mac_studio_m3_ultra", "gh200", "h100_1_pcie5", "a100_1_pcie4"):
        idle = zsim.simulate(base, [f"cluster=../topologies/{machine}.yaml"]).time.idle_by
        copies[machine] = sum(s for name, s in idle.items() if name.startswith(("h2d", "d2h")))
    assert copies["mac_studio_m3_ultra"] == 0
    assert 0 < copies["gh200"] < copies["h100_1_pcie5"] / 3 < copies["a100_1_pcie4"] / 3


def test_fragments_in_the_way_are_said_to_be() -> None:
    """What is allocated would fit, what the allocator has to reserve for it does not."""
    fragmented = zsim.simulate(SCENARIOS / "llama31_8b_4xa100_zero3.yaml", ["micro_batch=12"])
    gpu = fragmented.gpu
    assert not fragmented.fits
    assert gpu.peak_allocated_bytes + gpu.framework_bytes < gpu.capacity_bytes
    assert remedies(fragmented, 1)[0].name == "allocator.expandable_segments=true"


@pytest.mark.parametrize("name", ["muon", "sgd", "adafactor"])
def test_only_bitsandbytes_optimizers_are_paged(name: str) -> None:
    with pytest.raises(InputError, match=f"no paged {name}") as caught:
        zsim.load_scenario(LLAMA, [f"optimizer={{name: {name}, paged: true}}"]).resolve()
    assert (caught.value.field, caught.value.accepted) == ("optimizer.paged", "adamw, adam, lion, adamw8bit")


@pytest.mark.parametrize(
    ("override", "field", "accepted"),
    [
        ("optimizer={name: adamw, paged: true}", "optimizer.paged", "false"),
        ("allocator=expandable_segments:True", "allocator", "null"),
    ],
)
def test_a_mac_has_neither_cudas_allocator_nor_its_managed_memory(override: str, field: str, accepted: str) -> None:
    mac = SCENARIOS / "llama31_8b_mac_studio.yaml"
    with pytest.raises(InputError, match="Apple M3 Ultra does not have") as caught:
        zsim.load_scenario(mac, [override]).resolve()
    assert (caught.value.field, caught.value.accepted) == (field, accepted)
    zsim.load_scenario(mac, ["allocator=null", "optimizer={name: adamw, paged: false}"]).resolve()


def test_what_is_not_quantized_is_widened_where_the_base_is_prepared() -> None:
    """peft's prepare_model_for_kbit_training: Llama 3.1's embedding, head and 65 norms take 4 bytes instead of 2."""
    plain, prepared = (
        zsim.simulate(QLORA, [f"quantize={{type: nf4, prepared: {flag}}}", "seq_len=256"]).gpu.by_category
        for flag in ("false", "true")
    )
    wider = 2 * (2 * 128_256 * 4_096 + 65 * 4_096)
    assert prepared["parameters"] - plain["parameters"] == wider
    with pytest.raises(InputError, match="DDP's alone"):
        zsim.simulate(QLORA, ["framework=fsdp2", "ddp=null", "quantize={type: nf4, prepared: true}"])


def test_norms_that_trl_leaves_in_float32_widen_what_all_blocks_but_the_first_are_given() -> None:
    """65 norms of 4,096 at 4 bytes; bitsandbytes gives back the dtype that norms hand it, so that inputs of 31 of 32
    checkpointed blocks, 512 tokens of 4,096, take 4 bytes instead of 2."""
    plain, norms = (
        zsim.simulate(QLORA, [f"quantize={{type: nf4, prepared: {how}}}", "seq_len=256"]).gpu.by_category
        for how in ("false", "norms")
    )
    assert norms["parameters"] - plain["parameters"] == 2 * 65 * 4_096
    assert norms["activations"] - plain["activations"] == 2 * 31 * 512 * 4_096


def test_layer_norm_under_autocast_widens_what_a_quantized_block_hands_on(tmp_path: Path) -> None:
    """Float32 comes out of it, and out of 4-bit products of that; a block more keeps its input in 4 bytes."""

    def kept(layers: int) -> int:
        config = {
            "model_type": "gpt_neox", "hidden_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 8,
            "intermediate_size": 4096, "vocab_size": 1024, "max_position_embeddings": 2048,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        overrides = [f"model={tmp_path / 'config.json'}", "seq_len=1024", "micro_batch=4"]
        return zsim.simulate(QLORA, overrides).gpu.by_category["activations"]

    assert kept(8) - kept(4) == 4 * 4096 * 1024 * 4


def test_four_bit_weights_are_as_small_where_products_are_in_float32() -> None:
    """bnb_4bit_compute_dtype, float32 unless BitsAndBytesConfig is told: what is unpacked takes 4 bytes, no more."""
    wide = zsim.simulate(QLORA, ["precision=fp32", "ddp=null", "seq_len=256"]).gpu.by_category
    prepared = zsim.simulate(QLORA, ["quantize={type: nf4, prepared: true}", "seq_len=256"]).gpu.by_category
    assert wide["parameters"] == prepared["parameters"]
    with pytest.raises(InputError, match="16-bit elements"):
        zsim.simulate(QLORA, ["framework=fsdp2", "ddp=null", "precision=fp32"])
