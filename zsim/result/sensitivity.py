"""What would help, and by how much: the same run simulated again with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from zsim.cluster.spec import Cluster, Device, Link
from zsim.cost.profile import CpuCost, Profile
from zsim.errors import InputError
from zsim.model.architecture import Architecture
from zsim.model.spec import Workload, every_nth
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.program.deepspeed import overlaps
from zsim.program.lower import under
from zsim.program.ops import CPU, WORKER
from zsim.result.measure import Lowered, lowered, timed
from zsim.result.names import setting
from zsim.result.need import need
from zsim.result.spec import Result
from zsim.result.tables import link_rows

if TYPE_CHECKING:
    from zsim.scenario import Setup


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed. `kind`: "hardware" (what if it were twice as fast) or "setting" (what a user can set).

    A setting's name is what `--set` takes. `saves`: which part of the step (`suggestions.stakes`); "": memory alone.
    """

    name: str
    kind: str
    setup: Setup
    profile: Profile
    saves: str = ""
    same_program: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """What a variant makes of the run. `gain`: relative change of tokens/s; +0.1 is 10 % faster."""

    name: str
    kind: str
    gain: float
    step_s: float
    tokens_per_s_per_gpu: float
    needed_bytes: int
    headroom_bytes: int
    fits: bool
    tokens_per_step: int  # of all GPUs: what else it changes
    short_of: str | None = None  # where it does not fit


def change(result: Result, variant: Variant, *, if_it_fits: bool = False) -> Change | None:
    """Simulates a variant; None where a framework refuses it or zsim does not model it.

    `if_it_fits`: also None, and no clock runs, where its allocations alone are more than there is.
    """
    setup = variant.setup
    try:
        setup = replace(setup, workload=under(setup.plan, setup.workload, setup.model))
        if setup.workload != result.setup.workload:
            setup = replace(setup, tree=trace(setup.model, setup.workload))
        same, left = variant.same_program, result.timeline.left_out
        known = Lowered(result.program, left.micro_steps if left else 0) if same else lowered(setup)
    except InputError:
        return None
    if if_it_fits and not same and need(known.program, setup.cluster).excluded:
        return None
    other = timed(setup, variant.profile, known)
    speed = other.throughput.tokens_per_s_per_gpu
    return Change(
        name=variant.name,
        kind=variant.kind,
        gain=speed / result.throughput.tokens_per_s_per_gpu - 1,
        step_s=other.time.step_s,
        tokens_per_s_per_gpu=speed,
        needed_bytes=other.gpu.nvidia_smi_bytes,
        headroom_bytes=other.gpu.headroom_bytes,
        fits=other.fits,
        tokens_per_step=other.headline.tokens_per_step,
        short_of=other.short_of,
    )


def hardware(result: Result) -> Iterator[Variant]:
    """Each part of the machine twice as fast, alone."""
    setup, profile = result.setup, result.profile

    def variant(name: str, saves: str, cluster: Cluster = setup.cluster, profile: Profile = profile) -> Variant:
        changed = replace(setup, cluster=cluster)
        return Variant(name, "hardware", changed, profile, saves, same_program=True)

    for kind in sorted({row["kind"] for row in link_rows(result) if row["kind"]}):
        yield variant(f"{kind} links twice as fast", kind, _links(setup.cluster, kind, 2.0))
    yield variant("matrix units twice as fast", "matrix units", _devices(setup.cluster, _twice_the_flops))
    yield variant("GPU memory twice as fast", "GPU memory", _devices(setup.cluster, _twice_the_bandwidth))
    yield variant("host twice as fast", "host", profile=replace(profile, host=profile.host.scaled(0.5)))
    if any(record.op.lane in (CPU, WORKER) for record in result.timeline.ops):
        cpu = profile.cpu
        double = CpuCost(
            dram_efficiency=2 * cpu.dram_efficiency,
            crowded_efficiency=2 * cpu.crowded_efficiency,
            thread_bandwidth={vendor: 2 * rate for vendor, rate in cpu.thread_bandwidth.items()},
            conversion={code: {kind: s / 2 for kind, s in of.items()} for code, of in cpu.conversion.items()},
        )
        yield variant("CPU optimizer twice as fast", "cpu", profile=replace(profile, cpu=double))


