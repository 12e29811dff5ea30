"""What it takes to run a plan's choice: its scenario, and the configuration of DeepSpeed or of FSDP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from zsim.document import Document
from zsim.plan.spec import DeepSpeedPlan, Fsdp2Plan
from zsim.scenario import Setup
from zsim.sweep.choices import Choice
from zsim.sweep.evaluate import setup_of
from zsim.sweep.identity import files_of


def write(choice: Choice, base: Document, folder: Path) -> list[Path]:
    """Write scenario.yaml, and ds_config.json or accelerate.yaml; returns their paths.

    Paths in the scenario are relative to `folder`, so that it runs from there.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    setup = setup_of(choice.candidate.task(base))
    data = {"name": choice.candidate.title, **choice.candidate.data(base)}
    scenario = folder / "scenario.yaml"
    moved = _moved(data, Path(base.file).parent, folder)
    scenario.write_text(yaml.safe_dump(moved, sort_keys=False, width=120), encoding="utf-8")
    if isinstance(setup.plan, DeepSpeedPlan):
        config = folder / "ds_config.json"
        config.write_text(json.dumps(deepspeed(setup, setup.plan), indent=2) + "\n", encoding="utf-8")
    else:
        assert isinstance(setup.plan, Fsdp2Plan)
        config = folder / "accelerate.yaml"
        text = "".join(f"# {line}\n" for line in _beside_accelerate(setup, setup.plan))
        text += yaml.safe_dump(accelerate(setup, setup.plan), sort_keys=False)
        config.write_text(text, encoding="utf-8")
    return [scenario, config]


def _moved(data: dict[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """Data with the paths of its files as seen from the folder `new`."""
    moved = dict(data)
    for (section, *inner), name in files_of(data):
        path, value = os.path.relpath(old / name, new), data[section]
        moved[section] = value | {inner[0]: path} if isinstance(value, dict) else path
    return moved


def deepspeed(setup: Setup, plan: DeepSpeedPlan) -> dict[str, Any]:
    """A DeepSpeed configuration that zsim reads back as the same plan."""
    zero: dict[str, Any] = {
        "stage": plan.stage,
        "reduce_bucket_size": plan.reduce_bucket_size,
        "contiguous_gradients": plan.contiguous_gradients,
    }
    if plan.overlap_comm is not None:
        zero["overlap_comm"] = plan.overlap_comm
    if plan.stage == 3:
        zero["stage3_prefetch_bucket_size"] = plan.stage3_prefetch_bucket_size
        zero["stage3_param_persistence_threshold"] = plan.stage3_param_persistence_threshold
        zero |= _stage_3(plan)
        if plan.stage3_gather_16bit_weights_on_model_save:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
    else:
        zero["allgather_bucket_size"] = plan.allgather_bucket_size
    if plan.offload_optimizer:
        zero["offload_optimizer"] = {"device": plan.offload_optimizer, "pin_memory": plan.offload_optimizer_pin_memory}
    if plan.offload_param:
        zero["offload_param"] = {"device": plan.offload_param, "pin_memory": plan.offload_param_pin_memory}
    config: dict[str, Any] = {
        "train_batch_size": setup.workload.micro_batch * plan.grad_accum * plan.data_parallel_size,
        "train_micro_batch_size_per_gpu": setup.workload.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": plan.grad_clip or 0.0,
        "zero_optimization": zero,
    }
    if plan.sequence_parallel_size > 1:
        config["sequence_parallel_size"] = plan.sequence_parallel_size
        dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.seq_parallel_communication_data_type, "fp32")
        config["seq_parallel_communication_data_type"] = dtype
    if plan.autoep_size:
        config["expert_parallel"] = {"enabled": True, "autoep_size": plan.autoep_size}
        if plan.use_data_before_expert_parallelism:
            config["use_data_before_expert_parallelism"] = True
        if not plan.optimizer.decay_groups:  # with the training script's own, stages 1 and 2 fail
            config["optimizer"] = {"type": plan.optimizer.name}
    if plan.dtype != "float32":
        config["bf16" if plan.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return config


def _stage_3(plan: DeepSpeedPlan) -> dict[str, Any]:
    """What differs from DeepSpeed's defaults of ZeRO++ and leaf modules."""
    own = DeepSpeedPlan(world_size=plan.world_size)
    plain = (
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "stage3_module_granularity_threshold", "mics_shard_size",
    )  # fmt: skip
    leaf = {
        name: list(getattr(plan, f"leaf_{name}"))
        for name in ("classes", "names", "name_suffixes")
        if getattr(plan, f"leaf_{name}") != getattr(own, f"leaf_{name}")
    }
    found = {name: getattr(plan, name) for name in plain if getattr(plan, name) != getattr(own, name)}
    return found | ({"leaf_module": leaf} if leaf else {})


def accelerate(setup: Setup, plan: Fsdp2Plan) -> dict[str, Any]:
    """A configuration of `accelerate launch` for FSDP2."""
    cluster = setup.cluster
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}.get(plan.param_dtype, "no"),
        "num_machines": cluster.nodes,
        "num_processes": plan.world_size,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.reshard_after_forward,
            "fsdp_offload_params": plan.cpu_offload,
            "fsdp_activation_checkpointing": setup.workload.checkpointing == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    if plan.mesh:
        replicate, shard = plan.mesh
        sizes = {"parallelism_config_dp_replicate_size": replicate, "parallelism_config_dp_shard_size": shard}
        config["parallelism_config"] = sizes
    return config


def _beside_accelerate(setup: Setup, plan: Fsdp2Plan) -> list[str]:
    """What the training script has to set itself."""
    lines = [
        f"per_device_train_batch_size {setup.workload.micro_batch}, gradient_accumulation_steps {plan.grad_accum}",
    ]
    if setup.workload.checkpointing == "selective":
        lines.append("selective checkpointing: torch.utils.checkpoint with torchtitan's per-op policy")
    if plan.prefetch:
        lines.append(f"set_modules_to_forward_prefetch and _backward_prefetch: {plan.prefetch} block ahead")
    return lines
