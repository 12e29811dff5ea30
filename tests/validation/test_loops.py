"""What is known of a training loop's code is what its rows are simulated with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.trace import trace
from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.program.ops import Launch
from zsim.program.units import groups_of
from zsim.scenario import Setup
from zsim.validation import stated
from zsim.validation.evidence import setup_of
from zsim.validation.loops import loop, prefers_cudnn
from zsim.validation.published import predict
from zsim.validation.rows import Row, read_rows

SECOND = Path(__file__).parents[2] / "validation" / "published" / "second_holdout"

LLAMA = {
    "id": "x", "source": "somebody", "model": "llama3-8b", "n_layers": "2", "d_model": "256", "n_heads": "4",
    "n_kv_heads": "2", "d_ff": "512", "vocab": "1000", "seq_len": "128", "gpu": "H200", "n_gpus": "4",
    "gpus_per_node": "4", "framework": "PyTorch FSDP1", "strategy": "fsdp-full", "offload": "none", "precision": "bf16",
    "micro_batch": "2", "grad_accum": "2", "activation_checkpoint": "none", "attention_impl": "SDPA",
}  # fmt: skip


def row(**cells: str) -> Row:
    return Row("rows.csv", 2, LLAMA | cells)


def of(**cells: str) -> Setup:
    return setup_of(row(**cells))


def test_a_loop_nobody_knows_runs_as_the_nearest_stack() -> None:
    setup = of(framework="some trainer (FSDP2)")
    assert isinstance(setup.plan, Fsdp2Plan)
    assert (setup.plan.storage_dtype, setup.plan.reduce_dtype, setup.plan.sync_only_last) == (
        "float32",
        "float32",
        False,
    )
    assert (setup.workload.implementation, setup.workload.loss) == ("hf", "hf")
    other = of(framework="some trainer (PyTorch FSDP1)").plan
    assert isinstance(other, Fsdp1Plan)
    assert (other.storage_dtype, other.reduce_dtype, other.no_sync) == ("float32", "bfloat16", False)


def test_kempnerforge_keeps_everything_in_bf16_and_reduces_once() -> None:
    for words in ("bf16", "bf16 mixed precision", "bf16 params, fp32 reduce"):
        setup = of(framework="KempnerForge (FSDP2)", precision=words)
        assert isinstance(setup.plan, Fsdp2Plan)
        assert (setup.plan.storage_dtype, setup.plan.reduce_dtype) == ("bfloat16", "float32")
        assert setup.plan.sync_only_last
        assert (setup.workload.implementation, setup.workload.loss) == ("torchtitan", "uncast_held")
        assert setup.workload.attention == "sdpa"  # cuDNN's on Hopper
    alone = of(framework="KempnerForge (FSDP2)", n_gpus="1", strategy="").plan
    assert isinstance(alone, DdpPlan)
    assert (alone.dtype, alone.autocast) == ("bfloat16", None)


def test_vectorlm_accumulates_without_sync() -> None:
    plan = of(framework="vectorlm (HF, PyTorch FSDP1)", attention_impl="flash-attn 2").plan
    assert isinstance(plan, Fsdp1Plan)
    assert (plan.storage_dtype, plan.reduce_dtype, plan.no_sync, plan.forward_prefetch) == (
        "bfloat16", "bfloat16", True, True,
    )  # fmt: skip
    assert plan.optimizer.impl == "foreach"
    assert not plan.adapter_units
    words = "pure bf16; LoRA r=8 on q_proj, v_proj"
    adapted = of(framework="vectorlm (HF, PyTorch FSDP1)", attention_impl="flash-attn 2", precision=words).plan
    assert isinstance(adapted, Fsdp1Plan)
    assert adapted.adapter_units


def test_litgpt_has_its_own_modules() -> None:
    setup = of(framework="litgpt (FSDP1)", precision="bf16-true", attention_impl="SDPA (flash)")
    assert setup.workload.implementation == "litgpt"
    assert any(parameter.name.endswith("attn.attn.weight") for parameter in setup.model.parameters)
    assert setup.workload.attention == "flash"
    assert isinstance(setup.plan, Fsdp1Plan)
    assert not setup.plan.adapter_units
    assert setup.workload.loss == "uncast"


def test_lightning_thunders_benchmark_of_it_is_another_loop() -> None:
    """Seven modules with parameters in each block, embedding, norm and head: each is gathered by itself."""
    setup = of(framework="litgpt (FSDP1)", precision="pure bf16", notes="thunder/benchmarks/benchmark_litgpt.py")
    assert isinstance(setup.plan, Fsdp1Plan)
    assert setup.plan.adapter_units
    assert setup.workload.loss == "uncast_held"
    assert len(groups_of(setup.model, setup.tree, adapter_units=True)) == 2 * 7 + 3
    blocks = of(framework="litgpt (FSDP1)", notes="benchmark_litgpt.py --bucketing_mode block").plan
    assert isinstance(blocks, Fsdp1Plan)
    assert not blocks.adapter_units


@pytest.mark.parametrize(
    ("words", "all_bf16", "reduce"),
    [
        ("pure bf16 (params, reduce and states bf16)", True, "bfloat16"),
        ("bf16-true", True, "bfloat16"),
        ("bf16 params and states, fp32 reduce", True, "float32"),
        ("bf16 weights, grads and states", True, "bfloat16"),
        ("bf16 (params, reduce, buffers bf16; fp32 AdamW states)", False, "bfloat16"),
        ("bf16, fp32 master and Adam states", False, None),
        ("bf16", False, None),
    ],
)
def test_precision_in_words(words: str, all_bf16: bool, reduce: str | None) -> None:
    assert stated.all_bf16(row(precision=words)) is all_bf16
    assert stated.reduce_dtype(row(precision=words)) == reduce


@pytest.mark.parametrize(
    ("cells", "preferred"),
    [
        ({"notes": "torch 2.11.0, CUDA 12.8"}, True),
        ({"notes": "PyTorch 2.6; 2026-05"}, False),
        ({"notes": "2026-05-01"}, True),
        ({"notes": "2026-02-01"}, False),
        ({"source": "KempnerForge benchmarks", "framework": "KempnerForge"}, True),
        ({}, False),
    ],
)
def test_cudnns_attention_came_with_a_release(cells: dict[str, str], preferred: bool) -> None:
    assert prefers_cudnn(row(**cells)) is preferred
    assert (of(**cells).workload.attention == "sdpa") is preferred


@pytest.mark.parametrize(
    ("words", "gpus_per_node", "gbps"),
    [
        ("", "8", 3200), ("", "4", 1600), ("InfiniBand", "4", 1600), ("InfiniBand NDR 400 Gbps", "4", 1600),
        ("400 Gb/s per GPU RDMA", "4", 1600), ("200 Gb/s HDR per GPU", "4", 800), ("800 Gb/s RDMA per node", "4", 800),
        ("400 Gbps EFA per node", "8", 400), ("3.2 Tbps RoCE per node", "8", 3200),
        ("400 Gbps (as printed; per node presumed)", "8", 400),
    ],
)  # fmt: skip
def test_what_a_node_can_send(words: str, gpus_per_node: str, gbps: float) -> None:
    cluster = of(inter_node_network=words, gpus_per_node=gpus_per_node, n_gpus="16").cluster
    sent = [link.raw for link in cluster.links.values() if link.kind == "nic" and link.src.startswith("n0/")]
    assert sum(sent) == pytest.approx(gbps / 8 * 1e9)


def test_a_host_that_is_stated_is_not_assumed() -> None:
    """Where nothing is stated: that of the GPU's machine in topologies/, and of one that has none there any."""
    given, usual, unknown = (
        of(**cells).cluster.templates[0].host
        for cells in ({"host_cores": "64", "host_dram_gbps": "409.6"}, {}, {"gpu": "L40S"})
    )
    assert (given.cores, given.dram_bandwidth) == (64, 409.6e9)
    assert (usual.cores, usual.dram_bandwidth) == (128, 716.8e9)
    assert (unknown.cores, unknown.dram_bandwidth) == (96, 500e9)


