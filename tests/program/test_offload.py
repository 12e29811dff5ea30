"""Optimizer, gradients and parameters outside the GPU: what moves where, what the host holds, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import ceil

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.huggingface import from_architecture
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.activations import StreamedTensors
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.lower import lower
from zsim.program.ops import COMPUTE, CPU, RANK_0, Alloc, Compute, Copy, CpuWork, Free, HostWait, Launch, Program
from zsim.program.optimizer import LOOP_ON_CPU

WORLD = 2
WORKLOAD = Workload(1, 16)
MODEL = from_architecture(
    "small",
    Architecture(
        family="llama", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
        kinds=(LayerKind(),) * 4, tied=False,
    ),
)  # fmt: skip
OWNED = sum(ceil(parameter.numel / WORLD) for parameter in MODEL.parameters)  # elements of one rank's shards


def program(model: ModelSpec = MODEL, workload: Workload = WORKLOAD, **options) -> Program:
    plan = DeepSpeedPlan(
        world_size=WORLD, stage=3, optimizer=Optimizer(impl="cpu"), sub_group_size=20_000, **options
    )  # fmt: skip
    return lower(model, trace(model, workload), plan, workload)


def moved(program: Program, step: int = -1) -> dict[tuple[str, str], float]:
    """Bytes by (direction, phase) in one step."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for instruction in program.steps[step]:
        if isinstance(instruction, Launch) and isinstance(instruction.op.work, Copy):
            total[instruction.op.work.direction, instruction.op.phase] += instruction.op.work.nbytes
    return total


def held(program: Program, device: str, until: int = 1) -> dict[str, int]:
    """Bytes by category after initialization and the first steps."""
    live: dict[str, Alloc] = {}
    for part in (program.init, *program.steps[:until]):
        for instruction in part:
            if isinstance(instruction, Alloc):
                live[instruction.key] = instruction
            elif isinstance(instruction, Free):
                live.pop(instruction.key)
    total: dict[str, int] = defaultdict(int)
    for alloc in live.values():
        if alloc.device == device:
            total[alloc.category] += alloc.nbytes
    return total


def adam(program: Program) -> int:
    """Parameters that the CPU's optimizer updates in a step."""
    works = [i.op.work for i in program.steps[-1] if isinstance(i, Launch) and i.op.lane == CPU]
    return sum(work.numel for work in works if isinstance(work, CpuWork) and work.label == "adamw")


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 4096, 4097, 18_800_000_000)] == [0, 1, 4096, 8192, 1 << 35]


@pytest.fixture
def all_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size, for a small model."""
    monkeypatch.setattr("zsim.program.nvme.min_swapped_bytes", lambda plan: 0)


@pytest.mark.usefixtures("all_swapped")
def test_nvme_moves_sixteen_bytes_in_and_twelve_out_per_parameter() -> None:
    """Weights, both moments and gradients are read; the gradients, written in backward, are not written again."""
    found = moved(program(offload_optimizer="nvme"))
    assert found["nvme_read", "optimizer"] == 16 * OWNED
    assert found["nvme_write", "optimizer"] == 12 * OWNED
    assert found["nvme_write", "backward"] == 4 * OWNED


def test_gradients_below_a_mebibyte_are_not_swapped() -> None:
    """They stay on the GPU in float32 until their sub-group's update (swap_tensor/optimizer_utils.py)."""
    run = program(offload_optimizer="nvme")
    found = moved(run)
    assert found["nvme_write", "backward"] == 0
    assert found["nvme_read", "optimizer"] == 12 * OWNED
    assert found["d2h", "optimizer"] == 4 * OWNED
    sizes = {i.key: i.nbytes for i in run.steps[-1] if isinstance(i, Alloc) and i.key.startswith("unswapped")}
    assert sum(sizes.values()) == 4 * OWNED
    assert "gradients" not in held(run, "nvme")


@pytest.mark.usefixtures("all_swapped")
def test_before_the_first_update_there_are_no_moments_to_read() -> None:
    run = program(offload_optimizer="nvme")
    assert moved(run, step=0)["nvme_read", "optimizer"] == 8 * OWNED
    made = [i.nbytes for i in run.steps[0] if isinstance(i, Alloc) and i.key.startswith("new moments")]
    assert sum(made) == 8 * OWNED


@pytest.mark.usefixtures("all_swapped")
def test_nvme_holds_states_and_gradients_and_the_host_a_few_buffers() -> None:
    run = program(offload_optimizer="nvme", offload_optimizer_buffer_count=5)
    assert held(run, "nvme") == {"optimizer_states": 12 * OWNED, "gradients": 4 * OWNED}
    host = held(run, "host")
    assert host["master_weights"] == 0
    largest = max(work.numel for i in run.steps[-1] if isinstance(i, Launch) for work in [i.op.work] if _is_adam(work))
    assert host["buffers"] == 5 * ceil(4 * largest / 1024) * 1024  # AIO_ALIGNED_BYTES


def _is_adam(work: object) -> bool:
    return isinstance(work, CpuWork) and work.label == "adamw"


