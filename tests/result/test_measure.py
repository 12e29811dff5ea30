"""Every figure of the miniature run, worked out by hand."""

import json
from typing import Any

import pytest

from tests.result import made
from zsim.cluster import catalog
from zsim.cluster.load import cluster_from
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.deepspeed import whole_world
from zsim.program.ops import Program
from zsim.result.memory import (
    CUDA_CONTEXT_BYTES,
    NCCL_FIRST_BYTES,
    NCCL_FURTHER_BYTES,
    NVLS_BYTES,
    framework_bytes,
    process_bytes,
)


@pytest.fixture(scope="module")
def result():
    return made.result()


def test_step_splits_into_causes_that_add_up(result):
    time = result.time
    assert time.step_s == pytest.approx(1.9)
    assert time.compute_s == pytest.approx(0.2 + 0.2 + 0.4 + 0.4 + 0.1)
    # 0.01-0.11 and 0.31-0.41 wait for gathers; 1.41-1.71 for a reduction, seen through the host's wait for it.
    assert time.exposed_by == pytest.approx({"all_gather/forward": 0.2, "reduce_scatter/backward": 0.3})
    assert time.host_s == pytest.approx(0.01 + 0.04 + 0.05)
    assert time.idle_s == pytest.approx(0)
    assert time.compute_s + time.exposed_comm_s + time.host_s + time.idle_s == pytest.approx(time.step_s)
    assert time.comm_s == pytest.approx(0.4 + 0.2 + 0.3)
    assert time.overlapped_comm_s == pytest.approx(0.2 + 0.2)


def test_peak_allocated_and_who_holds_it(result):
    # During bwd1: both layers gathered and saved, one gradient.
    gpu = result.gpu
    assert gpu.peak_allocated_bytes == 1_000 + 6_000 + 2 * 1_000 + 2 * 3_000 + 1_000
    held = dict(gpu.by_category)
    assert held.pop("framework") == gpu.framework_bytes > 2**30
    assert held == {
        "parameters": 1_000, "optimizer_states": 6_000, "all_gather_buffers": 2_000, "activations": 6_000,
        "gradients": 1_000,
    }  # fmt: skip
    assert "layers.1" in gpu.peak_at
    assert result.host.peak_bytes == 2 * (500 + process_bytes(made.DEVICE))
    assert result.fits


def test_utilization_counts_recomputation_only_in_hfu(result):
    gemm, attention = 2 * 1024**3, 4 * 8 * 1024 * 1024 * 128
    model = 2 * (3 * gemm + 3 * attention)
    hardware = 2 * (4 * gemm + 4.5 * attention)
    assert result.throughput.mfu == pytest.approx(model / 1.9 / 1e12)
    assert result.throughput.hfu == pytest.approx(hardware / 1.9 / 1e12)
    assert result.throughput.tokens_per_s == pytest.approx(2 * 1024 / 1.9)


def test_bottleneck_is_named(result):
    assert result.bottleneck.group == "compute"
    assert result.bottleneck.group_share == pytest.approx(1.1 / 1.9)  # 1.3 s of kernels, of which fwd0 holds nothing up


def test_waited_link_is_the_full_one(result):
    from zsim.result.bottleneck import _full_link
    from zsim.result.critical_path import RankView

    view = RankView(result.program, result.timeline, 0)
    gathers = [s for s in view.critical_path() if s.record and s.record.op.label.startswith("AG")]
    assert _full_link(gathers, view, result.setup.cluster) == "nvlink n0/gpu0>n0/nvswitch"


def test_critical_path_covers_the_step(result):
    from zsim.result.critical_path import RankView

    path = RankView(result.program, result.timeline, 0).critical_path()
    labels = [segment.record.op.label if segment.record else "host" for segment in path]
    assert labels == ["host", "AG0", "AG1", "fwd1", "bwd1", "bwd0", "RS0", "host", "adam", "host"]
    assert sum(segment.seconds for segment in path) == pytest.approx(1.9)


