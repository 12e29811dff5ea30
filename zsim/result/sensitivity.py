"""What would help, and by how much: the same run simulated again with one thing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zsim.cluster.spec import Cluster, Device, Link
from zsim.cost.profile import Profile
from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.result.measure import timed
from zsim.result.spec import Result
from zsim.result.tables import link_rows

if TYPE_CHECKING:
    from zsim.scenario import Setup


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed. `kind`: "hardware" (what if it were twice as fast) or "setting" (what a user can set)."""

    name: str
    kind: str
    setup: Setup
    profile: Profile
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


def changes(result: Result, variants: list[Variant]) -> Iterator[Change]:
    """Simulates every variant; those that a framework refuses or zsim does not model are left out."""
    base = result.throughput.tokens_per_s_per_gpu
    for variant in variants:
        try:
            other = again(result, variant)
        except InputError:
            continue
        speed = other.throughput.tokens_per_s_per_gpu
        yield Change(
            variant.name,
            variant.kind,
            speed / base - 1,
            other.time.step_s,
            speed,
            other.gpu.nvidia_smi_bytes,
            other.gpu.headroom_bytes,
            other.fits,
        )


def again(result: Result, variant: Variant) -> Result:
    """The run of `result` with a variant's setup and profile."""
    setup = variant.setup
    program = result.program
    if not variant.same_program:
        program = lower(setup.model, setup.tree, setup.plan, setup.workload)
    return timed(setup, program, variant.profile)


def hardware(result: Result) -> Iterator[Variant]:
    """Each part of the machine twice as fast, alone."""
    setup, profile = result.setup, result.profile

    def variant(name: str, cluster: Cluster = setup.cluster, profile: Profile = profile) -> Variant:
        return Variant(name, "hardware", dataclasses.replace(setup, cluster=cluster), profile, same_program=True)

    for kind in sorted({row["kind"] for row in link_rows(result) if row["kind"]}):
        yield variant(f"{kind} links twice as fast", _links(setup.cluster, kind, 2.0))
    yield variant("matrix units twice as fast", _devices(setup.cluster, _twice_the_flops))
    yield variant("GPU memory twice as fast", _devices(setup.cluster, _twice_the_bandwidth))
    host = profile.host
    faster = dataclasses.replace(
        host,
        launch=host.launch / 2,
        backward_launch=host.backward_launch / 2,
        collective=host.collective / 2,
        copy=host.copy / 2,
        hooks={name: seconds / 2 for name, seconds in host.hooks.items()},
        default_hook=host.default_hook / 2,
    )
    yield variant("host twice as fast", profile=dataclasses.replace(profile, host=faster))


def settings(result: Result) -> Iterator[Variant]:
    """What a user can change without buying anything, one at a time."""
    setup = result.setup
    for name, plan in _plan_changes(setup):
        yield Variant(name, "setting", dataclasses.replace(setup, plan=plan), result.profile)
    for name, workload in _workload_changes(setup):
        from zsim.model.trace import trace

        tree = trace(setup.model, workload)
        yield Variant(name, "setting", dataclasses.replace(setup, workload=workload, tree=tree), result.profile)


def _plan_changes(setup: Setup) -> Iterator[tuple[str, Any]]:
    plan = setup.plan

    def change(**fields: Any) -> tuple[str, Any]:
        name = ", ".join(f"{field} = {_shown(value)}" for field, value in fields.items())
        return name, dataclasses.replace(plan, **fields)

    yield change(grad_accum=plan.grad_accum * 2)
    if isinstance(plan, DeepSpeedPlan):
        overlap = plan.stage == 3 if plan.overlap_comm is None else plan.overlap_comm
        if plan.stage:
            yield change(overlap_comm=not overlap)
            yield change(reduce_bucket_size=plan.reduce_bucket_size * 4)
            yield change(reduce_bucket_size=max(plan.reduce_bucket_size // 4, 1))
        for stage in (plan.stage - 1, plan.stage + 1):
            if 1 <= stage <= 3 and not plan.offload_param:
                yield change(stage=stage)
        if plan.stage == 3:
            yield change(stage3_prefetch_bucket_size=plan.stage3_prefetch_bucket_size * 4)
            yield change(stage3_param_persistence_threshold=plan.stage3_param_persistence_threshold * 10)
            if setup.cluster.nodes > 1 and plan.zero_hpz_partition_size == 1:
                yield change(zero_hpz_partition_size=setup.cluster.gpus_per_node)
        if plan.stage and plan.offload_optimizer is None:
            offload = dataclasses.replace(plan.optimizer, impl="cpu")
            name, changed = change(offload_optimizer="cpu")
            yield name, dataclasses.replace(changed, optimizer=offload)
    elif isinstance(plan, Fsdp2Plan):
        yield change(reshard_after_forward=plan.reshard_after_forward is False)
        yield change(prefetch=plan.prefetch + 1)
        if plan.reduce_dtype != plan.param_dtype:
            yield change(reduce_dtype=plan.param_dtype)
        if setup.cluster.nodes > 1 and plan.mesh is None:
            yield change(mesh=(setup.cluster.nodes, setup.cluster.gpus_per_node))


def _workload_changes(setup: Setup) -> Iterator[tuple[str, Any]]:
    workload = setup.workload

    def change(**fields: Any) -> tuple[str, Any]:
        name = ", ".join(f"{field} = {_shown(value)}" for field, value in fields.items())
        return name, dataclasses.replace(workload, **fields)

    yield change(micro_batch=workload.micro_batch * 2)
    if workload.micro_batch > 1:
        yield change(micro_batch=workload.micro_batch // 2)
    for checkpointing in ("none", "selective", "full"):
        if checkpointing != workload.checkpointing:
            yield change(checkpointing=checkpointing)
    if workload.loss != "fused":
        yield change(loss="fused")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def _links(cluster: Cluster, kind: str, factor: float) -> Cluster:
    def scaled(link: Link) -> Link:
        return dataclasses.replace(link, bandwidth=link.bandwidth * factor, raw=link.raw * factor)

    templates = tuple(
        dataclasses.replace(
            node,
            links={name: scaled(link) if link.kind == kind else link for name, link in node.links.items()},
            _cache={},
        )
        for node in cluster.templates
    )
    return dataclasses.replace(cluster, templates=templates, _cache={})


def _devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    templates = tuple(
        dataclasses.replace(node, devices=tuple(change(device) for device in node.devices), _cache={})
        for node in cluster.templates
    )
    return dataclasses.replace(cluster, templates=templates, _cache={})


def _twice_the_flops(device: Device) -> Device:
    return dataclasses.replace(device, peak_flops={dtype: 2 * peak for dtype, peak in device.peak_flops.items()})


def _twice_the_bandwidth(device: Device) -> Device:
    return dataclasses.replace(device, memory_bandwidth=2 * device.memory_bandwidth)
