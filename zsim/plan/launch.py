"""`accelerate launch` in a script: its options, its configuration file, and what they make of the Trainer's arguments.

accelerate 1.15 commands/launch.py, _validate_launch_command: options go before the file. What both become reaches the
Trainer through the environment (transformers 5.24 training_args.py): its own bf16, fp16 and deepspeed go before that.
"""

from __future__ import annotations

from typing import Any

from zsim.document import Document, Path_, nearest, parse_yaml, read_text
from zsim.errors import NotModeled
from zsim.plan.accelerate import read_accelerate
from zsim.plan.deepspeed import with_trainers_groups
from zsim.plan.reading import FP32_ASSUMED, NOT_SHARDED, Reading
from zsim.plan.recipe import Recipe

# argparse's store_true: every other option takes a value.
SWITCHES = {
    "quiet", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic",
    "dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp", "use_parallelism_config", "use_megatron_lm",
    "same_network", "module", "no_python", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16",
    "fp8_use_autocast_during_eval", "debug",
}  # fmt: skip
_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
_REFUSED = {"use_megatron_lm": "Megatron-LM", "cpu": "training on CPUs", "tpu": "TPUs", "use_xpu": "XPUs"}
_TOP = ("mixed_precision", "num_processes", "num_machines")
_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping",
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_PLACES = (
    "machine_rank", "main_process_ip", "main_process_port", "log_dir", "role", "rdzv_backend", "rdzv_conf", "tee",
    "max_restarts", "monitor_interval", "gpu_ids", "main_training_function", "mpirun_hostfile", "deepspeed_hostfile",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
)  # fmt: skip
_FP8 = ("fp8_backend", "fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim")


def read_launch(recipe: Recipe, launch: Document) -> None:
    """Add to the Trainer's reading what accelerate is told. Raises InputError, NotModeled."""
    reading = recipe.reading
    for name, what in _REFUSED.items():
        if launch.data.get(name):
            raise launch.error((name,), what, "GPUs with DDP, DeepSpeed or FSDP", kind=NotModeled)
    given, missing = _file(launch)
    if missing:
        _leave_open(reading, f"(accelerate's configuration {missing} is not there)")
    document = _with_options(given, launch, missing)
    document.environment = recipe.document.environment
    _with_trainers(document, recipe)
    launched = read_accelerate(document, reading.ranks)
    reading.ranks = launched.ranks
    framework: Path_ = ("framework", "name")
    if launched.fields[framework] == "ddp":
        launched.defaults.add(framework)  # the Trainer's own arguments may shard
        if missing:
            del launched.fields[framework]
    if FP32_ASSUMED in launched.notes:  # nothing said: as the Trainer's own
        launched.notes.remove(FP32_ASSUMED)
        del launched.fields[("precision",)]
    if ("precision",) in launched.fields and not _flag(recipe):
        reading.defaults.add(("precision",))
    if launched.fields.get(framework) == "deepspeed" and not recipe.document.data.get("deepspeed"):
        with_trainers_groups(launched)
    reading.include(launched)


def _file(launch: Document) -> tuple[Document, str | None]:
    """The configuration that the launcher names, empty where it names none, and its name if it is not there."""
    name = launch.data.get("config_file")
    if "config_file" in launch.unknown:
        raise launch.error(("config_file",), launch.unknown["config_file"], "its value")
    if name is None:
        return Document(launch.file, {}), None
    path = launch.beside(str(name), "accelerate")
    if not path.is_file():
        return Document(launch.file, {}), str(name)
    document = parse_yaml(read_text(path), path, repeats=True)
    document.given = launch.given
    return document, None


def _leave_open(reading: Reading, why: str) -> None:
    """What the Trainer has by default is not known where accelerate may say otherwise."""
    fields, defaults = reading.fields, reading.defaults
    if ("framework", "name") in defaults:
        reading.fields = {to: value for to, value in fields.items() if to[0] not in ("framework", "ddp")}
        reading.notes = [text for text in reading.notes if text != NOT_SHARDED]
        reading.lacks("framework", why)
    if ("precision",) in defaults and reading.fields.pop(("precision",), None):
        reading.lacks("precision", why)


