"""What holds for every Program of DDP, FSDP1 and FSDP2, whatever the setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.program.sound import CONFIG, LAYERS, sound
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.lower import lower
from zsim.program.ops import (
    COMPUTE,
    Alloc,
    Collective,
    Free,
    HostWait,
    Instruction,
    Launch,
    Program,
)
from zsim.program.optimizer import state_bytes


@cache
def model_and_tree(checkpointing: str = "none", frozen: bool = False) -> tuple[ModelSpec, Module, Workload]:
    model = from_config(CONFIG, "tiny")
    if frozen:
        kept = ("layers.2.", "norm", "lm_head")
        parameters = [replace(p, trainable=any(part in p.name for part in kept)) for p in model.parameters]
        model = replace(model, parameters=tuple(parameters))
    workload = Workload(1, 16, checkpointing=checkpointing)
    return model, trace(model, workload), workload


def program_of(plan: AnyPlan, checkpointing: str = "none", frozen: bool = False, steps: int = 5) -> Program:
    model, tree, workload = model_and_tree(checkpointing, frozen)
    return lower(model, tree, plan, workload, steps)


def collectives(instructions: Iterable[Instruction], phase: str | None = None) -> list[Collective]:
    return [
        i.op.work
        for i in instructions
        if isinstance(i, Launch) and isinstance(i.op.work, Collective) and phase in (None, i.op.phase)
    ]


FSDP2 = st.builds(
    Fsdp2Plan,
    world_size=st.just(4),
    grad_accum=st.integers(1, 3),
    grad_clip=st.sampled_from([None, 1.0]),
    optimizer=st.sampled_from(
        [Optimizer(), Optimizer(impl="foreach"), Optimizer("sgd", "loop", momentum=True), Optimizer("lion")]
    ),
    param_dtype=st.sampled_from(["bfloat16", "float32"]),
    reduce_dtype=st.sampled_from(["bfloat16", "float32", "float16"]),
    reshard_after_forward=st.sampled_from([True, False, 2]),
    root_reshard_after_forward=st.sampled_from([None, True, False]),
    mesh=st.sampled_from([None, (2, 2), (4, 1), (1, 4)]),
    prefetch=st.integers(0, 2),
    sync_only_last=st.booleans(),
    all_reduce_only_last=st.booleans(),
    reshard_backward_only_last=st.booleans(),
    last_backward_only_last=st.booleans(),
    grouping=st.sampled_from(["hf", "titan"]),
    cpu_offload=st.booleans(),
)
FSDP1 = st.builds(
    Fsdp1Plan,
    world_size=st.just(4),
    grad_accum=st.integers(1, 3),
    sharding_strategy=st.sampled_from(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    ),
    param_dtype=st.sampled_from(["bfloat16", "float32"]),
    reduce_dtype=st.sampled_from(["bfloat16", "float32"]),
    backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None]),
    forward_prefetch=st.booleans(),
    limit_all_gathers=st.booleans(),
    mesh=st.just((2, 2)),
    no_sync=st.booleans(),
    use_orig_params=st.booleans(),
    flat=st.booleans(),
    cpu_offload=st.booleans(),
)
DDP = st.builds(
    DdpPlan,
    world_size=st.just(4),
    grad_accum=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    autocast=st.sampled_from([None, "bfloat16"]),
    bucket_cap_mb=st.sampled_from([None, 0.05, 1, 1000]),
    find_unused_parameters=st.booleans(),
    static_graph=st.booleans(),
    gradient_as_bucket_view=st.booleans(),
    no_sync=st.booleans(),
).filter(lambda plan: not (plan.static_graph and plan.no_sync and plan.grad_accum > 1))
RUN = st.tuples(st.sampled_from(["none", "full"]), st.booleans())


@settings(max_examples=60, deadline=None)
@given(plan=st.one_of(FSDP2, FSDP1, DDP), run=RUN)
def test_every_program_is_consistent(plan: AnyPlan, run: tuple[str, bool]):
    sound(program_of(plan, *run), "unsharded:", "all-gather:")


@settings(max_examples=40, deadline=None)
@given(plan=st.one_of(FSDP2, FSDP1, DDP), run=RUN)
@example(plan=DdpPlan(world_size=4, static_graph=True), run=("none", False))
def test_the_last_step_can_be_repeated(plan: AnyPlan, run: tuple[str, bool]):
    model, tree, workload = model_and_tree(*run)
    program = lower(model, tree, plan, workload)
    sound(replace(program, steps=program.steps + program.steps[-1:] * 3), "unsharded:", "all-gather:")


@settings(max_examples=30, deadline=None)
@given(plan=FSDP2, run=RUN)
def test_fsdp2_reduces_every_trained_element_once_per_synchronization(plan: Fsdp2Plan, run: tuple[str, bool]):
    model, _, _ = model_and_tree(*run)
    program = program_of(plan, *run)
    shards = plan.mesh[1] if plan.mesh else plan.world_size
    scattered = sum(c.out_numel for c in collectives(program.steps[1], "backward") if c.kind == "reduce_scatter")
    expected = sum(-(-p.shape[0] // shards) * (p.numel // p.shape[0]) for p in model.parameters if p.trainable)
    times = 1 if plan.sync_only_last else plan.grad_accum
    assert scattered == (times * expected if shards > 1 else 0)


def test_fsdp2_checkpointing_adds_no_collective():
    plan = Fsdp2Plan(world_size=4)
    assert collectives(program_of(plan).steps[1]) == collectives(program_of(plan, "full").steps[1])


def test_fsdp2_gathers_overlap_and_compute_waits_for_them():
    """Backward of a block waits for its all-gather; the next one is issued before the block's compute."""
    instructions = program_of(Fsdp2Plan(world_size=4)).steps[1]
    ops = [i.op for i in instructions if isinstance(i, Launch)]
    gathers = [op for op in ops if op.label == "all-gather" and op.phase == "backward"]
    copies = {op.module: op for op in ops if op.label == "all-gather copy-out" and op.phase == "backward"}
    order = [op.module for op in gathers]
    assert order == [f"model.layers.{i}" for i in reversed(range(LAYERS))]
    for gather in gathers:
        assert gather.id in copies[gather.module].waits
    first_compute = {
        op.module.split(".self_attn")[0]: op.id
        for op in reversed(ops)
        if op.lane == COMPUTE and op.phase == "backward" and ".mlp" in op.module
    }
    for before, gather in pairwise(gathers):
        assert gather.id < min(i for name, i in first_compute.items() if name.startswith(before.module))


