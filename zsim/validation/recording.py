"""Recordings of real runs: one header line, then every collective a rank issued, as JSON lines.

`python -m validation.oracles.record` writes them. The header holds the run's whole configuration, from which
`setup` builds what zsim needs to predict the rest.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from zsim.errors import InputError, NotModeled
from zsim.model.spec import Evaluation, Float8, Images, ModelSpec, Module, Preference, Workload
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.plan.version import parse_version
from zsim.program.lower import under

STEPS = 3  # recorded after initialization, which is step 0

# torch.distributed calls with the same meaning and bytes; on GPUs the first of a pair is what runs.
KINDS = {
    "all_gather_into_tensor": "all_gather", "all_gather": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce",
    "barrier": "barrier", "all_to_all_single": "all_to_all", "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
}  # fmt: skip
PHASES = {
    "init": "init", "forward": "forward", "reference": "forward", "recompute": "backward", "backward": "backward",
    "optimizer": "step", "evaluation": "evaluation",
}  # fmt: skip


class Call(NamedTuple):
    """One collective as rank 0 sees it. `root` only for reduce and broadcast, `reduce_op` only where known."""

    kind: str
    dtype: str
    in_numel: int
    out_numel: int
    group: tuple[int, ...]
    phase: str
    micro: int
    root: int | None = None
    reduce_op: str | None = None

    def __str__(self) -> str:
        sizes = f"{self.in_numel} -> {self.out_numel}" if self.in_numel != self.out_numel else str(self.in_numel)
        ending = "".join(
            f" {word}" for word in (self.reduce_op, None if self.root is None else f"root {self.root}") if word
        )
        return f"{self.kind} {self.dtype} {sizes} ranks {list(self.group)}{ending} ({self.phase}, micro {self.micro})"


@dataclass(frozen=True)
class Recording:
    path: Path
    header: Mapping[str, Any]
    steps: tuple[tuple[Call, ...], ...]  # index 0: initialization

    @property
    def name(self) -> str:
        return str(self.header.get("name", self.path.name))

    @property
    def world_size(self) -> int:
        return int(self.header["world"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file whose first one is a header. Raises InputError with file and line where it is none."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise InputError(f"cannot be read ({error})", file=path) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"not JSON ({error.msg})", file=path, line=number) from None
        if not isinstance(row, dict):
            raise InputError("not a JSON object", file=path, line=number)
        rows.append(row)
    if not rows or rows[0].get("kind") != "header":
        raise InputError("the first line is not a header", file=path, line=1, accepted='{"kind": "header", ...}')
    return rows


def read(path: Path) -> Recording:
    """Raises InputError with file and line where the file is not a recording."""
    rows = read_rows(path)
    header = rows[0]
    for field in ("engine", "world", "config", "model", "params"):
        if field not in header:
            raise InputError("missing", file=path, line=1, field=field)
    count = max([STEPS, *(row.get("step", 0) for row in rows[1:])]) + 1
    steps: list[list[Call]] = [[] for _ in range(count)]
    for number, row in enumerate(rows[1:], 2):
        if row.get("kind") != "coll" or row.get("rank", 0) != 0:
            continue
        try:
            steps[row["step"]].append(_call(row))
        except (KeyError, TypeError) as error:
            raise InputError(f"not a collective ({error!r})", file=path, line=number) from None
    return Recording(path, header, tuple(map(tuple, steps)))


def _call(row: Mapping[str, Any]) -> Call:
    kind = KINDS.get(row["op"], row["op"])
    reduce_op = row.get("reduce_op")
    return Call(
        kind, row["dtype"], row["in_numel"], row["out_numel"], tuple(row["group"]), row["phase"],
        row["micro"] if row["phase"] in ("forward", "backward") else 0,
        row.get("root") if kind in ("broadcast", "reduce") else None,
        reduce_op.upper() if reduce_op else None,
    )  # fmt: skip


# From the header to what zsim simulates.


def plan_of(header: Mapping[str, Any]) -> AnyPlan:
    """Raises NotModeled for a setting that no Plan field expresses, InputError for an unknown engine."""
    engine = header["engine"]
    if engine not in _PLANS:
        raise InputError(f"engine {engine!r}", field="engine", accepted=", ".join(_PLANS))
    if header.get("skipped_steps"):
        raise NotModeled("optimizer steps that the run skipped, as its gradients overflowed", field="skipped_steps")
    try:
        plan = _PLANS[engine](header["config"], int(header["world"]))
        version = header.get("versions", {}).get("deepspeed")
        return replace(plan, version=version) if isinstance(plan, DeepSpeedPlan) and version else plan
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"is not what the recorder writes ({error!r})", field="config") from None


def _widened(config: Mapping[str, Any]) -> bool:
    """Whether adapters alone are in float32."""
    return bool(config.get("lora", {}).get("widened"))


def _shared(config: Mapping[str, Any], world: int) -> dict[str, Any]:
    return {
        "world_size": world,
        "grad_accum": config.get("ga", 1),
        "grad_clip": 1.0 if config.get("clip", True) else None,
        "optimizer": Optimizer(config.get("optimizer", "adamw"), impl=config.get("impl", "loop")),
    }


def _take(settings: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Plan fields from recorded settings; every setting has to be known."""
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise NotModeled(f"{', '.join(unknown)}", field=where, accepted=", ".join(sorted(names)))
    return {names[key]: value for key, value in settings.items() if names[key]}


