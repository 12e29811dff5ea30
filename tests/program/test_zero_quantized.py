"""ZeRO++ and leaf modules: what travels, in which groups, and what DeepSpeed fails with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Collective, Free, Launch, Program
from zsim.program.zero3_quantized import scales_of

LAYERS = 3
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 304, "tie_word_embeddings": False,
}  # fmt: skip
QUANTIZED = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True, "gpus_per_node": 4, "world_size": 8}
MICS = {"mics_shard_size": 4, "version": "0.18.9", "world_size": 8}
STORED = {"zero_quantized_nontrainable_weights": True}


@cache
def model_and_tree() -> tuple[ModelSpec, Module, Workload]:
    model, workload = from_config(CONFIG, "tiny"), Workload(1, 16)
    return model, trace(model, workload), workload


def program_of(frozen: str | None = None, **changes: Any) -> Program:
    model, tree, workload = model_and_tree()
    if frozen:
        parameters = tuple(replace(p, trainable=frozen not in p.name) for p in model.parameters)
        model = replace(model, parameters=parameters)
        tree = trace(model, workload)
    settings = {
        "world_size": 4, "stage": 3, "reduce_bucket_size": 20_000, "stage3_max_live_parameters": 30_000,
        "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 100,
    }  # fmt: skip
    return lower(model, tree, DeepSpeedPlan(**settings | changes), workload, 3)


def moved(program: Program, *phases: str) -> Counter[tuple[str, str]]:
    """Bytes of the last step's calls by (kind, dtype)."""
    found: Counter[tuple[str, str]] = Counter()
    for instruction in program.steps[-1]:
        if isinstance(instruction, Launch) and isinstance(instruction.op.work, Collective):
            work = instruction.op.work
            if instruction.op.phase in phases:
                found[work.kind, work.dtype] += int(work.payload_bytes)
    return found


@given(eights=st.integers(1, 20_000))
def test_groups_are_as_few_as_hold_at_most_8000_weights_in_multiples_of_8(eights: int):
    """DeepSpeed counts up from numel / 8000 until 8 times the number of groups divides numel."""
    numel = 8 * eights
    groups = next(count for count in range(ceil(numel / 8000), numel) if numel % (8 * count) == 0) if eights > 1 else 1
    assert scales_of(numel) == groups


def test_what_8_does_not_divide_is_refused():
    with pytest.raises(InputError, match="multiples of 8, and a rank's share is 1,004"):
        scales_of(1004)
    with pytest.raises(InputError, match="multiples of 8"):
        program_of(world_size=3, **QUANTIZED)


def test_gathers_move_half_the_bytes_and_scales():
    plain, quantized = program_of(zero_init=True), program_of(zero_init=True, **QUANTIZED)
    before, after = (moved(program, "forward", "recompute", "backward") for program in (plain, quantized))
    assert after["all_gather", "int8"] * 2 == before["all_gather", "bfloat16"]
    assert 0 < after["all_gather", "float32"] < 0.05 * after["all_gather", "int8"]
    assert after["all_gather", "bfloat16"] == 0
    assert moved(quantized, "optimizer") == moved(plain, "optimizer")  # persistent parameters come back as they are