def test_collectives_of_one_communicator_keep_their_order():
    """A reduce-scatter waits for the all-gather issued before it on another stream, as NCCL makes it."""
    ops = [i.op for i in program_of(Fsdp2Plan(world_size=4)).steps[1] if isinstance(i, Launch)]
    world = [op for op in ops if isinstance(op.work, Collective)]
    for before, after in pairwise(world):
        assert before.lane == after.lane or before.id in after.waits


def test_hsdp_holds_what_it_all_reduces_until_backward_ends():
    """With a cast the all-reduced buffers stay alive (torch PR 180900); without one they are the gradients."""
    both = []
    for reduce_dtype in ("bfloat16", "float32"):
        plan = Fsdp2Plan(world_size=4, mesh=(2, 2), reduce_dtype=reduce_dtype)
        allocs = [i for i in program_of(plan).steps[1] if isinstance(i, Alloc) and i.key.startswith("reduce output:")]
        both.append(len(allocs))
    assert both == [LAYERS + 1, 0]


def test_cpu_offload_moves_every_shard_each_way():
    program = program_of(Fsdp2Plan(world_size=4, cpu_offload=True, offload_pin_memory=False))
    moved: Counter[str] = Counter()
    for instruction in program.steps[1]:
        if isinstance(instruction, Launch) and instruction.op.lane in ("h2d", "d2h"):
            moved[instruction.op.lane] += int(instruction.op.work.nbytes)  # type: ignore[union-attr]
    shards = sum(i.nbytes for i in program.init if isinstance(i, Alloc) and i.key.startswith("shard:"))
    root = next(i.nbytes for i in program.init if isinstance(i, Alloc) and i.key == "shard:")
    assert moved["d2h"] == shards
    assert moved["h2d"] == 2 * shards - root  # the root keeps its parameters
    assert all(i.device == "host" for i in program.init if isinstance(i, Alloc) and i.key.startswith("shard:"))


def test_fsdp1_blocks_the_host_at_two_gathers_in_flight():
    plan = Fsdp1Plan(world_size=4)
    waits = [i for i in program_of(plan).steps[1] if isinstance(i, HostWait)]
    assert waits
    free = program_of(replace(plan, limit_all_gathers=False)).steps[1]
    assert not [i for i in free if isinstance(i, HostWait)]


def peak(program: Program, category: str, step: int = 1) -> int:
    live = best = 0
    for instructions in (program.init, *program.steps[: step + 1]):
        sizes: dict[str, int] = {}
        for instruction in instructions:
            if isinstance(instruction, Alloc) and instruction.category == category:
                sizes[instruction.key] = instruction.nbytes
                live += instruction.nbytes
                best = max(best, live)
            elif isinstance(instruction, Free) and instruction.key in sizes:
                live -= sizes[instruction.key]
    return best


