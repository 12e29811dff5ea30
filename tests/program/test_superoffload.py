"""SuperOffload: a sub-group is updated in another process as soon as its last gradient is on the host."""

from __future__ import annotations

import pytest

from tests.program.test_offload import MODEL, OWNED, WORKLOAD, held
from zsim.cluster.spec import Host
from zsim.cost.host import cpu_seconds
from zsim.cost.profile import CpuCost
from zsim.document import Document
from zsim.errors import InputError
from zsim.model.trace import trace
from zsim.plan.deepspeed import read_document
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.builder import pinned_bytes
from zsim.program.lower import lower
from zsim.program.ops import CPU, WORKER, CpuWork, HostWait, Launch, Op, Program


def program(**options) -> Program:
    given = {
        "grad_clip": None,
        "offload_optimizer_super_offload": True,
        "sub_group_size": 20_000,
        "reduce_bucket_size": 10_000,
    } | options
    plan = DeepSpeedPlan(
        world_size=2, stage=3, offload_optimizer="cpu", optimizer=Optimizer(impl="cpu"), **given
    )  # fmt: skip
    return lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)


def updates(run: Program, step: int = -1) -> list[Op]:
    ops = [i.op for i in run.steps[step] if isinstance(i, Launch)]
    return [op for op in ops if isinstance(op.work, CpuWork) and op.work.label == "adamw"]


def test_all_sub_groups_are_updated_during_backward_the_last_layers_first() -> None:
    found, plain = updates(program()), updates(program(offload_optimizer_super_offload=False))
    assert {op.lane for op in found} == {WORKER}
    assert {op.phase for op in found} == {"backward"}
    assert {op.lane for op in plain} == {CPU}
    assert [op.work.numel for op in found] == [op.work.numel for op in reversed(plain)]
    assert sum(op.work.numel for op in found) == OWNED
    assert {op.work.cores for op in found} == {0.8}


def test_the_host_waits_for_an_update_in_the_step_alone() -> None:
    """_wait_for_async_operations, before the gradient norm; then it takes each result out of shared memory."""
    instructions = program().steps[-1]
    queued = {op.id for op in updates(program())}
    waits = [at for at, i in enumerate(instructions) if isinstance(i, HostWait) and i.op in queued]
    last = max(at for at, i in enumerate(instructions) if isinstance(i, Launch) and i.op.phase == "backward")
    assert len(waits) == len(queued)
    assert min(waits) > last
    taken = [i.op.work.nbytes for i in instructions if isinstance(i, Launch) and i.op.label == "copy parameters"]
    assert sum(taken) == 8 * OWNED


def test_with_accumulation_only_the_last_micro_step_updates() -> None:
    assert [op.work.numel for op in updates(program(grad_accum=3))] == [op.work.numel for op in updates(program())]


def test_clipping_leaves_nothing_to_speculate_on() -> None:
    """partition_grads: `and not self.clip_grad`."""
    found = updates(program(grad_clip=1.0))
    assert {op.phase for op in found} == {"optimizer"}
    assert {op.lane for op in found} == {WORKER}


def test_the_worker_has_its_own_buffer_and_the_states() -> None:
    own, plain = (held(program(offload_optimizer_super_offload=on), "host") for on in (True, False))
    largest = 4 * max(op.work.numel for op in updates(program()))
    assert own["buffers"] - plain.get("buffers", 0) == pinned_bytes(largest)
    assert own["optimizer_states"] == plain["optimizer_states"] == 8 * OWNED


def test_what_stays_on_the_gpu_is_not_the_workers() -> None:
    found = updates(program(offload_optimizer_ratio=0.5))
    assert 0.3 * OWNED < sum(op.work.numel for op in found if op.lane == WORKER) < 0.7 * OWNED


def test_a_share_of_the_cores() -> None:
    host = Host(sockets=1, cores=10, dram_bytes=1, dram_bandwidth=1e12, vendor="intel")
    cost = CpuCost(dram_efficiency=1.0, crowded_efficiency=0.2, thread_bandwidth={"default": 1e9}, conversion={})
    whole, half = (cpu_seconds(CpuWork("adamw", 1, 1e9, cores), cost, host, 1, None) for cores in (1.0, 0.5))
    assert half == pytest.approx(2 * whole) == pytest.approx(0.2)


def test_a_deepspeed_file_says_it() -> None:
    section = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.9}
    data = {"zero_optimization": {"stage": 3, "offload_optimizer": section}, "train_micro_batch_size_per_gpu": 1}
    fields = read_document(Document("ds.json", data)).fields
    assert fields["zero", "offload_optimizer", "super_offload"] is True
    assert fields["zero", "offload_optimizer", "cpuadam_cores_perc"] == 0.9


@pytest.mark.parametrize(
    "overrides",
    [
        ["zero.stage=2"], ["zero.offload_optimizer.device=nvme"], ["framework={name: deepspeed, version: 0.17.0}"],
        ["optimizer={name: adamw, impl: fused}"], ["optimizer=lion"],
    ],
)  # fmt: skip
def test_refused(overrides: list[str]) -> None:
    from pathlib import Path

    import zsim

    scenario = Path(__file__).parents[2] / "scenarios" / "optimizer_offload.yaml"
    wanted = ["zero.stage=3", "zero.offload_optimizer={device: cpu, super_offload: true}", *overrides]
    with pytest.raises(InputError, match="SuperOffload"):
        zsim.load_scenario(scenario, wanted).resolve()