_DDP = {
    "bucket_cap_mb": "bucket_cap_mb", "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph", "find_unused_parameters": "find_unused_parameters",
}  # fmt: skip


def _ddp(config: Mapping[str, Any], world: int) -> DdpPlan:
    return DdpPlan(
        **_shared(config, world),
        dtype="float32" if _widened(config) else config.get("dtype", "float32"),
        autocast=config.get("autocast"),
        no_sync=bool(config.get("no_sync")),
        **_take(config.get("ddp", {}), _DDP, "ddp"),
    )


_FSDP2 = {
    "mesh": "mesh", "reshard_after_forward": "reshard_after_forward", "prefetch": "prefetch",
    "sync_only_last": "sync_only_last", "all_reduce_only_last": "all_reduce_only_last",
    "no_reshard_bwd_until_last": "reshard_backward_only_last", "is_last_backward": "last_backward_only_last",
    "offload": "cpu_offload",
    "param_dtype": "param_dtype", "reduce_dtype": "reduce_dtype", "mp": "", "titan": "", "root_reshard": "",
    "upcast": "", "accelerate": "", "adapter_units": "adapter_units",
    "upcast_trained": "", "wrap": "wrap",
}  # fmt: skip


def _fsdp2(config: Mapping[str, Any], world: int) -> Fsdp2Plan:
    settings = dict(config.get("fsdp", {}))
    fields = _take(settings, _FSDP2, "fsdp")
    fields |= {name: tuple(fields[name]) for name in ("mesh", "wrap") if name in fields}
    if not settings.get("mp", True):
        fields |= {"param_dtype": "float32", "reduce_dtype": "float32"}
    if settings.get("root_reshard") != "default":
        fields["root_reshard_after_forward"] = bool(fields.get("reshard_after_forward", True))
    if settings.get("titan"):
        fields["grouping"] = "titan"
    if settings.get("accelerate"):
        fields["grouping"] = "accelerate"
    if settings.get("offload"):
        fields["offload_pin_memory"] = False
    if settings.get("upcast_trained"):
        fields["frozen_dtype"] = config["dtype"]
    elif not settings.get("upcast"):
        fields["storage_dtype"] = config.get("dtype", "float32")
    return Fsdp2Plan(**_shared(config, world), **fields)


_FSDP1 = {
    "strategy": "sharding_strategy", "backward_prefetch": "backward_prefetch", "forward_prefetch": "forward_prefetch",
    "reduce_dtype": "reduce_dtype", "mesh": "mesh", "no_sync": "no_sync", "use_orig_params": "use_orig_params",
    "offload": "cpu_offload", "adapter_units": "adapter_units", "param_dtype": "param_dtype",
    "min_num_params": "min_num_params", "wrap": "wrap", "mp": "",
}  # fmt: skip


def _fsdp1(config: Mapping[str, Any], world: int) -> Fsdp1Plan:
    settings, stored = config.get("fsdp", {}), config.get("dtype", "float32")
    fields = _take(settings, _FSDP1, "fsdp")
    if not settings.get("mp", True):
        fields |= {"param_dtype": stored, "reduce_dtype": stored}
    fields |= {name: tuple(fields[name]) for name in ("mesh", "wrap") if name in fields}
    return Fsdp1Plan(**_shared(config, world), storage_dtype=stored, **fields)


