"""From a checked scenario to what the simulator runs: model, tree, workload, plan and cluster."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zsim.cluster.spec import Cluster
from zsim.document import siblings
from zsim.errors import NotModeled
from zsim.model.architecture import Architecture
from zsim.model.families import breaks_graphs
from zsim.model.spec import Evaluation, Float8, Images, ModelSpec, Module, Preference, Workload, every_nth
from zsim.plan.batch import triangle
from zsim.plan.spec import TORCH_DTYPE, Allocator, AnyPlan, DdpPlan, DeepSpeedPlan
from zsim.program.lower import under
from zsim.scenario.evaluation import evaluation_of
from zsim.scenario.kinds import FEW, MICRO_STEPS
from zsim.scenario.pairs import target_of
from zsim.scenario.plans import build_plan
from zsim.scenario.releases import (
    attention_of,
    experts_of,
    loss_of,
    release_of_models,
    stated_release,
    transformers_release,
)
from zsim.scenario.sequences import check_shared, data_parallel_ranks, shared_notes

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario


@dataclass(frozen=True)
class Setup:
    """All that a simulation needs. `profile` names the software stack of the cost profile, or its file.

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
    evaluation: Evaluation | None = None  # between steps


def resolve(scenario: Scenario) -> Setup:
    """Read what the scenario names. Raises InputError, or NotModeled where a part cannot be simulated; one that names a
    field alone is given its file and line by `Scenario.resolve`."""
    from zsim.model.trace import trace

    fields = scenario.fields
    topology = _file(scenario, "cluster", fields.cluster.topology)
    cluster = cluster_of(topology, fields.cluster.nodes)
    model, config, expert_notes, unlike = _model(scenario)
    micro_batch, grad_accum = _batch(scenario, cluster.world_size)
    images, image_notes, waits = _images(scenario, model)
    target, target_notes = target_of(scenario, model)
    release = transformers_release(scenario)
    attention, attention_notes = attention_of(fields, release, model)
    loss, loss_notes = loss_of(fields, release, model.family)
    float8, float8_notes = _float8(scenario, cluster)
    preference, preference_notes, uncompared = _preference(scenario, model, release)
    workload = Workload(
        micro_batch=micro_batch,
        seq_len=fields.seq_len,
        dtype=TORCH_DTYPE[fields.precision],
        attention=attention,
        checkpointing=fields.checkpointing.policy,
        checkpointed=_checkpointed(scenario, model),
        early_stop=fields.checkpointing.early_stop or fields.compile,  # of which nothing is left that is not needed
        implementation=fields.implementation,
        loss=loss,
        kernels=fields.kernels,
        compile=fields.compile,
        float8=float8,
        sequence_parallel_size=fields.sequence_parallel_size,
        images=images,
        target_len=target,
        checkpoint_frozen_tower=fields.checkpointing.frozen_tower,
        preference=preference,
        workspace_bytes=cluster.devices[0].workspace_bytes,
        transformers=release_of_models(release, model.family, fields.framework.name),
    )
    check_shared(model, workload, cluster.world_size, fields.framework.name)
    plan, plan_notes, not_modeled = build_plan(scenario, model, cluster.world_size, grad_accum, cluster.gpus_per_node)
    _check_memory(scenario, cluster, plan)
    _check_whole(scenario, plan)
    if preference is not None:
        from zsim.scenario.objective import check_placed

        check_placed(preference, plan)
    plan_notes += shared_notes(model, plan, workload)
    workload = under(plan, workload, model)
    model, plan, shared_experts = _with_experts_shared(model, plan)
    evaluation, unevaluated = evaluation_of(scenario, model, workload)
    plan_notes += shared_experts
    return Setup(
        name=fields.name or Path(scenario.document.file).stem,
        model=model,
        tree=trace(model, workload),
        workload=workload,
        plan=plan,
        cluster=cluster,
        profile=_profile(scenario),
        assumptions=(
            *_length(scenario, model),
            *attention_notes,
            *_attention(workload, cluster),
            *_compiled(workload, model),
            *_sequential_layers(workload, model),
            *expert_notes,
            *image_notes,
            *target_notes,
            *(loss_notes if preference is None else preference_notes),
            *float8_notes,
            *model.notes,
            *cluster.assumptions,
            *scenario.notes,
            *plan_notes,
        ),
        not_modeled=(*scenario.not_modeled, *not_modeled, *waits, *unlike, *uncompared, *unevaluated),
        sources=(*scenario.sources, topology, *config),
        evaluation=evaluation,
    )


def _images(scenario: Scenario, model: ModelSpec) -> tuple[Images | None, list[str], list[str]]:
    """What a vision tower is given, notes on that, and what of it is not modeled."""
    if getattr(model.arch, "vision", None) is None and scenario.fields.images is None:
        return None, [], []
    from zsim.scenario.images import WAITS, images_of

    return *images_of(scenario, model), [WAITS]


def _float8(scenario: Scenario, cluster: Cluster) -> tuple[Float8 | None, list[str]]:
    given = scenario.fields.float8
    if given is None:
        return None, []
    from zsim.scenario.float8 import float8_of

    return float8_of(scenario, given, cluster)


