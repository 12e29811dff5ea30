"""What holds for the Program of every strategy that compares a model with a reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.program.sound import CONFIG, sound
from zsim.errors import NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import Compute, ModelSpec, Module, Preference, Workload
from zsim.model.trace import trace, trace_reference
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import lower, under
from zsim.program.ops import HostWait, Launch, Program
from zsim.program.walk import modules_in_order

ADAPTED = Tuning(Lora(4, ("q_proj", "down_proj")))


def computes(module: Module) -> list[Compute]:
    return [item for item in module.body if isinstance(item, Compute)]


PLANS: dict[str, AnyPlan] = {
    **{f"zero{stage}": DeepSpeedPlan(world_size=4, stage=stage, grad_accum=2) for stage in (0, 1, 2, 3)},
    "zero3 alone": DeepSpeedPlan(world_size=1, stage=3),
    "zero3 regathering": DeepSpeedPlan(
        world_size=4, stage=3, stage3_max_live_parameters=20_000, stage3_max_reuse_distance=0,
        stage3_param_persistence_threshold=100,
    ),
    "zero3 on the host": DeepSpeedPlan(world_size=2, stage=3, offload_param="cpu", grad_accum=2),
    "zero3 hpz": DeepSpeedPlan(world_size=4, stage=3, zero_hpz_partition_size=2, grad_accum=2),
    "fsdp2": Fsdp2Plan(world_size=4, grad_accum=2),
    "fsdp2 hsdp": Fsdp2Plan(world_size=4, mesh=(2, 2), grouping="accelerate"),
    "fsdp1": Fsdp1Plan(world_size=4, grad_accum=2),
    "fsdp1 ahead": Fsdp1Plan(world_size=4, forward_prefetch=True),
    "ddp": DdpPlan(world_size=4, grad_accum=2),
    "ddp low": DdpPlan(world_size=2, autocast="bfloat16"),
    "ddp alone": DdpPlan(world_size=1, autocast="bfloat16", grad_accum=2),
}  # fmt: skip


def made(plan: AnyPlan, how: Preference, checkpointing: str = "none") -> tuple[ModelSpec, Workload, Program]:
    model = from_config(CONFIG, "tiny")
    if how.reference == "adapters":
        model = tune(model, ADAPTED)
    dtype = "float32" if isinstance(plan, DdpPlan) and not plan.autocast else "bfloat16"
    workload = under(plan, Workload(1, 16, dtype=dtype, checkpointing=checkpointing, preference=how), model)
    return model, workload, lower(model, trace(model, workload), plan, workload, steps=5)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("reference", ["model", "adapters", "none"])
def test_programs_are_sound(name: str, reference: str, checkpointing: str) -> None:
    if (name, reference) == ("fsdp1 ahead", "adapters"):
        with pytest.raises(NotModeled, match="forward_prefetch of FSDP1"):
            made(PLANS[name], Preference(reference=reference))
        return
    for log_probs, sharded in product(("log_softmax", "selective", "sliced", "shifted"), (True, False)):
        how = Preference(
            reference=reference, log_probs=log_probs, sharded=sharded, widened=not sharded, held=2 * sharded,
            surveyed=log_probs == "shifted", averaged=sharded, likelihood=not sharded, metrics=8, gathered=True,
        )  # fmt: skip
        sound(made(PLANS[name], how, checkpointing)[2])


@pytest.mark.parametrize("name", PLANS)
def test_the_host_waits_for_every_metric_before_the_backward(name: str) -> None:
    plan = PLANS[name]
    _, _, program = made(plan, Preference(metrics=8, gathered=True))
    waits, before = 0, True
    issued: dict[int, str] = {}
    for instruction in program.steps[-1]:
        if isinstance(instruction, Launch):
            issued[instruction.op.id] = instruction.op.label
            before = before and instruction.op.phase != "backward"
        elif isinstance(instruction, HostWait) and before and instruction.op is not None:
            waits += issued.get(instruction.op) == "metrics"
    assert waits == 8


def test_a_reference_runs_a_forward_of_the_same_work_and_saves_nothing() -> None:
    model, workload, _ = made(PLANS["zero3"], Preference())
    tree, reference = trace(model, workload), trace_reference(model, workload)
    ours, theirs = (
        {(module.name, item.label): item for module in modules_in_order(each) for item in computes(module)}
        for each in (tree, reference)
    )
    within = [key for key in ours if key[0]]  # what stands in the root's own code is the loss
    assert all(ours[key].forward == theirs[key].forward for key in within)
    assert not any(item.saved or item.backward or item.grads for item in theirs.values())


def test_without_adapters_they_are_not_called() -> None:
    model, workload, _ = made(PLANS["zero3"], Preference(reference="adapters"))
    names, without = (
        {module.name for module in modules_in_order(tree)}
        for tree in (trace(model, workload), trace_reference(model, workload))
    )
    assert without < names
    assert all(".lora_" in name for name in names - without)


def test_a_family_with_a_loss_of_its_own_is_refused() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112}
    bert = from_config({"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 301} | shape, "tiny")
    with pytest.raises(NotModeled, match="whose loss is its own"):
        trace(bert, Workload(1, 16, preference=Preference()))


def test_twice_the_pairs_are_twice_the_tokens() -> None:
    workload = Workload(2, 16, preference=Preference())
    assert (workload.sequences, workload.tokens) == (4, 64)
    assert replace(workload, preference=None).tokens == 32