def settings(result: Result) -> Iterator[Variant]:
    """What a user can change without buying anything, one at a time."""
    setup = result.setup
    for saves, name, plan in _plan_changes(setup):
        yield Variant(name, "setting", replace(setup, plan=plan), result.profile, saves)
    blocks = len(cast(Architecture, setup.model.arch).kinds)
    for saves, name, workload in _workload_changes(setup.workload, blocks):
        yield Variant(name, "setting", replace(setup, workload=workload), result.profile, saves)
    size = setup.workload.sequence_parallel_size
    for saves, other in (("communication", size // 2), ("", size * 2)) if size > 1 else ():
        if (shared := sharing(setup, other)) is not None:
            yield Variant(f"sequence_parallel_size={other}", "setting", shared, result.profile, saves)


def sharing(setup: Setup, size: int) -> Setup | None:
    """The same with `size` ranks to a sequence, where DeepSpeed can."""
    from zsim.scenario.sequences import check_shared

    workload, plan = replace(setup.workload, sequence_parallel_size=size), setup.plan
    if not isinstance(plan, DeepSpeedPlan) or not plan.stage or workload.preference is not None:
        return None
    try:
        check_shared(setup.model, workload, plan.world_size, "deepspeed")
    except InputError:
        return None
    return replace(setup, workload=workload, plan=replace(plan, sequence_parallel_size=size))


def may_leave_the_host(plan: AnyPlan) -> bool:
    """Whether FSDP's shards, which are on the host, could be on the GPU with all else as it is."""
    zeroed = isinstance(plan, Fsdp1Plan) and not plan.zero_grad_to_none
    return isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.cpu_offload and not zeroed


def _plan_changes(setup: Setup) -> Iterator[tuple[str, str, AnyPlan]]:
    plan = setup.plan

    def change(saves: str, **fields: Any) -> tuple[str, str, AnyPlan]:
        return saves, named(plan, **fields), replace(plan, **fields)

    yield change("batch", grad_accum=plan.grad_accum * 2)
    if isinstance(plan, DeepSpeedPlan):
        yield from _deepspeed_changes(setup, plan, change)
    elif isinstance(plan, Fsdp2Plan):
        yield change("communication", reshard_after_forward=plan.reshard_after_forward is False)
        yield change("communication", prefetch=plan.prefetch + 1)
        if plan.reduce_dtype != plan.param_dtype:
            yield change("communication", reduce_dtype=plan.param_dtype)
        if setup.cluster.nodes > 1 and plan.mesh is None:
            yield change("communication", mesh=(setup.cluster.nodes, setup.cluster.gpus_per_node))
    elif isinstance(plan, Fsdp1Plan):
        yield change("communication", forward_prefetch=not plan.forward_prefetch)
        if plan.sharding_strategy == "FULL_SHARD":
            yield change("communication", sharding_strategy="SHARD_GRAD_OP")
    if may_leave_the_host(plan):
        yield change("offload", cpu_offload=False)
    if plan.optimizer.impl == "cpu" or (isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.cpu_offload):
        threads = setup.cluster.cores_per_gpu
        if threads > 1 and plan.omp_num_threads != threads:
            yield change("offload", omp_num_threads=threads)


def _deepspeed_changes(setup: Setup, plan: DeepSpeedPlan, change: Callable[..., Any]) -> Iterator[Any]:
    if not plan.stage:
        return
    yield change("" if overlaps(plan) else "communication", overlap_comm=not overlaps(plan))
    for stage in (plan.stage - 1, plan.stage + 1):
        if 1 <= stage <= 3 and not plan.offload_param and not (stage == 3 and plan.load == "gpu"):
            yield change("communication", stage=stage)
    if plan.stage == 3:
        if setup.cluster.nodes > 1:
            yield from _zero_plus_plus(setup, plan, change)
        yield change("communication", stage3_prefetch_bucket_size=plan.stage3_prefetch_bucket_size * 4)
        yield change("communication", stage3_param_persistence_threshold=plan.stage3_param_persistence_threshold * 10)
    yield change("communication", reduce_bucket_size=plan.reduce_bucket_size * 4)
    yield change("communication", reduce_bucket_size=max(plan.reduce_bucket_size // 4, 1))
    if plan.offload_param:
        yield change("offload", offload_param=None)
    moved = {None: "cpu", "cpu": None, "nvme": "cpu"}[plan.offload_optimizer]
    if moved or not plan.offload_param:
        saves, name, changed = change("offload" if plan.offload_optimizer else "", offload_optimizer=moved)
        optimizer = replace(plan.optimizer, impl=moved or Optimizer().impl)
        yield saves, name, replace(changed, optimizer=optimizer)


def _zero_plus_plus(setup: Setup, plan: DeepSpeedPlan, change: Callable[..., Any]) -> Iterator[Any]:
    if plan.zero_hpz_partition_size == 1:
        yield change("communication", zero_hpz_partition_size=setup.cluster.gpus_per_node)
    weights, gradients = not plan.zero_quantized_weights, not plan.zero_quantized_gradients
    yield change("communication" if weights else "", zero_quantized_weights=weights)
    if plan.dtype == "float16" or not gradients:  # gradients of any other type its kernel misreads
        saves, name, changed = change("communication" if gradients else "", zero_quantized_gradients=gradients)
        yield saves, name, replace(changed, gpus_per_node=setup.cluster.gpus_per_node)


def _workload_changes(workload: Workload, blocks: int) -> Iterator[tuple[str, str, Workload]]:
    def change(saves: str, **fields: Any) -> tuple[str, str, Workload]:
        return saves, named(workload, **fields), replace(workload, **fields)

    yield change("batch", micro_batch=workload.micro_batch * 2)
    if workload.micro_batch > 1:
        yield change("", micro_batch=workload.micro_batch // 2)
    now = workload.checkpointing if workload.checkpointed is None else "some"
    if now != "none":
        yield "recompute", "checkpointing=none", replace(workload, checkpointing="none", checkpointed=None)
    if now in ("none", "full") and blocks > 1:
        every_second = replace(workload, checkpointing="full", checkpointed=every_nth(blocks, 2))
        yield "recompute", "checkpointing={every: 2}", every_second
    for policy in ("selective", "full"):
        if policy != now:
            saves = "recompute" if policy == "selective" else ""
            yield saves, f"checkpointing={policy}", replace(workload, checkpointing=policy, checkpointed=None)
    if workload.loss != "fused" and workload.preference is None:
        yield change("", loss="fused")


def named(changed: AnyPlan | Workload, **fields: Any) -> str:
    """Fields of a plan or workload as `--set` takes them: "zero.reduce_bucket_size=2e9"."""
    return ", ".join(f"{setting(type(changed), name)}={_shown(value)}" for name, value in fields.items())


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    short = f"{value:g}".replace("e+0", "e").replace("e+", "e")
    return short if float(short) == value else str(value)


def _links(cluster: Cluster, kind: str, factor: float) -> Cluster:
    def scaled(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * factor, raw=link.raw * factor)

    templates = tuple(
        replace(
            node,
            links={name: scaled(link) if link.kind == kind else link for name, link in node.links.items()},
        )
        for node in cluster.templates
    )
    return replace(cluster, templates=templates)


def _devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    templates = tuple(
        replace(node, devices=tuple(change(device) for device in node.devices)) for node in cluster.templates
    )
    return replace(cluster, templates=templates)


def _twice_the_flops(device: Device) -> Device:
    return replace(device, peak_flops={dtype: 2 * peak for dtype, peak in device.peak_flops.items()})


def _twice_the_bandwidth(device: Device) -> Device:
    return replace(device, memory_bandwidth=2 * device.memory_bandwidth)
