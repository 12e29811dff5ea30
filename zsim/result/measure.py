"""Program and Timeline in, Result out. Everything a report says is computed here or below, once."""

from __future__ import annotations

import time as clock
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

from zsim import __version__
from zsim.cluster.classes import rank_classes
from zsim.cluster.spec import Device
from zsim.cost.price import Price
from zsim.cost.profile import Profile, load_profile
from zsim.engine.simulator import run
from zsim.engine.timeline import LeftOut
from zsim.model.kernels import DTYPE_BYTES
from zsim.model.spec import Module
from zsim.plan.spec import AnyPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.program.ops import Program
from zsim.program.serial import serial
from zsim.result import bottleneck, flops, memory, textbook
from zsim.result.accuracy import accuracy, unmeasured, waits_for_host
from zsim.result.breakdown import REMAPPING, measure_time
from zsim.result.critical_path import RankView, slowest_of
from zsim.result.shortened import SHOWN, compared, shortened
from zsim.result.spec import GpuMemory, Headline, HostMemory, Meta, MomentMemory, Result, Throughput, Time

if TYPE_CHECKING:
    from zsim.scenario import Setup


OF_OTHERS = ("weights", "workspace_bytes")  # of a workload: the plan says it, the GPU


class Lowered(NamedTuple):
    """What a setup lowers to, but for `left_out` micro-steps in the middle (`shortened`)."""

    program: Program
    left_out: int


def lowered(setup: Setup) -> Lowered:
    """With as few micro-steps as may do. Raises InputError or NotModeled, as the framework or zsim refuses it."""
    few, more = next(_shortened(setup))
    return Lowered(lower(few.model, few.tree, few.plan, few.workload), more)


def timed(
    setup: Setup, profile: Profile, known: Lowered | None = None, *, fold: bool = True, begun: float | None = None
) -> Result:
    """Run what `setup` lowers to under the constants of `profile`, and measure it.

    `known`: what it lowers to, where that is known. `fold=False` simulates every rank and every micro-step. `begun`:
    the `time.perf_counter()` of the request, now if not given.
    """
    begun = clock.perf_counter() if begun is None else begun
    for few, more in _shortened(setup) if fold else [(setup, 0)]:
        program = known.program if known and known.left_out == more else None
        result = _timed(setup, few, more, program, profile, fold=fold, begun=begun)
        if result is not None:
            return result
    raise AssertionError("all micro-steps are a step")


def _shortened(setup: Setup) -> Iterator[tuple[Setup, int]]:
    """A few micro-steps are shown as they are."""
    return iter([(setup, 0)]) if setup.plan.grad_accum <= 2 * SHOWN else shortened(setup)


def _timed(
    setup: Setup, few: Setup, more: int, program: Program | None, profile: Profile, *, fold: bool, begun: float
) -> Result | None:
    """None where the `more` micro-steps that `few` has not are no repetition."""
    program = program or lower(few.model, few.tree, few.plan, few.workload)
    cluster = setup.cluster if fold else setup.cluster.unfolded()
    if cluster.devices[0].vendor == "CPU":
        program = serial(program, setup.plan)

    def simulated(paging: bool) -> Result | None:
        price = Price(cluster, profile, setup.plan.omp_num_threads, paging=paging)
        left_out = (compared(few), more) if more else None
        timeline = run(program, rank_classes(cluster), price, fold=fold, left_out=left_out)
        if more and timeline.left_out is None:
            return None
        views = [RankView(program, timeline, ranks[0]) for ranks in timeline.rank_classes]
        if timeline.left_out:
            if any(view.stretches is None for view in views):
                return None
            timeline.notes.append(_said(timeline.left_out))
        return measure(setup=setup, views=views, profile=profile, begun=begun)

    result = simulated(False)
    if result is not None and result.gpu.evicted_bytes:
        result = simulated(True)
    if result is not None and setup.evaluation is not None and result.trains:
        from zsim.result.evaluation import evaluated

        result = replace(result, moments=(*evaluated(few, result), *result.moments))
    return result


def _said(left: LeftOut) -> str:
    first, last = left.micro + 2, left.micro + 1 + left.micro_steps
    return (
        f"micro-steps {first} to {last} repeat the one before them op by op, {left.seconds:.3g} s each: counted "
        "in all sums, not shown in timelines, tables of ops and memory over time"
    )


def own_profile(setup: Setup) -> Profile:
    """The profile of the setup's device and software stack."""
    return load_profile(setup.cluster.devices[0].name, setup.profile)


