"""From a scenario's fields to the plan of its framework; defaults are the framework's own (`plan.spec`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from zsim.errors import InputError, NotModeled
from zsim.model.spec import ModelSpec
from zsim.plan.batch import divisors
from zsim.plan.spec import (
    PAGED,
    TORCH_DTYPE,
    Allocator,
    AnyPlan,
    DdpPlan,
    DeepSpeedPlan,
    Fsdp1Plan,
    Fsdp2Plan,
    Optimizer,
)
from zsim.plan.version import parse_version
from zsim.scenario.releases import fsdp1_defaults, transformers_release
from zsim.scenario.saving import saving_of, unsaved
from zsim.scenario.sequences import check_version

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario

_PLANS: dict[str, Any] = {"deepspeed": DeepSpeedPlan, "fsdp2": Fsdp2Plan, "fsdp1": Fsdp1Plan, "ddp": DdpPlan}


def build_plan(
    scenario: Scenario, model: ModelSpec, ranks: int, grad_accum: int, gpus_per_node: int | None = None
) -> tuple[AnyPlan, list[str], list[str]]:
    """The plan of the scenario's framework on `ranks` ranks, notes on what was chosen, and what is not modeled.

    Raises InputError.
    """
    fields = scenario.fields
    threads, launched = _threads(scenario, ranks)
    allocator, allocator_notes = _allocator(scenario)
    launched += allocator_notes
    common: dict[str, Any] = {
        "world_size": ranks,
        "grad_accum": grad_accum,
        "grad_clip": fields.grad_clip or None,
        "optimizer": _optimizer(scenario),
        "offload_activations": _offloads_activations(scenario),
        "omp_num_threads": threads,
        "allocator": allocator,
        "load": fields.load or ("meta" if fields.implementation == "torchtitan" else "every_rank"),
        "load_dtype": _load_dtype(scenario),
        "saving": saving_of(scenario),
    }
    name, version = fields.framework.name, fields.framework.version
    plan_class = _PLANS[name]
    not_modeled = []
    if version:
        parse_version(version)
        common["version"] = version
        recorded = plan_class.__dataclass_fields__["version"].default
        if version != recorded:
            not_modeled.append(f"{name} {version}: its defaults{_own(name, version)}, but the operations of {recorded}")
    if name == "deepspeed":
        plan, notes = _deepspeed(scenario, model, common, gpus_per_node or ranks)
        return plan, [*notes, *launched], [*not_modeled, *unsaved(plan)]
    if name == "ddp":
        return _ddp(scenario, common), launched, not_modeled
    sharded, notes = _fsdp(scenario, model, common, gpus_per_node or ranks)
    return sharded, [*notes, *launched], [*not_modeled, *unsaved(sharded)]


def _own(name: str, version: str) -> str:
    """What of an old release is simulated as it was (zero12.py, zero3_early.py)."""
    if name != "deepspeed" or parse_version(version) >= (0, 12, 4):
        return ""
    gathers = " and the gathers of stage 3" if parse_version(version) < (0, 6) else ""
    return f", the reductions of stages 1 and 2{gathers}"


def _threads(scenario: Scenario, ranks: int) -> tuple[int | None, list[str]]:
    """OMP_NUM_THREADS where the CPU computes, and a note where the launcher sets it: torch/distributed/run.py to 1 for
    several processes per node; deepspeed/launcher/launch.py not at all without --bind_cores_to_rank."""
    fields = scenario.fields
    computes = _offloads(scenario) or (fields.fsdp is not None and fields.fsdp.cpu_offload)
    if fields.omp_num_threads or ranks == 1 or not computes:
        return fields.omp_num_threads, []
    if fields.framework.name == "deepspeed":
        return None, ["omp_num_threads: one per core of the node in every process, as the deepspeed launcher leaves it"]
    return 1, ["omp_num_threads: 1, as torchrun sets it"]


def _allocator(scenario: Scenario) -> tuple[Allocator, list[str]]:
    """Settings of the allocator, and a note on one without effect."""
    from zsim.plan.alloc_conf import divisions

    given = scenario.fields.allocator.given() if scenario.fields.allocator else {}
    if "roundup_power2_divisions" in given:
        path = ("allocator", "roundup_power2_divisions")
        try:
            given[path[1]] = divisions(str(given[path[1]]))
        except InputError as error:
            raise scenario.error(path, error.message, error.accepted) from None
    allocator, notes = Allocator(**given), []
    if allocator.garbage_collection_threshold and allocator.per_process_memory_fraction == 1:
        notes.append(
            "allocator.garbage_collection_threshold has no effect: torch collects only where "
            "per_process_memory_fraction is below 1"
        )
    return allocator, notes


def _load_dtype(scenario: Scenario) -> str | None:
    fields = scenario.fields
    if fields.load_dtype and fields.load != "gpu":
        raise scenario.error(("load_dtype",), "goes with load: gpu", "null, or load: gpu")
    if fields.load == "gpu" and fields.framework.name == "deepspeed" and fields.zero and fields.zero.stage == 3:
        raise scenario.error(("load",), "stage 3 shards what rank 0 reads as it is built", "every_rank, rank0, meta")
    return fields.load_dtype


def _optimizer(scenario: Scenario) -> Optimizer:
    given, framework = scenario.fields.optimizer.given(), scenario.fields.framework.name
    if "momentum" in given and given.get("name", "adamw") != "sgd":
        raise scenario.error(("optimizer", "momentum"), "is an option of sgd alone", "null, or name: sgd")
    if "ns_method" in given and (given.get("name") != "muon" or framework != "deepspeed"):
        raise scenario.error(("optimizer", "ns_method"), "is an option of DeepSpeed's muon alone", "null")
    if given.get("paged") and (name := given.get("name", "adamw")) not in PAGED:
        raise scenario.error(("optimizer", "paged"), f"bitsandbytes has no paged {name}", ", ".join(PAGED))
    if given.get("decay_groups") and framework != "deepspeed":  # elsewhere groups share shards and collectives
        raise scenario.error(("optimizer", "decay_groups"), "has an effect with framework deepspeed alone", "false")
    if given.get("impl") == "cpu" and framework == "deepspeed" and not _offloads(scenario):
        why = "cpu goes with zero.offload_optimizer, which is not set"
        raise scenario.error(("optimizer", "impl"), why, "fused, foreach, loop, or zero.offload_optimizer: cpu")
    if "impl" not in given and (impl := _trainers_impl(scenario)):
        given["impl"] = impl
    return Optimizer(**given)


def _trainers_impl(scenario: Scenario) -> str | None:
    """How the Trainer's own AdamW steps in an old release; None: fused, or DeepSpeed's own optimizer.

    transformers training_args.py, default_optim: adamw_torch_fused from torch 2.8 (August 2025) on, of whose days is
    DeepSpeed 0.17.5; adamw_torch before. torch 2.0 took foreach for its default, but of flat parameters, whose type
    `_default_to_fused_or_foreach` does not know, and a loop before.
    """
    fields = scenario.fields
    if fields.framework.version is None or fields.implementation == "torchtitan":
        return None
    version = parse_version(fields.framework.version)
    if fields.framework.name == "deepspeed":
        return "foreach" if fields.optimizer.decay_groups and version < (0, 17, 5) else None
    flat = fields.framework.name == "fsdp1" and not _keeps_parameters(scenario)
    return None if version >= (2, 8) else "loop" if flat or version < (2,) else "foreach"


def _keeps_parameters(scenario: Scenario) -> bool:
    given = scenario.fields.fsdp.use_orig_params if scenario.fields.fsdp else None
    return fsdp1_defaults(scenario)["use_orig_params"] if given is None else given


def _offloads_activations(scenario: Scenario) -> str | None:
    field = scenario.fields.checkpointing
    if field.offload and field.policy != "full":
        raise scenario.error(("checkpointing", "offload"), f"does not go with policy: {field.policy}", "policy: full")
    return "stream" if field.offload == "stream" else "blocking" if field.offload else None


def _offloads(scenario: Scenario) -> bool:
    zero = scenario.fields.zero
    return bool(zero and zero.offload_optimizer and zero.offload_optimizer.device != "none")


def _ddp(scenario: Scenario, common: dict[str, Any]) -> DdpPlan:
    """Mixed precision with DDP is torch.autocast over float32 parameters, unless their type is given."""
    given = scenario.fields.ddp.given() if scenario.fields.ddp else {}
    compute = TORCH_DTYPE[scenario.fields.precision]
    parameters = given.setdefault("dtype", "float32")
    return DdpPlan(**common, **given, autocast=compute if compute != parameters else None)


def _deepspeed(
    scenario: Scenario, model: ModelSpec, common: dict[str, Any], gpus_per_node: int
) -> tuple[DeepSpeedPlan, list[str]]:
    zero = scenario.fields.zero
    given = zero.given() if zero else {}
    given["sequence_parallel_size"] = size = scenario.fields.sequence_parallel_size
    notes = _resolve_auto(scenario, model, given)
    version = parse_version(common.get("version", DeepSpeedPlan.__dataclass_fields__["version"].default))
    check_version(version, size)
    stage = given.get("stage", 0)
    for side in ("offload_optimizer", "offload_param"):
        _offload(scenario, side, given, stage, version)
    if leaf := given.pop("leaf_module", None):
        given |= {f"leaf_{name}": tuple(chosen) for name, chosen in leaf.given().items()}
    if aio := given.pop("aio", None):
        if "nvme" in (given.get("offload_optimizer"), given.get("offload_param")):
            given |= {f"aio_{name}": value for name, value in aio.given().items()}
        else:
            notes.append("zero.aio has no effect: nothing is offloaded to NVMe")
    if given.get("offload_optimizer") and scenario.fields.optimizer.impl is None:
        common["optimizer"] = dataclasses.replace(common["optimizer"], impl="cpu")
    if given.get("offload_optimizer_ratio", 1.0) < 1 and common["optimizer"].impl != "cpu":
        raise scenario.error(("optimizer", "impl"), "partial offload needs DeepSpeedCPUAdam, as DeepSpeed says", "cpu")
    ranks, hpz = common["world_size"], given.get("zero_hpz_partition_size", 1)
    if ranks % hpz:
        why = f"{hpz} does not divide the {ranks} ranks"
        raise scenario.error(("zero", "zero_hpz_partition_size"), why, divisors(ranks))
    if hpz > 1 and stage < 3:
        notes.append("zero.zero_hpz_partition_size has no effect below stage 3")
    if given.get("mics_shard_size", -1) > 0:
        notes += _mics(scenario, given, version, stage)
    notes += _quantized(scenario, ranks // gpus_per_node, given, stage)
    if given.get("zero_quantized_gradients"):
        given["gpus_per_node"] = gpus_per_node
    if stage == 3 and scenario.fields.quantize:  # transformers 4.40 and 5.24: not is_quantized
        given["zero_init"] = False
        notes.append(
            "the model is not built under deepspeed.zero.Init, as transformers leaves it out of a quantized one: every "
            "GPU holds all of it until the engine has cut it into shards"
        )
    if stage == 3 and "zero_init" not in given:
        given["zero_init"] = True
        by_whom = "zero.Init, as the Trainer and accelerate do"
        if given.get("mics_shard_size", -1) > 0:
            by_whom = "zero.MiCS_Init; one built under zero.Init, as the Trainer does, is refused"
        notes.append(
            f"the model is built under deepspeed.{by_whom} (zero.zero_init: false puts all of it on every GPU first)"
        )
    if (0, 17) <= version < (0, 19, 3) and stage < 3 and scenario.fields.precision == "bf16":
        given.setdefault("check_grad_overflow", False)  # precision_config.py of 0.17 and 0.18
    if version < (0, 4, 3):
        given.setdefault("contiguous_gradients", False)  # zero/constants.py
    return DeepSpeedPlan(**common, dtype=TORCH_DTYPE[scenario.fields.precision], **given), notes


def _mics(scenario: Scenario, given: dict[str, Any], version: tuple[int, ...], stage: int) -> list[str]:
    if version >= (0, 19, 7):
        older = "framework: {name: deepspeed, version: 0.18.9}"
        raise scenario.error(("zero", "mics_shard_size"), "DeepSpeed 0.19.7 has removed MiCS", older)
    if stage < 3:
        return ["zero.mics_shard_size has no effect below stage 3"]
    return []


def _quantized(scenario: Scenario, nodes: int, given: dict[str, Any], stage: int) -> list[str]:
    """What of ZeRO++ has no effect, or not the one that was meant (DeepSpeed 0.19.8)."""
    asked = [name for name, value in given.items() if name.startswith("zero_quantized") and value]
    if stage < 3:
        return [f"zero.{name} has no effect below stage 3" for name in asked]
    notes = []
    if given.get("zero_quantized_nontrainable_weights") and given.get("zero_init", True):
        notes.append(
            "zero.zero_quantized_nontrainable_weights has no effect: zero.Init cuts the weights before any is frozen"
        )
    if given.get("zero_quantized_gradients"):
        if nodes < 2:
            notes.append("zero.zero_quantized_gradients has no effect within one node")
        elif scenario.fields.precision != "fp16":
            notes.append(
                "zero.zero_quantized_gradients: DeepSpeed's kernel takes the gradients for float16, whatever they are: "
                f"{scenario.fields.precision} trains on wrong values, in this time"
            )
    return notes


def _offload(scenario: Scenario, side: str, given: dict[str, Any], stage: int, version: tuple[int, ...]) -> None:
    """Replace the section `side` in `given` by the plan's fields."""
    offload = given.pop(side, None)
    if offload is None or offload.device == "none":
        return
    if side == "offload_param" and stage != 3:
        raise scenario.error(("zero", side), f"needs stage 3, not {stage}", "none, or zero.stage: 3")
    if stage == 0:
        raise scenario.error(("zero", side), "needs stage 1, 2 or 3, not 0", "none, or zero.stage: 1, 2 or 3")
    given[side] = offload.device
    # offload_config.py: pinned by default from 0.19.5 on, pageable before.
    given[f"{side}_pin_memory"] = version >= (0, 19, 5)
    if getattr(offload, "super_offload", None):  # engine.py, _configure_zero_optimizer: of stage 3 alone
        if stage != 3 or offload.device != "cpu" or version < (0, 18):
            needs = "stage 3, device: cpu and DeepSpeed 0.18 or later"
            raise scenario.error(("zero", side, "super_offload"), f"SuperOffload needs {needs}", f"false, or {needs}")
        optimizer = scenario.fields.optimizer
        if optimizer.name not in ("adam", "adamw") or optimizer.impl not in (None, "cpu"):
            raise scenario.error(("optimizer",), "SuperOffload's worker runs DeepSpeedCPUAdam", "adamw, impl: cpu")
    for name, value in offload.given().items():
        if name == "ratio" and value < 1 and stage != 3:
            why = "partial offloading is only supported for ZeRO stage 3"
            raise scenario.error(("zero", side, name), why, "1, or zero.stage: 3")
        if name != "device":
            given[f"{side}_{name}"] = value


