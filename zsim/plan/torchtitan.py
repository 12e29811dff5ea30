"""Reads a torchtitan job (TOML), with the sections and defaults of its job_config.py."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from zsim.document import Document, Path_, Place, read_text, subsection
from zsim.errors import InputError, NotModeled
from zsim.plan.float8 import read_converters
from zsim.plan.reading import Reading
from zsim.plan.recipe import ULYSSES

_HARMLESS = {"job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "memory_estimation", "validation"}
_REFUSED_DEGREES = {
    "tensor_parallel_degree": "tensor parallelism",
    "pipeline_parallel_degree": "pipeline parallelism",
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}
_DEGREES = {*_REFUSED_DEGREES, "data_parallel_replicate_degree", "data_parallel_shard_degree"}
_READ = {
    "training": {
        *_DEGREES, "data_parallel_degree", "data_parallel_type", "local_batch_size", "batch_size", "seq_len",
        "global_batch_size", "max_norm", "mixed_precision_param", "mixed_precision_reduce", "fp8_linear", "dtype",
        "enable_cpu_offload", "compile",
    },
    "experimental": {*_DEGREES},
    "parallelism": {*_DEGREES, "fsdp_reshard_after_forward"},
    "model": {"name", "flavor", "converters"},
    "optimizer": {"name", "implementation", "fused", "early_step_in_backward"},
    "activation_checkpoint": {"mode", "selective_ac_option", "early_stop"},
    "compile": {"enable", "components"},
    "fault_tolerance": {"enable"},
    "activation_offload": {"mode"},
}  # fmt: skip
_WITHOUT_EFFECT = {
    "training": {
        "dataset", "dataset_path", "steps", "warmup_steps", "gc_freq", "gc_debug", "seed", "deterministic",
        "debug_moe_force_load_balance", "data_parallel_size",
    },
    "experimental": {"custom_import", "custom_args_module", "enable_async_tensor_parallel"},
    "parallelism": {
        "disable_loss_parallel", "enable_async_tensor_parallel", "expert_tensor_parallel_degree",
        "pipeline_parallel_schedule", "pipeline_parallel_split_points", "pipeline_parallel_microbatch_size",
        "pipeline_parallel_layers_per_stage", "context_parallel_rotate_method", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_schedule_csv",
    },
    "model": {"hf_assets_path", "tokenizer_path", "print_after_conversion", "norm_type", "tokenizer"},
    "optimizer": {"lr", "beta1", "beta2", "eps", "weight_decay"},
    "activation_checkpoint": {"per_op_sac_force_recompute_mm_shapes_by_fqns", "preserve_rng_state"},
    "compile": {"backend"},
}  # fmt: skip
_OTHER_MODELS = re.compile("flux|siglip|vlm", re.IGNORECASE)
_IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def parse_toml(path: Path) -> Document:
    """A TOML file with the line of every field. Raises InputError where it is not TOML."""
    text = read_text(path, "torchtitan job")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise InputError(f"not TOML: {error}", path, int(line.group(1)) if line else None) from None
    except RecursionError:
        raise InputError("not TOML: nested too deeply", path) from None
    places: dict[Path_, Place] = {}
    section: Path_ = ()
    for number, content in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\-]+)\]", content):
            section = tuple(header.group(1).split("."))
            places.setdefault(section, (path, number))
        elif key := re.match(r"\s*([\w.\-]+)\s*=", content):
            places.setdefault((*section, *key.group(1).split(".")), (path, number))
    return Document(path, data, places)


def read_torchtitan(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in a torchtitan job. Raises InputError, NotModeled."""
    reading = Reading("torchtitan job", document, ranks=ranks)
    sections = {name: subsection(document, document.data, (), name) for name in document.data}
    training, model = sections.get("training", {}), sections.get("model", {})
    _refuse_other(document, sections)
    sections["parallelism"] = _old_degrees(document, sections) | sections.get("parallelism", {})
    _training(reading, training)
    _parallelism(reading, sections.get("parallelism", {}), training)
    read_converters(reading, sections)
    _optimizer(reading, sections.get("optimizer", {}))
    _compile(reading, sections.get("compile", {}), training)
    _checkpointing(reading, sections)
    reading.fields[("implementation",)] = "torchtitan"
    reading.fields[("attention",)] = "sdpa"
    name = f"{model.get('name', 'llama3')} {model.get('flavor', '')}".strip()
    reading.model_name = name
    reading.lacks("model", f"(the config.json of {name})")
    reading.lacks("cluster")
    harmless = sorted(_HARMLESS & sections.keys())
    if _saves_beside_training(reading, sections.get("checkpoint", {})):
        harmless.remove("checkpoint")
    if harmless:
        reading.without_effect.append(f"{', '.join(harmless)} (logging, learning rate, saving)")
    _rest(reading, sections)
    return reading


