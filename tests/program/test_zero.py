"""Rules of DeepSpeed's buckets, streams and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import pytest

from tests.program.sound import sound
from tests.program.zero_programs import (
    CONFIG,
    PASSING,
    SMALL,
    calls,
    model_and_tree,
    modules,
    ops,
    program_of,
    state_bytes,
)
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import (
    ALL_GATHER,
    COMPUTE,
    CPU,
    D2H,
    H2D,
    REDUCE_SCATTER,
    Alloc,
    Collective,
    Copy,
    Free,
    HostWait,
    Instruction,
    Launch,
)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"version": "0.14.2"}, True),
        ({"version": "0.14.2", "zero_init": True}, False),
        ({"version": "0.19.4"}, False),
        ({"memory_efficient_linear": False}, True),
        ({"memory_efficient_linear": False, "zero_init": True}, True),
    ],
)
def test_linear_layers_of_torch_keep_gathered_weights_until_their_backward(
    changes: dict[str, Any], held: bool, checkpointing: str
):
    """Live bytes of gathered parameters where the forward ends: all Linear weights outside checkpointed blocks."""
    keep_none = {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    }
    program = program_of(3, checkpointing=checkpointing, **keep_none, **changes)
    model, tree, _ = model_and_tree(checkpointing)
    blocks = [] if checkpointing == "full" else [p for name, m in modules(tree) if "layers" in name for p in m.params]
    kept = {p for p in blocks if model.parameters[p].module_class == "Linear"} if held else set()
    live: Counter[str] = Counter()
    for instruction in program.steps[2]:
        if isinstance(instruction, Launch) and instruction.op.phase == "backward":
            break
        if isinstance(instruction, Alloc) and instruction.category == "all_gather_buffers":
            live[instruction.key] = instruction.nbytes
        elif isinstance(instruction, Free):
            live.pop(instruction.key, None)
    assert {key for key in live if key != f"full:{len(model.parameters) - 1}"} == {f"full:{p}" for p in kept}
    frees = Counter(instruction.key for instruction in program.steps[2] if isinstance(instruction, Free))
    allocs = Counter(instruction.key for instruction in program.steps[2] if isinstance(instruction, Alloc))
    assert all(frees[key] == count for key, count in allocs.items() if "full:" in key or "regathered:" in key)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_later_steps_are_the_same_object(stage: int, grad_accum: int):
    program = program_of(stage, grad_accum=grad_accum)
    assert program.steps[2] is program.steps[3]
    if stage == 3 and grad_accum == 1:  # the second forward compares the trace
        compared = [call.in_numel for call in calls(program.steps[1], "forward") if call.kind == "broadcast"]
        assert len(compared) == 6
        assert compared[::2] == [1, 1, 1]
        assert not [call for call in calls(program.steps[2], "forward") if call.kind == "broadcast"]
    else:
        assert program.steps[1] is program.steps[2]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_states_are_those_of_the_textbook(world: int):
    """P parameters, W ranks, mixed precision: 2 + 12/W bytes each in stages 1 and 2, (2 + 2 + 12)/W in stage 3."""
    model = model_and_tree()[0]
    total = model.numel
    for stage in (1, 2):
        states = state_bytes(program_of(stage, world_size=world))
        partition = ceil(total / (2 * world)) * 2
        assert states["parameters"] == 2 * partition * world
        assert states["master_weights"] == 4 * partition
        assert states["optimizer_states"] == 8 * partition + 4  # and Adam's step
        assert states["gradients"] == 0  # they come and go
    states = state_bytes(program_of(3, world_size=world, stage3_param_persistence_threshold=0))
    shards = sum(ceil(parameter.numel / world) for parameter in model.parameters)
    assert states["parameters"] == 2 * shards
    assert states["gradients"] == 2 * shards
    assert states["master_weights"] == 4 * shards
    assert states["optimizer_states"] == 8 * shards + 4
    assert states["reduce_buffers"] == 2 * 20_000  # the bucket stays for good


def test_offload_leaves_parameters_and_moves_the_rest():
    shards = sum(ceil(parameter.numel / 4) for parameter in model_and_tree()[0].parameters)
    program = program_of(3, offload_optimizer="cpu", offload_optimizer_pin_memory=False)
    gpu, host = state_bytes(program), state_bytes(program, "host")
    assert gpu["master_weights"] == gpu["optimizer_states"] == gpu["gradients"] == 0
    assert gpu["parameters"] == 2 * shards
    assert host["master_weights"] == 4 * shards
    assert host["optimizer_states"] - 4 == 8 * shards
    assert host["gradients"] == (4 + 2) * shards  # float32 for Adam, and the buffer that accumulates
    everything = program_of(3, offload_optimizer="cpu", offload_param="cpu", stage3_param_persistence_threshold=0)
    assert state_bytes(everything)["parameters"] == 0


def test_offloaded_gradients_go_to_the_host_and_parameters_come_back():
    shards = sum(ceil(parameter.numel / 4) for parameter in model_and_tree()[0].parameters)
    step = program_of(3, offload_optimizer="cpu").steps[-1]
    down = sum(op.work.nbytes for op in ops(step, D2H) if isinstance(op.work, Copy))
    up = [op for op in ops(step, H2D) if isinstance(op.work, Copy)]
    assert down == (2 + 4) * shards  # the accumulation buffer, then float32
    assert sum(op.work.nbytes for op in up if op.phase == "optimizer") == 2 * shards
    assert [op.label for op in ops(step, CPU)] == ["scale", "adamw", "cast"]
    assert not [op for op in ops(step, COMPUTE) if op.label == "adamw"]


def test_zero_1_reduces_at_the_boundary_and_zero_2_in_every_micro_step():
    once = calls(program_of(1, grad_accum=3).steps[-1], "backward")
    always = calls(program_of(2, grad_accum=3).steps[-1], "backward")
    assert len(always) == 3 * len(once)
    assert sum(call.in_numel for call in once) == model_and_tree()[0].numel


def test_a_bucket_may_be_filled_exactly():
    def sizes(limit: int) -> list[int]:
        return [call.in_numel for call in calls(program_of(2, reduce_bucket_size=limit).steps[-1], "backward")]

    two = next(size for size in sizes(20_000) if size < 19_264)  # several parameters together
    assert two in sizes(two)
    assert two not in sizes(two - 1)
    head = model_and_tree()[0].parameters[-1].numel
    assert sizes(1)[:1] == [head]  # alone in its bucket, however large


def test_an_oversize_parameter_across_a_boundary_takes_two_calls():
    """allreduce_and_scatter sends what exceeds the bucket size before it takes the next rank's slice."""
    numels = [parameter.numel for parameter in model_and_tree()[0].parameters]
    partition = ceil(sum(numels) / (2 * 5)) * 2
    ends = list(accumulate(numels))
    crossing = next(
        (cut - (end - numel), end - cut)
        for numel, end in zip(numels, ends, strict=True)
        for cut in range(partition, end, partition)
        if end - numel + 1000 < cut
    )
    step = program_of(2, world_size=5, reduce_bucket_size=1000).steps[-1]
    sizes = [call.in_numel for call in calls(step, "backward")]
    assert crossing in set(pairwise(sizes))
    assert sum(sizes) == sum(numels)


