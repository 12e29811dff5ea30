"""What ranks hold to write and to read a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.program.small_job import MODEL, RANKS, TREE, WORKLOAD, P, most
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import ModelSpec, Module
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Saving
from zsim.program.saving import RESUMING, STATES, WEIGHTS, Moment, moments

ADAPTERS = tune(MODEL, Tuning(Lora(8, ("q_proj",))))


def found(plan: AnyPlan, model: ModelSpec = MODEL, tree: Module = TREE, **saving: object) -> dict[str, Moment]:
    settings = replace(Saving(resume=True), **saving)  # type: ignore[arg-type]
    return {moment.name: moment for moment in moments(model, tree, replace(plan, saving=settings))}


def peak(moment: Moment, device: str, rank: int = 0) -> int:
    return most(moment.instructions, device, rank)


def near(nbytes: float) -> object:
    return pytest.approx(nbytes, rel=1e-3)


def test_nothing_is_said_of_a_plan_that_says_nothing():
    assert not list(moments(MODEL, TREE, DeepSpeedPlan(world_size=RANKS, stage=3)))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_the_trainer_copies_all_weights_on_every_rank(stage: int):
    """accelerate's clone_tensors_for_torch_save; the engine's own save_checkpoint copies storages one by one."""
    plan = DeepSpeedPlan(world_size=RANKS, stage=stage)
    assert [peak(found(plan)[WEIGHTS], "host", rank) for rank in (0, 3)] == [2 * P, 2 * P]
    assert peak(found(plan, by="engine")[WEIGHTS], "host") == 0
    assert peak(found(replace(plan, version="0.9.5"))[WEIGHTS], "host") == 0  # the Trainer of its time: on the GPU
    assert peak(found(plan)[RESUMING], "host", 3) == near(2 * P + 12 * P if stage == 0 else max(2 * P, 12 * P / RANKS))


def test_stage_3_gathers_on_rank_0_if_it_is_told_to():
    plan = DeepSpeedPlan(world_size=RANKS, stage=3, zero_init=True)
    assert peak(found(plan)[WEIGHTS], "host") == 0
    gathering = found(replace(plan, stage3_gather_16bit_weights_on_model_save=True))[WEIGHTS]
    assert [peak(gathering, "host", rank) for rank in (0, 1)] == [2 * P, 0]
    assert peak(gathering, "gpu", 1) == 2 * 4000 * 256  # the embedding
    # one flat tensor of float32 weights, or of a moment, at a time: all of a rank's, or a sub-group's
    assert peak(found(plan)[STATES], "host", 1) == near(4 * P / RANKS)
    assert peak(found(replace(plan, sub_group_size=10_000))[STATES], "host", 1) < 0.3 * P
    assert peak(found(replace(plan, offload_optimizer="cpu"))[STATES], "host", 1) == 0


def test_the_trainer_saves_of_adapters_alone_in_stage_3():
    """exclude_frozen_parameters: the base is gathered on the GPUs all the same. Below stage 3 all of it is copied."""
    tree = trace(ADAPTERS, WORKLOAD)
    plan = DeepSpeedPlan(world_size=RANKS, stage=3, stage3_gather_16bit_weights_on_model_save=True)
    trained = ADAPTERS.trainable_numel
    moment = found(plan, ADAPTERS, tree)[WEIGHTS]
    assert peak(moment, "host") == 2 * trained
    assert peak(moment, "gpu") == 2 * 4000 * 256
    assert peak(found(plan, ADAPTERS, tree, by="engine")[WEIGHTS], "host") == 2 * ADAPTERS.numel
    before_5 = replace(plan, version="0.16.9")  # of the time of transformers 4
    assert peak(found(before_5, ADAPTERS, tree)[WEIGHTS], "host") == 2 * ADAPTERS.numel
    base = ADAPTERS.numel - trained
    for version, copied in (("0.12.6", 2 * base / RANKS), ("0.16.9", 4 * trained / RANKS)):
        states = found(replace(plan, version=version), ADAPTERS, tree)[STATES]
        assert peak(states, "host", 1) == near(copied)
    assert peak(found(replace(plan, stage=2), ADAPTERS, tree)[WEIGHTS], "host", 2) == 2 * ADAPTERS.numel


def test_frozen_weights_go_to_every_host_with_the_partitions():
    frozen = replace(MODEL, parameters=tuple(replace(p, trainable="layers" in p.name) for p in MODEL.parameters))
    rest = frozen.numel - frozen.trainable_numel
    two, three = (found(DeepSpeedPlan(world_size=RANKS, stage=stage), frozen)[STATES] for stage in (2, 3))
    assert peak(two, "host", 1) == 2 * rest
    assert peak(three, "host", 1) == near(max(2 * rest / RANKS, 4 * frozen.trainable_numel / RANKS))


@pytest.mark.parametrize("plan", [Fsdp1Plan(world_size=RANKS), Fsdp2Plan(world_size=RANKS)])
def test_full_state_dicts_lie_with_rank_0_and_sharded_ones_with_all(plan: Fsdp1Plan | Fsdp2Plan):
    full = found(replace(plan, state_dict_type="FULL_STATE_DICT"))
    assert peak(full[STATES], "host") == 8 * P
    assert peak(full[STATES], "host", 1) == 0
    root = 4 * (2 * 4000 * 256 + 256) if isinstance(plan, Fsdp1Plan) else 0  # its flat copy, around all others
    assert peak(full[WEIGHTS], "host") == near(4 * P + root)
    sharded = found(replace(plan, state_dict_type="SHARDED_STATE_DICT"))
    assert [peak(sharded[STATES], "host", rank) for rank in (0, 1)] == [near(8 * P / RANKS)] * 2
    assert peak(full[RESUMING], "host", 3) == near(4 * P if isinstance(plan, Fsdp1Plan) else 8 * P / RANKS)
    assert peak(full[RESUMING], "host") == near(8 * P + 8 * P / RANKS)
    assert STATES not in found(plan, only_model=True)


@pytest.mark.parametrize("plan", [Fsdp1Plan(world_size=RANKS), Fsdp2Plan(world_size=RANKS)])
def test_without_offload_every_gpu_holds_a_full_state_dict(plan: Fsdp1Plan | Fsdp2Plan):
    whole = replace(plan, state_dict_type="FULL_STATE_DICT", state_dict_offload_to_cpu=False)
    moment = found(whole)[WEIGHTS]
    assert peak(moment, "gpu", 3) >= 4 * P
    assert peak(moment, "host") == 0
    assert "GPU" in moment.cause


def test_async_saves_stage_all_shards_at_once():
    staged = found(Fsdp2Plan(world_size=RANKS), by="async")
    assert list(staged) == [STATES]
    assert [peak(staged[STATES], "host", rank) for rank in (0, 3)] == [near(12 * P / RANKS)] * 2


@pytest.mark.parametrize("plan", [DeepSpeedPlan(world_size=RANKS, stage=2), DdpPlan(world_size=RANKS)])
def test_a_run_that_only_resumes(plan: DeepSpeedPlan | DdpPlan):
    assert found(plan, by="none")[RESUMING] == found(plan)[RESUMING]
    assert list(found(plan, by="none")) == [RESUMING]


def test_what_a_rank_brings_to_its_host_is_named():
    """Nothing is gathered; under offload an optimizer's shards are on the host before."""
    ddp = found(DdpPlan(world_size=RANKS))
    assert "a tensor" in ddp[STATES].cause
    assert "file" in ddp[WEIGHTS].cause
    assert "and all of the optimizer's states" in ddp[RESUMING].cause
    offloaded = found(DeepSpeedPlan(world_size=RANKS, stage=2, offload_optimizer="cpu"))
    assert offloaded[STATES].cause == "rank 0 brings all weights to its host"


def test_ddp_saves_from_rank_0_and_resumes_everywhere():
    found_ = found(DdpPlan(world_size=RANKS))
    assert [peak(found_[WEIGHTS], "host", rank) for rank in (0, 1)] == [4 * P, 0]
    assert peak(found_[RESUMING], "host", 1) == 8 * P
