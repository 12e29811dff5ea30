"""From a checked scenario to what the simulator runs: model, tree, workload, plan and cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.cluster.spec import Cluster
from zsim.model.spec import ModelSpec, Module, Workload
from zsim.plan.document import siblings
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario

_TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Setup:
    """All that a simulation needs. `profile` names the software stack of the cost profile.

    `assumptions` are what was not stated and had to be chosen; `not_modeled` what was stated and has no effect here;
    `sources` the files that were read.
    """

    name: str
    model: ModelSpec
    tree: Module
    workload: Workload
    plan: AnyPlan
    cluster: Cluster
    profile: str = "default"
    assumptions: tuple[str, ...] = ()
    not_modeled: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()


def resolve(scenario: Scenario) -> Setup:
    """Read what the scenario names. Raises InputError, or NotModeled where a part cannot be simulated."""
    from zsim.cluster.load import load_topology
    from zsim.model.trace import trace

    fields, folder = scenario.fields, scenario.folder
    sources: list[Path] = [Path(scenario.document.file)]

    topology = folder / fields.cluster.topology
    require_file(scenario, ("cluster",), topology)
    cluster = load_topology(topology, fields.cluster.nodes)
    sources.append(topology)

    model = _model(scenario, sources)
    workload = Workload(
        micro_batch=fields.micro_batch,
        seq_len=fields.seq_len,
        dtype=_TORCH_DTYPE[fields.precision],
        attention=fields.attention,
        checkpointing=fields.checkpointing,
        implementation=fields.implementation,
        loss=fields.loss,
        compile=fields.compile,
    )
    plan = build_plan(scenario, cluster.world_size)
    return Setup(
        name=fields.name or Path(scenario.document.file).stem,
        model=model,
        tree=trace(model, workload),
        workload=workload,
        plan=plan,
        cluster=cluster,
        profile=fields.profile,
        assumptions=(*model.notes, *cluster.assumptions),
        sources=tuple(sources),
    )


def require_file(scenario: Scenario, path: tuple[str, ...], file: Path) -> None:
    """Refuse a file that is not there at the field that names it."""
    if not file.exists():
        raise scenario.error(path, f"no such file: {file}", notes=siblings(file))


def _model(scenario: Scenario, sources: list[Path]) -> ModelSpec:
    wanted = scenario.fields.model
    if (wanted.config is None) == (wanted.params is None):
        raise scenario.error(
            ("model",),
            "one of config and params is needed",
            accepted="model: path/to/config.json, or model: {params: 8e9}",
        )
    if wanted.params is not None:
        from zsim.model.bare import from_params

        model = from_params(wanted.params)
    else:
        from zsim.model.huggingface import read_config

        assert wanted.config is not None
        path = scenario.folder / wanted.config
        if path.is_dir():
            path = path / "config.json"
        require_file(scenario, ("model",), path)
        model = read_config(path)
        sources.append(path)
    return _freeze(scenario, model) if wanted.freeze else model


def _freeze(scenario: Scenario, model: ModelSpec) -> ModelSpec:
    patterns = scenario.fields.model.freeze
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(parameter.name, pattern) for parameter in model.parameters):
            some = ", ".join(parameter.name for parameter in model.parameters[:3])
            raise scenario.error(
                ("model", "freeze", index),
                f"no parameter is named like {pattern!r}",
                accepted=f"patterns of names such as {some}",
            )
    parameters = tuple(
        dataclasses.replace(parameter, trainable=False)
        if any(fnmatchcase(parameter.name, pattern) for pattern in patterns)
        else parameter
        for parameter in model.parameters
    )
    if not any(parameter.trainable for parameter in parameters):
        raise scenario.error(("model", "freeze"), "leaves nothing to train")
    return dataclasses.replace(model, parameters=parameters, _cache={})


def build_plan(scenario: Scenario, world_size: int) -> AnyPlan:
    """The plan of the scenario's framework on `world_size` ranks."""
    fields = scenario.fields
    dtype = _TORCH_DTYPE[fields.precision]
    name = fields.framework.name
    optimizer = Optimizer(**fields.optimizer.given())
    common: dict[str, Any] = {
        "world_size": world_size,
        "grad_accum": fields.grad_accum,
        "grad_clip": fields.grad_clip or None,
        "optimizer": optimizer,
    }
    if fields.framework.version:
        common["version"] = fields.framework.version
    if name == "ddp":
        autocast = None if dtype == "float32" else dtype
        given = fields.ddp.given() if fields.ddp else {}
        if given.get("dtype", "float32") != "float32":
            autocast = None
        return DdpPlan(**common, **({"autocast": autocast} | given))
    if name == "deepspeed":
        return _deepspeed(scenario, common, dtype)
    return _fsdp(scenario, common, dtype)


def _deepspeed(scenario: Scenario, common: dict[str, Any], dtype: str) -> DeepSpeedPlan:
    zero = scenario.fields.zero
    given = zero.given() if zero else {}
    for side in ("offload_optimizer", "offload_param"):
        if side in given:
            device = given.pop(side).device
            given[side] = None if device == "none" else device
    stage = given.get("stage", 0)
    if given.get("offload_param") and stage != 3:
        raise scenario.error(("zero", "offload_param"), f"needs stage 3, not {stage}")
    if given.get("offload_optimizer"):
        if stage == 0:
            raise scenario.error(("zero", "offload_optimizer"), "needs stage 1, 2 or 3, not 0")
        common["optimizer"] = dataclasses.replace(common["optimizer"], impl="cpu")
    hpz = given.get("zero_hpz_partition_size", 1)
    if common["world_size"] % hpz:
        raise scenario.error(
            ("zero", "zero_hpz_partition_size"), f"{hpz} does not divide the {common['world_size']} ranks"
        )
    return DeepSpeedPlan(**common, dtype=dtype, **given)


def _fsdp(scenario: Scenario, common: dict[str, Any], dtype: str) -> Fsdp1Plan | Fsdp2Plan:
    fields = scenario.fields
    plan_class: type[Fsdp1Plan] | type[Fsdp2Plan] = Fsdp2Plan if fields.framework.name == "fsdp2" else Fsdp1Plan
    given = fields.fsdp.given() if fields.fsdp else {}
    known = {field.name for field in dataclasses.fields(plan_class)}
    for name in given:
        if name not in known:
            other = "fsdp1" if plan_class is Fsdp2Plan else "fsdp2"
            raise scenario.error(
                ("fsdp", name), f"is a field of {other}, and this scenario's framework is {fields.framework.name}"
            )
    mesh = given.get("mesh")
    world = common["world_size"]
    if mesh and mesh[0] * mesh[1] != world:
        raise scenario.error(("fsdp", "mesh"), f"{mesh[0]} x {mesh[1]} is not the cluster's {world} ranks")
    reshard = given.get("reshard_after_forward")
    if reshard is not None and not isinstance(reshard, bool) and (mesh[1] if mesh else world) % reshard:
        raise scenario.error(
            ("fsdp", "reshard_after_forward"),
            f"{reshard} does not divide the {mesh[1] if mesh else world} ranks of a shard group",
        )
    if given.get("backward_prefetch") == "NONE":
        given["backward_prefetch"] = None
    if plan_class is Fsdp2Plan and fields.implementation == "torchtitan":
        given.setdefault("grouping", "titan")
    if dtype == "float32":
        given.setdefault("reduce_dtype", "float32")
    given.setdefault("param_dtype", dtype)
    if plan_class is Fsdp1Plan:
        given.setdefault("reduce_dtype", dtype)  # HF Trainer and accelerate set both alike
    return plan_class(**common, **given)
