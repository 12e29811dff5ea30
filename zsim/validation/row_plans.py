"""How the frameworks of published rows sharded, and what they set: the plan that a row describes."""

from __future__ import annotations

import re
from typing import Any

from zsim.cluster.spec import Cluster
from zsim.errors import NotModeled
from zsim.plan.spec import Allocator, AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.plan.version import VERSION, parse_version
from zsim.validation import stated, titan_history
from zsim.validation.loops import OWN, loop
from zsim.validation.rows import Row

LLAMA_FACTORY = "LLaMA-Factory"
# DeepSpeedExamples training/bf16_master_weight: its two files, for what DeepSpeed 0.18.3 of late 2025 had just brought.
_EXAMPLE_SETS: dict[str, Any] = {
    "version": "0.18.3", "grad_clip": None, "overlap_comm": True, "reduce_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 0,
}  # fmt: skip


def is_example(row: Row) -> bool:
    return loop(row).implementation == "torch.nn"


def plan_of_row(row: Row, cluster: Cluster) -> AnyPlan:
    """How the row's framework sharded. Raises InputError or NotModeled with the reason if it cannot be simulated."""
    framework, strategy = row["framework"], row.get("strategy")
    rules = loop(row)
    common: dict[str, Any] = {"world_size": cluster.world_size, "grad_accum": row.count("grad_accum", 1)}
    offload = row.get("offload", "none")
    # LLaMA-Factory: launcher.py, under torchrun, since April 2025 (pull request 7714)
    if LLAMA_FACTORY in framework or "expandable segments" in row.get("notes"):
        common["allocator"] = Allocator(expandable_segments=True)
    if strategy in ("zero1", "zero2", "zero3"):
        given = _deepspeed(row, int(strategy[-1])) | stated.zero_settings(row)
        return DeepSpeedPlan(
            **common,
            **given,
            **stated.master_weights(row, given.get("version", VERSION), "optimizer-cpu" in offload),
            offload_optimizer="cpu" if "optimizer-cpu" in offload else None,
            offload_param="cpu" if "param-cpu" in offload else None,
            optimizer=Optimizer(impl="cpu" if "optimizer-cpu" in offload else stated.optimizer(row, "fused")),
            **(_zero_plus_plus(cluster) if "ZeRO++" in row.get("notes") else {}),
            omp_num_threads=_threads(row, cluster),
            dtype=stated.half(row),
        )
    # Under FSDP the update is then torch's own on the CPU: a loop that nobody has read may fuse it or set its threads.
    offloads = offload == "param-cpu" and strategy.startswith("fsdp") and rules is not OWN
    if offload not in ("none", "") and not offloads:
        raise NotModeled(f"{offload} under {framework} {strategy}", row.file, row.line, "offload")
    common["grad_clip"] = rules.grad_clip
    alone = cluster.world_size == 1 and not rules.sharded_alone
    if alone or (strategy == "ddp" and not rules.flat):
        pure = stated.all_bf16(row) or rules.storage_dtype == "bfloat16" or _loaded_in_bf16(row)
        return DdpPlan(
            **common,
            dtype=stated.half(row) if pure else "float32",
            autocast=None
            if stated.half(row) == "float32" or (pure and "--bf16" not in row["precision"])
            else stated.half(row),
            optimizer=Optimizer(impl=stated.optimizer(row, "foreach" if "HF Trainer" in framework else "fused")),
        )
    if strategy not in ("fsdp-full", "fsdp-grad-op", "hsdp", "ddp"):
        raise NotModeled(f"strategy {strategy!r}", row.file, row.line, "strategy")
    mesh = (cluster.nodes, cluster.gpus_per_node) if strategy == "hsdp" else None
    if "FSDP1" not in framework and ("FSDP2" in framework or rules.implementation == "torchtitan"):
        titan = "torchtitan" in framework
        return Fsdp2Plan(
            **common,
            reshard_after_forward=strategy != "fsdp-grad-op",
            mesh=mesh,
            grouping=titan_history.grouping(row) if titan else rules.grouping,
            optimizer=Optimizer(impl=titan_history.optimizer(row) if titan else stated.optimizer(row, "fused")),
            storage_dtype=_storage(row),
            reduce_dtype=rules.reduce_dtype
            or stated.reduce_dtype(row)
            or (stated.half(row) if framework.startswith("accelerate") else "float32"),
            sync_only_last=rules.sync_only_last,
            root_reshard_after_forward=rules.root_reshard,
            cpu_offload=offloads,
        )
    return _fsdp1(row, {**common, "cpu_offload": offloads}, mesh)


