"""Ranks that share a model's experts (DeepSpeed's AutoEP): what each holds, computes, and sends to the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.model.test_families import recorded
from zsim.errors import InputError, NotModeled
from zsim.model.expert_parallel import FAMILIES, converted
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Collective, Free, HostWait, Launch, Program
from zsim.result.flops import per_micro_batch

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 3, 16, 2, 128, 256
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}  # fmt: skip
BASE = Workload(micro_batch=2, seq_len=512)
OF_EXPERTS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH


def mixtral(**changes: object) -> ModelSpec:
    return from_config(MIXTRAL | changes, "mixtral")


def program(size: int, *, world: int = 8, workload: Workload = BASE, **fields: object) -> Program:
    plan = DeepSpeedPlan(world_size=world, autoep_size=size, **({"stage": 2} | fields))  # type: ignore[arg-type]
    model = converted(mixtral(), size, renumbered=plan.stage == 3 and plan.zero_init) if size else mixtral()
    return lower(model, trace(model, workload), plan, workload, 2)


def held(lowered: Program, category: str) -> int:
    return sum(i.nbytes for i in lowered.init if isinstance(i, Alloc) and i.category == category)


def calls(lowered: Program, group: str) -> list[Collective]:
    launched = [i.op.work for i in lowered.steps[-1] if isinstance(i, Launch)]
    return [work for work in launched if isinstance(work, Collective) and work.group == group]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_conversion_keeps_the_weights_and_the_work(size: int) -> None:
    """One rank has `1 / size` of the experts, to which as many tokens come from all as its own would have gone to."""
    model, own = mixtral(), converted(mixtral(), size)
    assert own.numel == model.numel
    assert sum(p.numel for p in own.parameters) == model.numel - OF_EXPERTS + OF_EXPERTS // size
    before, after = (per_micro_batch(trace(spec, BASE)) for spec in (model, own))
    assert list(after) == pytest.approx(list(before), rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_states_of_experts_are_sharded_over_the_ranks_that_have_them(stage: int, size: int) -> None:
    """All ranks together hold each state once, whoever shares the experts."""
    nbytes = held(program(size, stage=stage), "master_weights")
    assert nbytes == pytest.approx(4 * mixtral().numel / 8, rel=1e-3)


def test_parameters_of_experts_are_not_replicated() -> None:
    rest = mixtral().numel - OF_EXPERTS
    for size in (1, 2, 8):
        assert held(program(size), "parameters") == pytest.approx(2 * (rest + OF_EXPERTS / size), rel=1e-3)


@pytest.mark.parametrize(("checkpointing", "forwards"), [("none", 1), ("full", 2)])
def test_tokens_travel_there_and_back(checkpointing: str, forwards: int) -> None:
    lowered = program(4, workload=replace(BASE, checkpointing=checkpointing))
    found = Counter((work.kind, work.dtype, work.in_numel) for work in calls(lowered, "expert_parallel"))
    rows = BASE.tokens * TOP_K
    assert found == {
        ("all_to_all", "bfloat16", rows * HIDDEN): 2 * LAYERS * (forwards + 1),
        ("all_to_all", "int32", EXPERTS): LAYERS * forwards,  # how many rows of which expert
    }
    waits = sum(isinstance(i, HostWait) for i in lowered.steps[-1])
    assert waits == sum(isinstance(i, HostWait) for i in program(1).steps[-1]) + LAYERS * forwards


def test_with_one_rank_for_all_experts_no_token_travels() -> None:
    assert not calls(program(1), "expert_parallel")


def test_groups() -> None:
    assert program(2, world=4).groups["expert_parallel"] == ((0, 1), (2, 3))
    assert program(2, world=4).groups["expert_data_parallel"] == ((0, 2), (1, 3))
    apart = program(2, world=4, use_data_before_expert_parallelism=True).groups
    assert (apart["expert_parallel"], apart["expert_data_parallel"]) == (((0, 2), (1, 3)), ((0, 1), (2, 3)))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_experts_are_reduced_among_those_that_have_them(stage: int) -> None:
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    for size in (2, 8):
        lowered = program(size, stage=stage, reduce_bucket_size=500_000)
        assert sum(c.in_numel for c in calls(lowered, "expert_data_parallel") if c.kind == kind and c.in_numel > 1) == (
            OF_EXPERTS // size
        )


def test_parameter_groups_of_experts_are_limited() -> None:
    """moe/utils.py: a group of DeepSpeed's own optimizer has up to 178,956,971 elements of experts."""
    from zsim.program.deepspeed import parameter_groups

    model = converted(mixtral(hidden_size=1024, intermediate_size=4096), 2)  # 33.6 million in each of the nine
    plan = DeepSpeedPlan(world_size=8, stage=2, autoep_size=2)
    sizes = [[model.parameters[p].numel for p in group] for group in parameter_groups(model, plan)]
    each = 8 * 1024 * 4096
    assert sizes[1:] == [[each] * 5, [each] * 4]
    own = replace(plan, stage=3, optimizer=Optimizer(decay_groups=True))
    assert [len(group) for group in parameter_groups(model, own)] == [4 * LAYERS + 2 + LAYERS, 9, 2 * LAYERS + 1]


