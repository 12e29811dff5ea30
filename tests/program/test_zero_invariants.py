"""What holds for every Program of DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.program.sound import sound
from tests.program.zero_programs import PASSING, model_and_tree, modules, program_of
from zsim.program.ops import COMPUTE, Alloc, Free, Instruction, Launch

PLANS = st.fixed_dictionaries(
    {
        "world_size": st.sampled_from([1, 2, 3, 8]),
        "grad_accum": st.integers(1, 3),
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "communication_data_type": st.sampled_from([None, "float32"]),
        "grad_accum_dtype": st.sampled_from([None, "float32"]),
        "grad_clip": st.sampled_from([None, 1.0]),
        "reduce_bucket_size": st.sampled_from([1_000, 20_000, 10**8]),
        "overlap_comm": st.sampled_from([None, False, True]),
        "contiguous_gradients": st.booleans(),
        "reduce_scatter": st.booleans(),
        "round_robin_gradients": st.booleans(),
        "use_multi_rank_bucket_allreduce": st.booleans(),
        "offload_optimizer": st.sampled_from([None, "cpu"]),
        "offload_optimizer_pin_memory": st.booleans(),
    }
)
STAGE3 = st.fixed_dictionaries(
    {
        "sub_group_size": st.sampled_from([5_000, 10**9]),
        "stage3_prefetch_bucket_size": st.sampled_from([0, 15_000, 10**8]),
        "stage3_param_persistence_threshold": st.sampled_from([0, 100, 10**5]),
        "stage3_max_live_parameters": st.sampled_from([0, 30_000, 10**9]),
        "stage3_max_reuse_distance": st.sampled_from([0, 30_000, 10**9]),
        "stage3_allgather_sequential": st.booleans(),
        "use_all_reduce_for_fetch_params": st.booleans(),
        "zero_init": st.booleans(),
        "memory_efficient_linear": st.booleans(),
        "leaf_blocks": st.booleans(),
        "leaf_name_suffixes": st.sampled_from([(), ("mlp",)]),
        "stage3_module_granularity_threshold": st.sampled_from([0, 1]),
        "zero_hpz_partition_size": st.sampled_from([1, 2]),
        "zero_quantized_weights": st.booleans(),
        "zero_quantized_gradients": st.booleans(),
        "gpus_per_node": st.sampled_from([2, 4, 8]),
        "offload_param": st.sampled_from([None, "cpu"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(stage=st.sampled_from([0, 1, 2]), changes=PLANS, checkpointing=st.sampled_from(["none", "full"]))
def test_every_program_of_stages_0_to_2_is_sound(stage: int, changes: dict[str, Any], checkpointing: str):
    if stage == 0:
        changes = changes | {"offload_optimizer": None, "grad_accum_dtype": None}
    sound(program_of(stage, checkpointing=checkpointing, **changes), *PASSING)


@settings(max_examples=60, deadline=None)
@given(changes=PLANS, stage3=STAGE3, checkpointing=st.sampled_from(["none", "full"]))
def test_every_program_of_stage_3_is_sound_and_computes_with_gathered_parameters(
    changes: dict[str, Any], stage3: dict[str, Any], checkpointing: str
):
    if changes["world_size"] in (1, 3):  # shards of which 8 is no divisor, and no two to a node
        stage3 = stage3 | {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "gpus_per_node": None}
    if not changes["reduce_scatter"]:
        stage3 = stage3 | {"zero_quantized_gradients": False}
    program = program_of(3, checkpointing=checkpointing, **changes, **stage3)
    sound(program, *PASSING)
    if changes["world_size"] > 1 and not stage3["use_all_reduce_for_fetch_params"]:
        for instructions in program.steps:
            check_gathered(instructions, stage3["leaf_blocks"])


def check_gathered(instructions: Sequence[Instruction], leaf_blocks: bool) -> None:
    """A module's own kernels run only while its parameters are gathered."""
    owned = {name: module.params for name, module in modules(model_and_tree()[1])}
    full = set(range(len(model_and_tree()[0].parameters)))  # persistent ones are there from before
    seen: set[int] = set()
    for instruction in instructions:
        gathered = isinstance(instruction, Alloc | Free) and re.fullmatch(r"(?:full|regathered):(\d+)", instruction.key)
        if gathered and isinstance(instruction, Alloc):
            seen.add(int(gathered[1]))
        elif gathered:
            full.discard(int(gathered[1]))
            seen.discard(int(gathered[1]))
        elif isinstance(instruction, Launch) and instruction.op.lane == COMPUTE and instruction.op.module in owned:
            assert set(owned[instruction.op.module]) <= full | seen
