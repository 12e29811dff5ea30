"""Program and Timeline in, Result out. Everything a report says is computed here or below, once."""

from __future__ import annotations

import time as clock
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from zsim import __version__
from zsim.cluster.classes import rank_classes
from zsim.cluster.spec import Device
from zsim.cost.price import Price
from zsim.cost.profile import Profile, load_profile
from zsim.engine.simulator import run
from zsim.engine.timeline import Timeline
from zsim.model.kernels import DTYPE_BYTES
from zsim.plan.spec import AnyPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.program.ops import Program
from zsim.program.serial import serial
from zsim.result import bottleneck, flops, memory, textbook
from zsim.result.breakdown import measure_time
from zsim.result.critical_path import RankView
from zsim.result.spec import Accuracy, CheckpointMemory, GpuMemory, Headline, HostMemory, Meta, Result, Throughput

if TYPE_CHECKING:
    from zsim.scenario import Setup


OF_OTHERS = ("weights", "workspace_bytes")  # of a workload: the plan says it, the GPU


def timed(setup: Setup, program: Program, profile: Profile, *, fold: bool = True, begun: float | None = None) -> Result:
    """Run `program`, what `setup` lowers to, under the constants of `profile`, and measure it.

    `fold=False` simulates every rank. `begun`: the `time.perf_counter()` of the request, now if not given.
    """
    begun = clock.perf_counter() if begun is None else begun
    cluster = setup.cluster if fold else setup.cluster.unfolded()
    if cluster.devices[0].vendor == "CPU":
        program = serial(program, setup.plan)

    def simulated(paging: bool) -> Result:
        price = Price(cluster, profile, setup.plan.omp_num_threads, paging=paging)
        timeline = run(program, rank_classes(cluster), price, fold=fold)
        return measure(setup=setup, program=program, timeline=timeline, profile=profile, begun=begun)

    result = simulated(False)
    return simulated(True) if result.gpu.evicted_bytes else result


def own_profile(setup: Setup) -> Profile:
    """The profile of the setup's device and software stack."""
    return load_profile(setup.cluster.devices[0].name, setup.profile)


def measure(*, setup: Setup, program: Program, timeline: Timeline, profile: Profile, begun: float) -> Result:
    """What the simulated steps say about memory, time, and what holds the run back.

    Memory is that of the fullest simulated rank over all simulated steps; time that of the steady step on the slowest
    rank. `begun` is the `time.perf_counter()` at which the simulation was asked for.
    """
    model, cluster = setup.model, setup.cluster
    views = [RankView(program, timeline, ranks[0]) for ranks in timeline.rank_classes]
    slowest = max(views, key=lambda view: view.steady.end_s - view.steady.start_s)
    device = cluster.devices[slowest.rank]
    time = measure_time(slowest, device, profile)
    gpu = memory.measure_gpu(views, cluster, program, setup.plan.allocator)
    host = memory.measure_host(views, cluster, gpu)
    return Result(
        name=setup.name,
        headline=_headline(setup),
        gpu=gpu,
        host=host,
        textbook=textbook.of_plan(setup.plan, model.trainable_numel, _frozen_bytes(setup)),
        time=time,
        throughput=throughput(setup, device, time.step_s),
        bottleneck=bottleneck.find(slowest, cluster, device, profile),
        params=model.numel,
        trainable_params=model.trainable_numel,
        assumptions=_unique(setup.assumptions, program.assumptions, timeline.notes),
        not_modeled=_unique(setup.not_modeled, program.not_modeled),
        accuracy=accuracy(
            profile,
            cluster.world_size,
            _framework(setup.plan),
            _steps_on_cpu(setup.plan),
            model.tuning is not None,
            setup.workload.tokens,
            gpu.allocator_retries_per_step > 0,
            unmeasured(model.arch),
            setup.workload.float8 is not None,
        ),
        meta=Meta(
            __version__, len(views), len(timeline.rank_classes), timeline.events, round(clock.perf_counter() - begun, 4)
        ),
        setup=setup,
        program=program,
        timeline=timeline,
        profile=profile,
        checkpoints=_checkpoints(setup, views, gpu, host) if setup.plan.saving else (),
    )


def _checkpoints(setup: Setup, views: list[RankView], gpu: GpuMemory, host: HostMemory) -> tuple[CheckpointMemory, ...]:
    from zsim.result import checkpoints

    return tuple(checkpoints.measure(setup, views, gpu, host))


def _frozen_bytes(setup: Setup) -> float:
    """In the dtype of compute, unless they have one of their own."""
    dtype = setup.workload.dtype
    return sum(p.numel * DTYPE_BYTES[p.dtype or dtype] for p in setup.model.parameters if not p.trainable)


def throughput(setup: Setup, device: Device, step_s: float) -> Throughput:
    """Tokens per second and utilization of a `device` whose step takes `step_s`."""
    plan, peak = setup.plan, device.peak_flops.get(setup.workload.dtype)
    model, hardware = (plan.grad_accum * each for each in flops.per_micro_batch(setup.tree))
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


