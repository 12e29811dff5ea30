"""Rules of DeepSpeed's older releases, read in their sources (the tags v0.3.16, v0.9.5, v0.12.3, v0.12.4)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import ceil
from typing import Any

import pytest

from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.program.ops import ALL_GATHER, Alloc, Collective, Free, HostWait, Launch, Op, Program

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 301, "tie_word_embeddings": False,
}  # fmt: skip
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
@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_were_reduced_to_their_owners_until_0_12_4(stage: int, version: str, kind: str) -> None:
    found = collectives(program_of(stage, version), "backward")
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