def test_gradients_cross_the_network_once_per_node_in_four_bits():
    plain, quantized = program_of(world_size=8), program_of(**GRADIENTS)
    gradients = moved(plain, "backward")["reduce_scatter", "bfloat16"]
    calls = [
        instruction.op.work
        for instruction in quantized.steps[-1]
        if isinstance(instruction, Launch) and isinstance(instruction.op.work, Collective)
    ]
    by_group: Counter[str] = Counter()
    for work in calls:
        if work.kind == "all_to_all" and work.dtype == "int8":
            by_group[work.group] += work.in_numel
    matrices = gradients - 2 * 64 * (2 * LAYERS + 1)  # the norms' go as ever
    assert by_group["node"] == matrices / 4
    assert by_group["across nodes"] == matrices / 4 / 4
    assert quantized.groups["node"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert quantized.groups["across nodes"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert moved(quantized, "backward")["reduce_scatter", "bfloat16"] == 2 * 64 * (2 * LAYERS + 1)


def test_within_one_node_nothing_is_reduced_in_four_bits():
    for gpus_per_node in (8, 16, None):
        one = program_of(**GRADIENTS | {"gpus_per_node": gpus_per_node})
        assert one.steps == program_of(world_size=8).steps
        assert set(one.groups) == {"world", "world's clone"}


def test_nodes_have_to_be_full():
    with pytest.raises(InputError, match="12 ranks do not fill nodes of 8"):
        program_of(**GRADIENTS | {"world_size": 12, "gpus_per_node": 8})
    assert program_of(**GRADIENTS | {"world_size": 4, "gpus_per_node": 8}).groups.keys() == {"world", "world's clone"}


def test_mics_shards_within_groups_and_reduces_between_them_once_per_step():
    plain = program_of(world_size=4, version="0.18.9", grad_accum=2)
    mics = program_of(**MICS, grad_accum=2)
    assert (mics.groups["shards"], mics.groups["replicas"]) == (
        ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)),
    )  # fmt: skip
    for kind in ("all_gather", "reduce_scatter"):
        assert (
            moved(mics, "forward", "backward")[kind, "bfloat16"]
            == moved(plain, "forward", "backward")[kind, "bfloat16"]
        )
    shards = sum(ceil(parameter.numel / 4) for parameter in model_and_tree()[0].parameters)
    assert moved(mics, "backward")["all_reduce", "bfloat16"] == 2 * shards  # of two micro-steps


def test_frozen_weights_are_kept_in_eight_bits():
    alone = {"stage3_allgather_sequential": True}
    whole, stored = program_of("mlp", **alone), program_of("mlp", **alone, **STORED)
    mlp = LAYERS * 3 * 64 * 112 // 4  # elements per rank

    def shards(program: Program) -> int:
        return next(i.nbytes for i in program.init if isinstance(i, Alloc) and i.key == "parameter shards")

    scales = LAYERS * 3 * 4 * scales_of(64 * 112 // 4)
    assert shards(whole) - shards(stored) == mlp - scales
    assert moved(stored, "forward")["all_gather", "int8"] > 0
    assert program_of("mlp", zero_init=True, **STORED).steps == program_of("mlp", zero_init=True).steps


@pytest.mark.parametrize(
    ("frozen", "changes", "error", "message"),
    [
        ("mlp", STORED, InputError, "several int8 weights at once"),
        ("mlp", STORED | {"offload_param": "cpu"}, NotModeled, "quantized frozen weights on the CPU"),
        (None, GRADIENTS | {"reduce_scatter": False}, InputError, "need it, as DeepSpeed says"),
        (None, {"zero_hpz_partition_size": 2, "offload_optimizer": "nvme", "offload_param": "nvme"}, InputError, "hpZ"),
        (None, MICS | {"version": "0.19.7"}, InputError, "has removed MiCS"),
        (None, MICS | {"world_size": 6}, InputError, "4 does not divide the 6 ranks"),
        (None, MICS | {"offload_optimizer": "cpu"}, InputError, "several groups of shards cannot offload"),
        (None, MICS | QUANTIZED, NotModeled, "MiCS with parameters on the CPU, or with"),
        (None, MICS | {"mics_hierarchical_params_gather": True}, NotModeled, r"fails with torch 2\.1 and later"),
        (None, {"stage3_module_granularity_threshold": 10**9}, InputError, r"the whole model \(LlamaForCausalLM\)"),
        (None, {"leaf_classes": ("LlamaAttention",)}, InputError, r"self_attn \(LlamaAttention\) cannot be a leaf"),
        ("embed_tokens", {"leaf_names": ("model.layers.0.input_layernorm",)}, InputError, "cannot be a leaf"),
        (None, {"leaf_name_suffixes": ("layers",)}, InputError, "model.layers holds modules and is never called"),
        (None, {"leaf_classes": ("ModuleList",)}, InputError, "ModuleList holds modules"),
    ],
)
def test_what_deepspeed_fails_with(frozen: str | None, changes: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        program_of(frozen, **changes)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"mics_shard_size": 3, "world_size": 8}, "1, 2, 4, 8"),
        ({"offload_optimizer": "cpu"}, f"{MICS['world_size']}, or no offload_optimizer"),
        (QUANTIZED, "null (no MiCS), or neither offload_param nor zero_quantized_* nor zero_hpz_partition_size"),
    ],
)
def test_a_refusal_of_mics_says_what_is_accepted(changes: dict[str, Any], accepted: str):
    with pytest.raises(InputError) as refused:
        program_of(None, **(MICS | changes))
    assert (refused.value.field, refused.value.accepted) == ("zero.mics_shard_size", accepted)