def test_ddp_gradients_exist_twice_unless_they_are_views():
    model, _, _ = model_and_tree()
    for view, expected in ((False, 4 * model.numel), (True, 4 * max(p.numel for p in model.parameters))):
        program = program_of(DdpPlan(world_size=4, gradient_as_bucket_view=view))
        assert peak(program, "gradients") == expected
        buckets = [i.nbytes for i in program.init if isinstance(i, Alloc) and i.key.startswith("bucket:")]
        assert sum(buckets) == 4 * model.numel


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Fsdp2Plan(world_size=8, mesh=(3, 2)), "mesh"),
        (Fsdp1Plan(world_size=4, sharding_strategy="FULL"), "sharding_strategy"),
        (DdpPlan(world_size=4, static_graph=True, grad_accum=2), "static_graph"),
    ],
)
def test_impossible_plans_are_input_errors(plan: AnyPlan, field: str):
    with pytest.raises(InputError) as error:
        program_of(plan)
    assert error.value.field == field


def test_ddp_fails_on_parameters_without_a_gradient_unless_it_looks_for_them():
    """DeepSeek-V3.2's indexers run without gradients, and have no states of the optimizer then."""
    latent = {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "index_n_heads": 2, "index_head_dim": 16,
    }  # fmt: skip
    model = from_config(CONFIG | latent | {"model_type": "deepseek_v32", "num_key_value_heads": 4}, "indexed")
    workload = Workload(1, 16, attention="sdpa", dtype="float32")
    tree = trace(model, workload)
    plan = DdpPlan(world_size=2, optimizer=Optimizer("adamw"))
    with pytest.raises(InputError, match=r"indexer\.wq_b\.weight gets no gradient") as error:
        lower(model, tree, plan, workload)
    assert error.value.field == "find_unused_parameters"
    trained = sum(p.numel for p in model.parameters if ".indexer." not in p.name)
    for found in (replace(plan, find_unused_parameters=True), replace(plan, static_graph=True)):
        steps = lower(model, tree, found, workload, steps=3).steps
        states = [op for op in steps[0] if isinstance(op, Alloc) and op.category == "optimizer_states"]
        assert 0 <= sum(op.nbytes for op in states) - 8 * trained < 8 * len(model.parameters)  # and numbers of steps


def test_tied_weights_in_two_groups_are_refused_as_fully_shard_does():
    model = from_config(CONFIG | {"tie_word_embeddings": True}, "tied")
    workload = Workload(1, 16)
    tree = trace(model, workload)
    lower(model, tree, Fsdp2Plan(world_size=4), workload)
    with pytest.raises(InputError, match=r"fsdp.grouping: .* shared by two groups"):
        lower(model, tree, Fsdp2Plan(world_size=4, grouping="titan"), workload)


def test_a_head_whose_bias_has_two_names_is_refused_as_fully_shard_does():
    """BERT's is that of its predictions and of the decoder in them; with the tied embedding it would be in a group."""
    encoder = {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    model, workload = from_config(encoder, "bert"), Workload(1, 16)
    tree = trace(model, workload)
    lower(model, tree, Fsdp2Plan(world_size=4), workload)
    with pytest.raises(InputError, match="bias is shared by two groups"):
        lower(model, tree, Fsdp2Plan(world_size=4, grouping="accelerate"), workload)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (DdpPlan(world_size=2, autocast="float16"), False),
        (Fsdp1Plan(world_size=2, param_dtype="float16"), True),
        (Fsdp2Plan(world_size=2, param_dtype="float16"), True),
        (Fsdp2Plan(world_size=2), False),
    ],
)
def test_the_scaler_of_float16_is_said_not_to_be_modeled(plan: AnyPlan, said: bool):
    assert any("GradScaler" in item for item in program_of(plan).not_modeled) == said