def _threads(row: Row, cluster: Cluster) -> int | None:
    """Of each process on the CPU, as the notes have it; llamafactory-cli starts several processes by torchrun."""
    if found := re.search(r"(\d+) threads a process", row.get("notes")):
        return int(found[1])
    return 1 if LLAMA_FACTORY in row["framework"] and cluster.world_size > 1 else None


def _deepspeed(row: Row, stage: int) -> dict[str, Any]:
    """Which DeepSpeed, and what the framework around it sets.

    Peaks are of training: they leave out the start, where without zero.Init the model is whole on the GPU.
    """
    given: dict[str, Any] = {"stage": stage, "zero_init": stage == 3}
    if is_example(row):
        given |= _EXAMPLE_SETS | {"torch_autocast": "bfloat16" if "bf16 master" in row["precision"] else None}
    if row.source == "Qwen README":  # its tables are of September to December 2023
        given["version"] = "0.12.3"
    if found := re.search(r"DeepSpeed (\d+(?:\.\d+)+)", row["framework"]):
        given["version"] = found[1]
    if LLAMA_FACTORY in row["framework"]:  # its ds_z2_offload.json and ds_z3_offload.json, auto as the Trainer has it
        # parser.py takes no later DeepSpeed from mid 2025 to January 2026 (pull request 9714)
        given = {"version": "0.16.9", **given, "overlap_comm": True, "grad_clip": 1.0}
        if stage == 2:
            return given | {"round_robin_gradients": True}
        hidden = row.count("d_model")
        return given | {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    # A loop of one's own builds the model as ever. (gist-a800: 40 GB of host memory per process with nothing offloaded:
    # the whole model, as loaded and as cast.)
    version = parse_version(given.get("version", VERSION))
    if row["framework"].startswith(("DeepSpeed", "FlagPerf")) and version < (0, 19, 4):
        given["memory_efficient_linear"] = False
    # offload_config.py: pageable unless the configuration says otherwise
    pinned = version >= (0, 19, 5)
    return given | {"offload_optimizer_pin_memory": pinned, "offload_param_pin_memory": pinned}


def _zero_plus_plus(cluster: Cluster) -> dict[str, Any]:
    """As DeepSpeed's tutorial has it: all three parts, second shards within the node.

    (gist-a800-9: 12.2 GB of host memory more than the run before, which are second shards: 2 bytes per parameter.)
    """
    return {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": cluster.gpus_per_node,
        "gpus_per_node": cluster.gpus_per_node,
    }


def _loaded_in_bf16(row: Row) -> bool:
    """fms-acceleration's scenarios load all models with torch_dtype bfloat16. Under mixed precision accelerate's FSDP
    widens what it wraps to float32, but one process wraps nothing."""
    return row["framework"].startswith("HF Trainer + accelerate FSDP")


def _fsdp1(row: Row, common: dict[str, Any], mesh: tuple[int, int] | None) -> Fsdp1Plan:
    precision, strategy = row["precision"], row["strategy"]
    kinds = {"fsdp-full": "FULL_SHARD", "fsdp-grad-op": "SHARD_GRAD_OP", "hsdp": "HYBRID_SHARD", "ddp": "NO_SHARD"}
    if row["framework"].startswith("llm-foundry"):
        # Composer: BACKWARD_POST and a loop over parameters in DecoupledAdamW; PURE tables are from torch 1.13 / 2.0.
        return Fsdp1Plan(
            **common,
            version="2.0.1" if "PURE" in precision else "2.1.0",
            sharding_strategy=kinds[strategy],
            reduce_dtype="bfloat16" if "PURE" in precision else "float32",
            backward_prefetch="BACKWARD_POST",
            optimizer=Optimizer(impl="loop"),
        )
    if precision.startswith("bf16 amp"):
        raise NotModeled("autocast over FSDP without its mixed precision", row.file, row.line, "precision")
    rules = loop(row)
    return Fsdp1Plan(
        **common,
        sharding_strategy=kinds[strategy],
        reduce_dtype=rules.reduce_dtype or stated.reduce_dtype(row) or "bfloat16",
        storage_dtype=_storage(row),
        mesh=mesh,
        no_sync=rules.sync_only_last,
        forward_prefetch=rules.forward_prefetch,
        limit_all_gathers="limit_all_gathers=False" not in row.get("notes"),
        adapter_units=(rules.unit_per_module and "bucketing_mode block" not in row.get("notes"))
        or (rules.unit_per_adapter and stated.adapters(row) is not None),
        use_orig_params=not rules.flat,
        optimizer=Optimizer(impl=stated.optimizer(row, rules.optimizer or "foreach")),
    )


def _storage(row: Row) -> str:
    """Of shards, their gradients and optimizer states under FSDP."""
    return loop(row).storage_dtype or ("bfloat16" if stated.all_bf16(row) else "float32")