SWAPPED = {
    "offload_param": "nvme", "offload_optimizer": "nvme", "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}  # fmt: skip


@pytest.mark.usefixtures("all_swapped")
def test_parameters_beyond_max_in_cpu_are_read_from_nvme_for_every_gather() -> None:
    all_kept = program(**SWAPPED)
    assert held(all_kept, "nvme").get("parameters", 0) == 0
    assert moved(all_kept)["nvme_read", "forward"] == 0
    none_kept = program(**SWAPPED, offload_param_max_in_cpu=0)
    assert held(none_kept, "nvme")["parameters"] == 2 * OWNED
    assert moved(none_kept)["nvme_read", "forward"] == 2 * OWNED
    assert moved(none_kept)["nvme_write", "optimizer"] == (12 + 2) * OWNED
    assert held(none_kept, "host")["buffers"] >= 5 * 100_000_000 * 2  # buffer_count x buffer_size


@pytest.mark.usefixtures("all_swapped")
def test_whole_sub_groups_stay_in_host_memory() -> None:
    """The first holds the embedding and is all that `max_in_cpu` has room for, though single shards behind it had."""
    first = ceil(MODEL.parameters[0].numel / WORLD)
    run = program(**SWAPPED, offload_param_max_in_cpu=first + 25_000)
    kept = OWNED - held(run, "nvme")["parameters"] / 2
    sub_groups = [work.numel for work in (i.op.work for i in run.steps[-1] if isinstance(i, Launch)) if _is_adam(work)]
    assert kept == sub_groups[0]


def test_shards_below_a_request_stay_in_host_memory() -> None:
    """max(MIN_AIO_BYTES, block_size) of partitioned_param_swapper.py; pinned by themselves."""
    run = program(**SWAPPED, offload_param_max_in_cpu=0)
    assert "parameters" not in held(run, "nvme")
    alone = [i.nbytes for i in run.init if isinstance(i, Alloc) and i.key.startswith("small shard")]
    assert alone == [pinned_bytes(2 * ceil(parameter.numel / WORLD)) for parameter in MODEL.parameters]


@pytest.mark.usefixtures("all_swapped")
def test_more_buffers_read_further_ahead_of_the_gathers() -> None:
    """__prefetch_nvme_param_partitions, from the second step on: reads that the host does not wait for at once."""

    def at_once(count: int, step: int) -> int:
        most = reads = 0
        for i in program(**SWAPPED, offload_param_max_in_cpu=0, offload_param_buffer_count=count).steps[step]:
            if isinstance(i, Launch) and i.op.label == "shard from NVMe":
                reads += 1
            elif isinstance(i, HostWait):
                most, reads = max(most, reads), 0
        return most

    assert [at_once(count, 0) for count in (2, 4, 8)] == [1, 1, 1]
    assert [at_once(count, -1) for count in (2, 4, 8)] == [1, 3, 7]


@pytest.mark.usefixtures("all_swapped")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        # as recorded: "Not enough buffers 0 for swapping 1", "already assigned swap buffer id"
        ({"stage3_max_reuse_distance": 1_000_000_000}, "runs out of buffers"),
        ({"stage3_max_reuse_distance": 1_000_000_000, "offload_param_buffer_count": 40}, "already assigned"),
        ({"offload_param_buffer_size": 10}, "cannot hold"),
    ],
)
def test_buffers_that_do_not_do(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        program(**SWAPPED | options, offload_param_max_in_cpu=0)


@pytest.mark.usefixtures("all_swapped")
def test_gpudirect_storage_reads_into_buffers_of_the_gpu() -> None:
    over, direct = (program(**SWAPPED, offload_param_max_in_cpu=0, aio_use_gds=gds) for gds in (False, True))
    assert moved(over)["h2d", "forward"] == moved(over)["nvme_read", "forward"] == 2 * OWNED
    assert moved(direct)["nvme_read", "forward"] == 2 * OWNED
    assert moved(direct)["h2d", "forward"] == 0
    buffers = 5 * 100_000_256 * 2  # whole multiples of 1 KiB
    assert held(over, "host")["buffers"] - held(direct, "host")["buffers"] == buffers
    assert held(direct, "gpu")["all_gather_buffers"] == buffers


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


def test_pipelining_reads_the_next_sub_group_before_the_update_of_this_one() -> None:
    def order(run: Program) -> list[str]:
        labels = [i.op.label for i in run.steps[-1] if isinstance(i, Launch) and i.op.phase == "optimizer"]
        return [label for label in labels if label in ("states from NVMe", "adamw")]

    assert order(program(offload_optimizer="nvme"))[:4] == ["states from NVMe", "adamw"] * 2
    piped = program(offload_optimizer="nvme", offload_optimizer_pipeline_read=True, offload_optimizer_buffer_count=8)
    assert order(piped)[:4] == ["states from NVMe", "states from NVMe", "adamw", "states from NVMe"]
    assert moved(piped) == moved(program(offload_optimizer="nvme"))


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


@pytest.mark.parametrize(
    "plan",
    [
        Fsdp1Plan(world_size=2, cpu_offload=True, optimizer=Optimizer("adamw8bit")),
        Fsdp2Plan(world_size=2, cpu_offload=True, optimizer=Optimizer("adamw8bit")),
        DeepSpeedPlan(world_size=2, stage=2, offload_optimizer="cpu", optimizer=Optimizer("adamw8bit", "cpu")),
        DeepSpeedPlan(world_size=2, stage=3, offload_optimizer="cpu", optimizer=Optimizer("adamw8bit", "cpu")),
    ],
)
def test_an_eight_bit_optimizer_is_not_one_of_the_cpu(plan) -> None:
    with pytest.raises(NotModeled, match="8-bit Adam on host tensors"):
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


def work(program: Program, label: str) -> float:
    """Bytes that the CPU moves in a step's ops of that name."""
    works = [i.op.work for i in program.steps[-1] if isinstance(i, Launch) and i.op.lane == CPU]
    return sum(work.nbytes for work in works if isinstance(work, CpuWork) and work.label == label)


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