def _with_options(document: Document, launch: Document, missing: str | None) -> Document:
    """The configuration with the command's options in it; `missing`: the name of one that is not there."""
    kinds = [name for name in _KINDS if launch.data.get(name)]
    if len(kinds) > 1:
        raise launch.error((kinds[1],), f"accelerate refuses it next to --{kinds[0]}", "one of them")
    for name in kinds:
        document.set(("distributed_type",), _KINDS[name], launch.place((name,)))
    for name, value in launch.data.items():
        if missing and not kinds and _of_one_kind(name):
            launch.notes.append(f"{name}: has an effect if {missing}, which is not there, is of DeepSpeed or FSDP")
            continue
        path = _path(document, launch, name)
        if path is None:
            continue
        if name in launch.unknown and name != "mixed_precision" and path == (name,):
            document.data.pop(name, None)  # a count, of which a note says so
            continue
        if name in launch.unknown:
            raise launch.error((name,), launch.unknown[name], "its value")
        if len(path) == 2:
            section, option = map(str, path)
            if not isinstance(document.data.get(section), dict):
                document.set((section,), {}, launch.place((name,)))
            document.data[section].pop(option.removeprefix("fsdp_"), None)  # the file has it with and without it
        document.set(path, value, launch.place((name,)))
    return document


def _of_one_kind(name: str) -> bool:
    return name in _DEEPSPEED or name.startswith("fsdp_")


def _path(document: Document, launch: Document, name: str) -> Path_ | None:
    """Where accelerate's configuration has this option; None where it is no matter of it."""
    if name in _TOP:
        return (name,)
    if _of_one_kind(name):
        kind = "DEEPSPEED" if name in _DEEPSPEED else "FSDP"
        own = str(document.data.get("distributed_type")).upper()
        if own == kind:
            return (f"{kind.lower()}_config", name)
        raise launch.error((name,), f"has no effect without {kind}, and accelerate is not told to use it",
                           f"--use_{kind.lower()}, or a --config_file with it")  # fmt: skip
    if name.startswith("parallelism_config_"):
        if not launch.data.get("use_parallelism_config") and not document.data.get("parallelism_config"):
            raise launch.error((name,), "has no effect without --use_parallelism_config", "--use_parallelism_config")
        return ("parallelism_config", name)
    if name in _FP8:
        return ("fp8_config", name.removeprefix("fp8_"))
    if name == "dynamo_backend":
        return ("dynamo_config", name)
    if name.startswith(("fp8_", "megatron_lm_")):
        raise launch.error((name,), name.rpartition("_")[0], "a command without it", kind=NotModeled)
    known = {*SWITCHES, *_PLACES, "dynamo_mode", "config_file", "num_cpu_threads_per_process"}
    if name not in known:
        close = nearest(name, {*known, *_TOP, *_DEEPSPEED})
        hint = f"; did you mean --{close}?" if close else ""
        raise launch.error((name,), f"accelerate launch has no such option{hint}")
    return None


def _flag(recipe: Recipe) -> str | None:
    return "bf16" if recipe.flag("bf16") else "fp16" if recipe.flag("fp16") else None


def _with_trainers(document: Document, recipe: Recipe) -> None:
    """The Trainer's own precision and DeepSpeed configuration, in place of accelerate's."""
    script, own = recipe.document, recipe.document.data.get("deepspeed")
    kind = str(document.data.get("distributed_type")).upper()
    section: Any = document.data.get("deepspeed_config")
    if own and kind == "DEEPSPEED":
        path = str(script.beside(str(own), "deepspeed").absolute())
        section = {"deepspeed_config_file": path, "zero3_init_flag": True}
        document.set(("deepspeed_config",), section, script.place(("deepspeed",)))
    elif own and kind == "FSDP":
        raise script.error(("deepspeed",), "accelerate is told to use FSDP", "one of them")
    if flag := _flag(recipe):
        file = isinstance(section, dict) and section.get("deepspeed_config_file") not in (None, "none")
        value = "no" if file and kind == "DEEPSPEED" else flag  # DeepSpeed's file must agree with it
        document.set(("mixed_precision",), value, script.place((flag,)))