@pytest.mark.parametrize(("impl", "waits"), [("fused", 0), ("foreach", 1), ("loop", 1)])
def test_the_scaler_of_float16_under_ddp(impl: str, waits: int):
    """torch 2.13 amp/grad_scaler.py: one pass unscales all gradients; optimizers that cannot take `found_inf` wait."""
    steps = {
        dtype: program_of(DdpPlan(world_size=2, autocast=dtype, optimizer=Optimizer(impl=impl))).steps[-1]
        for dtype in ("float16", "bfloat16")
    }
    passes = {
        dtype: [i.op for i in step if isinstance(i, Launch) and i.op.label == "unscale"]
        for dtype, step in steps.items()
    }
    assert (len(passes["float16"]), len(passes["bfloat16"])) == (1, 0)
    (kernel,) = passes["float16"][0].work.kernels
    grads = sum(4 * p.numel for p in from_config(CONFIG, "small").parameters)
    assert (kernel.read_bytes, kernel.write_bytes) == (grads, grads)
    counts = {dtype: sum(isinstance(i, HostWait) for i in step) for dtype, step in steps.items()}
    assert counts["float16"] - counts["bfloat16"] == waits


def test_ddp_casts_the_weights_of_convolutions_under_autocast():
    """Whisper's two have biases, of one dimension: no product of theirs is cast for."""
    config = {
        "model_type": "whisper", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80,
        "vocab_size": 256, "max_source_positions": 32, "max_target_positions": 16,
    }  # fmt: skip
    model, workload = from_config(config, "whisper"), Workload(1, 32, target_len=8)
    step = lower(model, trace(model, workload), DdpPlan(world_size=2, autocast="bfloat16"), workload).steps[-1]
    cast = {i.key: i.nbytes for i in step if isinstance(i, Alloc) and i.key.startswith("cast:")}
    convolutions = {f"cast:{i}": p for i, p in enumerate(model.parameters) if p.module_class == "Conv1d"}
    weights = {key: 2 * p.numel for key, p in convolutions.items() if len(p.shape) > 1}
    assert sorted(weights.values()) == [2 * 3 * 64 * 64, 2 * 3 * 64 * 80]
    assert {key: cast[key] for key in convolutions if key in cast} == weights


def test_unknown_optimizers_are_not_modeled():
    with pytest.raises(NotModeled, match="shampoo"):
        program_of(DdpPlan(world_size=2, optimizer=Optimizer("shampoo")))


def states(optimizer: Optimizer) -> int:
    program = program_of(DdpPlan(world_size=2, optimizer=optimizer))
    return sum(
        i.nbytes
        for i in program.steps[0]
        if isinstance(i, Alloc) and i.category == "optimizer_states" and "steps" not in i.key
    )


def test_optimizer_states():
    model, _, _ = model_and_tree()
    n = model.numel
    assert states(Optimizer("adamw")) == 8 * n
    assert states(Optimizer("sgd", momentum=True)) == states(Optimizer("lion")) == 4 * n
    assert states(Optimizer("sgd")) == 0
    assert 2 * n < states(Optimizer("adamw8bit")) < 4 * n  # small tensors keep float32 states
    assert states(Optimizer("adafactor")) < n / 5


@pytest.mark.parametrize(("size", "nbytes"), [(2, 4_082_792), (4, 8_115_560)])
def test_four_bit_states_as_torchao_makes_them(size: int, nbytes: int) -> None:
    """Counted of the tensors of torchao 0.18's AdamW4bit: of whole blocks alone, others as the parameter is."""
    numels = [64 * 64, 4095, 4224, 4097, 128 * 300, 1000 * 1000]
    assert state_bytes(Optimizer("adamw4bit"), numels, size) == nbytes


@pytest.mark.parametrize("optimizer", [Optimizer("adamw"), Optimizer("adamw", impl="foreach")])
def test_states_and_lists_of_temporaries_are_tensors_like_the_parameters(optimizer: Optimizer) -> None:
    """Parameter by parameter: torch makes both moments of one before it comes to the next."""
    program = program_of(DdpPlan(world_size=2, optimizer=optimizer))
    numels = [parameter.numel for parameter in model_and_tree()[0].parameters]
    states = next(i for i in program.steps[0] if isinstance(i, Alloc) and i.key == "optimizer_states")
    assert states.tensors == tuple(4 * n for n in numels for _ in range(2))
    update = next(i.op for i in program.steps[1] if isinstance(i, Launch) and i.op.label == "adamw")
    own = [nbytes for _, nbytes in update.temp_tensors[len(update.temp_left) :]]
    assert own == ([4 * n for n in numels] if optimizer.impl == "foreach" else [])


def test_foreach_adamw_needs_one_more_copy_fused_none():
    for impl, expected in (("fused", 0), ("foreach", 4)):
        program = program_of(DdpPlan(world_size=2, optimizer=Optimizer(impl=impl)))
        model, _, _ = model_and_tree()
        update = next(i.op for i in program.steps[1] if isinstance(i, Launch) and i.op.label == "adamw")
        assert update.temp_peak - update.temp_live == expected * model.numel
