"""Reads an accelerate configuration (YAML), as accelerate 1.15 `launch` and its plugins do."""

from __future__ import annotations

from typing import Any

from zsim.document import Document, nearest, subsection
from zsim.errors import NotModeled
from zsim.plan.deepspeed import read_deepspeed, read_document
from zsim.plan.float8 import read_ao
from zsim.plan.fsdp_args import read_fsdp
from zsim.plan.parallelism import Sizes
from zsim.plan.reading import FP32_ASSUMED, NOT_ENABLED, Reading
from zsim.plan.recipe import Recipe, as_flag
from zsim.plan.spec import LEAF_CLASSES

# commands/config/config_args.py, ClusterConfig: any other key is refused.
_KNOWN = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config", "fp16",
    "dynamo_backend",
}  # fmt: skip
# What may not stand next to deepspeed_config_file (dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks).
_INSIDE_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip

_BACKENDS = (
    "NO", "INDUCTOR", "EAGER", "AOT_EAGER", "CUDAGRAPHS", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "OFI", "FX2TRT",
    "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON",
)  # fmt: skip
# What a deepspeed_config may hold beside what is read of it (commands/launch.py).
_DEEPSPEED_PLACES = {
    "deepspeed_config_file", "zero3_init_flag", "offload_optimizer_nvme_path", "offload_param_nvme_path",
    "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names", "seq_parallel_communication_data_type",
}  # fmt: skip


def read_accelerate(document: Document, ranks: int | None = None) -> Reading:
    """The plan in an accelerate configuration. Raises InputError where accelerate refuses it, NotModeled."""
    reading = Reading("accelerate configuration", document, ranks=ranks)
    recipe = Recipe(reading)
    where = recipe.get("compute_environment")
    if where not in (None, "LOCAL_MACHINE"):
        accepted = "LOCAL_MACHINE"
        raise document.error(
            ("compute_environment",), f"{where}: another kind of configuration", accepted, kind=NotModeled
        )
    for key in document.data:
        if key == "tp_config":
            why = "a key of accelerate 1.4 to 1.6 alone, which later ones refuse"
            raise document.error((key,), why, "a file without it, where its tp_size is 1", kind=NotModeled)
        if key not in _KNOWN:
            close = nearest(str(key), _KNOWN)
            hint = f"; did you mean {close}?" if close else ""
            raise document.error((key,), f"accelerate does not know this key and refuses it{hint}", "a file without it")
    processes, nodes = recipe.count("num_processes"), recipe.count("num_machines")
    reading.ranks = processes or ranks
    kind = str(recipe.get("distributed_type") or "NO").upper()  # without quotes, `no` is YAML's false
    if kind == "NO":
        recipe.refuse("use_cpu", (False,), "training on CPUs")
    if kind == "DEEPSPEED":
        _deepspeed(recipe)
        Sizes(recipe).share_sequences(reading.ranks)
    elif kind == "FSDP":
        mesh = Sizes(recipe).mesh()
        section = subsection(document, document.data, (), "fsdp_config")
        defaults: dict[str, Any] = {"default_version": 1, "default_wrap": "NO_WRAP", "default_least": 10**8}
        read_fsdp(reading, section, ("fsdp_config",), **defaults, nodes=nodes)
        if mesh:
            reading.set(("fsdp", "mesh"), mesh, ("parallelism_config",))
    elif kind in ("MULTI_GPU", "NO"):
        recipe.set("framework.name", "ddp", "distributed_type")
        Sizes(recipe).mesh()  # of one dimension here: what is refused with FSDP is refused
    else:
        accepted = "DEEPSPEED, FSDP, MULTI_GPU, NO"
        raise document.error(("distributed_type",), f"distributed_type {kind}", accepted, kind=NotModeled)
    _precision(recipe)
    _compile(recipe)
    _threads(recipe)
    for field in ("model", "cluster", "seq_len", "micro_batch"):
        reading.lacks(field)
    return reading


def _threads(recipe: Recipe) -> None:
    """commands/launch.py: `use_cpu` keeps one process that starts alone off the GPUs; several it gives their cores."""
    recipe.threads("accelerate launch")
    if recipe.flag("use_cpu"):
        recipe.reading.without_effect.append("use_cpu (accelerate starts several processes on GPUs all the same)")
        if recipe.reading.fields.pop(("omp_num_threads",), None):
            recipe.reading.notes.pop()
            recipe.reading.lacks("omp_num_threads", "(use_cpu: physical cores of a node by its processes)")


