"""Optimizer, gradients and parameters outside the GPU: what moves where, what the host holds, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.huggingface import from_architecture
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.builder import pinned_bytes
from zsim.program.lower import lower
from zsim.program.ops import CPU, RANK_0, Alloc, Copy, CpuWork, Free, Launch, Program

WORLD = 2
WORKLOAD = Workload(1, 16)
MODEL = from_architecture(
    "small",
    Architecture(
        family="llama", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
        kinds=(LayerKind(),) * 4, tied=False,
    ),
)  # fmt: skip
OWNED = sum(ceil(parameter.numel / WORLD) for parameter in MODEL.parameters)  # elements of one rank's shards


def program(model: ModelSpec = MODEL, workload: Workload = WORKLOAD, **options) -> Program:
    plan = DeepSpeedPlan(
        world_size=WORLD, stage=3, optimizer=Optimizer(impl="cpu"), sub_group_size=20_000, **options
    )  # fmt: skip
    return lower(model, trace(model, workload), plan, workload)


def moved(program: Program, step: int = -1) -> dict[tuple[str, str], float]:
    """Bytes by (direction, phase) in one step."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for instruction in program.steps[step]:
        if isinstance(instruction, Launch) and isinstance(instruction.op.work, Copy):
            total[instruction.op.work.direction, instruction.op.phase] += instruction.op.work.nbytes
    return total


def held(program: Program, device: str, until: int = 1) -> dict[str, int]:
    """Bytes by category after initialization and the first steps."""
    live: dict[str, Alloc] = {}
    for part in (program.init, *program.steps[:until]):
        for instruction in part:
            if isinstance(instruction, Alloc):
                live[instruction.key] = instruction
            elif isinstance(instruction, Free):
                live.pop(instruction.key)
    total: dict[str, int] = defaultdict(int)
    for alloc in live.values():
        if alloc.device == device:
            total[alloc.category] += alloc.nbytes
    return total


def adam(program: Program) -> int:
    """Parameters that the CPU's optimizer updates in a step."""
    works = [i.op.work for i in program.steps[-1] if isinstance(i, Launch) and i.op.lane == CPU]
    return sum(work.numel for work in works if isinstance(work, CpuWork) and work.label == "adamw")


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 4096, 4097, 18_800_000_000)] == [0, 1, 4096, 8192, 1 << 35]


def test_nvme_moves_sixteen_bytes_in_and_twelve_out_per_parameter() -> None:
    """Weights, both moments and gradients are read; the gradients, written in backward, are not written again."""
    found = moved(program(offload_optimizer="nvme"))
    assert found["nvme_read", "optimizer"] == 16 * OWNED
    assert found["nvme_write", "optimizer"] == 12 * OWNED
    assert found["nvme_write", "backward"] == 4 * OWNED


def test_nvme_holds_states_and_gradients_and_the_host_a_few_buffers() -> None:
    run = program(offload_optimizer="nvme", offload_optimizer_buffer_count=5)
    assert held(run, "nvme") == {"optimizer_states": 12 * OWNED, "gradients": 4 * OWNED}
    host = held(run, "host")
    assert host["master_weights"] == 0
    largest = max(work.numel for i in run.steps[-1] if isinstance(i, Launch) for work in [i.op.work] if _is_adam(work))
    assert host["buffers"] == 5 * 4 * largest


def _is_adam(work: object) -> bool:
    return isinstance(work, CpuWork) and work.label == "adamw"


def test_parameters_beyond_max_in_cpu_are_read_from_nvme_for_every_gather() -> None:
    few = {"offload_param": "nvme", "offload_optimizer": "nvme", "stage3_param_persistence_threshold": 0}
    all_kept = program(**few)
    assert held(all_kept, "nvme").get("parameters", 0) == 0
    assert moved(all_kept)["nvme_read", "forward"] == 0
    none_kept = program(**few, offload_param_max_in_cpu=0)
    assert held(none_kept, "nvme")["parameters"] == 2 * OWNED
    assert moved(none_kept)["nvme_read", "forward"] == 2 * OWNED
    assert moved(none_kept)["nvme_write", "optimizer"] == (12 + 2) * OWNED
    assert held(none_kept, "host")["buffers"] >= 5 * 100_000_000 * 2  # buffer_count x buffer_size


