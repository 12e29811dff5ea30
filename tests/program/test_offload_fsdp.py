"""Shards of FSDP1 and FSDP2 in host memory: where gradients and states lie, and what the CPU does with them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from tests.program.offloaded import MODEL, WORKLOAD, held, moved, work
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.trace import trace
from zsim.plan.spec import Fsdp1Plan, Fsdp2Plan
from zsim.program.builder import pinned_bytes
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Copy, CpuWork, Free, Launch


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


def test_fsdp1_keeps_reduced_gradients_on_the_gpu_until_backward_ends() -> None:
    """_saved_grad_shard, though each is copied to the pinned _cpu_grad as well (FSDP1's prepare_gradient_for_optim)."""
    run = lower(MODEL, trace(MODEL, WORKLOAD), Fsdp1Plan(world_size=2, cpu_offload=True), WORKLOAD)
    shards = [i.nbytes // 4 for i in run.init if isinstance(i, Alloc) and i.key.endswith(", pageable")]
    most = 0
    sizes: dict[str, int] = {}
    for instruction in run.steps[-1]:
        if isinstance(instruction, Alloc) and instruction.key.startswith("sharded grad:"):
            assert instruction.device == "gpu"
            sizes[instruction.key] = instruction.nbytes
        elif isinstance(instruction, Free):
            sizes.pop(instruction.key, None)
        most = max(most, sum(sizes.values()))
    assert most == pytest.approx(4 * MODEL.numel / 2, rel=0.01)
    assert not sizes
    assert held(run, "host", until=0) == {"parameters": 4 * sum(shards)}  # pageable until the first forward
    assert held(run, "host")["gradients"] == held(run, "host")["parameters"] == sum(pinned_bytes(4 * n) for n in shards)


def test_fsdp1_copies_gradients_on_the_host_before_each_backward() -> None:
    """_writeback_orig_params finds each parameter's .grad, a view of _cpu_grad, where the flat one has none."""
    plan = Fsdp1Plan(world_size=2, cpu_offload=True)
    run = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)
    written = [i for i in run.steps[-1] if isinstance(i, Alloc) and i.key.startswith("gradient written back")]
    assert len(written) == 5  # four blocks and the root
    assert work(run, "write back gradients") == 3 * sum(i.nbytes for i in written) >= 3 * 2 * MODEL.numel
    assert "gradient written back" not in str([*held(run, "host", until=2)])
    flat = lower(MODEL, trace(MODEL, WORKLOAD), replace(plan, use_orig_params=False), WORKLOAD)
    assert work(flat, "write back gradients") == 0


def test_fsdp2_pins_every_shard_and_gradient_by_itself() -> None:
    def host(pinned: bool) -> dict[str, int]:
        plan = Fsdp2Plan(world_size=2, cpu_offload=True, offload_pin_memory=pinned)
        return held(lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD), "host", until=0)

    shards = [ceil(p.shape[0] / 2) * p.numel // p.shape[0] * 4 for p in MODEL.parameters]
    assert host(False)["parameters"] == sum(shards)
    assert host(True)["parameters"] == sum(map(pinned_bytes, shards))


def test_fsdp2_adds_gradients_of_later_micro_steps_on_the_cpu() -> None:
    """foreach_reduce: with a gradient there already the copy down is not `non_blocking`, and `+=` runs on the host."""
    plan = Fsdp2Plan(world_size=2, cpu_offload=True, grad_accum=3)
    run = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)
    assert work(run, "accumulate gradient") == 2 * 3 * 4 * MODEL.numel / 2
    copies = [
        i.op.work for i in run.steps[-1] if isinstance(i, Launch) and i.op.lane == "d2h" and isinstance(i.op.work, Copy)
    ]
    assert sum(copy.nbytes for copy in copies if not copy.pinned) == 2 * 4 * MODEL.numel / 2


def test_fsdp2_on_one_gpu_fetches_its_shards_too() -> None:
    run = lower(MODEL, trace(MODEL, WORKLOAD), Fsdp2Plan(world_size=1, cpu_offload=True), WORKLOAD)
    assert moved(run)["h2d", "forward"] == 4 * MODEL.numel


def test_fsdp1_writes_gradients_back_into_the_same_tensor_when_a_unit_is_gathered_twice() -> None:
    """An adapter's unit that backward prefetched is gathered again in a checkpointed block's second forward, which
    reshards it, and in its own backward."""
    adapted = tune(MODEL, Tuning(Lora(2, ("q_proj", "v_proj"))))
    workload = replace(WORKLOAD, checkpointing="full")
    plan = Fsdp1Plan(world_size=2, cpu_offload=True, adapter_units=True)
    run = lower(adapted, trace(adapted, workload), plan, workload)
    last = run.steps[-1]
    written = [i.key for i in last if isinstance(i, Alloc) and i.key.startswith("gradient written back")]
    assert len(written) == len(set(written)) > 0
    assert sum(isinstance(i, Launch) and i.op.label == "write back gradients" for i in last) > len(written)


def test_gradients_that_are_not_given_up_are_zeroed_on_the_host() -> None:
    """optimizer.zero_grad(set_to_none=False) after the update: a write of each of this rank's gradients."""

    def on_host(to_none: bool) -> dict[str, float]:
        plan = Fsdp1Plan(
            world_size=2, cpu_offload=True, storage_dtype="bfloat16", grad_clip=None, zero_grad_to_none=to_none
        )
        steps = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD).steps
        launched = [i.op.work for i in steps[-1] if isinstance(i, Launch) and i.op.phase == "optimizer"]
        return {work.label: work.nbytes for work in launched if isinstance(work, CpuWork)}

    assert set(on_host(True)) == {"adamw"}
    done = on_host(False)
    assert list(done) == ["adamw", "zero gradients"]
    # 7 passes over bf16 in fused AdamW, one write here
    assert done["zero gradients"] == pytest.approx(done["adamw"] / 7)