def _preference(
    scenario: Scenario, model: ModelSpec, release: tuple[int, ...] | None
) -> tuple[Preference | None, list[str], list[str]]:
    if scenario.fields.objective is None:
        return None, [], []
    from zsim.scenario.objective import preference_of

    return preference_of(scenario, model, release)


def _check_whole(scenario: Scenario, plan: AnyPlan) -> None:
    """Whether every rank has the 8-bit weights that it multiplies with whole, as bitsandbytes does."""
    quantize = scenario.fields.quantize
    whole = isinstance(plan, DdpPlan) or (isinstance(plan, DeepSpeedPlan) and plan.stage < 3)
    if quantize and quantize.type == "int8" and not whole:
        accepted = "nf4, or framework: ddp, or zero.stage up to 2"
        raise scenario.error(("quantize",), "8-bit weights in shards", accepted, kind=NotModeled)
    if quantize and quantize.experts and not whole:
        accepted = "false, or framework: ddp, or zero.stage up to 2"
        raise scenario.error(("quantize", "experts"), "experts in 4 bits in shards", accepted, kind=NotModeled)


def _sequential_layers(workload: Workload, model: ModelSpec) -> tuple[str, ...]:
    """What runs them. Times were compared with two published steps of Qwen3.5 alone (docs/linear-attention.md)."""
    mixers = {kind.mixer for kind in getattr(model.arch, "kinds", ())}
    if getattr(model.arch, "mamba", None) is not None:
        if workload.kernels == "mamba-ssm":
            return (
                "kernels of mamba-ssm and causal-conv1d as fast as the memory that they read and write, from below: no "
                "run with them has been measured",
            )
        return (
            "state spaces as PyTorch code, which transformers runs where mamba-ssm and causal-conv1d are not "
            "installed (kernels: mamba-ssm where they are: less time, and without checkpointing much less memory); no "
            "run with it has been measured",
        )
    if "conv" in mixers:
        return (
            "short convolutions as PyTorch code, which transformers runs where causal-conv1d is not installed; its "
            "kernels are not modeled; no run with either has been measured",
        )
    if "delta" not in mixers:
        return ()
    if workload.kernels == "fla":
        return (
            "kernels of flash-linear-attention and causal-conv1d as fast as the memory that they read and write, which "
            "was compared with one run alone",
        )
    return (
        "linear attention as PyTorch code, which transformers runs where flash-linear-attention and causal-conv1d are "
        "not installed (kernels: fla where they are: less time, and without checkpointing much less memory); its time "
        "was compared with one run alone",
    )