_ZERO = {
    name: name
    for name in (
        "stage", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "reduce_scatter",
        "overlap_comm", "contiguous_gradients", "round_robin_gradients", "use_multi_rank_bucket_allreduce",
        "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "use_all_reduce_for_fetch_params", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "stage3_module_granularity_threshold",
        "mics_shard_size", "mics_hierarchical_params_gather", "stage3_gather_16bit_weights_on_model_save",
    )
} | {
    "allgather_sequential": "stage3_allgather_sequential", "offload_optimizer": "", "offload_param": "",
    "leaf_module": "",
    "stage3_allgather_sequential": "stage3_allgather_sequential",
    "stage3_use_all_reduce_for_fetch_params": "use_all_reduce_for_fetch_params",
}  # fmt: skip
_OFFLOAD = {
    "offload_optimizer": {
        "device": "offload_optimizer", "pin_memory": "offload_optimizer_pin_memory", "nvme_path": "",
        "ratio": "offload_optimizer_ratio", "buffer_count": "offload_optimizer_buffer_count",
        "pipeline_read": "offload_optimizer_pipeline_read", "pipeline_write": "offload_optimizer_pipeline_write",
    },
    "offload_param": {
        "device": "offload_param", "pin_memory": "offload_param_pin_memory", "nvme_path": "",
        "buffer_count": "offload_param_buffer_count", "buffer_size": "offload_param_buffer_size",
        "max_in_cpu": "offload_param_max_in_cpu",
    },
}  # fmt: skip
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}


def _deepspeed(config: Mapping[str, Any], world: int) -> DeepSpeedPlan:
    settings = config["ds"]
    zero = settings["zero_optimization"]
    fields = _take(zero, _ZERO, "zero_optimization")
    offloads = "offload_optimizer" in zero
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            fields |= _take(zero[name], _OFFLOAD[name], name)
    leaf = {"classes": "leaf_classes", "names": "leaf_names", "name_suffixes": "leaf_name_suffixes"}
    chosen = _take(zero.get("leaf_module", {}), leaf, "leaf_module")
    fields |= {field: tuple(values) for field, values in chosen.items()}
    enabled = [d for k, d in (("bf16", "bfloat16"), ("fp16", "float16")) if settings.get(k, {}).get("enabled")]
    fields["dtype"] = enabled[0] if enabled else "float32"
    if settings.get("communication_data_type"):
        fields["communication_data_type"] = _DTYPES[settings["communication_data_type"]]
    if settings.get("seq_parallel_communication_data_type"):
        name = settings["seq_parallel_communication_data_type"]
        fields["seq_parallel_communication_data_type"] = _DTYPES[name]
    if accum := settings.get("data_types", {}).get("grad_accum_dtype"):
        fields["grad_accum_dtype"] = _DTYPES[accum]
    if not enabled and "dtype" in config:  # a model in 16 bits, trained as one in float32
        fields |= {"dtype": config["dtype"], "communication_data_type": "float32", "check_grad_overflow": False}
        fields |= {"grad_accum_dtype": "float32"} if fields["stage"] >= 2 else {}
    else:
        fields["check_grad_overflow"] = settings.get("bf16", {}).get("check_grad_overflow", True)
    optimizer = settings.get("optimizer", {}).get("params", {})
    muon = settings.get("optimizer", {}).get("type") == "Muon"
    experts = settings.get("expert_parallel", {})
    return DeepSpeedPlan(
        world_size=world,
        autoep_size=experts.get("autoep_size", 1) if experts.get("enabled") else 0,
        use_data_before_expert_parallelism=settings.get("use_data_before_expert_parallelism", False),
        sequence_parallel_size=config.get("sequence_parallel", 1),
        grad_accum=settings.get("gradient_accumulation_steps", 1),
        grad_clip=settings.get("gradient_clipping") or None,
        optimizer=Optimizer(
            "muon" if muon else "adamw",
            impl="loop" if optimizer.get("torch_adam") else "cpu" if offloads else "fused",
            decay_groups=bool(config.get("decay_groups")),
            ns_method=optimizer.get("ns_method", "gram"),
        ),
        prescale_gradients=settings.get("prescale_gradients", False),
        bf16_master_weights_and_grads=settings.get("bf16", {}).get("bf16_master_weights_and_grads", False),
        bf16_optimizer_states=settings.get("bf16", {}).get("bf16_optimizer_states", False),
        torch_autocast=settings["torch_autocast"]["dtype"] if "torch_autocast" in settings else None,
        zero_init=bool(config.get("zero_init")),
        leaf_blocks=bool(config.get("leaf")),
        gpus_per_node=config.get("gpus_per_node"),
        **fields,
    )


_PLANS: dict[str, Callable[[Mapping[str, Any], int], AnyPlan]] = {
    "ddp": _ddp,
    "ds": _deepspeed,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}