def gathers(program: Program) -> list[int]:
    """Elements of each call of the first step's forward, where nothing is prefetched."""
    return [
        instruction.op.work.in_numel
        for instruction in program.steps[0]
        if isinstance(instruction, Launch)
        and isinstance(instruction.op.work, Collective)
        and (instruction.op.phase, instruction.op.work.kind) == ("forward", "all_gather")
    ]


def test_a_leaf_is_named_by_class_by_name_and_by_the_end_of_a_name():
    mlp = 3 * 64 * 112 // 4
    assert gathers(program_of()).count(mlp) == 0
    whole = "transformers.models.llama.modeling_llama.LlamaMLP"
    for changes in ({"leaf_classes": ("LlamaMLP",)}, {"leaf_classes": (whole,)}, {"leaf_name_suffixes": (".mlp",)}):
        assert gathers(program_of(**changes)).count(mlp) == LAYERS
    assert gathers(program_of(leaf_names=("model.layers.1.mlp",))).count(mlp) == 1
    assert gathers(program_of(leaf_classes=("my.models.LlamaMLP",))).count(mlp) == 0


def test_leaf_modules_that_match_nothing_are_named_as_deepspeed_warns_of_them():
    none = "zero.leaf_module has no effect: it did not match any modules, of which DeepSpeed warns"
    name = "zero.leaf_module.names: no module is called model.head; DeepSpeed warns, and goes on"
    suffix = "zero.leaf_module.name_suffixes: no module's name ends in .experts; DeepSpeed warns, and goes on"
    assert program_of().assumptions == ()  # DeepSpeed's own classes may match nothing
    assert program_of(leaf_classes=("Foo",)).assumptions == (none,)
    assert program_of(leaf_classes=("Foo", "LlamaMLP")).assumptions == ()
    assert program_of(leaf_names=("model.head",)).assumptions == (name, none)
    assert program_of(leaf_names=("model.head", "model.layers.1.mlp")).assumptions == (name,)
    assert program_of(leaf_name_suffixes=(".experts", ".mlp")).assumptions == (suffix,)


def test_parameters_of_coarse_leaves_go_without_waiting_for_what_reads_them():
    """Blocks have 33,920 / 12 = 2,826 parameters per layer, their attention 2,457, the model as a whole 3,040."""
    coarse, leaf = program_of(stage3_module_granularity_threshold=2900), program_of(leaf_blocks=True)
    block = sum(p.numel for p in model_and_tree()[0].parameters if ".layers.0." in p.name) // 4
    assert gathers(coarse).count(block) == LAYERS
    assert gathers(coarse) == gathers(leaf)

    def waiting(program: Program) -> Counter[bool]:
        frees = (i for i in program.steps[-1] if isinstance(i, Free) and i.key.startswith("full:"))
        return Counter(free.after is not None for free in frees)

    assert waiting(coarse)[False] > 0
    assert waiting(leaf)[False] == 0
