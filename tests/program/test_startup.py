"""What a job holds before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.program.small_job import MODEL, RANKS, TREE, WORKLOAD, P, most
from zsim.model.spec import Preference
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import lower


def peak(plan: AnyPlan, device: str, rank: int = 0) -> int:
    """Of the init program, bytes on a device of one rank."""
    return most(lower(MODEL, TREE, plan, WORKLOAD, steps=1).init, device, rank)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_lay_parameters_out_flat_on_the_host_until_0_18_6(stage: int):
    """Beside what was read, which is on the GPU by then; since pull request 7828 on the GPU."""
    plan = DeepSpeedPlan(world_size=RANKS, stage=stage)
    for version, nbytes in (("0.9.5", 4 * P), ("0.18.6", 4 * P), ("0.18.9", 2 * P), ("0.19.8", 2 * P)):
        assert peak(replace(plan, version=version), "host", 3) == pytest.approx(nbytes, rel=1e-4)
    old = replace(plan, version="0.16.9", load="meta")
    assert peak(old, "host") == pytest.approx(4 * P, rel=1e-4)
    assert peak(replace(old, stage=3), "host") == 0


@pytest.mark.parametrize(
    "plan", [DdpPlan(world_size=RANKS), DeepSpeedPlan(world_size=RANKS, stage=2), Fsdp2Plan(world_size=RANKS)]
)
def test_a_model_may_be_read_straight_to_the_gpu_and_widened_there(plan: AnyPlan):
    """LLaMA-Factory: float32 parameters on every GPU before DeepSpeed narrows or FSDP shards them."""
    straight = replace(plan, load="gpu", load_dtype="float32")
    assert peak(straight, "host") == 0
    assert peak(straight, "gpu", 3) >= 4 * P
    narrow = replace(DeepSpeedPlan(world_size=RANKS, stage=2), load="gpu")
    assert peak(narrow, "gpu") == peak(replace(narrow, load="meta"), "gpu")  # no more than is trained with


def test_under_fsdp1s_offload_ranks_that_read_nothing_hold_shards_alone():
    """accelerate's cpu_ram_efficient_loading with sync_module_states: units come to them on the GPU."""
    plan = Fsdp1Plan(world_size=RANKS, cpu_offload=True)
    assert peak(plan, "host", 3) >= 4 * P
    first, other = (peak(replace(plan, load="rank0"), "host", rank) for rank in (0, 3))
    assert first >= 4 * P
    assert other == pytest.approx(4 * P / RANKS, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        (DdpPlan(world_size=RANKS), 4 + 4), (DdpPlan(world_size=RANKS, autocast="bfloat16"), 4 + 4),
        (DeepSpeedPlan(world_size=RANKS, stage=2), 2 + 2), (Fsdp2Plan(world_size=RANKS), 2 + 2),
        (DeepSpeedPlan(world_size=RANKS, stage=3, zero_init=True), 2),
        (DeepSpeedPlan(world_size=RANKS, stage=3), 2 + 2),
    ],
)  # fmt: skip
def test_a_second_model_is_read_beside_the_first(plan: AnyPlan, copies: int):
    """Both lie on the host until the trainer is made, but what zero.Init shards as it is built."""
    workload = replace(WORKLOAD, preference=Preference())
    init = lower(MODEL, trace(MODEL, workload), plan, workload, steps=1).init
    assert most(init, "host", 0) == pytest.approx(copies * P, rel=1e-4)
    straight = replace(plan, load="gpu")
    if not isinstance(plan, DeepSpeedPlan) or plan.stage < 3:
        init = lower(MODEL, trace(MODEL, workload), straight, workload, steps=1).init
        assert most(init, "host", 0) == 0
        assert most(init, "gpu", 3) >= copies * P