def test_blocks_that_are_checkpointed_are_counted_in_words() -> None:
    setup = of(activation_checkpoint="selective", notes="1 of 2 layers checkpointed")
    assert setup.workload.checkpointing == "full"
    assert len(setup.workload.checkpointed or ()) == 1


@pytest.mark.parametrize(("file", "name"), [("kempnerforge", "kf-7b-n4"), ("thunder_memory", "lt-474-13b-l2-n8")])
def test_what_a_loop_does_is_what_its_peak_is_made_of(file: str, name: str) -> None:
    """Without its rules: 1.8 % less and 28 % more than measured."""
    rows = {found.id: found for found in read_rows(SECOND / f"{file}.csv")}
    assert abs(predict(rows[name]).memory_error("allocated") or 99) < 1.5


def test_a_loss_outside_of_the_model_comes_before_the_roots_gather() -> None:
    """FSDP2's hook for backward is on the root's output: the loss in transformers, else the logits."""

    def backward(loss: str) -> list[str]:
        setup = of(framework="some trainer (FSDP2)")
        assert isinstance(setup.plan, Fsdp2Plan)
        plan = replace(setup.plan, root_reshard_after_forward=True, grad_accum=1)
        workload = replace(setup.workload, loss=loss)
        program = lower(setup.model, trace(setup.model, workload), plan, workload)
        ops = [item.op for item in program.steps[-1] if isinstance(item, Launch) and item.op.phase == "backward"]
        return ["gather" if getattr(op.work, "kind", "") == "all_gather" else op.label.split(" ")[0] for op in ops]

    inside, outside = backward("hf"), backward("uncast")
    assert inside.index("gather") < inside.index("cross_entropy")
    assert outside.index("cross_entropy") < outside.index("gather")