def test_contract_of_json(result):
    said = json.loads(json.dumps(result.to_dict()))
    assert {"fits", "memory", "time", "throughput", "bottleneck", "model", "assumptions", "not_modeled", "meta"} <= set(
        said
    )
    gpu = said["memory"]["gpu"]
    assert {"capacity_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "by_category", "peak_at"} <= set(gpu)
    assert {"per_gpu_bytes", "formula"} <= set(said["memory"]["textbook"])
    assert {"step_s", "compute_s", "exposed_comm_s", "host_s", "idle_s"} <= set(said["time"])
    assert {"tokens_per_s_per_gpu", "tokens_per_s", "mfu", "hfu"} <= set(said["throughput"])
    assert {"name", "share"} <= set(said["bottleneck"])
    assert said["model"] == {"params": 1_000_010, "trainable_params": 1_000_000}
    assert {"zsim_version", "simulated_ranks", "rank_classes", "events", "wall_s"} <= set(said["meta"])
    assert said["assumptions"] == ["NVLink at 100 GB/s", "made by hand", "engine note"]


@pytest.mark.parametrize(
    ("gpu", "multicasts"),
    [("H200", True), ("B300", True), ("GB200", True), ("A100", False), ("RTX PRO 6000", False)],
)
def test_buffers_for_multicast_are_where_nvswitch_has_it(gpu, multicasts):
    """NVLink 4 and later; the cards of the same generations have no NVLink."""
    found = outside(gpu, nvlink=multicasts) - outside("A100")
    assert found == (NVLS_BYTES if multicasts else 0)


@pytest.mark.parametrize(
    ("gpu", "machine", "held"),
    [
        ("RTX 3090", {"p2p": "none"}, CUDA_CONTEXT_BYTES),
        ("RTX 3090", {"p2p": "all"}, CUDA_CONTEXT_BYTES + NCCL_FIRST_BYTES),
        ("RTX 3090", {"p2p": "none", "gpus": 2, "nvlink": [[0, 1, 4]]}, CUDA_CONTEXT_BYTES + NCCL_FIRST_BYTES),
        ("A100", {}, CUDA_CONTEXT_BYTES + NCCL_FIRST_BYTES),
    ],
)
def test_where_gpus_talk_through_host_memory_nccls_buffers_lie_there(gpu, machine, held):
    assert outside(gpu, **machine) == held


def test_deepspeed_talks_in_two_communicators_of_all_ranks():
    groups = whole_world(DeepSpeedPlan(world_size=8, stage=2))
    assert outside("A100", groups=groups) == CUDA_CONTEXT_BYTES + NCCL_FIRST_BYTES + NCCL_FURTHER_BYTES
    assert outside("A100", gpus=1, groups=whole_world(DeepSpeedPlan(world_size=1, stage=2))) == CUDA_CONTEXT_BYTES


def outside(
    gpu: str, *, nvlink: object = None, gpus: int = 8, p2p: str = "all", groups: dict[str, Any] | None = None
) -> int:
    """Of a rank in `groups`, or in one communicator with all others, on a machine of `gpus`."""
    cpu = {"sockets": 1, "cores": 8, "dram_gib": 64, "dram_gbps": 100}
    wires = {"nvlink": "switch" if nvlink is True else nvlink} if nvlink else {}
    cluster = cluster_from({"gpu": gpu, "gpus": gpus, "p2p": p2p, "cpu": cpu, **wires})
    world = Program(gpus, groups or {"world": (tuple(range(gpus)),)}, (), ())
    return framework_bytes(catalog.device(gpu), world, cluster)


@pytest.mark.parametrize(("load", "offered"), [("every_rank", True), ("gpu", False)])
def test_a_stage_that_would_be_refused_is_not_offered(load, offered):
    import zsim
    from zsim.result.sensitivity import settings

    scenario = made.TOPOLOGIES.parent / "scenarios" / "qwen7b_8xh100.yaml"
    result = zsim.simulate(scenario, ["zero.stage=2", f"load={load}"])
    assert ("zero.stage=3" in {variant.name for variant in settings(result)}) == offered