def _attention(workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """What is put in place of a kernel that the GPU does not have."""
    device = cluster.devices[0]
    if workload.attention != "flash" or not device.without_flash:
        return ()
    return (f"FlashAttention 2 does not run on {device.name}: torch's memory-efficient kernel in its place",)


def _compiled(workload: Workload, model: ModelSpec) -> tuple[str, ...]:
    """What torch.compile leaves as it is."""
    if workload.checkpointing == "none" or not breaks_graphs(model.family, workload):
        return ()
    why = "FlashAttention of transformers looks at the positions there, which breaks their graphs"
    return (f"compile: checkpointed blocks run uncompiled, for {why} (attention: sdpa does not)",)


def _with_experts_shared(model: ModelSpec, plan: AnyPlan) -> tuple[ModelSpec, AnyPlan, list[str]]:
    """The model as one rank of DeepSpeed's AutoEP holds it, the plan, and what is assumed of both."""
    if not (isinstance(plan, DeepSpeedPlan) and plan.autoep_size):
        return model, plan, []
    from zsim.scenario.experts import shared

    return shared(model, plan)


def _check_memory(scenario: Scenario, cluster: Cluster, plan: AnyPlan) -> None:
    """Refuses what belongs to CUDA's allocator and its managed memory where there is no CUDA."""
    device = cluster.devices[0]
    if not device.without_cuda:
        return
    if plan.allocator != Allocator():
        why = f"PYTORCH_ALLOC_CONF sets CUDA's caching allocator, which {device.name} does not have"
        raise scenario.error(("allocator",), why, "null")
    if plan.optimizer.paged:
        why = f"paged states lie in CUDA's managed memory, which {device.name} does not have"
        raise scenario.error(("optimizer", "paged"), why, "false")


def _checkpointed(scenario: Scenario, model: ModelSpec) -> tuple[int, ...] | None:
    """The blocks that checkpointing applies to; None: all."""
    field = scenario.fields.checkpointing
    if field.every is None and field.blocks is None:
        return None
    name = "every" if field.every is not None else "blocks"
    if field.policy == "none" or (field.every is not None and field.blocks is not None):
        taken = "policy: none" if field.policy == "none" else "every"
        raise scenario.error(("checkpointing", "blocks" if taken == "every" else name), f"does not go with {taken}")
    layers = len(cast(Architecture, model.arch).kinds)
    for index, block in enumerate(field.blocks or ()):
        if block in (field.blocks or ())[:index]:
            raise scenario.error(("checkpointing", "blocks", index), f"block {block} stands here twice", "each once")
    chosen = every_nth(layers, field.every) if field.every else tuple(sorted(field.blocks or ()))
    if not chosen:
        raise scenario.error(("checkpointing", name), f"chooses none of the {layers} blocks of {model.name}")
    if chosen[-1] >= layers:
        accepted = f"0 to {layers - 1}, the blocks of {model.name}"
        raise scenario.error(("checkpointing", name), f"there is no block {chosen[-1]}", accepted)
    return None if len(chosen) == layers else chosen


def _file(scenario: Scenario, field: str, name: str) -> Path:
    """The file that a field names; refused at the field where it is not there."""
    path = scenario.folder / name
    if not os.path.exists(path):  # unlike Path's, false also for a name that no file can have
        raise scenario.error((field,), f"no such file: {path}", notes=siblings(path))
    return path


def _profile(scenario: Scenario) -> str:
    """A software stack's name, or the path of a calibrated profile, beside the scenario as other files are."""
    name = scenario.fields.profile
    return str(_file(scenario, "profile", name)) if name.endswith((".yaml", ".yml")) else name


def cluster_of(topology: Path, nodes: int | None) -> Cluster:
    """From a topology file, or from what nvidia-smi, rocm-smi or NCCL printed."""
    if topology.suffix in (".yaml", ".yml"):
        from zsim.cluster.load import load_topology

        return load_topology(topology, nodes)
    from zsim.cluster.files import assumed, read_machine

    cluster, reading = read_machine(topology, nodes=nodes)
    return dataclasses.replace(cluster, assumptions=assumed(topology, reading))


def _model(scenario: Scenario) -> tuple[ModelSpec, list[Path], list[str], list[str]]:
    """The model, the files that it was read from, notes, and what of it is not modeled."""
    wanted = scenario.fields.model
    if (wanted.config is None) == (wanted.params is None):
        accepted = "model: path/to/config.json, or model: {params: 8e9}"
        raise scenario.error(("model",), "one of config and params is needed", accepted)
    if wanted.params is not None:
        from zsim.model.bare import from_params

        model, sources = from_params(wanted.params), []
    else:
        from zsim.model.huggingface import read_config

        assert wanted.config is not None
        path = _file(scenario, "model", wanted.config)
        if path.is_dir():
            path = _file(scenario, "model", f"{wanted.config}/config.json")
        model, sources = read_config(path), [path]
    notes, unlike = list[str](), list[str]()
    if scenario.fields.implementation == "hf":
        model, notes, unlike = experts_of(model, stated_release(scenario))
    if scenario.fields.lora or scenario.fields.quantize:
        from zsim.scenario.adapters import tuned

        model = tuned(scenario, model)
    return (_freeze(scenario, model) if wanted.freeze else model), sources, notes, unlike


def _freeze(scenario: Scenario, model: ModelSpec) -> ModelSpec:
    from zsim.model.parts import part_of

    patterns = scenario.fields.model.freeze
    names = [parameter.name for parameter in model.parameters]
    has_parts = getattr(model.arch, "vision", None) is not None

    def meant(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or (has_parts and part_of(name) == pattern)

    for index, pattern in enumerate(patterns):
        if not any(meant(name, pattern) for name in names):
            some = f"patterns of names such as {', '.join(names[:3])}"
            raise scenario.error(("model", "freeze", index), f"no parameter is named like {pattern!r}", some)
    parameters = tuple(
        dataclasses.replace(parameter, trainable=False)
        if any(meant(parameter.name, pattern) for pattern in patterns)
        else parameter
        for parameter in model.parameters
    )
    if not any(parameter.trainable for parameter in parameters):
        raise scenario.error(("model", "freeze"), "leaves nothing to train")
    return dataclasses.replace(model, parameters=parameters)


# Their positions count from behind the one of padding, 1.
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "esm")


def _length(scenario: Scenario, model: ModelSpec) -> list[str]:
    """Longer than the model was made for: impossible with a table of positions, questionable with any other kind."""
    positions, length = getattr(model.arch, "positions", 0) or 0, scenario.fields.seq_len
    if positions and getattr(model.arch, "family", "") in _AFTER_PADDING:
        positions -= 2
    if length <= positions or not positions:
        return []
    tables = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
    if any(parameter.name.endswith(tables) for parameter in model.parameters):
        raise scenario.error(
            ("seq_len",), f"{length} is longer than the model's {positions} positions", f"up to {positions}"
        )
    return [f"seq_len {length:,} is longer than the {positions:,} positions of the model's configuration"]


def _batch(scenario: Scenario, ranks: int) -> tuple[int, int]:
    fields = scenario.fields
    ranks = data_parallel_ranks(ranks, fields.sequence_parallel_size)
    micro_batch, grad_accum = triangle(fields.train_batch_size, fields.micro_batch, fields.grad_accum, ranks)
    for name, size, range_ in (("micro_batch", micro_batch, FEW), ("grad_accum", grad_accum, MICRO_STEPS)):
        if size > range_.high:
            raise scenario.error(("train_batch_size",), f"makes {name} {size:,}", f"{name} up to {range_.high:,}")
    return micro_batch, grad_accum