def test_loops_are_found_by_name() -> None:
    assert loop(row(framework="lit-gpt FSDP")) == loop(row(framework="litgpt"))
    assert loop(row(framework="torchtitan (FSDP2)")).implementation == "torchtitan"


def test_offload_under_a_loop_that_nobody_has_read_is_refused() -> None:
    """Its update runs on the CPU, fused or not, in as many threads as it sets: between 1 and 10 ns per parameter."""
    known = of(framework="fsdp_qlora (PyTorch FSDP1)", offload="param-cpu").plan
    assert isinstance(known, Fsdp1Plan)
    assert known.cpu_offload
    with pytest.raises(NotModeled, match="param-cpu under PyTorch FSDP1"):
        of(offload="param-cpu")


FOURTH = SECOND.with_name("fourth_holdout")


def test_olmo_core_shards_as_torchtitan_did() -> None:
    """Its Llama has torchtitan's modules, OLMo 2 those of transformers with a copy of the logits before the loss."""
    rows = {row.id: row for row in read_rows(FOURTH / "olmo_core.csv")}
    llama, olmo = setup_of(rows["oc-h100-llama8b-bf16"]), setup_of(rows["oc-h100-7b-fp8"])
    earlier = setup_of(rows["oc-h100-1b-bf16-202409"])
    for setup in (llama, olmo, earlier):
        assert isinstance(setup.plan, Fsdp2Plan)
        assert (setup.plan.grouping, setup.plan.storage_dtype, setup.plan.reduce_dtype) == (
            "titan2024",
            "float32",
            "float32",
        )
        assert (setup.plan.grad_clip, setup.plan.sync_only_last) == (1.0, False)
    assert (llama.workload.implementation, llama.workload.loss) == ("torchtitan", "compiled")
    assert (olmo.workload.implementation, olmo.workload.loss) == ("hf", "copied_compiled")
    assert earlier.workload.loss == "copied"
    assert olmo.workload.float8 is not None
    assert (olmo.workload.float8.exclude, olmo.workload.float8.all_gather) == (("lm_head",), True)


def test_a_loop_that_wraps_every_module() -> None:
    rows = {row.id: row for row in read_rows(FOURTH / "universal_llm_trainer.csv")}
    sharded, alone = setup_of(rows["ult-h100-l2-13b-full-fsdp"]), setup_of(rows["ult-h100-phi3-full"])
    assert isinstance(sharded.plan, Fsdp1Plan)
    assert (sharded.plan.cpu_offload, sharded.plan.adapter_units, sharded.plan.use_orig_params) == (True, True, False)
    assert (sharded.workload.dtype, sharded.plan.storage_dtype) == ("float16", "bfloat16")
    assert isinstance(alone.plan, DdpPlan)
    assert (alone.plan.dtype, alone.plan.optimizer.impl, alone.plan.grad_clip) == ("bfloat16", "foreach", 10.0)
    assert (alone.workload.attention, alone.workload.loss, alone.model.family) == ("efficient", "copied_uncast", "phi3")


