"""Memory of evaluations between steps, beside what the steps hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zsim.cluster.classes import rank_classes
from zsim.cost.price import Price
from zsim.engine.simulator import run
from zsim.program.lower import lower
from zsim.program.serial import serial
from zsim.result.critical_path import RankView
from zsim.result.memory import measure_gpu
from zsim.result.spec import MomentMemory, Result

if TYPE_CHECKING:
    from zsim.scenario import Setup

MICRO_STEPS = 2  # what those in the middle of a step hold, one in its middle does


def evaluated(setup: Setup, training: Result) -> Iterator[MomentMemory]:
    """The evaluation of `setup`, if it needs more than `training` does: steps with one behind each are simulated."""
    evaluation = setup.evaluation
    assert evaluation is not None
    plan = replace(setup.plan, grad_accum=min(setup.plan.grad_accum, MICRO_STEPS))
    program = lower(setup.model, setup.tree, plan, replace(setup.workload, evaluation=evaluation))
    if setup.cluster.devices[0].vendor == "CPU":
        program = serial(program, plan)
    price = Price(setup.cluster, training.profile, plan.omp_num_threads)
    timeline = run(program, rank_classes(setup.cluster), price)
    views = [RankView(program, timeline, ranks[0]) for ranks in timeline.rank_classes]
    gpu = measure_gpu(views, setup.cluster, program, plan.allocator)
    if gpu.nvidia_smi_bytes <= training.gpu.nvidia_smi_bytes:
        return
    nbytes, kind = max((gpu.by_category.get(kind, 0), kind) for kind in ("activations", "logits"))
    at_its_peak = gpu.peak_allocated_bytes > training.gpu.peak_allocated_bytes
    largest = f", {nbytes / 2**30:.1f} GiB of {kind}" if at_its_peak else ""
    tokens = evaluation.micro_batch * setup.workload.seq_len
    yield MomentMemory(
        moment=f"evaluating {evaluation.micro_batch} sequence{'s' * (evaluation.micro_batch > 1)} at a time",
        cause=f"a forward over {tokens:,} tokens{largest}",
        gpu_bytes=gpu.nvidia_smi_bytes,
        gpu_fits=gpu.fits,
        gpu_tight=gpu.allocator_retries > training.gpu.allocator_retries,
        host_bytes=training.host.peak_bytes,
        host_by_category=training.host.by_category,
        host_fits=True,
        host_tight=False,
    )
