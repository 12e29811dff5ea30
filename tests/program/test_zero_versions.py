"""Rules of DeepSpeed's older releases, read in their sources (from the tag v0.3.16 on)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import ceil
from typing import Any

import pytest

from tests.program.sound import CONFIG
from zsim.cost.profile import load_profile
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.program.ops import (
    ALL_GATHER,
    COMPUTE,
    REDUCE_SCATTER,
    Alloc,
    Collective,
    Free,
    HostWait,
    HostWork,
    Launch,
    Op,
    Program,
)

MODEL = from_config(CONFIG, "tiny")
WORLD = 4


def program_of(stage: int, version: str, **changes: Any) -> Program:
    workload = Workload(1, 16, checkpointing=changes.pop("checkpointing", "none"))
    plan = DeepSpeedPlan(
        world_size=WORLD, stage=stage, version=version, **{"reduce_bucket_size": 20_000, "zero_init": True} | changes
    )
    return lower(MODEL, trace(MODEL, workload), plan, workload, 4)


def collectives(program: Program, *phases: str) -> list[Op]:
    launched = [item.op for item in program.steps[-1] if isinstance(item, Launch)]
    return [op for op in launched if isinstance(op.work, Collective) and op.phase in phases]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("version", "starts"), [("0.13.1", True), ("0.13.2", False)])
def test_states_were_made_at_the_start_until_0_13_2(stage: int, version: str, starts: bool) -> None:
    """initialize_optimizer_states: an update with gradients of zero, which are gone before the first forward."""
    program = program_of(stage, version)
    parts = [
        {item.key for item in part if isinstance(item, Alloc) and item.key.endswith("_states")}
        for part in (program.init, program.steps[0], program.steps[-1])
    ]
    made = {"optimizer:0_states"}
    assert parts == ([made, set(), set()] if starts else [set(), made, set()])
    zeros = [item.key for item in program.init if isinstance(item, Alloc) and item.key.startswith("gradients of zero")]
    freed = [item.key for item in program.init if isinstance(item, Free)]
    assert bool(zeros) == starts
    assert set(zeros) <= set(freed)


@pytest.mark.parametrize(("version", "kind"), [("0.12.3", "reduce"), ("0.12.4", "all_reduce")])
def test_buckets_were_reduced_to_their_owners_until_0_12_4(version: str, kind: str) -> None:
    found = collectives(program_of(2, version), "backward")
    assert {op.work.kind for op in found} == {kind}
    assert sum(op.work.in_numel for op in found) == MODEL.numel


@pytest.mark.parametrize("accumulation", [None, "float32"])
def test_each_owner_gets_its_partition_and_nothing_is_flattened_or_waited_for(accumulation: str | None) -> None:
    program = program_of(2, "0.9.5", grad_accum_dtype=accumulation, offload_optimizer="cpu" if accumulation else None)
    received: Counter[int | None] = Counter()
    for op in collectives(program, "backward"):
        received[op.work.root] += op.work.in_numel
    partition = ceil(MODEL.numel / (2 * WORLD)) * 2
    assert received == {0: partition, 1: partition, 2: partition, 3: MODEL.numel - 3 * partition}
    step = program.steps[-1]
    assert not any(
        isinstance(item, Alloc) and item.category == "reduce_buffers" and item.key == "flat gradients" for item in step
    )
    reduces = [i for i, item in enumerate(step) if isinstance(item, Launch) and item.op.label == "reduce gradients"]
    one_bucket = [(i, j) for i, j in pairwise(reduces) if j == i + 1]
    assert one_bucket  # several owners in one bucket, one reduce straight after the other


@pytest.mark.parametrize(("version", "apart"), [("0.12.6", False), ("0.12.7", True)])
def test_stage_1_knew_neither_overlap_nor_buckets_until_0_12_7(version: str, apart: bool) -> None:
    program = program_of(1, version, overlap_comm=True)
    found = collectives(program, "backward")
    assert {op.work.kind for op in found} == {"all_reduce"}  # gradients flattened, not copied into a bucket
    assert {op.lane for op in found} == {REDUCE_SCATTER if apart else COMPUTE}
    keys = {item.key for item in program.steps[-1] if isinstance(item, Alloc) and item.category == "reduce_buffers"}
    assert ("bucket 1" in keys) == apart


@pytest.mark.parametrize(("version", "whole"), [("0.14.0", True), ("0.14.1", False)])
def test_all_of_a_bucket_was_averaged_until_0_14_1(version: str, whole: bool) -> None:
    """Recorded with 0.12.6 and 0.14.5: without reduce_scatter all-reduces of the bucket's size, filled or not."""
    program = program_of(2, version, reduce_scatter=False)
    sizes = {op.work.in_numel for op in collectives(program, "backward")}
    assert (sizes == {20_000}) == whole
    kernels = (item.op for item in program_of(2, version).steps[-1] if isinstance(item, Launch))
    scaled = {op.work.kernels[0].read_bytes for op in kernels if op.label == "scale" and op.phase == "backward"}
    assert (scaled == {2 * 20_000}) == whole