@pytest.mark.parametrize(
    ("file", "name", "loss"),
    [
        ("nanogpt", "ng-4090-202303", "compiled"),
        ("nanogpt", "ng-a100-bench-eager-202212", "hf"),
        ("llms_from_scratch", "lfs-a100-8-compile", "uncast"),
        ("open_llama", "ol-a100-13b-z3", "copied_uncast"),
        ("flagperf", "fp-a800-s4096", "copied"),
        ("llama_recipes", "lr-a100-40gb-limit", "copied_held"),
        ("llama_recipes", "lr-a100-40gb-limit-freed", "copied"),
    ],
)
def test_losses_of_loops(file, name, loss) -> None:
    found = next(row for row in read_rows(FOURTH / f"{file}.csv") if row.id == name)
    assert setup_of(found).workload.loss == loss


def test_gathers_ahead_of_their_turn_as_the_notes_have_it() -> None:
    ahead, limited = (setup_of(row).plan for row in read_rows(FOURTH / "llama_recipes.csv")[:2])
    assert isinstance(ahead, Fsdp1Plan)
    assert isinstance(limited, Fsdp1Plan)
    assert (ahead.limit_all_gathers, limited.limit_all_gathers) == (False, True)


def test_sixteen_bits_are_those_that_the_precision_names() -> None:
    found = next(row for row in read_rows(FOURTH / "flagperf.csv") if row.id == "fp-a100-40gb-lora-fp16")
    plan = setup_of(found).plan
    assert isinstance(plan, DdpPlan)
    assert (plan.dtype, plan.autocast) == ("float16", None)


FIFTH = SECOND.with_name("fifth_holdout")


@pytest.mark.parametrize(
    ("file", "name", "loss"),
    [
        ("prime_rl", "pr-h100-0.6b-16k", "held"),
        ("oumi", "ou-polaris-4-compile", "copied_compiled"),
        ("internevo", "ie-7b-8", "uncast"),
        ("torchao_quantized", "ao-4090-b32", "copied_compiled"),
    ],
)
def test_losses_of_the_fifth_round(file: str, name: str, loss: str) -> None:
    rows = {row.id: row for row in read_rows(FIFTH / f"{file}.csv")}
    assert setup_of(rows[name]).workload.loss == loss


def test_prime_rl_shards_on_one_gpu_and_compiles_no_checkpointed_block() -> None:
    rows = {row.id: row for row in read_rows(FIFTH / "prime_rl.csv")}
    setup = setup_of(rows["pr-h100-0.6b-16k"])
    assert isinstance(setup.plan, Fsdp2Plan)
    assert (setup.plan.storage_dtype, setup.plan.reduce_dtype, setup.plan.grad_clip) == ("float32", "float32", 1.0)
    assert (setup.workload.attention, setup.workload.compile) == ("flash3", True)
    assert abs(predict(rows["pr-h100-0.6b-8k"]).memory_error("reserved") or 99) < 1.5


SIXTH = SECOND.with_name("sixth_holdout")


def sixth(file: str) -> dict[str, Setup]:
    return {row.id: setup_of(row) for row in read_rows(SIXTH / f"{file}.csv")}


def test_a_loop_of_torchtitans_modules_under_deepspeed() -> None:
    """clip and sub-groups as the notes have them; each GPU's Grace has 72 cores, and no PCIe switch between them."""
    setup = sixth("lsaie")["la-z3-offload"]
    plan, cluster = setup.plan, setup.cluster
    assert isinstance(plan, DeepSpeedPlan)
    assert (plan.grad_clip, plan.sub_group_size, plan.omp_num_threads) == (None, 400_000_000, 72)
    assert (setup.workload.implementation, setup.workload.loss) == ("torchtitan", "hf")
    assert (cluster.host.vendor, cluster.host.sockets, cluster.host.cores, cluster.host.avx512) == (
        "arm",
        4,
        288,
        False,
    )
    assert not any(link.kind == "pcie" for link in cluster.links.values())