def _refuse_other(document: Document, sections: dict[str, dict[str, Any]]) -> None:
    """What trains other models, or in another way, than torchtitan's language models."""
    model = sections.get("model", {})
    name = str(model.get("name", ""))
    parallelism = sections.get("parallelism", sections.get("experimental", {}))
    offload = sections.get("activation_offload", {})
    for path, found, why in (
        (("model", "name"), _OTHER_MODELS.search(name), f"{name}, which is no language model alone"),
        (("model", "config"), "config" in model, "a job of flame, whose models are flash-linear-attention's"),
        (("fault_tolerance", "enable"), sections.get("fault_tolerance", {}).get("enable"), "replicas held by torchft"),
        (("activation_offload", "mode"), offload.get("mode", "none") != "none", "activations on the host"),
        (
            ("parallelism", "enable_compiled_autograd"),
            parallelism.get("enable_compiled_autograd"),
            "a compiled backward",
        ),
    ):
        if found:
            raise document.error(path, why, "a job of a language model without it", kind=NotModeled)


def _rest(reading: Reading, sections: dict[str, dict[str, Any]]) -> None:
    """List the keys that nobody looked at."""
    quiet: list[str] = []
    unread: list[str] = []
    for name, section in sections.items():
        if name in _HARMLESS:
            continue
        for key in section.keys() - _READ.get(name, set()):
            (quiet if key in _WITHOUT_EFFECT.get(name, ()) else unread).append(f"{name}.{key}")
    if quiet:
        reading.without_effect.append(f"{', '.join(sorted(quiet))} (data, learning rate, and degrees that are 1)")
    if unread:
        reading.not_read.append(", ".join(sorted(unread)))


def _saves_beside_training(reading: Reading, section: dict[str, Any]) -> bool:
    """components/checkpoint.py (`enable` was enable_checkpoint until summer 2025). Otherwise a tensor at a time is
    written from the GPU."""
    mode = str(section.get("async_mode", "disabled")).lower()
    if not section.get("enable", section.get("enable_checkpoint")) or mode == "disabled":
        return False
    accepted = ("disabled", "async", "async_with_pinned_mem")
    if mode not in accepted:
        raise reading.document.error(("checkpoint", "async_mode"), f"{mode!r} is not known", ", ".join(accepted))
    if reading.fields.get(("framework", "name")) != "fsdp2":
        return False
    reading.set(("saving", "by"), "async", ("checkpoint", "async_mode"))
    return True