def setup(header: Mapping[str, Any]) -> tuple[ModelSpec, Module, Workload]:
    """The recorded model as zsim builds it from its configuration. Raises InputError where the parameters differ."""
    from zsim.model.expert_modules import with_modules
    from zsim.model.huggingface import from_config
    from zsim.model.trace import trace

    config = {**header["model"], "model_type": header["model"]["kind"]}
    if config["kind"] == "gpt2":  # the recorder turns its dropouts off
        config = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0) | config
    release = header.get("versions", {}).get("transformers")
    model = with_modules(from_config(config, header["name"]), parse_version(release) if release else None)
    if "lora" in header["config"]:
        model = _adapted(model, header["config"])
    recorded = [(parameter["name"], tuple(parameter["shape"])) for parameter in header["params"]]
    ours = [(parameter.name, parameter.shape) for parameter in model.parameters]
    if ours != recorded:
        odd = next(((a, b) for a, b in zip(ours, recorded, strict=False) if a != b), (len(ours), len(recorded)))
        raise InputError(f"parameters differ: predicted {odd[0]}, recorded {odd[1]}", field="params")
    trained = [parameter.get("trainable", True) for parameter in header["params"]]
    if trained != [parameter.trainable for parameter in model.parameters]:
        parameters = zip(model.parameters, trained, strict=True)
        model = replace(model, parameters=tuple(replace(p, trainable=flag) for p, flag in parameters))
    plan = plan_of(header)
    if isinstance(plan, DeepSpeedPlan) and plan.autoep_size:
        model = _converted(header, model, plan)
    dtype = plan.dtype if isinstance(plan, DdpPlan | DeepSpeedPlan) else plan.param_dtype
    preference = _preference(header["config"])
    workload = Workload(
        header.get("micro_batch", 1) // (2 if preference else 1),
        header.get("seq", 32),
        dtype=header["config"].get("autocast", dtype),
        attention=header["config"].get("attention", "sdpa"),
        checkpointing="full" if header["config"].get("ckpt") else "none",
        compile=bool(header["config"].get("compile")),
        float8=_float8(header["config"].get("float8")),
        sequence_parallel_size=header["config"].get("sequence_parallel", 1),
        images=Images(**header["images"]) if "images" in header else None,
        target_len=header.get("target"),
        preference=preference,
        evaluation=Evaluation(header["config"]["evaluate"]) if "evaluate" in header["config"] else None,
    )
    workload = under(plan, workload)
    return model, trace(model, workload), workload


def _adapted(model: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    from zsim.model.lora import Lora, Tuning, tune

    lora = config["lora"]
    saved, tied = tuple(lora.get("modules_to_save", ())), lora.get("ensure_weight_tying", False)
    adapters = Lora(
        lora["r"], tuple(lora["targets"]), dropout=lora.get("dropout", 0.0), save=saved, tie=tied,
        parameters=tuple(lora.get("target_parameters", ())),
    )  # fmt: skip
    model = tune(model, Tuning(adapters))
    if not _widened(config):
        return model
    low = config["dtype"]
    parameters = tuple(p if ".lora_" in p.name else replace(p, dtype=low) for p in model.parameters)
    return replace(model, parameters=parameters)


def _preference(config: Mapping[str, Any]) -> Preference | None:
    """LLaMA-Factory's casts logits, and holds them; accelerate's autocast widens them, too."""
    if "preference" not in config:
        return None
    settings = config["preference"]
    cast, gathered = settings["log_probs"] == "float32", settings["metrics"] == "gathered"
    return Preference(
        reference=settings["reference"],
        log_probs="log_softmax" if cast else settings["log_probs"].removeprefix("selective_"),
        sharded=bool(settings.get("sharded")),
        widened=cast or "autocast" in config,
        held=float(cast) or (2.0 - ("autocast" in config)) * (settings["log_probs"] == "selective_shifted"),
        averaged=settings["log_probs"] in ("log_softmax", "selective"),
        metrics=8 if gathered else 0,
        gathered=gathered,
    )


def _float8(settings: Mapping[str, Any] | None) -> Float8 | None:
    """Recorded with the output projection left out."""
    return None if settings is None else Float8(exclude=("lm_head",), **settings)


def _converted(header: Mapping[str, Any], model: ModelSpec, plan: DeepSpeedPlan) -> ModelSpec:
    """The model with the experts of one rank. Raises InputError where its parameters differ from those recorded."""
    from zsim.model.expert_parallel import converted

    found = converted(model, plan.autoep_size)
    recorded = [(parameter["name"], tuple(parameter["shape"])) for parameter in header["converted"]]
    if [(parameter.name, parameter.shape) for parameter in found.parameters] != recorded:
        raise InputError("parameters differ after the conversion of the experts", field="converted")
    return converted(model, plan.autoep_size, renumbered=True) if plan.stage == 3 and plan.zero_init else found


def differences(predicted: Sequence[Call], recorded: Sequence[Call]) -> int | None:
    """Index of the first call that differs, None if the lists are equal; a reduce_op counts where both know it."""
    for index, (ours, theirs) in enumerate(zip(predicted, recorded, strict=False)):
        known = ours.reduce_op and theirs.reduce_op
        if ours[:-1] != theirs[:-1] or (known and ours.reduce_op != theirs.reduce_op):
            return index
    return None if len(predicted) == len(recorded) else min(len(predicted), len(recorded))