def test_reduce_goes_to_owners_of_contiguous_slices():
    program = program_of(2, use_multi_rank_bucket_allreduce=False)
    found = calls(program.steps[-1], "backward")
    assert {call.kind for call in found} == {"reduce"}
    partition = ceil(model_and_tree()[0].numel / 8) * 2
    received: Counter[int | None] = Counter()
    for call in found:
        received[call.root] += call.in_numel
    last = model_and_tree()[0].numel - 3 * partition
    assert received == {0: partition, 1: partition, 2: partition, 3: last}


def test_overlap_moves_reductions_to_their_own_lane():
    for stage in (2, 3):
        apart = program_of(stage, overlap_comm=True).steps[-1]
        within = program_of(stage, overlap_comm=False).steps[-1]
        for lane, instructions in ((REDUCE_SCATTER, apart), (COMPUTE, within)):
            reductions = [op for op in ops(instructions) if op.label == "reduce gradients"]
            assert reductions
            assert {op.lane for op in reductions} == {lane}


def test_compute_waits_for_the_gather_of_its_own_parameters_only():
    step = program_of(3, stage3_max_live_parameters=30_000, stage3_max_reuse_distance=0).steps[-1]
    by_id = {op.id: op for op in ops(step)}
    ahead = 0
    for op in ops(step, COMPUTE):
        gathers = [by_id[event] for event in op.waits if event in by_id and by_id[event].lane == ALL_GATHER]
        issued = [other for other in ops(step, ALL_GATHER) if other.id < op.id]
        ahead += bool(gathers) and max(issued, key=lambda other: other.id) not in gathers
    assert ahead > 3  # a prefetch is under way while compute waits for an earlier gather only