def test_torchtune_compiles_a_loss_in_chunks_alone() -> None:
    rows = sixth("torchtune")
    assert [rows[f"tn-3b-{which}"].workload.loss for which in ("packed", "compile", "chunked")] == [
        "hf",
        "hf",
        "compiled",
    ]
    tuned, quantized = rows["tn-70b-lora"], rows["tn-4090-qlora"]
    assert isinstance(tuned.plan, Fsdp2Plan)
    assert (tuned.plan.storage_dtype, tuned.plan.grouping, tuned.plan.grad_clip) == ("bfloat16", "titan", None)
    assert tuned.workload.implementation == "hf"
    assert quantized.model.tuning is not None
    assert quantized.model.tuning.quantize == "nf4"


def test_a_model_compiled_whole_gives_sdpa_a_mask() -> None:
    rows = sixth("torch_compile_bench")
    assert (rows["cb-8b-eager"].workload.attention, rows["cb-8b-compile"].workload.attention) == ("sdpa", "efficient")
    assert rows["cb-8b-compile"].workload.cudnn_masks


def test_gpus_that_could_have_nvlink_and_have_none() -> None:
    """Their base is in float32, of which 80 GB hold what 16 bytes for every parameter would not."""
    rows = sixth("soup")
    assert not any(link.kind == "nvlink" for link in rows["so-0.5b-ddp4"].cluster.links.values())
    plan = rows["so-8b-sdpa"].plan
    assert isinstance(plan, DdpPlan)
    assert (plan.dtype, plan.autocast) == ("float32", "bfloat16")


def test_opt_and_hybrid_shards_of_fsdp2() -> None:
    opt = sixth("deepspeed_chat")["dc-opt-1.3b"]
    assert (opt.model.family, opt.workload.loss, opt.workload.dtype) == ("opt", "copied_uncast", "float16")
    hybrid = sixth("torchtitan_gb200")["gb-8b-hsdp-b8-compile"].plan
    assert isinstance(hybrid, Fsdp2Plan)
    assert (hybrid.mesh, hybrid.reshard_after_forward) == ((2, 4), True)


SEVENTH = SECOND.with_name("seventh_holdout")


def seventh(file: str) -> dict[str, Setup]:
    return {row.id: setup_of(row) for row in read_rows(SEVENTH / f"{file}.csv")}


def test_flash_attention_4_and_the_host_that_such_gpus_usually_have() -> None:
    """That of topologies/hgx_h200_8.yaml and hgx_b200_8.yaml; a source that states one is heard."""
    rows = seventh("ml_engineering")
    hopper, blackwell = rows["me-h200-8k"], rows["me-b200-8k"]
    assert (hopper.workload.attention, blackwell.workload.attention) == ("flash3", "flash4")
    assert (hopper.workload.loss, hopper.workload.kernels, rows["me-h200-8k-z2"].workload.loss) == (
        "fused",
        "liger",
        "held",
    )
    assert [(host.cores, host.dram_bandwidth) for host in (hopper.cluster.host, blackwell.cluster.host)] == [
        (128, 716.8e9),
        (112, 716.8e9),
    ]
    stated = next(row for row in read_rows(SECOND.parent / "deepspeed_a800.csv") if row.id == "gist-a800-3")
    assert setup_of(stated).cluster.host.cores == 64


def test_torchtune_of_may_2024_wraps_adapters_in_flat_parameters() -> None:
    plan = seventh("torchtune_2024")["tu-70b-lora"].plan
    assert isinstance(plan, Fsdp1Plan)
    assert (plan.adapter_units, plan.use_orig_params, plan.storage_dtype) == (True, False, "bfloat16")


def test_a_vocabulary_that_the_number_of_parameters_gives() -> None:
    assert seventh("torchtitan_plugin")["tp-410m"].model.numel == 465_097_728


def test_accelerates_example_in_float8_keeps_the_output_projection() -> None:
    rows = seventh("accelerate_fsdp2")
    float8, plain = rows["af-fp8"].workload.float8, rows["af-bf16"].plan
    assert float8 is not None
    assert (float8.recipe, float8.exclude) == ("tensorwise", ("lm_head",))
    assert isinstance(plain, Fsdp2Plan)
    assert (plain.storage_dtype, plain.root_reshard_after_forward) == ("bfloat16", True)


def test_samples_of_a_length_that_the_source_does_not_state_are_refused() -> None:
    with pytest.raises(InputError, match="not stated"):
        setup_of(read_rows(SIXTH / "swift_benchmark.csv")[0])
