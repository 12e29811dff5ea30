"""Optimizer, gradients and parameters outside the GPU: what moves where, what the host holds, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from tests.program.offloaded import MODEL, OWNED, WORKLOAD, WORLD, adam, held, moved, program, work
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_architecture
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.activations import StreamedTensors
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.lower import lower
from zsim.program.ops import COMPUTE, RANK_0, Alloc, Compute, Copy, CpuWork, Free, Launch, Program
from zsim.program.optimizer import LOOP_ON_CPU


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 4096, 4097, 18_800_000_000)] == [0, 1, 4096, 8192, 1 << 35]


def test_on_one_gpu_offloaded_parameters_come_up_as_they_are() -> None:
    """NoGatherHandle: nothing is gathered, yet each module waits for its copy, and gives it up again."""
    plan = DeepSpeedPlan(
        world_size=1, stage=3, offload_optimizer="cpu", offload_param="cpu", optimizer=Optimizer(impl="cpu"),
        stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0,
    )  # fmt: skip
    run = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)
    # the last thing that forward needs is the first that backward needs
    assert moved(run)["h2d", "forward"] == 2 * MODEL.numel
    most, live = 0, 0
    sizes: dict[str, int] = {}
    for instruction in run.steps[-1]:
        if isinstance(instruction, Alloc) and instruction.key.startswith("full:"):
            sizes[instruction.key] = instruction.nbytes
        elif isinstance(instruction, Free):
            sizes.pop(instruction.key, None)
        live = sum(sizes.values())
        most = max(most, live)
    assert not live
    assert 0 < most < 2 * MODEL.numel


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
        ({"offload_optimizer": "nvme", "offload_optimizer_pipeline_read": True}, InputError),
        (
            {
                "offload_optimizer": "nvme",
                "offload_optimizer_pipeline_read": True,
                "offload_optimizer_pipeline_write": True,
                "offload_optimizer_buffer_count": 11,
            },
            InputError,
        ),
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


def at_load(plan: AnyPlan) -> dict[str, tuple[str, int]]:
    run = lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)
    keys = ("checkpoint", "checkpoint file")
    return {i.key: (i.category, i.nbytes) for i in run.init if isinstance(i, Alloc) and i.key in keys}


def test_older_releases_read_whole_files_of_a_checkpoint() -> None:
    """transformers 4.34 and older: torch.load of a file of at most 10 GB beside the model, also under zero.Init."""
    two, four = 2 * MODEL.numel, 4 * MODEL.numel
    old = at_load(DeepSpeedPlan(world_size=2, stage=2, version="0.10.3"))
    assert old == {"checkpoint": ("checkpoint", two), "checkpoint file": ("checkpoint", two)}
    assert at_load(DeepSpeedPlan(world_size=2, stage=2, version="0.11.0")) == {"checkpoint": ("checkpoint", two)}
    under_init = DeepSpeedPlan(world_size=2, stage=3, zero_init=True, version="0.10.3")
    assert at_load(under_init) == {"checkpoint": ("checkpoint", two)}
    assert at_load(replace(under_init, version="0.11.0")) == {"checkpoint": (RANK_0, two)}
    # what FSDP1 keeps in float32 was loaded so, before accelerate converted it
    assert at_load(Fsdp1Plan(world_size=2, version="2.0.1"))["checkpoint"] == ("checkpoint", four)
    assert at_load(Fsdp1Plan(world_size=2)) == {"checkpoint": ("checkpoint", two)}


def test_pinned_memory_is_rounded_from_torch_1_11_on() -> None:
    """THCCachingHostAllocator.cpp takes what is asked for; DeepSpeed before 0.6 ran on it."""
    options = {"offload_param": "cpu", "offload_optimizer": "cpu", "offload_optimizer_pin_memory": True}
    shards = 2 * OWNED
    assert held(program(**options, version="0.5.9"), "host")["parameters"] == shards
    assert held(program(**options, version="0.6.0"), "host")["parameters"] == pinned_bytes(shards) > shards


@pytest.mark.parametrize(
    "plan",
    [
        Fsdp1Plan(world_size=2, cpu_offload=True, optimizer=Optimizer("adamw8bit")),
        Fsdp2Plan(world_size=2, cpu_offload=True, optimizer=Optimizer("adamw8bit")),
        Fsdp2Plan(world_size=2, cpu_offload=True, optimizer=Optimizer("adamw4bit")),
        DeepSpeedPlan(world_size=2, stage=2, offload_optimizer="cpu", optimizer=Optimizer("adamw8bit", "cpu")),
        DeepSpeedPlan(world_size=2, stage=3, offload_optimizer="cpu", optimizer=Optimizer("adamw8bit", "cpu")),
    ],
)
def test_an_optimizer_in_few_bits_is_not_one_of_the_cpu(plan) -> None:
    with pytest.raises(NotModeled, match=r"[84]-bit Adam on host tensors"):
        lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)


@pytest.mark.parametrize(
    "plan",
    [
        DdpPlan(world_size=2, offload_activations="blocking"),
        Fsdp1Plan(world_size=2, offload_activations="blocking"),
        Fsdp2Plan(world_size=2, offload_activations="blocking"),
        DeepSpeedPlan(world_size=2, stage=2, offload_activations="blocking"),
        DeepSpeedPlan(world_size=2, stage=3, offload_activations="blocking"),
    ],
)
def test_inputs_of_checkpointed_blocks_wait_on_the_host(plan) -> None:
    """Unsloth's checkpointer: down before a block runs, up before it runs again, none left on the GPU in between."""
    workload = Workload(1, 16, checkpointing="full")
    run = lower(MODEL, trace(MODEL, workload), plan, workload)
    inputs = 4 * 16 * 64 * 2  # blocks x tokens x hidden x bfloat16
    assert moved(run)["d2h", "forward"] == inputs
    assert moved(run)["h2d", "recompute"] == inputs
    on_gpu, on_host = set(), 0
    for instruction in run.steps[-1]:
        if isinstance(instruction, Alloc) and instruction.key.startswith("saved:0:model.layers"):
            on_gpu.add(instruction.key)
        elif isinstance(instruction, Alloc) and instruction.key.startswith("input on host"):
            on_host += instruction.nbytes
        elif isinstance(instruction, Free):
            on_gpu.discard(instruction.key)
        elif isinstance(instruction, Launch) and instruction.op.label == "cross_entropy":
            assert not on_gpu
            assert on_host == inputs  # powers of two already
    assert "activations" not in held(run, "host", until=2)