def _old_degrees(document: Document, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Degrees where they stood until January 2025, as `parallelism` has them since; before October 2024 of one kind."""
    moved: dict[str, Any] = {}
    for section in ("training", "experimental"):
        for name, value in sections.get(section, {}).items():
            new = "data_parallel_shard_degree" if name == "data_parallel_degree" else name
            if new in _DEGREES:
                moved[new] = value
                document.places[("parallelism", new)] = document.place((section, name))
    if str(sections.get("training", {}).get("data_parallel_type", "fsdp")).lower() == "ddp":
        moved["data_parallel_replicate_degree"] = moved.pop("data_parallel_shard_degree", -1)
        moved["data_parallel_shard_degree"] = 1
    return moved


def _take(reading: Reading, name: str, section: dict[str, Any], key: str, default: Any, kind: Any) -> Any:
    """A field of a section, of the right type. Raises InputError."""
    value = section.get(key, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise reading.document.error((name, key), f"{value!r} is not of the right kind", f"such as {default!r}")
    return value


def _training(reading: Reading, training: dict[str, Any]) -> None:
    batch = "local_batch_size" if "local_batch_size" in training else "batch_size"
    for key, field, default in ((batch, "micro_batch", 8), ("seq_len", "seq_len", 2048)):
        value = _take(reading, "training", training, key, default, int)
        if value <= 0:
            raise reading.document.error(("training", key), f"{value!r} is not greater than 0", "a whole number")
        reading.set((field,), value, ("training", key))
    whole = _take(reading, "training", training, "global_batch_size", -1, int)
    if whole != -1:
        reading.set(("train_batch_size",), whole, ("training", "global_batch_size"))
    clip = _take(reading, "training", training, "max_norm", 1.0, (int, float))
    reading.set(("grad_clip",), clip, ("training", "max_norm"))
    dtype = _take(reading, "training", training, "mixed_precision_param", "bfloat16", str)
    if dtype not in _DTYPES:
        raise reading.document.error(
            ("training", "mixed_precision_param"), f"{dtype!r} is not known", ", ".join(_DTYPES)
        )
    reading.set(("precision",), _DTYPES[dtype], ("training", "mixed_precision_param"))


def _compile(reading: Reading, section: dict[str, Any], training: dict[str, Any]) -> None:
    """torchtitan compiles each block, and the loss besides (from April 2025; `components` from August)."""
    if not section.get("enable", training.get("compile", False)):
        return
    components = _take(reading, "compile", section, "components", ["model", "loss"], list)
    if "model" in components:
        reading.set(("compile",), True, ("compile", "enable"))
    if "loss" in components:
        reading.set(("loss",), "compiled", ("compile", "components" if "components" in section else "enable"))


def _parallelism(reading: Reading, section: dict[str, Any], training: dict[str, Any]) -> None:
    document = reading.document
    for name, why in _REFUSED_DEGREES.items():
        if section.get(name, 1) != 1:
            accepted = ULYSSES if name.startswith("context") else "1"
            raise document.error(("parallelism", name), why, accepted, kind=NotModeled)
    replicate = _take(reading, "parallelism", section, "data_parallel_replicate_degree", 1, int)
    shard = _take(reading, "parallelism", section, "data_parallel_shard_degree", -1, int)
    if shard == 1 and (replicate > 1 or replicate == -1):
        reading.set(("framework", "name"), "ddp", ("parallelism", "data_parallel_replicate_degree"))
        if training.get("dtype", "float32") != "float32":
            reading.set(("ddp", "dtype"), training["dtype"], ("training", "dtype"))
        return
    reading.set(("framework", "name"), "fsdp2", ("parallelism", "data_parallel_shard_degree"))
    if replicate > 1:
        if shard == -1 and reading.ranks and reading.ranks % replicate == 0:
            shard = reading.ranks // replicate
        if shard == -1:
            reading.lacks("fsdp.mesh", f"([{replicate}, the other ranks])")
        else:
            reading.set(("fsdp", "mesh"), [replicate, shard], ("parallelism", "data_parallel_replicate_degree"))
    policy = _take(reading, "parallelism", section, "fsdp_reshard_after_forward", "default", str)
    if policy not in ("default", "always", "never"):
        path = ("parallelism", "fsdp_reshard_after_forward")
        raise document.error(path, f"{policy!r} is not known", "default, always, never")
    reading.set(("fsdp", "reshard_after_forward"), policy != "never", ("parallelism", "fsdp_reshard_after_forward"))
    if training.get("mixed_precision_reduce", "float32") != "float32":
        reading.set(
            ("fsdp", "reduce_dtype"), training["mixed_precision_reduce"], ("training", "mixed_precision_reduce")
        )
    stored = _take(reading, "training", training, "dtype", "float32", str)
    if stored != "float32":  # job_config.py: parameters, gradients and states of the optimizer
        if stored not in _DTYPES:
            raise document.error(("training", "dtype"), f"{stored!r} is not known", ", ".join(_DTYPES))
        reading.set(("fsdp", "storage_dtype"), stored, ("training", "dtype"))
    if training.get("enable_cpu_offload", False):
        reading.set(("fsdp", "cpu_offload"), True, ("training", "enable_cpu_offload"))


def _optimizer(reading: Reading, section: dict[str, Any]) -> None:
    name = str(section.get("name", "AdamW"))
    if name.lower() not in ("adamw", "adam"):
        raise reading.document.error(("optimizer", "name"), f"optimizer {name}", "AdamW, Adam", kind=NotModeled)
    reading.set(("optimizer", "name"), name.lower(), ("optimizer", "name"))
    if section.get("early_step_in_backward"):
        path = ("optimizer", "early_step_in_backward")
        raise reading.document.error(path, "optimizer steps inside the backward", "false", kind=NotModeled)
    default = "foreach" if section.get("fused") is False else "fused"
    implementation = _take(reading, "optimizer", section, "implementation", default, str)
    if implementation not in _IMPLEMENTATIONS:
        accepted = ", ".join(_IMPLEMENTATIONS)
        raise reading.document.error(("optimizer", "implementation"), f"{implementation!r} is not known", accepted)
    reading.set(("optimizer", "impl"), _IMPLEMENTATIONS[implementation], ("optimizer", "implementation"))


def _checkpointing(reading: Reading, sections: dict[str, dict[str, Any]]) -> None:
    section = sections.get("activation_checkpoint", {})
    mode = _take(reading, "activation_checkpoint", section, "mode", "selective", str)
    option = str(section.get("selective_ac_option", "2"))
    if mode not in ("none", "full", "selective"):
        path = ("activation_checkpoint", "mode")
        raise reading.document.error(path, f"mode {mode!r}", "none, full, selective", kind=NotModeled)
    if mode == "selective" and option != "op":
        path = ("activation_checkpoint", "selective_ac_option")
        if not option.isdecimal():
            raise reading.document.error(path, f"{option!r} is not known", "op, or a number of blocks")
        if option == "0":  # every block, as mode full
            reading.set(("checkpointing",), "full", path)
        else:
            reading.set(("checkpointing", "every"), int(option), path)
    else:
        reading.set(("checkpointing",), mode, ("activation_checkpoint", "mode"))
    if mode != "none" and ("compile",) not in reading.fields:  # which leaves out what nothing needs
        _early_stop(reading, sections)


def _early_stop(reading: Reading, sections: dict[str, dict[str, Any]]) -> None:
    """torchtitan's pull request 1580, of 29 August 2025: a second run goes on to the block's end unless this says
    otherwise; before, it stopped as torch has it. What newer jobs have is of the same month."""
    newer = "hf_assets_path" in sections.get("model", {}) or {"compile", "quantize"} & sections.keys()
    stops = _take(
        reading, "activation_checkpoint", sections.get("activation_checkpoint", {}), "early_stop", not newer, bool
    )
    if not stops:
        if (policy := reading.fields.pop(("checkpointing",), None)) is not None:
            reading.set(("checkpointing", "policy"), policy, ("activation_checkpoint", "mode"))
        reading.set(("checkpointing", "early_stop"), False, ("activation_checkpoint", "early_stop"))
        if "early_stop" not in sections.get("activation_checkpoint", {}):
            reading.notes.append("activation_checkpoint.early_stop: false, torchtitan's default from September 2025 on")