def _compile(recipe: Recipe) -> None:
    """utils/launch.py and dataclasses.py DynamoBackend; `dynamo_backend` at the top is the older way to write it
    (config_args.py, process_config)."""
    document = recipe.document
    section = subsection(document, document.data, (), "dynamo_config")
    path: tuple[str, ...] = ("dynamo_config", "backend" if "backend" in section else "dynamo_backend")
    value = section.get(path[1])
    if (old := recipe.get("dynamo_backend")) is not None:
        path, value = ("dynamo_backend",), old
    backend = "NO" if value in (None, False) else str(value).upper()
    if backend not in _BACKENDS:
        raise document.error(path, f"{value!r} is no backend of torch.compile", ", ".join(_BACKENDS))
    if backend == "INDUCTOR":
        recipe.reading.set(("compile",), True, path)
    elif backend != "NO":
        recipe.reading.not_modeled.append(f"{'.'.join(path)}: torch.compile by {backend}")


def _precision(recipe: Recipe) -> None:
    old = "fp16" if recipe.flag("fp16") else "no"  # config_args.py, process_config
    value = str(recipe.get("mixed_precision", old)).lower()
    if value in ("false", "none"):
        value = "no"
    if value == "fp8":
        read_ao(recipe)
        return
    if value not in ("no", "fp16", "bf16"):
        raise recipe.error(("mixed_precision",), f"{value!r} is not known", "bf16, fp16, no, fp8")
    fields = recipe.reading.fields
    own = fields.get(("precision",))
    if value != "no" and own in ("bf16", "fp16") and own != value:  # dataclasses.py, set_mixed_precision
        why = f"{value} next to {own} in DeepSpeed's file, which accelerate refuses"
        raise recipe.error(("mixed_precision",), why, f"{own}, no")
    if value != "no":
        recipe.set("precision", value, "mixed_precision")
        recipe.reading.notes = [text for text in recipe.reading.notes if text != NOT_ENABLED]
    elif any(what.startswith("deepspeed_config") for what in recipe.reading.missing):
        recipe.reading.lacks("precision", "(no mixed_precision here, and DeepSpeed's file is not there)")
    elif ("precision",) not in fields:
        recipe.set("precision", "fp32", "mixed_precision")
        recipe.reading.defaults.add(("precision",))  # training_args.py: the Trainer's bf16 and fp16 go before `no`
        recipe.reading.notes.append(FP32_ASSUMED)


def _deepspeed(recipe: Recipe) -> None:
    document, reading = recipe.document, recipe.reading
    section = subsection(document, document.data, (), "deepspeed_config")
    file = section.get("deepspeed_config_file")
    recipe.set("framework.name", "deepspeed", "distributed_type")
    for name in [name for name in section if name not in _DEEPSPEED_PLACES and name not in _WHERE]:
        close = nearest(str(name), {*_DEEPSPEED_PLACES, *_WHERE})
        hint = f"; did you mean {close}?" if close else ""
        reading.notes.append(f"deepspeed_config.{name} is no option of accelerate and is ignored{hint}")
    if file not in (None, "none"):
        for name in _INSIDE_FILE:
            if name in section:
                why = "accelerate refuses it next to deepspeed_config_file, in which it belongs"
                raise document.error(("deepspeed_config", name), why)
        path = document.beside(str(file), "deepspeed")
        if path.is_file():
            reading.include(read_deepspeed(path, zero_init=_zero_init(document, section, default=None)))
        else:
            reading.lacks("deepspeed_config", f"(names {file}, which is not there)")
    else:
        init = _zero_init(document, section, default=section.get("zero_stage") == 3)
        reading.include(read_document(_as_deepspeed(document, section), zero_init=init))
    if names := section.get("deepspeed_moe_layer_cls_names"):
        # accelerate utils/dataclasses.py DeepSpeedPlugin.set_moe_leaf_modules, beside what DeepSpeed itself chooses
        classes = [name.strip() for name in str(names).split(",")]
        field = ("zero", "leaf_module", "classes")
        classes = [*reading.fields.get(field, LEAF_CLASSES), *classes]
        reading.set(field, classes, ("deepspeed_config", "deepspeed_moe_layer_cls_names"))
    if "seq_parallel_communication_data_type" in section:
        reading.without_effect.append(
            "deepspeed_config.seq_parallel_communication_data_type (accelerate takes it from DeepSpeed's own file only)"
        )


def _zero_init(document: Document, section: dict[str, Any], default: bool | None) -> bool | None:
    value = section.get("zero3_init_flag")
    if value is None:
        return default
    path = ("deepspeed_config", "zero3_init_flag")
    return as_flag(value, lambda text: document.error(path, text, "true or false"))


_WHERE = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}


def _as_deepspeed(document: Document, section: dict[str, Any]) -> Document:
    """The DeepSpeed configuration that the plugin builds from its own options (DeepSpeedPlugin.__post_init__)."""
    built = Document(document.file, {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})
    built.data["zero_optimization"] = {"stage": 2, "offload_optimizer": {}, "offload_param": {}}
    built.data |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    for name, path in _WHERE.items():
        if section.get(name) is not None:
            built.set(path, section[name], document.place(("deepspeed_config", name)))
    return built
