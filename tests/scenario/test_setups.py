"""From a checked scenario to model, plan and cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import InputError, NotModeled
from zsim.plan.batch import triangle
from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import under
from zsim.scenario import Setup, load

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def resolve(path: Path, overrides: Sequence[str] = ()) -> Setup:
    return load(path, overrides).resolve()


def plan_of(path: Path, overrides: Sequence[str] = ()) -> Any:
    return resolve(path, overrides).plan


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_resolve(path: Path) -> None:
    setup = resolve(path)
    assert setup.plan.world_size == setup.cluster.world_size
    assert setup.model.numel > 1e9
    assert path in setup.sources
    assert all(source.exists() for source in setup.sources)


def test_deepspeed_defaults_are_its_own(write) -> None:
    """All but zero.Init, which the Trainer and accelerate put around a stage 3 model."""
    assert plan_of(write("zero: {stage: 3}\n")) == DeepSpeedPlan(world_size=8, stage=3, zero_init=True)
    assert plan_of(write("zero: {stage: 3, zero_init: false}\n")) == DeepSpeedPlan(world_size=8, stage=3)


def test_a_quantized_model_is_not_built_under_zero_init(write) -> None:
    """transformers leaves it out, whatever is asked for."""
    for text in ("{stage: 3}", "{stage: 3, zero_init: true}"):
        setup = resolve(write(f"zero: {text}\nlora: {{r: 8}}\nquantize: nf4\n"))
        assert setup.plan.zero_init is False
        assert any("not built under deepspeed.zero.Init" in note for note in setup.assumptions)


def test_every_deepspeed_field_arrives(write) -> None:
    """Whatever the scenario sets stands in the plan under the same name."""
    text = """zero:
  stage: 3
  reduce_bucket_size: 1e7
  allgather_bucket_size: 2e7
  allgather_partitions: false
  reduce_scatter: false
  overlap_comm: false
  contiguous_gradients: false
  round_robin_gradients: true
  use_multi_rank_bucket_allreduce: false
  sub_group_size: 3e7
  stage3_prefetch_bucket_size: 4e7
  stage3_param_persistence_threshold: 5
  stage3_model_persistence_threshold: 6
  stage3_max_live_parameters: 7
  stage3_max_reuse_distance: 8
  stage3_allgather_sequential: true
  stage3_use_all_reduce_for_fetch_params: true
  zero_hpz_partition_size: 4
  offload_optimizer: {device: cpu, pin_memory: false}
  offload_param: {device: cpu, pin_memory: false}
  zero_init: true
  leaf_blocks: true
  leaf_module: {classes: [MyBlock], names: [lm_head], name_suffixes: [mlp]}
  stage3_module_granularity_threshold: 9
  zero_quantized_weights: true
  zero_quantized_nontrainable_weights: true
  zero_quantized_gradients: true
  prescale_gradients: true
  communication_data_type: float32
  grad_accum_dtype: float32
  check_grad_overflow: false
