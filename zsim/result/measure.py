"""Program and Timeline in, Result out. Everything a report says is computed here or below, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from zsim import __version__
from zsim.cluster.spec import Cluster
from zsim.engine.timeline import Timeline
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.spec import AnyPlan, DeepSpeedPlan
from zsim.program.ops import Program
from zsim.result import bottleneck, flops, memory, textbook
from zsim.result.breakdown import measure_time
from zsim.result.critical_path import RankView
from zsim.result.spec import Meta, ProfileInfo, Result, Throughput


def measure(
    *,
    name: str,
    model: ModelSpec,
    tree: Module,
    workload: Workload,
    plan: AnyPlan,
    cluster: Cluster,
    program: Program,
    timeline: Timeline,
    profile: ProfileInfo,
    assumptions: Sequence[str] = (),
    not_modeled: Sequence[str] = (),
    wall_s: float = 0.0,
) -> Result:
    """What the simulated steps say about memory, time, and what holds the run back.

    Memory is that of the fullest simulated rank over all simulated steps; time that of the steady step on the slowest
    rank. `assumptions` and `not_modeled` are joined with those of the program, the cluster and the engine.
    """
    views = [RankView(program, timeline, ranks[0]) for ranks in timeline.rank_classes]
    slowest = max(views, key=lambda view: view.steady.end_s - view.steady.start_s)
    device = cluster.devices[slowest.rank]
    time = measure_time(slowest, device)
    return Result(
        name=name,
        setup=_setup(plan, workload, cluster, model),
        gpu=memory.measure_gpu(views, cluster, program),
        host=memory.measure_host(views, cluster),
        textbook=textbook.of_plan(plan, model.numel),
        time=time,
        throughput=_throughput(tree, workload, plan, device.peak_flops.get(workload.dtype), time.step_s),
        bottleneck=bottleneck.find(slowest, time, cluster, device),
        params=model.numel,
        trainable_params=model.trainable_numel,
        assumptions=_unique(assumptions, model.notes, program.assumptions, cluster.assumptions, timeline.notes),
        not_modeled=_unique(not_modeled, program.not_modeled),
        profile=profile,
        meta=Meta(__version__, len(views), len(timeline.rank_classes), timeline.events, wall_s),
        program=program,
        timeline=timeline,
        cluster=cluster,
    )


def _throughput(tree: Module, workload: Workload, plan: AnyPlan, peak: float | None, step_s: float) -> Throughput:
    model, hardware = (plan.grad_accum * f for f in flops.per_micro_batch(tree))
    tokens = workload.tokens * plan.grad_accum
    per_gpu = tokens / step_s if step_s else 0.0
    return Throughput(
        tokens_per_s_per_gpu=per_gpu,
        tokens_per_s=per_gpu * plan.world_size,
        mfu=model / step_s / peak if peak and step_s else None,
        hfu=hardware / step_s / peak if peak and step_s else None,
        model_flops=model,
        hardware_flops=hardware,
        peak_flops=peak,
        formula=flops.FORMULA,
    )


def _setup(plan: AnyPlan, workload: Workload, cluster: Cluster, model: ModelSpec) -> Mapping[str, Any]:
    """What the report's headline names; plain JSON types."""
    framework = type(plan).__name__.removesuffix("Plan").lower()
    devices = sorted({device.name for device in cluster.devices})
    return {
        "model": model.name,
        "cluster": cluster.name,
        "devices": devices,
        "world_size": plan.world_size,
        "gpus_per_node": cluster.gpus_per_node,
        "framework": framework,
        "stage": plan.stage if isinstance(plan, DeepSpeedPlan) else None,
        "tokens_per_step": workload.tokens * plan.grad_accum * plan.world_size,
        "workload": asdict(workload),
        "plan": asdict(plan),
    }


def _unique(*lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for texts in lists for text in texts))