def python(stage: int, version: str, **changes: Any) -> Counter[str]:
    """Host work of a step, by kind."""
    found: Counter[str] = Counter()
    for item in program_of(stage, version, **changes).steps[-1]:
        if isinstance(item, Launch) and isinstance(item.op.work, HostWork):
            found[item.op.work.label] += item.op.work.count
    return found


@pytest.mark.parametrize(
    ("version", "since"), [("0.17.6", " before 0.18"), ("0.18.0", " before 0.19.1"), ("0.19.1", "")]
)
def test_hooks_are_of_their_release(version: str, since: str) -> None:
    for stage, kinds in ((2, {"zero12 gradient hook", "zero12 bucket"}), (3, {"zero3 gradient hook"})):
        found = python(stage, version)
        trained = len(MODEL.parameters)
        assert {kind: found[f"{kind}{since}"] for kind in kinds} == dict.fromkeys(kinds, trained)
    assert python(3, version).keys() >= {f"zero3 hook{since}", f"zero3 backward hook{since}"}
    assert all(load_profile("generic").host.hooks[kind] for stage in (1, 2, 3) for kind in python(stage, version))


@pytest.mark.parametrize(("version", "counts"), [("0.18.4", 0), ("0.18.5", 1), ("0.18.6", 1), ("0.18.7", 0)])
def test_every_hook_of_0_18_5_and_6_asks_all_parameters(version: str, counts: int) -> None:
    for stage in (2, 3):
        assert python(stage, version)["zero counted parameter"] == counts * len(MODEL.parameters) ** 2


def test_stage_1_has_gradients_in_hand_only_at_the_boundary() -> None:
    trained, late = len(MODEL.parameters), {"grad_accum": 3, "overlap_comm": True}
    found = [python(stage, "0.19.8", **late) for stage in (1, 2)]
    assert [(each["zero12 gradient hook"], each["zero12 bucket"]) for each in found] == [
        (3 * trained, trained),
        (3 * trained, 3 * trained),
    ]
    old = python(1, "0.12.6", **late)  # neither hooks nor buckets
    assert {kind for kind in old if kind.startswith("zero12 grad")} == {"zero12 gradient"}
    assert old["zero12 gradient"] == trained


@pytest.mark.parametrize(("version", "waits"), [("0.19.5", False), ("0.19.8", True)])
def test_sums_on_the_host_are_not_waited_for_until_0_19_6(version: str, waits: bool) -> None:
    step = program_of(2, version, grad_accum=2, overlap_comm=True, offload_optimizer="cpu").steps[-1]
    copies = [i for i, item in enumerate(step) if isinstance(item, Launch) and item.op.label == "offload gradient"]
    between = (step[i:j] for i, j in pairwise(copies[: len(copies) // 3]))  # the micro-step before the boundary's
    awaited = [any(isinstance(item, HostWait) and item.op is not None for item in items) for items in between]
    assert awaited
    assert all(awaited) if waits else not any(awaited)


def test_gathers_before_0_6_are_one_parameter_each_and_overlap_with_nothing() -> None:
    program = program_of(3, "0.5.10", stage3_param_persistence_threshold=100, checkpointing="full")
    shards = {ceil(parameter.numel / WORLD) for parameter in MODEL.parameters}
    gathers = [op for op in collectives(program, "forward", "recompute", "backward") if op.lane == ALL_GATHER]
    assert {op.work.in_numel for op in gathers} <= shards
    times = Counter(op.module for op in gathers if ".layers." in op.module)
    assert len(times) == 7 * 3  # the matrices of three blocks; norms are persistent
    for module, count in times.items():  # forward, recomputation (which stops before the last one) and backward
        assert count == (2 if module.endswith("down_proj") else 3)
    step = program.steps[-1]
    for index, item in enumerate(step):
        if isinstance(item, Launch) and item.op in gathers:
            before = next(other for other in reversed(step[:index]) if isinstance(other, HostWait))
            after = next(other for other in step[index:] if isinstance(other, HostWait))
            assert before.op is None  # torch.cuda.synchronize()
            assert after.op is None


def test_from_0_6_on_parameters_are_fetched_ahead_together() -> None:
    def gathers(version: str) -> int:
        return len(collectives(program_of(3, version, stage3_param_persistence_threshold=100), "forward"))

    assert gathers("0.6.0") < gathers("0.5.10") == 1 + 7 * 3 + 1
