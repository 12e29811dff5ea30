"""Paged optimizers: states in managed memory cost nothing where they fit, and move whole where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.api import load_scenario, simulate
from zsim.document import Document
from zsim.errors import NotModeled
from zsim.plan.spec import Allocator, DdpPlan, DeepSpeedPlan, Optimizer
from zsim.plan.trainer import read_trainer
from zsim.program.builder import Builder
from zsim.program.ops import HOST, Alloc, Copy, Launch
from zsim.program.optimizer import update
from zsim.result.render.terminal import verdict
from zsim.scenario import Setup

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def states(optimizer: Optimizer, numels: list[int], dtype: str = "bfloat16") -> dict[str, int]:
    """Bytes by device that the first step allocates."""
    builder = Builder()
    update(builder, optimizer, numels, dtype, first=True)
    allocs = [i for i in builder.finish() if isinstance(i, Alloc) and not i.key.endswith("_steps")]
    return {alloc.device: alloc.nbytes for alloc in allocs}


def test_large_tensors_are_paged_and_the_maxima_of_their_blocks_are_not() -> None:
    """optim/optimizer.py get_state_buffer: from 1e5 elements on; states of 32 bits are float32 whatever the weights."""
    large, small = 1_000_000, 50_000
    assert states(Optimizer("adamw", paged=True), [large, small]) == {"managed": 8 * large, "gpu": 8 * small}
    blocks = -(-large // 256) - (-small // 256)
    eight_bit = states(Optimizer("adamw8bit", paged=True), [large, small])
    assert eight_bit == {"managed": 2 * large, "gpu": 2 * small + 2 * 4 * blocks}
    assert states(Optimizer("adamw8bit"), [large, small]) == {"gpu": sum(eight_bit.values())}


def test_a_paged_update_asks_for_its_states_first() -> None:
    builder = Builder()
    update(builder, Optimizer("adamw", paged=True), [1_000_000], "bfloat16", first=False)
    down, up, adam = (i.op for i in builder.finish() if isinstance(i, Launch) and i.op.lane != HOST)
    assert (down.work, up.work) == (Copy("d2h", 8e6, paged=True), Copy("h2d", 8e6, paged=True))
    assert down.id in up.waits
    assert up.id in adam.waits
    assert adam.work.kernels[0].bytes == pytest.approx((2 + 2 + 8 + 2 + 8) * 1e6)  # weight, gradient, both states


@pytest.fixture(scope="module")
def llama() -> Setup:
    """Llama-3.1-8B in bf16 on one A100, beside which 60 GiB of states have 48 GiB of room and 15 GiB plenty."""
    setup = load_scenario(
        ROOT / "scenarios" / "optimizer_offload.yaml",
        ["model=models/llama-3.1-8b/config.json", "zero=null", "framework=ddp", "ddp={dtype: bfloat16}", "seq_len=256",
         "cluster=../topologies/a100_1_pcie4.yaml", "micro_batch=2", "grad_clip=0"],
    ).resolve()  # fmt: skip
    assert isinstance(setup.plan, DdpPlan)
    return setup


def with_optimizer(setup: Setup, name: str, paged: bool) -> Setup:
    """Nobody reads a checkpoint, which would take more of the host than the states that wait there."""
    return replace(setup, plan=replace(setup.plan, optimizer=Optimizer(name, paged=paged), load="meta"))


def test_states_that_do_not_fit_go_down_and_come_up_whole(llama: Setup) -> None:
    """torchtune pull request 990: over 6 s a step with paged states of 32 bits, none of it with 8."""
    result = simulate(with_optimizer(llama, "adamw", True))
    gpu, paged = result.gpu, 8 * sum(p.numel for p in llama.model.parameters if p.numel >= 1e5)
    assert gpu.paged_bytes == paged
    assert gpu.evicted_bytes == paged - (gpu.capacity_bytes - gpu.nvidia_smi_bytes) > 10 * GIB
    assert result.fits
    assert gpu.headroom_bytes == 0
    assert verdict(result).startswith("FITS thanks to paging: ")
    assert result.host.by_category["optimizer_states"] == gpu.evicted_bytes
    eight = simulate(with_optimizer(llama, "adamw8bit", True))
    assert eight.gpu.evicted_bytes == 0
    assert result.time.step_s - eight.time.step_s == pytest.approx(2 * paged / 26e9, rel=0.02)
    assert 4.5 < result.time.step_s < 7


def test_states_that_fit_cost_nothing(llama: Setup) -> None:
    paged, plain = (simulate(with_optimizer(llama, "adamw8bit", paged)) for paged in (True, False))
    assert paged.time.step_s == pytest.approx(plain.time.step_s, rel=1e-3)
    states = paged.gpu.peak_allocated_bytes + paged.gpu.paged_bytes
    assert states == pytest.approx(plain.gpu.peak_allocated_bytes, rel=1e-4)
    # what torch keeps cached besides differs: its own states lie among it, managed ones do not
    cached = max(run.gpu.peak_reserved_bytes - run.gpu.peak_allocated_bytes for run in (paged, plain))
    assert abs(plain.gpu.headroom_bytes - paged.gpu.headroom_bytes) <= cached < 0.05 * plain.gpu.capacity_bytes
    assert not paged.host.by_category.get("optimizer_states")


def test_paging_makes_a_run_fit(llama: Setup) -> None:
    plain = simulate(with_optimizer(llama, "adamw", False))
    assert plain.fits  # torch's own states are of the weights' type, half as large
    wide = replace(llama.plan, dtype="float32", optimizer=Optimizer("adamw", paged=False))
    assert not simulate(replace(llama, plan=wide)).fits
    assert simulate(replace(llama, plan=replace(wide, optimizer=Optimizer("adamw", paged=True)))).fits


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (DeepSpeedPlan(world_size=1, stage=2, offload_optimizer="cpu", optimizer=Optimizer("adamw", "cpu", paged=True)),
         "host tensors"),
        (DdpPlan(world_size=1, optimizer=Optimizer("adafactor", "loop", paged=True)), "paged adafactor"),
    ],
)  # fmt: skip
def test_refused(llama: Setup, plan, named: str) -> None:
    with pytest.raises(NotModeled, match=named):
        simulate(replace(llama, plan=plan))


@pytest.mark.parametrize(
    ("optim", "name"), [("paged_adamw_8bit", "adamw8bit"), ("paged_adamw_32bit", "adamw"), ("paged_adamw", "adamw")]
)
def test_the_trainers_names(optim: str, name: str) -> None:
    reading = read_trainer(Document("arguments.json", {"optim": optim, "bf16": True}))
    assert reading.fields["optimizer", "name"] == name
    assert reading.fields["optimizer", "paged"] is True
    assert not any("paging" in text for text in reading.not_modeled)


def test_a_limit_of_the_allocators_own_leaves_the_rest_to_managed_memory(llama: Setup) -> None:
    """Managed pages are not of torch's pool: what it may not reserve is room for them as ever."""
    plain = simulate(with_optimizer(llama, "adamw8bit", True)).gpu
    fraction = (plain.peak_reserved_bytes + GIB) / plain.capacity_bytes
    setup = with_optimizer(llama, "adamw8bit", True)
    setup = replace(setup, plan=replace(setup.plan, allocator=Allocator(per_process_memory_fraction=fraction)))
    capped = simulate(setup)
    assert capped.gpu.paged_bytes == plain.paged_bytes > 10 * GIB
    assert capped.gpu.evicted_bytes == plain.evicted_bytes == 0
    assert capped.gpu.headroom_bytes == pytest.approx(GIB, abs=1)
    assert capped.fits