def measure(*, setup: Setup, views: list[RankView], profile: Profile, begun: float) -> Result:
    """What the simulated steps say about memory, time, and what holds the run back.

    Memory is that of the fullest simulated rank over all simulated steps; time that of the steady step on the slowest
    rank. `views`: every simulated rank. `begun` is the `time.perf_counter()` at which the simulation was asked for.
    """
    model, cluster, program, timeline = setup.model, setup.cluster, views[0].program, views[0].timeline
    slowest = slowest_of(views)
    device = cluster.devices[slowest.rank]
    gpu = memory.measure_gpu(views, cluster, program, setup.plan.allocator)
    time = _with_remapping(measure_time(slowest, device, profile), gpu)
    host = memory.measure_host(views, cluster, gpu)
    return Result(
        name=setup.name,
        headline=_headline(setup),
        gpu=gpu,
        host=host,
        textbook=textbook.of_plan(setup.plan, model.trainable_numel, _frozen_bytes(setup)),
        time=time,
        throughput=throughput(setup, device, time.step_s),
        bottleneck=bottleneck.find(slowest, cluster, device, profile, gpu.remapping_s),
        params=model.numel,
        trainable_params=model.trainable_numel,
        assumptions=_unique(setup.assumptions, program.assumptions, timeline.notes),
        not_modeled=_unique(setup.not_modeled, program.not_modeled),
        accuracy=accuracy(
            profile,
            cluster.world_size,
            framework_of(setup.plan),
            _steps_on_cpu(setup.plan),
            model.tuning is not None,
            setup.workload.tokens,
            gpu.allocator_retries_per_step > 0,
            unmeasured(model.arch),
            setup.workload.float8 is not None,
            waits_for_host(time),
        ),
        meta=Meta(
            __version__, len(views), len(timeline.rank_classes), timeline.events, round(clock.perf_counter() - begun, 4)
        ),
        setup=setup,
        program=program,
        timeline=timeline,
        profile=profile,
        moments=_moments(setup, views, gpu, host) if setup.plan.saving else (),
    )


def _with_remapping(time: Time, gpu: GpuMemory) -> Time:
    """Steps in which the allocator unmaps pages and maps others, which waits for all that the GPU has been given."""
    time = replace(time, first_step_s=time.first_step_s + (gpu.first_remapping_s or 0.0))
    seconds = gpu.remapping_s
    if not seconds:
        return time
    idle_by = dict(sorted({**time.idle_by, REMAPPING: seconds}.items(), key=lambda item: -item[1]))
    return replace(time, step_s=time.step_s + seconds, idle_s=time.idle_s + seconds, idle_by=idle_by)


def _moments(setup: Setup, views: list[RankView], gpu: GpuMemory, host: HostMemory) -> tuple[MomentMemory, ...]:
    from zsim.result import checkpoints

    return tuple(checkpoints.measure(setup, views, gpu, host))


def _frozen_bytes(setup: Setup) -> float:
    """In the dtype of compute, unless they have one of their own."""
    dtype = setup.workload.dtype
    return sum(p.numel * DTYPE_BYTES[p.dtype or dtype] for p in setup.model.parameters if not p.trainable)


def throughput(setup: Setup, device: Device, step_s: float) -> Throughput:
    """Tokens per second and utilization of a `device` whose step takes `step_s`."""
    plan, peak = setup.plan, device.peak_flops.get(setup.workload.dtype)
    counted = [flops.per_micro_batch(tree) for tree in _executed(setup)]
    model, hardware = (plan.grad_accum * sum(each) for each in zip(*counted, strict=True))
    per_gpu = setup.workload.tokens * plan.grad_accum / step_s if step_s else 0.0
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


def _executed(setup: Setup) -> Iterator[Module]:
    """What a micro-step runs: the model, and the forward of a reference that it is compared with."""
    yield setup.tree
    preference = setup.workload.preference
    if preference is not None and preference.reference != "none":
        from zsim.model.trace import trace_reference

        yield trace_reference(setup.model, setup.workload)


def _headline(setup: Setup) -> Headline:
    plan, cluster, workload = setup.plan, setup.cluster, setup.workload
    return Headline(
        model=setup.model.name,
        cluster=cluster.name,
        devices=tuple(sorted({device.name for device in cluster.devices})),
        world_size=plan.world_size,
        gpus_per_node=cluster.gpus_per_node,
        framework=framework_of(plan),
        stage=plan.stage if isinstance(plan, DeepSpeedPlan) else None,
        tokens_per_step=workload.tokens * plan.grad_accum * plan.world_size,
        workload={name: value for name, value in asdict(workload).items() if name not in OF_OTHERS},
        plan=asdict(plan),
    )


def framework_of(plan: AnyPlan) -> str:
    return type(plan).__name__.removesuffix("Plan").lower()


def _steps_on_cpu(plan: AnyPlan) -> bool:
    if isinstance(plan, DeepSpeedPlan):
        return plan.offload_optimizer is not None
    return isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.cpu_offload


def _unique(*lists: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for texts in lists for text in texts))
