"""Ranks that share sequences: what each computes, what they exchange, and how long that takes on a machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.cluster.load import load_topology
from zsim.cost.price import Price
from zsim.cost.profile import load_profile
from zsim.engine.simulator import run
from zsim.errors import InputError
from zsim.model.huggingface import from_config
from zsim.model.spec import Compute, ModelSpec, Module, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Collective, Launch, Program
from zsim.result.flops import per_micro_batch

ROOT = Path(__file__).parents[2]
LAYERS = 3
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 8192,
}  # fmt: skip
BASE = Workload(micro_batch=2, seq_len=512)


def model(**changes: object) -> ModelSpec:
    return from_config(LLAMA | changes, "llama")


def program(size: int, *, world: int = 8, steps: int = 3, workload: Workload = BASE, **plan: object) -> Program:
    workload = replace(workload, sequence_parallel_size=size)
    spec = model()
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0} | plan
    zero = DeepSpeedPlan(world_size=world, sequence_parallel_size=size, **settings)
    return lower(spec, trace(spec, workload), zero, workload, steps)


def shared_calls(lowered: Program, step: int) -> list[Collective]:
    launches = [i.op.work for i in lowered.steps[step] if isinstance(i, Launch)]
    return [work for work in launches if isinstance(work, Collective) and work.group == "sequence_parallel"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_ranks_of_a_sequence_do_the_work_of_one(size: int, checkpointing: str) -> None:
    alone = per_micro_batch(trace(model(), replace(BASE, checkpointing=checkpointing)))
    shared = per_micro_batch(trace(model(), replace(BASE, checkpointing=checkpointing, sequence_parallel_size=size)))
    assert [size * flops for flops in shared] == pytest.approx(list(alone))
    assert replace(BASE, sequence_parallel_size=size).tokens * size == BASE.tokens


def test_few_key_heads_are_held_by_several_ranks() -> None:
    """8 query heads on 8 ranks; 2 key heads, each on 4 of them: more bytes are exchanged, no more is computed."""
    spec, workload = model(num_key_value_heads=2), replace(BASE, sequence_parallel_size=8)
    local = BASE.micro_batch * BASE.seq_len // 8 * 32  # elements of a head
    exchanged = Counter(kernel.in_numel for kernel in exchanges(trace(spec, workload)) if kernel.kind == "all_to_all")
    assert exchanged == {8 * local: LAYERS * 4}  # queries, keys, values (2 heads four times), results


def exchanges(module: Module) -> list[object]:
    found = []
    for item in module.body:
        if isinstance(item, Compute):
            found += [kernel for kernel in item.forward if hasattr(kernel, "in_numel")]
        else:
            found += exchanges(item)
    return found


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("full", 2)])
def test_four_exchanges_an_attention(checkpointing: str, times: int) -> None:
    lowered = program(4, workload=replace(BASE, checkpointing=checkpointing))
    kinds = Counter((work.kind, work.dtype) for work in shared_calls(lowered, 1))  # a step without new samples
    assert kinds["all_to_all", "bfloat16"] == 4 * LAYERS * (times + 1)
    assert kinds["all_gather", "int64"] == LAYERS * times + 1  # positions; the counts of tokens
    assert kinds["all_gather", "float32"] == kinds["reduce_scatter", "float32"] == 1  # the loss


@pytest.mark.parametrize(
    ("size", "accumulation", "samples"),
    [(2, 1, [1, 0, 1]), (4, 1, [1, 0, 0]), (2, 2, [1, 1, 1]), (2, 3, [2, 1, 2]), (4, 2, [1, 0, 1])],
)
def test_samples_are_dealt_out_once_for_as_many_micro_steps_as_ranks(
    size: int, accumulation: int, samples: list[int]
) -> None:
    for stage in (2, 3):
        lowered = program(size, grad_accum=accumulation, stage=stage)
        tokens = BASE.micro_batch * BASE.seq_len
        gathered = [sum(work.in_numel == tokens for work in shared_calls(lowered, step)) for step in range(3)]
        assert gathered == [3 * each for each in samples]


def test_groups_are_neighbours_and_states_are_sharded_over_all_ranks() -> None:
    lowered, alone = program(4), program(1)
    assert lowered.groups["sequence_parallel"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "sequence_parallel" not in alone.groups

    def states(of: Program) -> int:
        held = [i for i in of.init if isinstance(i, Alloc) and i.category == "master_weights"]
        return sum(alloc.nbytes for alloc in held)

    assert states(lowered) == states(alone) > 0


@pytest.mark.parametrize(
    ("stage", "asked", "reduced"), [(3, None, "float32"), (3, "bfloat16", "bfloat16"), (2, "bfloat16", "float32")]
)
def test_gradients_travel_in_a_type_of_their_own(stage: int, asked: str | None, reduced: str) -> None:
    given = {"seq_parallel_communication_data_type": asked} if asked else {}
    lowered = program(2, stage=stage, **given)
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    works = [i.op.work for i in lowered.steps[-1] if isinstance(i, Launch) and isinstance(i.op.work, Collective)]
    found = {work.dtype for work in works if work.kind == kind and work.group == "world" and work.in_numel > 1000}
    assert found == {reduced}


def test_model_and_plan_must_agree() -> None:
    spec, workload = model(), replace(BASE, sequence_parallel_size=2)
    for plan in (DeepSpeedPlan(world_size=8, stage=3), Fsdp2Plan(world_size=8)):
        with pytest.raises(InputError, match="2 ranks share a sequence in the model and 1 in the plan"):
            lower(spec, trace(spec, workload), plan, workload)


def test_one_rank_of_each_class_tells_the_time_of_all() -> None:
    """Folded as every machine of equal GPUs is, and rank by rank, over two nodes."""
    cluster = load_topology(ROOT / "topologies" / "hgx_h100_8.yaml", 2)
    price = Price(cluster, load_profile("H100-SXM"))
    lowered = program(8, world=16)
    folded, apart = (run(lowered, [tuple(range(16))], price, fold=fold) for fold in (True, False))
    ends = [[span.end_s for span in each.steps if span.rank == 0] for each in (folded, apart)]
    assert ends[0] == pytest.approx(ends[1])
