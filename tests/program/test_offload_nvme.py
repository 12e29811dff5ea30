"""States, gradients and parameters on NVMe: what is swapped, through which buffers."""

from __future__ import annotations

from math import ceil

import pytest

from tests.program.offloaded import MODEL, OWNED, WORLD, held, moved, program
from zsim.errors import InputError
from zsim.program.builder import pinned_bytes
from zsim.program.ops import Alloc, CpuWork, HostWait, Launch, Program


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


def test_pipelining_reads_the_next_sub_group_before_the_update_of_this_one() -> None:
    def order(run: Program) -> list[str]:
        labels = [i.op.label for i in run.steps[-1] if isinstance(i, Launch) and i.op.phase == "optimizer"]
        return [label for label in labels if label in ("states from NVMe", "adamw")]

    assert order(program(offload_optimizer="nvme"))[:4] == ["states from NVMe", "adamw"] * 2
    piped = program(offload_optimizer="nvme", offload_optimizer_pipeline_read=True, offload_optimizer_buffer_count=8)
    assert order(piped)[:4] == ["states from NVMe", "states from NVMe", "adamw", "states from NVMe"]
    assert moved(piped) == moved(program(offload_optimizer="nvme"))