@pytest.mark.parametrize(
    "plan",
    [
        DdpPlan(world_size=2, offload_activations="stream"),
        Fsdp1Plan(world_size=2, offload_activations="stream"),
        Fsdp2Plan(world_size=2, offload_activations="stream", grad_accum=2),
        DeepSpeedPlan(world_size=2, stage=3, offload_activations="stream"),
    ],
)
def test_saved_tensors_leave_on_a_stream_of_their_own(plan) -> None:
    """OffloadActivations: the last five saved tensors stay, among them those of the loss; what left comes back once."""
    workload = Workload(1, 1024, checkpointing="full")
    run = lower(MODEL, trace(MODEL, workload), plan, workload)
    block = 1024 * 64 * 2  # its input in bfloat16
    down, up = moved(run)["d2h", "forward"], moved(run)["h2d", "backward"]
    assert down > (4 * block + 4 * 1024 * 256) * plan.grad_accum  # with the loss's float32 logits
    # of what stays the loss's, the norm's and blocks' inputs take turns: two tensors and two
    assert 4 * block * plan.grad_accum <= up < down - 4 * 1024 * 256 * plan.grad_accum
    away = set()
    for instruction in run.steps[-1]:
        if isinstance(instruction, Alloc) and instruction.key.startswith("on host:"):
            away.add(instruction.key)
        elif isinstance(instruction, Free):
            away.discard(instruction.key)
    assert not away


def test_stash_of_offloaded_tensors() -> None:
    """Of twelve saved tensors five stay; backward finds them, and the others come up, each after the one before."""
    builder = Builder()
    streamed = StreamedTensors(builder, 0)
    keys = [f"saved:{index}" for index in range(12)]
    for key in keys:
        builder.alloc(key, "activations", 4096)
        builder.launch(COMPUTE, "kernel", "forward", Compute(()))
        streamed.pack(key, "activations", (4096,))
    builder.alloc("small", "activations", 512)
    streamed.pack("small", "activations", (512,))
    freed = [i.key for i in builder.instructions if isinstance(i, Free)]
    assert freed == keys[:7]
    for key in reversed(keys):
        streamed.unpack(key)
        builder.launch(COMPUTE, "kernel", "backward", Compute(()))
        builder.free(key)
    up = [i.op for i in builder.instructions if isinstance(i, Launch) and i.op.label == "saved from host"]
    assert len(up) == 7
    # the tensor before is used by the kernel issued just before it was asked for, two ops before this copy
    assert all(later.id - 3 in later.waits for later in up[1:])
    hosted = {i.key for i in builder.instructions if isinstance(i, Alloc) and i.device == "host"}
    assert hosted == {f"on host:{key}" for key in keys} <= {i.key for i in builder.instructions if isinstance(i, Free)}