def _resolve_auto(scenario: Scenario, model: ModelSpec, given: dict[str, Any]) -> list[str]:
    """Sizes left to the Trainer (transformers 5.24 integrations/deepspeed.py, trainer_config_finalize)."""
    notes = []
    given["auto"] = tuple(name for name, value in given.items() if value == "auto")
    for name in given["auto"]:
        hidden = getattr(model.arch, "hidden", None)
        if hidden is None:
            raise scenario.error(("zero", name), "auto needs a model with a hidden size", "a number, or a config.json")
        given[name] = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }[name]
        notes.append(f"zero.{name}: auto is {given[name]:,} for hidden size {hidden}, as the Trainer sets it")
    return notes


def _fsdp(scenario: Scenario, model: ModelSpec, common: dict[str, Any], local: int) -> tuple[AnyPlan, list[str]]:
    """Units and dtypes as accelerate 1.15 and the Trainer (transformers 5.24) have them."""
    fields, notes = scenario.fields, []
    name, dtype = fields.framework.name, TORCH_DTYPE[fields.precision]
    plan_class = Fsdp2Plan if name == "fsdp2" else Fsdp1Plan
    given = fields.fsdp.given() if fields.fsdp else {}
    for option in given:
        if option not in plan_class.__dataclass_fields__:
            other = "fsdp1" if name == "fsdp2" else "fsdp2"
            raise scenario.error(("fsdp", option), f"is an option of {other}, and this scenario's framework is {name}")
    if "HYBRID" in given.get("sharding_strategy", "") and given.get("mesh") is None:
        # _init_utils.py, _init_intra_and_inter_node_groups: by the devices that a process sees
        given["mesh"] = (common["world_size"] // local, local)
        notes.append(f"fsdp.mesh: {list(given['mesh'])}, shards within a node and replicas across, as torch has it")
    _check_groups(scenario, given, common["world_size"])
    if given.get("backward_prefetch") == "NONE":
        given["backward_prefetch"] = None
    if name == "fsdp2" and getattr(model.arch, "seq2seq", None) is not None:
        given.setdefault("grouping", "hf")
        notes.append(f"fsdp.grouping: {given['grouping']}; accelerate's is refused by torch 2.13, as both stacks embed")
    elif name == "fsdp2":
        given.setdefault("grouping", "titan" if fields.implementation == "torchtitan" else "accelerate")
    if name == "fsdp2" and given.get("state_dict_type") == "LOCAL_STATE_DICT":
        accepted = "FULL_STATE_DICT, SHARDED_STATE_DICT"
        raise scenario.error(("fsdp", "state_dict_type"), "LOCAL_STATE_DICT is FSDP1's", accepted)
    release = transformers_release(scenario)
    if name == "fsdp1" and release and release < (4, 31):  # trainer.py, save_model: the model's own state_dict()
        given.setdefault("state_dict_offload_to_cpu", False)
    if name == "fsdp2" and "version" in common:  # accelerate's get_state_dict until 1.7 (May 2025)
        given.setdefault("state_dict_offload_to_cpu", parse_version(common["version"]) >= (2, 7, 1))
    if name == "fsdp1":
        given = fsdp1_defaults(scenario) | given
    given.setdefault("param_dtype", dtype)
    if fields.lora and "adapter_units" not in given:
        # trainer.py of transformers 4.57 and 5.24: peft's policy is set where the optimizer is made later, under FSDP1
        given["adapter_units"] = name == "fsdp1"
        if name == "fsdp1":
            notes.append("fsdp.adapter_units: true, every adapter is sharded by itself, as the Trainer has it for peft")
    if given.get("zero_grad_to_none") is False and not given.get("cpu_offload"):
        why = "zero_grad(set_to_none=False) keeps gradients on the GPU from one step to the next"
        raise scenario.error(("fsdp", "zero_grad_to_none"), why, "true, or cpu_offload: true", kind=NotModeled)
    units = [option for option in ("flat", "min_num_params", "wrap") if given.get(option)]
    if len(units) > 1:
        raise scenario.error(("fsdp", units[1]), f"{units[0]} says what the units are, too", "one of them")
    if "min_num_params" in given:
        notes += _by_size(scenario, given)
    if "wrap" in given:
        given["wrap"] = tuple(given["wrap"])
    if fields.quantize:
        # One dtype for packed weights and all the rest, as accelerate's FSDP-QLoRA demands.
        if name == "fsdp1" and not (given["adapter_units"] or given.get("use_orig_params", True)):
            why = "FSDP1 refuses frozen and trained parameters in one unit"
            raise scenario.error(("fsdp", "adapter_units"), why, "true, or use_orig_params: true")
        if given.setdefault("storage_dtype", dtype) != dtype:
            raise scenario.error(("fsdp", "storage_dtype"), "differs from that of the 4-bit weights", dtype)
    elif model.trainable_numel < model.numel and "frozen_dtype" not in given:
        given["frozen_dtype"] = dtype
        notes.append(f"fsdp.frozen_dtype: {dtype}, as loaded: accelerate widens what is trained alone")
    if given.get("grouping") != "titan" or dtype == "float32":
        # accelerate (1.6 to 1.15 dataclasses.py, set_mixed_precision) and the Trainer give both versions one type
        # throughout; torchtitan reduces in float32; without mixed precision all is float32.
        given.setdefault("reduce_dtype", dtype)
    return plan_class(**common, **given), notes


def _by_size(scenario: Scenario, given: dict[str, Any]) -> list[str]:
    """What becomes of units by size where there are adapters."""
    if not scenario.fields.lora:
        return []
    if not given["adapter_units"]:
        why = "units by size of a model with adapters"
        raise scenario.error(("fsdp", "min_num_params"), why, "adapter_units: true", kind=NotModeled)
    del given["min_num_params"]
    return ["fsdp.min_num_params has no effect: the Trainer has peft's units, which are blocks and adapters"]


def _check_groups(scenario: Scenario, given: dict[str, Any], ranks: int) -> None:
    mesh = given.get("mesh")
    if mesh and mesh[0] * mesh[1] != ranks:
        why = f"{mesh[0]} x {mesh[1]} is not the cluster's {ranks} ranks"
        raise scenario.error(("fsdp", "mesh"), why, f"[replicate, shard] whose product is {ranks}")
    shard = mesh[1] if mesh else ranks
    group = given.get("reshard_after_forward")
    if group is not None and not isinstance(group, bool) and shard % group:
        message = f"{group} does not divide the {shard} ranks of a shard group"
        raise scenario.error(("fsdp", "reshard_after_forward"), message, f"true, false, {divisors(shard)}")