grad_accum: 2
grad_clip: 0
precision: fp16
"""
    plan = plan_of(write(text))
    changed = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != getattr(DeepSpeedPlan(world_size=8), field.name)
    }
    assert changed.pop("optimizer").impl == "cpu"
    assert changed == {
        "grad_accum": 2,
        "grad_clip": None,
        "stage": 3,
        "dtype": "float16",
        "communication_data_type": "float32",
        "grad_accum_dtype": "float32",
        "reduce_bucket_size": 10_000_000,
        "allgather_bucket_size": 20_000_000,
        "allgather_partitions": False,
        "reduce_scatter": False,
        "overlap_comm": False,
        "contiguous_gradients": False,
        "round_robin_gradients": True,
        "use_multi_rank_bucket_allreduce": False,
        "prescale_gradients": True,
        "sub_group_size": 30_000_000,
        "stage3_prefetch_bucket_size": 40_000_000,
        "stage3_param_persistence_threshold": 5,
        "stage3_model_persistence_threshold": 6,
        "stage3_max_live_parameters": 7,
        "stage3_max_reuse_distance": 8,
        "stage3_allgather_sequential": True,
        "use_all_reduce_for_fetch_params": True,
        "zero_init": True,
        "leaf_blocks": True,
        "leaf_classes": ("MyBlock",),
        "leaf_names": ("lm_head",),
        "leaf_name_suffixes": ("mlp",),
        "stage3_module_granularity_threshold": 9,
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "gpus_per_node": 8,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "offload_optimizer_pin_memory": False,
        "offload_param_pin_memory": False,
        "check_grad_overflow": False,
    }


def test_auto_sizes_follow_the_trainer(write) -> None:
    """transformers 5.24: hidden ** 2, 0.9 hidden ** 2 rounded down, 10 hidden; Qwen2.5-7B has hidden size 3584."""
    sizes = "reduce_bucket_size: auto, stage3_prefetch_bucket_size: auto, stage3_param_persistence_threshold: auto"
    setup = resolve(write(f"zero: {{stage: 3, {sizes}}}\n"))
    plan = setup.plan
    assert isinstance(plan, DeepSpeedPlan)
    assert plan.reduce_bucket_size == 3584 * 3584
    assert plan.stage3_prefetch_bucket_size == 11_560_550
    assert plan.stage3_param_persistence_threshold == 35_840
    assert sum("auto is" in text for text in setup.assumptions) == 3


@pytest.mark.parametrize(
    ("version", "stage", "check", "pinned"),
    [("0.19.8", 2, True, True), ("0.18.9", 2, False, False), ("0.18.9", 3, True, False), ("0.16.9", 2, True, False)],
)
def test_defaults_by_version(write, version: str, stage: int, check: bool, pinned: bool) -> None:
    text = f"zero: {{stage: {stage}, offload_optimizer: cpu}}\n"
    setup = resolve(write(text, framework=f"{{name: deepspeed, version: {version}}}"))
    assert isinstance(setup.plan, DeepSpeedPlan)
    assert (setup.plan.check_grad_overflow, setup.plan.offload_optimizer_pin_memory) == (check, pinned)
    assert bool(setup.not_modeled) == (version != "0.19.8")


@pytest.mark.parametrize(
    ("framework", "extra", "impl"),
    [
        ("{name: fsdp1, version: 1.13.1}", "", "loop"),
        ("{name: fsdp1, version: 2.0.1}", "", "loop"),
        ("{name: fsdp1, version: 2.0.1}", "fsdp: {use_orig_params: true}", "foreach"),
        ("{name: fsdp1, version: 2.5.1}", "", "foreach"),
        ("{name: fsdp1, version: 2.5.1}", "fsdp: {use_orig_params: false}", "loop"),
        ("{name: ddp, version: 2.7.1}", "", "foreach"),
        ("{name: fsdp2, version: 2.8.0}", "", "fused"),
        ("{name: fsdp2, version: 2.7.0}", "optimizer: {impl: fused}", "fused"),
        ("{name: fsdp2, version: 2.7.0}", "implementation: torchtitan", "fused"),
        ("{name: deepspeed, version: 0.17.4}", "optimizer: {decay_groups: true}", "foreach"),
        ("{name: deepspeed, version: 0.17.5}", "optimizer: {decay_groups: true}", "fused"),
        ("{name: deepspeed, version: 0.15.3}", "", "fused"),
    ],
)
def test_the_trainers_adamw_by_release(write, framework: str, extra: str, impl: str) -> None:
    """DeepSpeed's own optimizer is fused; decay_groups says that the Trainer's is in its place."""
    assert resolve(write(extra + "\n", framework=framework)).plan.optimizer.impl == impl


def test_offload_takes_the_trainers_place(write) -> None:
    text = "zero: {stage: 2, offload_optimizer: cpu}\noptimizer: {decay_groups: true}\n"
    assert resolve(write(text, framework="{name: deepspeed, version: 0.15.3}")).plan.optimizer.impl == "cpu"


@pytest.mark.parametrize(
    ("versions", "keeps", "limits"),
    [
        ("version: 2.0.1", False, False),
        ("version: 2.1.0", False, False),
        ("version: 2.2.0", True, True),
        ("version: 2.1.0, transformers: 4.35.2", False, False),
        ("version: 2.1.0, transformers: 4.36.2", True, False),
        ("version: 2.0.1, transformers: 4.37.0", True, True),
        ("transformers: 4.36.0", True, False),
    ],
)
def test_fsdp1_limits_gathers_and_keeps_parameters_as_accelerate_did(
    write, versions: str, keeps: bool, limits: bool
) -> None:
    """accelerate 0.25 (December 2023) and 0.26 (January 2024) turned these on, on whatever torch."""
    plan = resolve(write(framework=f"{{name: fsdp1, {versions}}}")).plan
    assert isinstance(plan, Fsdp1Plan)
    assert (plan.use_orig_params, plan.limit_all_gathers) == (keeps, limits)


def test_a_script_says_itself_what_fsdp1_limits(write) -> None:
    given = write("fsdp: {limit_all_gathers: true}\n", framework="{name: fsdp1, version: 2.1.0, transformers: 4.31.0}")
    plan = resolve(given).plan
    assert isinstance(plan, Fsdp1Plan)
    assert (plan.use_orig_params, plan.limit_all_gathers) == (False, True)


def test_ddp_is_autocast_over_float32(write) -> None:
    assert plan_of(write(framework="ddp")) == DdpPlan(world_size=8, dtype="float32", autocast="bfloat16")
    assert plan_of(write("precision: fp32\n", framework="ddp")) == DdpPlan(world_size=8)
    pure = plan_of(write("ddp: {dtype: bfloat16, bucket_cap_mb: 10}\n", framework="ddp"))
    assert pure == DdpPlan(world_size=8, dtype="bfloat16", bucket_cap_mb=10)


@pytest.mark.parametrize(
    ("framework", "text", "weights"),
    [("ddp", "", "float32"), ("ddp", "precision: fp32\n", None), ("ddp", "ddp: {dtype: bfloat16}\n", None),
     ("fsdp2", "", None), ("deepspeed", "", None)],
)  # fmt: skip
def test_the_model_runs_under_autocast_where_the_plan_has_it(write, framework: str, text: str, weights: str) -> None:
    setup = resolve(write(text, framework=framework))
    assert setup.workload.weights == weights
    other = dataclasses.replace(setup.plan, autocast="float16") if framework == "ddp" else Fsdp2Plan(world_size=8)
    assert under(other, setup.workload).weights == (setup.plan.dtype if framework == "ddp" else None)


def test_fsdp_plans(write) -> None:
    by_accelerate = Fsdp2Plan(world_size=8, grouping="accelerate", reduce_dtype="bfloat16")
    assert plan_of(write(framework="fsdp2")) == by_accelerate
    assert plan_of(write("fsdp: {grouping: hf}\n", framework="fsdp2")).reduce_dtype == "bfloat16"
    assert plan_of(write("implementation: torchtitan\n", framework="fsdp2")) == Fsdp2Plan(
        world_size=8, grouping="titan", load="meta"
    )
    assert plan_of(write(framework="fsdp1")) == Fsdp1Plan(world_size=8)
    pure = plan_of(write("fsdp: {storage_dtype: bfloat16}\n", framework="fsdp1"))
    assert pure == Fsdp1Plan(world_size=8, storage_dtype="bfloat16")
    float32 = plan_of(write("precision: fp32\n", framework="fsdp2"))
    assert (float32.param_dtype, float32.reduce_dtype) == ("float32", "float32")
    text = "fsdp: {sharding_strategy: HYBRID_SHARD, mesh: [2, 4], backward_prefetch: NONE}\n"
    hybrid = plan_of(write(text, framework="fsdp1"))
    assert (hybrid.mesh, hybrid.backward_prefetch) == ((2, 4), None)
    by_node = resolve(write("fsdp: {sharding_strategy: HYBRID_SHARD}\n", framework="fsdp1"))
    assert by_node.plan.mesh == (1, 8)
    assert any(note.startswith("fsdp.mesh: [1, 8], shards within a node") for note in by_node.assumptions)
    assert plan_of(write("fsdp: {reshard_after_forward: 4}\n", framework="fsdp2")).reshard_after_forward == 4


BAD = [
    ("deepspeed", "zero: {stage: 2, offload_param: cpu}\n", "zero.offload_param", "needs stage 3, not 2"),
    ("deepspeed", "zero: {offload_optimizer: cpu}\n", "zero.offload_optimizer", "needs stage 1, 2 or 3, not 0"),
    ("deepspeed", "zero: {stage: 3, zero_hpz_partition_size: 3}\n", "zero.zero_hpz_partition_size", "does not divide"),
    ("deepspeed", "train_batch_size: 12\n", "train_batch_size", "12 is no multiple of 8 ranks x micro_batch 1"),
    ("deepspeed", "model: {params: 8e9, config: x}\n", "model", "one of config and params"),
    ("deepspeed", "model: nowhere/config.json\n", "model", "no such file"),
    ("deepspeed", "cluster: nowhere.yaml\n", "cluster", "no such file"),
    ("deepspeed", "optimizer: {name: adamw, momentum: true}\n", "optimizer.momentum", "option of sgd"),
    ("deepspeed", "optimizer: {name: adamw, impl: cpu}\n", "optimizer.impl", "goes with zero.offload_optimizer"),
    ("fsdp2", "fsdp: {mesh: [2, 3]}\n", "fsdp.mesh", "2 x 3 is not the cluster's 8 ranks"),
    ("fsdp2", "fsdp: {reshard_after_forward: 3}\n", "fsdp.reshard_after_forward", "does not divide the 8 ranks"),
    ("fsdp2", "fsdp: {sharding_strategy: FULL_SHARD}\n", "fsdp.sharding_strategy", "is an option of fsdp1"),
    ("fsdp1", "fsdp: {reshard_after_forward: true}\n", "fsdp.reshard_after_forward", "is an option of fsdp2"),
]


@pytest.mark.parametrize(("framework", "text", "field", "says"), BAD, ids=[f"{case[0]} {case[2]}" for case in BAD])
def test_what_cannot_be_is_refused(write, framework: str, text: str, field: str, says: str) -> None:
    replaced = {line.split(":")[0]: "" for line in text.splitlines() if line.split(":")[0] in ("model", "cluster")}
    path = write(text, framework=framework, **replaced)
    with pytest.raises(InputError) as refused:
        resolve(path)
    assert says in refused.value.message
    assert refused.value.field == field
    assert refused.value.file == path
    assert (refused.value.line or 0) >= 1


ACCEPTED = [
    ("zero: {stage: 3, zero_hpz_partition_size: 3}\n", "1, 2, 4, 8"),
    ("zero: {stage: 3, zero_hpz_partition_size: 16}\n", "1, 2, 4, 8"),
    ("zero: {offload_optimizer: cpu}\n", "none, or zero.stage: 1, 2 or 3"),
    ("zero: {stage: 2, offload_param: cpu}\n", "none, or zero.stage: 3"),
    ("zero: {stage: 2, offload_optimizer: {device: cpu, ratio: 0.5}}\n", "1, or zero.stage: 3"),
    ("zero: {stage: 1, offload_optimizer: {device: cpu, super_offload: true}}\n",
     "false, or stage 3, device: cpu and DeepSpeed 0.18 or later"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "accepted"), ACCEPTED)
def test_a_refusal_says_what_is_accepted(write, text: str, accepted: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve(write(text))
    assert refused.value.accepted == accepted


def test_element_types_have_short_names_as_in_precision(write) -> None:
    for short, full in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16")):
        zero = f"seq_parallel_communication_data_type: {short}, communication_data_type: {short}"
        plan = plan_of(write(f"zero: {{{zero}, grad_accum_dtype: {short}}}\n"))
        assert (
            plan.seq_parallel_communication_data_type == plan.communication_data_type == plan.grad_accum_dtype == full
        )
        sharded = plan_of(write(f"fsdp: {{param_dtype: {short}, reduce_dtype: {short}}}\n", framework="fsdp2"))
        assert (sharded.param_dtype, sharded.reduce_dtype) == (full, full)
    with pytest.raises(InputError, match="'int8' is not known"):
        load(write("zero: {grad_accum_dtype: int8}\n"))


def test_a_gpu_the_catalog_does_not_know(write, tmp_path: Path) -> None:
    topology = tmp_path / "topology.yaml"
    topology.write_text("name: x\ngpu: H900\ngpus: 8\n")
    with pytest.raises(InputError) as refused:
        resolve(write(cluster=str(topology)))
    assert refused.value.file == topology


def test_partial_offload_is_not_modeled_or_planned(write) -> None:
    path = write("zero: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.5}}\n")
    if "offload_optimizer_ratio" in {field.name for field in dataclasses.fields(DeepSpeedPlan)}:
        assert plan_of(path).offload_optimizer_ratio == 0.5
    else:
        with pytest.raises(NotModeled, match="partial offloading"):
            resolve(path)


def test_gradients_that_stay_on_the_gpu_are_not_modeled(write) -> None:
    def path(offloaded: str):
        return write(f"fsdp: {{zero_grad_to_none: false, cpu_offload: {offloaded}}}\n", framework="fsdp1")

    assert plan_of(path("true")).zero_grad_to_none is False
    with pytest.raises(NotModeled, match="keeps gradients on the GPU"):
        resolve(path("false"))


def test_freezing(write) -> None:
    path = write("zero: {stage: 2}\n")
    model = resolve(path, ["model.freeze=[model.embed_tokens.*, '*.mlp.*']"]).model
    frozen = {parameter.name for parameter in model.parameters if not parameter.trainable}
    assert "model.embed_tokens.weight" in frozen
    assert all(".mlp." in name or "embed" in name for name in frozen)
    assert 0 < model.trainable_numel < model.numel
    with pytest.raises(InputError, match="no parameter is named like 'modell") as refused:
        resolve(path, ["model.freeze=[modell.*]"])
    assert refused.value.field == "model.freeze.0"
    with pytest.raises(InputError, match="nothing to train"):
        resolve(path, ["model.freeze=['*']"])


def test_sequences_longer_than_the_model(write, tmp_path: Path) -> None:
    setup = resolve(write("zero: {stage: 3}\n"), ["seq_len=262144"])
    assert any("seq_len 262,144 is longer than the 131,072 positions" in text for text in setup.assumptions)
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = write("zero: {stage: 3}\n", model="config.json")
    assert resolve(path, ["seq_len=512"]).workload.seq_len == 512
    with pytest.raises(InputError, match="513 is longer than the model's 512 positions"):
        resolve(path, ["seq_len=513"])


@pytest.mark.parametrize(("family", "positions"), [("Bert", 512), ("DistilBert", 512), ("Roberta", 510)])
def test_an_encoder_has_no_more_positions_than_its_table(write, tmp_path: Path, family: str, positions: int) -> None:
    """RoBERTa's count from behind the one of padding."""
    config = {
        "model_type": family.lower(), "architectures": [f"{family}ForMaskedLM"], "hidden_size": 64, "dim": 64,
        "intermediate_size": 128, "hidden_dim": 128,
        "num_hidden_layers": 2, "n_layers": 2, "num_attention_heads": 4, "n_heads": 4, "vocab_size": 100,
        "max_position_embeddings": 512, "pad_token_id": 1, "hidden_act": "gelu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = write("zero: {stage: 3}\n", model="config.json")
    assert resolve(path, [f"seq_len={positions}"]).workload.seq_len == positions
    with pytest.raises(InputError, match=f"longer than the model's {positions} positions"):
        resolve(path, [f"seq_len={positions + 1}"])


def test_a_bare_number_of_parameters(write) -> None:
    setup = resolve(write("zero: {stage: 3}\nmodel: {params: 8B}\n", model=""))
    assert setup.model.numel == pytest.approx(8e9, rel=1e-3)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_the_triangle_closes_from_any_two_sides(micro: int, accum: int, ranks: int) -> None:
    whole = micro * accum * ranks
    for given_ in ((whole, micro, accum), (whole, micro, None), (whole, None, accum), (None, micro, accum)):
        assert triangle(*given_, ranks) == (micro, accum)
    assert triangle(None, micro, None, ranks) == (micro, 1)
    assert triangle(micro * ranks, None, None, ranks) == (micro, 1)


@pytest.mark.parametrize(
    ("sides", "says"),
    [
        ((64, 3, None), "64 is no multiple of 8 ranks x micro_batch 3"),
        ((4, None, None), "4 is no multiple of 8 ranks"),
        ((64, 2, 2), "64 is not 2 x 2 x 8"),
        ((None, None, 4), "neither"),
    ],
)
def test_a_triangle_that_does_not_close(sides: tuple[int | None, int | None, int | None], says: str) -> None:
    with pytest.raises(InputError, match=says):
        triangle(*sides, 8)


def test_micro_batch_from_deepspeeds_triangle(write) -> None:
    config = str(DATA / "ds_config/commented_stage3.json")
    setup = resolve(write("", framework="", micro_batch="", deepspeed_config=config))
    assert (setup.workload.micro_batch, setup.plan.grad_accum) == (2, 4)  # 64 sequences on 8 GPUs
