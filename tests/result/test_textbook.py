import pytest

from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.optimizer import state_bytes
from zsim.result.textbook import of_plan, optimizer_bytes, states, table


@pytest.mark.parametrize(("stage", "gb"), [("ddp", 128), ("zero1", 56), ("zero2", 44), ("zero3", 32)])
def test_eight_billion_parameters_on_four_gpus(stage, gb):
    assert states(stage, 8e9, 4).per_gpu_bytes == gb * 1e9


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (Optimizer("adamw"), "P (4 + 12/N)"),
        (Optimizer("sgd", momentum=True), "P (4 + 8/N)"),
        (Optimizer("sgd"), "P (4 + 4/N)"),
        (Optimizer("lion"), "P (4 + 8/N)"),
        (Optimizer("adamw8bit"), "P (4 + 6/N)"),
    ],
)
def test_the_twelve_bytes_are_adams(optimizer, formula):
    line = of_plan(DeepSpeedPlan(world_size=4, stage=1, optimizer=optimizer), 8e9)
    assert line.formula == formula
    shared = int(formula.split("+ ")[1].split("/")[0])
    assert line.per_gpu_bytes == 8e9 * (4 + shared / 4)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adamw8bit"])
def test_optimizers_keep_what_is_simulated(name):
    """Of a large tensor, whose 8-bit states have few block maxima."""
    optimizer = Optimizer(name)
    kept = state_bytes(optimizer, [2**24], 4) / 2**24
    assert optimizer_bytes(optimizer) - 4 == pytest.approx(kept, rel=0.02)


def test_offload_moves_bytes_without_losing_any():
    # ZeRO-3 keeps each of the 16 bytes once, wherever it is.
    for stage in ("zero3_offload", "zero3_offload_params"):
        line = states(stage, 8e9, 4)
        assert line.per_gpu_bytes + line.host_bytes == 32e9
    assert set(table(8e9, 4)) >= {"ddp", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize(
    ("plan", "stage"),
    [
        (DdpPlan(world_size=4), "ddp"),
        (DeepSpeedPlan(world_size=4, stage=0), "ddp"),
        (DeepSpeedPlan(world_size=4, stage=2, offload_optimizer="cpu"), "zero2_offload"),
        (DeepSpeedPlan(world_size=4, stage=3), "zero3"),
        (Fsdp2Plan(world_size=4), "zero3"),
        (Fsdp1Plan(world_size=4, sharding_strategy="SHARD_GRAD_OP"), "zero2"),
    ],
)
def test_line_of_a_plan(plan, stage):
    assert of_plan(plan, 8e9).stage == stage


def test_hybrid_shards_over_the_inner_group():
    assert of_plan(Fsdp2Plan(world_size=8, mesh=(2, 4)), 8e9).per_gpu_bytes == 32e9


@pytest.mark.parametrize(
    ("plan", "gb", "formula"),
    [
        (DdpPlan(world_size=4), 16 * 0.04 + 16, "16 P + F"),
        (DeepSpeedPlan(world_size=4, stage=2), 0.04 * (2 + 14 / 4) + 16, "P (2 + 14/N) + F"),
        (DeepSpeedPlan(world_size=4, stage=3), 16 * 0.04 / 4 + 16 / 4, "16 P / N + F / N"),
        (DeepSpeedPlan(world_size=4, stage=3, offload_optimizer="cpu", offload_param="cpu"), 0,
         "0 (one layer at a time)"),
    ],
)  # fmt: skip
def test_frozen_parameters_have_neither_gradients_nor_states(plan, gb, formula):
    """LoRA on 8e9 parameters in 16 bits, 4e7 trained: only full sharding splits what is frozen."""
    line = of_plan(plan, 4e7, 16e9)
    assert (line.per_gpu_bytes, line.formula) == (pytest.approx(gb * 1e9), formula)


def test_frozen_parameters_in_host_memory():
    line = of_plan(DeepSpeedPlan(world_size=4, stage=3, offload_optimizer="cpu", offload_param="cpu"), 4e7, 16e9)
    assert line.host_bytes == 16 * 4e7 / 4 + 4e9