def _headline(setup: Setup) -> Headline:
    plan, cluster, workload = setup.plan, setup.cluster, setup.workload
    return Headline(
        model=setup.model.name,
        cluster=cluster.name,
        devices=tuple(sorted({device.name for device in cluster.devices})),
        world_size=plan.world_size,
        gpus_per_node=cluster.gpus_per_node,
        framework=_framework(plan),
        stage=plan.stage if isinstance(plan, DeepSpeedPlan) else None,
        tokens_per_step=workload.tokens * plan.grad_accum * plan.world_size,
        workload={name: value for name, value in asdict(workload).items() if name not in OF_OTHERS},
        plan=asdict(plan),
    )


def _framework(plan: AnyPlan) -> str:
    return type(plan).__name__.removesuffix("Plan").lower()


def _steps_on_cpu(plan: AnyPlan) -> bool:
    if isinstance(plan, DeepSpeedPlan):
        return plan.offload_optimizer is not None
    return isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.cpu_offload


LINEAR_ATTENTION = "linear attention"


def unmeasured(arch: object) -> tuple[str, ...]:
    """Kinds of layers of a `zsim.model.architecture.Architecture` that no model of validation/published has: those are
    of attention to the same sequence and dense MLPs."""
    kinds = getattr(arch, "kinds", ())
    parts = {name for name in ("mamba", "moe", "latent", "vision", "seq2seq") if getattr(arch, name, None) is not None}
    found = {
        LINEAR_ATTENTION: any(kind.mixer == "delta" for kind in kinds),
        "state spaces": "mamba" in parts,
        "short convolutions": any(kind.mixer == "conv" for kind in kinds),
        "experts": "moe" in parts,
        "latent attention": "latent" in parts,
        "a vision tower": "vision" in parts,
        "cross-attention": "seq2seq" in parts or any(kind.crossed for kind in kinds),
    }
    return tuple(name for name, there in found.items() if there)


_TITLES = {"deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP"}


def accuracy(
    profile: Profile,
    gpus: int,
    framework: str,
    on_cpu: bool = False,
    adapters: bool = False,
    tokens: int = 4096,
    full: bool = False,
    unmeasured: Sequence[str] = (),
    float8: bool = False,
) -> Accuracy:
    """The error of the nearest runs that were measured, and how near they are. `on_cpu`: of the optimizer's step.
    `full`: of a GPU whose allocator gives memory back in every step. `unmeasured`: kinds of layers that none of these
    runs had, so that their error says nothing of this one. `float8`: of products in it.

    No evidence is of offload alone, and the rows of validation/published that are furthest off all offload.
    """
    if unmeasured:
        kinds = " or ".join(unmeasured)
        text = f"no run of validation/published has {kinds}"
        if tuple(unmeasured) == (LINEAR_ATTENTION,):
            text += "; two published steps of Qwen3.5-9B alone were compared (docs/linear-attention.md)"
        return Accuracy(profile.device, profile.stack, None, text)
    if float8 and profile.float8 is None:
        return Accuracy(profile.device, profile.stack, None, "no run in float8 on this kind of GPU has been measured")
    evidence = profile.expected_error(gpus, framework, adapters, tokens)
    if evidence is None:
        return Accuracy(profile.device, profile.stack, None, "nothing measured on this device stands behind the times")
    low, high = evidence.min_gpus, evidence.max_gpus
    text = f"{evidence.text}, {evidence.rows} run{'s' * (evidence.rows > 1)} on {low}"
    text += (f" to {high}" if high > low else "") + f" GPU{'s' * (high > 1)}"
    if not evidence.stack and profile.evidence == (evidence,):
        text = f"no measurement on this kind of GPU; this is the error on {text}"
    elif not evidence.speaks_for(framework, tokens):
        known = any(other.is_of(framework) for other in profile.evidence)
        such = f" and about {tokens:,} tokens in a micro-batch" if known else ""
        text = f"no measurement with {_TITLES[framework]}{such} on this kind of GPU; nearest is {text}"
    elif profile.device not in evidence.text:
        text = f"no measurement on {profile.device} itself; nearest is {text}"
    if evidence.is_of(framework) and evidence.adapters != adapters:
        text += f", {'without' if adapters else 'of'} adapters"
    if not low <= gpus <= high:
        text += f", and this is on {gpus}"
    if on_cpu:
        text += "; with the optimizer on the CPU, steps up to twice as long as predicted were measured"
    error = evidence.mape
    if full and (others := profile.full_memory):
        error = max(error, others.mape)
        way = f"{abs(others.bias):.0f} % too {'fast' if others.bias < 0 else 'slow'} on average"
        text += f"; {others.text}: {others.mape:.0f} % on {others.rows} runs, {way}"
    if float8 and (own := profile.float8):
        if own.mape > error:
            text = f"{own.rows} {own.text} on this kind of GPU; in 16 bits {error:.0f} %: {text}"
        else:
            text += f"; in float8 {own.mape:.0f} % on {own.rows} published runs"
        error = max(error, own.mape)
    return Accuracy(profile.device, profile.stack, error / 100, text)


def _unique(*lists: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for texts in lists for text in texts))