def test_gathered_experts_stay_until_backward_has_used_them() -> None:
    """torch._grouped_mm saves a transposed view: ZeRO-3 frees nothing by releasing the weight (transformers' too)."""
    for size in (0, 2):
        lowered = program(size, stage=3, stage3_max_reuse_distance=0, stage3_max_live_parameters=0)
        alive: dict[str, int] = {}
        for instruction in lowered.steps[-1]:
            if isinstance(instruction, Alloc) and instruction.category == "all_gather_buffers":
                alive[instruction.key] = instruction.nbytes
            elif isinstance(instruction, Free):
                alive.pop(instruction.key, None)
            elif isinstance(instruction, Launch) and instruction.op.phase == "backward":
                break
        whole = 2 * OF_EXPERTS // max(1, size)
        assert sum(nbytes for nbytes in alive.values() if nbytes > 10**6 / 8) >= whole


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"stage": 0}, NotModeled, "zero.autoep_size"),
        ({"world_size": 6}, InputError, "zero.autoep_size"),
        ({"stage": 2, "optimizer": Optimizer(decay_groups=True)}, InputError, "optimizer.decay_groups"),
        ({"stage": 2, "contiguous_gradients": False}, InputError, "zero.contiguous_gradients"),
        ({"stage": 1, "contiguous_gradients": False}, NotModeled, "zero.contiguous_gradients"),
        ({"stage": 1, "reduce_scatter": False}, InputError, "zero.reduce_scatter"),
        ({"stage": 1, "grad_accum_dtype": "float32"}, NotModeled, "zero.grad_accum_dtype"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, InputError, "zero.zero_hpz_partition_size"),
        ({"stage": 3, "zero_quantized_gradients": True}, InputError, "zero.zero_quantized_gradients"),
        ({"stage": 3, "zero_quantized_weights": True}, NotModeled, "zero.zero_quantized_weights"),
        ({"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"}, NotModeled, "zero.offload_param"),
        ({"stage": 2, "optimizer": Optimizer("muon")}, NotModeled, "zero.autoep_size"),
    ],
)
def test_refused(fields: dict[str, object], kind: type[InputError], field: str) -> None:
    with pytest.raises(InputError) as refused:
        program(4, **({"world": fields.pop("world_size")} if "world_size" in fields else {}), **fields)  # type: ignore[arg-type]
    assert type(refused.value) is kind
    assert refused.value.field == field


def test_model_and_plan_agree() -> None:
    model = converted(mixtral(), 2)
    with pytest.raises(InputError, match="2 ranks share the experts in the model and 4 in the plan"):
        lower(model, trace(model, BASE), DeepSpeedPlan(world_size=8, stage=2, autoep_size=4), BASE, 2)


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"num_local_experts": 6}, InputError, "4 does not divide the 6 experts"),
        ({"hidden_act": "gelu"}, NotModeled, "experts with gelu"),
        ({"model_type": "olmoe", "num_experts": 8}, NotModeled, "of olmoe"),
        ({"model_type": "llama"}, InputError, "has no experts"),
    ],
)
def test_models_that_are_not_converted(changes: dict[str, object], kind: type[InputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        converted(mixtral(**changes), 4)


SPARSE = {
    name: spec
    for name, spec in ((name, from_config(each["config"], name)) for name, each in recorded().items())
    if any(parameter.expert for parameter in spec.parameters) or getattr(spec.arch, "moe", None)
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("renumbered", [False, True])
def test_a_family_is_refused_or_its_experts_are_shared(name: str, renumbered: bool) -> None:
    """And the rest is all there: whatever the experts of a family are called, nothing is left as it was in silence."""
    spec = SPARSE[name]
    if spec.family not in FAMILIES:
        with pytest.raises(NotModeled, match=f"of {spec.family}") as refused:
            converted(spec, 2, renumbered=renumbered)
        assert "mixtral, qwen2_moe, qwen3_moe" in str(refused.value.accepted)
        return
    own = converted(spec, 2, renumbered=renumbered)
    whole, half = (sum(p.numel for p in each.parameters if ".experts." in p.name) for each in (spec, own))
    assert half * 2 == whole > 0
    assert sum(p.numel for p in own.parameters) == spec.numel - half
    assert {p.parts for p in own.parameters if ".experts." in p.name} == {2}


def test_a_model_of_stage_3_is_lowered_for_stage_2() -> None:
    """What zero.Init numbered anew goes back: a change of the stage, as `zsim explain` tries it."""
    model, natural = converted(mixtral(), 4, renumbered=True), converted(mixtral(), 4)
    assert [p.name for p in model.parameters] != [p.name for p in natural.parameters]
    plan = DeepSpeedPlan(world_size=8, stage=2, autoep_size=4, zero_init=True)
    found = [lower(spec, trace(spec, BASE), plan, BASE, 2) for spec in (model, natural)]
    assert found[0].steps == found[1].steps