def test_the_host_waits_where_deepspeed_synchronizes():
    def waits(instructions: Sequence[Instruction]) -> int:
        return sum(isinstance(instruction, HostWait) for instruction in instructions)

    plain = program_of(2).steps[-1]
    assert waits(plain) == 3  # overflow, norm, the throughput timer
    assert waits(program_of(2, check_grad_overflow=False).steps[-1]) == 1
    assert waits(program_of(2, overlap_comm=True).steps[-1]) == 4  # and the end of backward
    assert waits(program_of(0, dtype="float32").steps[-1]) == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_throughput_timer_waits_for_the_gpu_after_every_micro_step(stage: int):
    def idle(step: int, **changes: bool) -> int:
        found = program_of(stage, grad_accum=3, overlap_comm=False, **changes).steps[step]
        return sum(isinstance(item, HostWait) and item.op is None for item in found)

    assert isinstance(program_of(stage).steps[-1][-1], HostWait)
    assert idle(0) == idle(0, throughput_timer=False)
    assert idle(-1) == idle(-1, throughput_timer=False) + 3


@pytest.mark.parametrize(
    ("stage", "changes", "kind"),
    [
        (0, {"grad_accum_dtype": "float32"}, InputError),
        (0, {"offload_optimizer": "cpu"}, InputError),
        (2, {"prescale_gradients": True}, InputError),
        (3, {"prescale_gradients": True}, InputError),
        (2, {"offload_optimizer": "nvme"}, InputError),
        (3, {"offload_param": "nvme"}, NotModeled),
    ],
)
def test_what_deepspeed_refuses_is_refused(stage: int, changes: dict[str, Any], kind: type[InputError]):
    with pytest.raises(kind):
        program_of(stage, **changes)


def test_float32_accumulation_in_stage_1_is_another_optimizer():
    """BF16_Optimizer keeps float32 gradients of the whole model and asks no rank for the norm."""
    program = program_of(1, grad_accum=2, grad_accum_dtype="float32")
    total = model_and_tree()[0].numel
    flat = ceil(total / 8) * 8
    assert [call.in_numel for call in calls(program.steps[-1], "backward")] == [flat]
    assert [call.kind for call in calls(program.steps[-1], "optimizer")] == ["all_gather"]
    assert state_bytes(program)["gradients"] == 4 * flat


def test_frozen_parameters_have_no_states():
    model, _, workload = model_and_tree()
    frozen = replace(
        model,
        parameters=tuple(replace(p, trainable="layers.2." in p.name or "norm" in p.name) for p in model.parameters),
    )
    tree = trace(frozen, workload)
    for stage in (2, 3):
        program = lower(frozen, tree, DeepSpeedPlan(stage=stage, **{"world_size": 2} | SMALL), workload, 4)
        sound(program, *PASSING)
        states = state_bytes(program)
        trained = [p.numel for p in frozen.parameters if p.trainable]
        part = sum(ceil(n / 2) for n in trained) if stage == 3 else ceil(sum(trained) / 4) * 2
        assert states["master_weights"] == 4 * part
        assert states["parameters"] >= 2 * model.numel // (2 if stage == 3 else 1)


def test_a_group_without_weight_decay_is_a_flat_buffer_of_its_own() -> None:
    """Recordings (ds_*_groups_*) hold the order of all calls; here what the second group adds."""
    model, workload = from_config(CONFIG, "small"), Workload(1, 16)
    norms = sum(parameter.numel for parameter in model.parameters if "norm" in parameter.name)

    def gathers(split: bool) -> list[int]:
        plan = DeepSpeedPlan(world_size=4, stage=2, optimizer=Optimizer(decay_groups=split))
        program = lower(model, trace(model, workload), plan, workload, steps=2)
        works = [item.op.work for item in program.steps[1] if isinstance(item, Launch)]
        return [work.in_numel for work in works if isinstance(work, Collective) and work.kind == "all_gather"]

    (whole,) = gathers(split=False)
    matrices, vectors = gathers(split=True)
    assert matrices + vectors == whole
    assert vectors == norms // 4