def test_torchs_loop_on_the_cpu_is_five_to_seven_times_slower_than_one_pass() -> None:
    """arXiv 2101.06840: 5.0 to 6.3 times; DeepSpeed PR 735: 6.8. It needs two temporaries, and counters."""

    def run(impl: str) -> Program:
        plan = DeepSpeedPlan(world_size=WORLD, stage=2, offload_optimizer="cpu", optimizer=Optimizer(impl=impl))
        return lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)

    own, fused, loop = run("cpu"), run("fused"), run("loop")
    assert work(own, "adamw") == work(fused, "adamw") == 28 * ceil(MODEL.numel / WORLD)
    assert 5 < work(loop, "adamw") / work(own, "adamw") < 7
    assert LOOP_ON_CPU > 1
    temporaries = [i.nbytes for i in loop.steps[-1] if isinstance(i, Alloc) and i.key.endswith("_temporaries")]
    assert temporaries == [2 * 4 * ceil(MODEL.numel / WORLD)]
    counters = [held(program, "host")["optimizer_states"] % 8 for program in (own, fused, loop)]
    assert counters == [0, 4, 4]


def test_until_0_15_4_stage_3_converts_gradients_on_the_host_as_they_come() -> None:
    """DeepSpeed pull request 6670: blocking copies of bfloat16, pageable in any case, in the last micro-step alone."""

    def run(version: str) -> Program:
        plan = DeepSpeedPlan(world_size=WORLD, stage=3, offload_optimizer="cpu", grad_accum=2, version=version)
        return lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)

    old, new = run("0.15.3"), run("0.15.4")
    shards = sum(ceil(parameter.numel / WORLD) for parameter in MODEL.parameters)
    assert work(old, "cast") - work(new, "cast") == 6 * shards
    copies = [i.op for i in old.steps[-1] if isinstance(i, Launch) and isinstance(i.op.work, Copy)]
    pageable = [op.work.nbytes for op in copies if op.phase == "backward" and not op.work.pinned]
    assert sum(pageable) == 2 * shards
    assert {op.micro for op in copies if op.phase == "backward" and not op.work.pinned} == {1}


@pytest.mark.parametrize(("offload_param", "bytes_each"), [("cpu", 4 + 2), (None, 4 + 2 + 9.5 * 2)])
def test_a_large_new_tensor_on_the_host_costs_its_pages(offload_param: str | None, bytes_each: float) -> None:
    """Parameters that go to the GPU are converted into a new tensor, those that stay on the host into their own."""
    large = from_architecture("large", replace(MODEL.arch, hidden=512, vocab=40_000))
    plan = DeepSpeedPlan(world_size=1, stage=3, offload_optimizer="cpu", offload_param=offload_param)
    program = lower(large, trace(large, WORKLOAD), plan, WORKLOAD)
    assert work(program, "cast") == pytest.approx(bytes_each * large.numel)


@pytest.mark.parametrize("pinned", [False, True])
def test_frozen_shards_on_the_host_are_not_copied_to_the_flat_ones(pinned: bool) -> None:
    """_create_param_groups_fp16_flat_cpu_memory goes over trainable_param_groups; the others stay as they were cut."""
    frozen = {p.name for p in MODEL.parameters[:3]}
    model = replace(MODEL, parameters=tuple(replace(p, trainable=p.name not in frozen) for p in MODEL.parameters))
    plan = DeepSpeedPlan(world_size=2, stage=3, zero_init=True, offload_param="cpu", offload_param_pin_memory=pinned)
    run = lower(model, trace(model, WORKLOAD), plan, WORKLOAD)
    host = {i.key: i.nbytes for i in run.init if isinstance(i, Alloc) and i.device == "host"}
    own = {p.name: pinned_bytes(p.numel) if pinned else p.numel for p in MODEL.parameters}  # half of 2 bytes each
    assert host["frozen shards"] == sum(own[name] for name in frozen)
    assert host["parameter shards"] == pinned_bytes(sum(p.numel for p in MODEL.parameters if p.name not in frozen))
    assert host.get("shards as first pinned", 0) == pinned * sum(own[n] for n in own if n not in frozen)


@pytest.mark.parametrize(("stage", "pinned"), [(2, (8, 12, 6)), (3, (8, 4, 0))])
def test_what_a_process_pins(stage: int, pinned: tuple[int, int, int]) -> None:
    """Stages 1 and 2: master weights, their gradients and the copy in 16 bits. Stage 3: gradients."""
    for pin, expected in ((True, pinned), (False, (0, 0, 0))):
        plan = DeepSpeedPlan(
            world_size=1, stage=stage, offload_optimizer="cpu", offload_optimizer_pin_memory=pin, grad_clip=1.0,
            optimizer=Optimizer(impl="cpu"),
        )  # fmt: skip
        launched = [
            i.op.work for i in lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD).steps[-1] if isinstance(i, Launch)
        ]
        found = {work.label: work.pinned / work.numel for work in launched if isinstance(work, CpuWork)}
        assert [found[label] for label in ("scale", "adamw", "cast")] == pytest.approx(list(expected))