def test_pipelining_reads_the_next_sub_group_before_the_update_of_this_one() -> None:
    def order(run: Program) -> list[str]:
        labels = [i.op.label for i in run.steps[-1] if isinstance(i, Launch) and i.op.phase == "optimizer"]
        return [label for label in labels if label in ("states from NVMe", "adamw")]

    assert order(program(offload_optimizer="nvme"))[:4] == ["states from NVMe", "adamw"] * 2
    piped = program(offload_optimizer="nvme", offload_optimizer_pipeline_read=True)
    assert order(piped)[:4] == ["states from NVMe", "states from NVMe", "adamw", "states from NVMe"]
    assert moved(piped) == moved(program(offload_optimizer="nvme"))


def test_partial_offload_leaves_the_first_sub_groups_on_the_gpu() -> None:
    whole, half = program(offload_optimizer="cpu"), program(offload_optimizer="cpu", offload_optimizer_ratio=0.5)
    assert adam(whole) == OWNED
    assert 0.3 * OWNED < adam(half) < 0.7 * OWNED
    on_gpu = OWNED - adam(half)
    assert held(half, "gpu")["master_weights"] == 4 * on_gpu
    assert held(half, "gpu")["optimizer_states"] - held(whole, "gpu").get("optimizer_states", 0) >= 8 * on_gpu
    assert held(half, "host")["master_weights"] == 4 * adam(half)
    assert held(whole, "gpu").get("master_weights", 0) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"offload_optimizer": "nvme", "offload_optimizer_buffer_count": 3}, InputError),
        ({"offload_optimizer": "nvme", "offload_param": "nvme", "offload_param_buffer_size": 10}, InputError),
        ({"offload_param": "nvme"}, NotModeled),
        ({"offload_optimizer": "nvme", "offload_optimizer_ratio": 0.5}, NotModeled),
    ],
)
def test_refused(options: dict, error: type) -> None:
    with pytest.raises(error):
        program(**options)


def test_every_rank_reads_the_checkpoint_unless_told_otherwise() -> None:
    """Two bytes a parameter, gone before training; under zero.Init one rank's; on meta nobody's."""

    def first(**options) -> Alloc | None:
        run = program(**options)
        return next((i for i in run.init if isinstance(i, Alloc) and i.key == "checkpoint"), None)

    every = first()
    assert every is not None
    assert (every.category, every.nbytes, every.device) == ("checkpoint", 2 * MODEL.numel, "host")
    assert first(zero_init=True).category == RANK_0  # type: ignore[union-attr]
    assert first(load="rank0").category == RANK_0  # type: ignore[union-attr]
    assert first(load="meta") is None
    assert "checkpoint" not in held(program(), "host", until=0)


@pytest.mark.parametrize("plan", [Fsdp1Plan(world_size=2, cpu_offload=True), Fsdp2Plan(world_size=2, cpu_offload=True)])
def test_fsdp_offload_updates_on_the_cpu(plan) -> None:
    """CPUOffload and CPUOffloadPolicy: shards, gradients and states live on the host, where torch's Adam runs."""
    run = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)
    updated = sum(
        i.op.work.numel
        for i in run.steps[-1]
        if isinstance(i, Launch) and isinstance(i.op.work, CpuWork) and "adam" in i.op.work.label
    )
    assert MODEL.numel / 2 <= updated <= 1.01 * MODEL.numel / 2
    host = held(run, "host")
    assert host["optimizer_states"] >= 8 * updated
    assert host["parameters"] >= 4 * updated
    assert held(run, "gpu").get("optimizer_states", 0) == 0
