"""Tells what somebody's file is, and reads it with the reader for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zsim.document import Document, dotted, parse_yaml, read_text
from zsim.errors import InputError
from zsim.plan.environment import read_environment
from zsim.plan.reading import Reading
from zsim.plan.swift_start import task_of

READERS = (
    "DeepSpeed JSON, accelerate YAML, Trainer arguments (also in a shell script), axolotl YAML, LLaMA-Factory YAML, "
    "ms-swift YAML, JSON and args.json, oumi YAML, torchtitan TOML, adapter_config.json of peft, config.json"
)

_TOML, _SCRIPT, _YAML, _JSON = (
    (".toml",), (".sh", ".bash", ".slurm", ".sbatch"), (".yaml", ".yml"), (".json", ".hjson", ".json5", ".jsonc"),
)  # fmt: skip
SUFFIXES = (*_TOML, *_SCRIPT, *_YAML, *_JSON)

# Keys that only GPT-NeoX has, which takes several files and merges them.
NEOX = ("checkpoint_activations", "checkpoint-activations", "lr_decay_iters", "lr-decay-iters", "no_weight_tying")

# Commands that export to the allocator (axolotl cli/main.py, llamafactory launcher.py), not the modules they start.
_OWN_COMMANDS = {"axolotl": ("axolotl",), "llama_factory": ("llamafactory-cli", "lmf")}
_BATCH = "per_device_train_batch_size"
_OWN_BATCH = {
    "per_gpu_train_batch_size", "train_batch_size", "batch_size", "total_batch_size", "micro_batch", "max_epochs",
}  # fmt: skip

# Arguments of ms-swift, of which a recipe without tuner_type has some.
_OF_SWIFT = {"torch_dtype", "lora_rank", "split_dataset_ratio", "max_length", "attn_impl", "freeze_vit", _BATCH}

# Sections of oumi's TrainingConfig, which refuses any other.
_OUMI = {"model", "data", "training", "peft", "fsdp", "deepspeed"}

# Recipes of tools without a reader here: their name, and keys that only they have, in a section where there is a dot.
_FOREIGN: tuple[tuple[str, frozenset[str]], ...] = (
    ("an oumi configuration that does not train", frozenset({"model.model_name", "generation"})),
    ("an oumi configuration that does not train", frozenset({"model.model_name", "tasks"})),
    ("an oumi or SkyPilot job, whose commands name the recipe", frozenset({"resources", "run"})),
    ("a recipe of LLaMA-Factory's v1 trainer", frozenset({"model", "dist_config"})),
    ("a recipe of LLaMA-Factory's v1 trainer", frozenset({"model", "model_class"})),
    ("an xtuner or mmengine configuration", frozenset({"train_dataloader", "train_cfg"})),
    ("a NeMo configuration", frozenset({"trainer", "exp_manager"})),
    ("a torchtune recipe", frozenset({"tokenizer", "checkpointer"})),
    ("an llm-foundry configuration", frozenset({"model", "max_duration"})),
    ("an llm-foundry configuration", frozenset({"icl_tasks"})),
    ("a NeMo AutoModel recipe", frozenset({"dist_env", "distributed"})),
    ("the log of a run of the Trainer", frozenset({"log_history"})),
    ("a Hydra configuration, whose parts are other files", frozenset({"defaults"})),
    ("a Kubernetes manifest", frozenset({"apiVersion", "kind"})),
    ("an Azure ML job", frozenset({"command", "environment", "compute"})),
    ("an llm-foundry configuration", frozenset({"parameters", "command", "image"})),
    ("a verl configuration", frozenset({"actor_rollout_ref"})),
    ("the start of a script with arguments of its own", frozenset({"deepspeed_config"})),
    ("the start of DeepSpeed-Chat, with arguments of its own", frozenset({"zero_stage", "deepspeed"})),
    ("the start of DeepSpeed-Chat, with arguments of its own", frozenset({"actor_model_name_or_path"})),
    ("the start of Megatron-DeepSpeed, with arguments of its own", frozenset({"micro_batch_size", "num_layers"})),
    (
        "a loop of its own on accelerate, as Open-Instruct's and the examples without a Trainer",
        frozenset({"with_tracking"}),
    ),
    ("an Open-Instruct configuration", frozenset({"dataset_mixer_list"})),
    ("an Open-Instruct configuration", frozenset({"mixer_list"})),
    ("what Weights & Biases noted of a run (its config.yaml holds the arguments)", frozenset({"os", "python"})),
)


def parse(path: Path) -> Document:
    """The fields of a configuration file, whichever of JSON, Hjson, YAML and TOML it is. Raises InputError."""
    suffix = path.suffix.lower()
    if suffix in _TOML:
        from zsim.plan.torchtitan import parse_toml

        return parse_toml(path)
    if suffix in _SCRIPT:
        from zsim.plan.script import parse_script

        return parse_script(path)
    text = read_text(path)
    if suffix in _YAML:
        return unwrapped(parse_yaml(text, path, repeats=True))
    if suffix in _JSON:
        if is_neox_text(text):
            return parse_yaml(text.replace("\t", " "), path, repeats=True)
        from zsim.plan.hjson import parse_hjson

        return parse_hjson(text, path)
    raise InputError(f"{suffix or 'no suffix'}: not a file of a kind that is read", path, accepted=READERS)


def unwrapped(document: Document) -> Document:
    """The Trainer arguments in the config.yaml that Weights & Biases keeps of a run: `name: {value: ...}`."""
    sections = {name: value for name, value in document.data.items() if name != "wandb_version"}
    if not sections or not all(isinstance(one, dict) and "value" in one for one in sections.values()):
        return document
    data = {name: one["value"] for name, one in sections.items() if not str(name).startswith("_")}
    places = {path[:1] + path[2:]: place for path, place in document.places.items() if path[1:2] in ((), ("value",))}
    return Document(document.file, data, places)


def is_neox_text(text: str) -> bool:
    """GPT-NeoX writes YAML that looks like JSON, with Python's True."""
    return "pipe_parallel_size" in text or "pipe-parallel-size" in text


def identify(document: Document) -> str:
    """What the file is: a kind that `read` takes, "model" or "scenario". Raises InputError for anything else."""
    keys = {str(key) for key in document.data}
    if {"framework", "cluster"} <= keys:
        return "scenario"
    if {"pipe_parallel_size", "pipe-parallel-size", *NEOX} & keys and "micro_batch_size" not in keys:
        return "neox"
    if {"distributed_type", "compute_environment"} & keys:
        return "accelerate"
    if "base_model" in keys and {"micro_batch_size", "sequence_len", "datasets", "adapter"} & keys:
        return "axolotl"
    if "model_name_or_path" in keys and {"finetuning_type", "cutoff_len", "stage", "template"} & keys:
        return "llama_factory"
    if isinstance(document.data.get("training"), dict) and {"parallelism", "job", "activation_checkpoint"} & keys:
        return "torchtitan"
    if _is_swift(document, keys):
        return "swift"
    if {"model", "training"} <= keys <= _OUMI and "model_name" in _inside(document, "model"):
        return "oumi"
    if {"peft_type", "base_model_name_or_path"} <= keys or {"r", "lora_alpha", "target_modules"} <= keys:
        return "peft"
    _refuse_foreign(document, keys)
    if _is_fsdp_config(keys):
        return "fsdp_config"
    is_yaml = Path(document.file).suffix.lower() in _YAML  # as no model's config.json is
    # some models have gradient_checkpointing
    if {"model_type", "architectures"} <= keys and _BATCH not in keys and not is_yaml:
        return "model"
    if _is_trainer(document, keys):
        return "trainer"
    if document.script:
        why = "is the start of a script with arguments of its own, which is not read"
        raise InputError(why, *document.place(()), accepted=READERS)
    of_model = {"model_type", "architectures", "hidden_size", "n_embd", "d_model"} & keys
    if of_model and "zero_optimization" not in keys and not is_yaml:
        return "model"
    if _is_deepspeed(document, keys):
        return "deepspeed"
    some = ", ".join(sorted(keys)[:5])
    raise InputError(f"is no configuration that is known here (its keys: {some} ...)", document.file, accepted=READERS)


def _refuse_foreign(document: Document, keys: set[str]) -> None:
    inner = {f"{name}.{key}" for name, section in document.data.items() if isinstance(section, dict) for key in section}
    for name, marks in _FOREIGN:
        if marks <= keys | inner:
            raise InputError(f"is {name}, which is not read", document.file, accepted=READERS)


def _inside(document: Document, name: str) -> dict[str, Any]:
    section = document.data.get(name)
    return section if isinstance(section, dict) else {}


def _is_swift(document: Document, keys: set[str]) -> bool:
    """By who starts it; a file also by arguments of ms-swift's own, older ones too."""
    if task_of(document.program):
        return True
    if document.script:
        return False
    if {"tuner_type", "train_type", "sft_type", "rlhf_type"} & keys:
        return bool({"model", "model_type", "model_id_or_path", "dataset"} & keys)
    return isinstance(document.data.get("model"), str) and "dataset" in keys and len(_OF_SWIFT & keys) > 1


def _is_trainer(document: Document, keys: set[str]) -> bool:
    """Raises InputError for arguments of a loop of its own, and of a run that does not train."""
    if not {"gradient_checkpointing", "num_train_epochs", _BATCH} & keys and not (
        {"model_name_or_path", "fsdp_config"} & keys and {"learning_rate", "max_steps", "fsdp"} & keys
    ):
        return False
    own = sorted(key for key in keys if key in _OWN_BATCH)
    if own and _BATCH not in keys:
        message = f"{own[0]} is no argument of Hugging Face's Trainer: a loop of its own, which is not read"
        raise InputError(message, *document.place((own[0],)), accepted=READERS)
    for name in ("do_eval", "do_predict"):
        if document.data.get(name) is True and not {"do_train", _BATCH} & keys:
            why = f"{name} without do_train: a run that does not train"
            raise InputError(why, *document.place((name,)), accepted="do_train")
    return True


def _is_fsdp_config(keys: set[str]) -> bool:
    from zsim.plan.fsdp_args import OPTIONS

    return bool(keys) and {key.removeprefix("fsdp_") for key in keys} <= OPTIONS


def _is_deepspeed(document: Document, keys: set[str]) -> bool:
    from zsim.plan.deepspeed_keys import REMOVED, TOP

    known = keys & (TOP.keys() | REMOVED.keys())
    optimizer = document.data.get("optimizer")
    own = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
    own |= {name for name in ("fp16", "bf16", "bfloat16") if not isinstance(document.data.get(name), bool)}
    return bool(known & own) or (known == {"optimizer"} and isinstance(optimizer, dict) and "type" in optimizer)


def read(document: Document, kind: str, ranks: int | None = None) -> Reading:
    """Read a file that `identify` calls `kind` (but "model" and "scenario"), for `ranks` GPUs where that is known.

    Raises InputError, NotModeled.
    """
    if document.repeated and kind == "llama_factory":
        raise document.error(document.repeated[0], "stands here twice, which LLaMA-Factory's OmegaConf refuses")
    reading = _readers()[kind](document, document.ranks or ranks)
    reading.notes += document.notes + (document.launch.notes if document.launch else [])
    if document.launch or document.program not in ("", *_OWN_COMMANDS.get(kind, (document.program,))):
        reading.without_launcher()
    read_environment(reading)
    reading.notes += [f"{dotted(path)} stands here twice: the last one counts" for path in document.repeated]
    return reading


def _read_fsdp_config(document: Document, ranks: int | None) -> Reading:
    """What the Trainer's `fsdp_config: FILE` names."""
    from zsim.plan.fsdp_args import read_fsdp

    reading = Reading("fsdp_config of the Trainer", document, ranks=ranks)
    read_fsdp(reading, document.data, (), default_version=2)
    for field in ("model", "cluster", "micro_batch", "seq_len", "precision", "grad_accum", "grad_clip"):
        reading.lacks(field)
    return reading


def _readers() -> dict[str, Callable[[Document, int | None], Reading]]:
    from zsim.plan.accelerate import read_accelerate
    from zsim.plan.axolotl import read_axolotl
    from zsim.plan.deepspeed import read_document
    from zsim.plan.llama_factory import read_llama_factory
    from zsim.plan.neox import read_neox
    from zsim.plan.oumi import read_oumi
    from zsim.plan.peft import read_peft
    from zsim.plan.swift import read_swift
    from zsim.plan.torchtitan import read_torchtitan
    from zsim.plan.trainer import read_trainer

    return {
        "deepspeed": lambda document, ranks: read_document(document),
        "accelerate": read_accelerate,
        "axolotl": read_axolotl,
        "llama_factory": read_llama_factory,
        "swift": read_swift,
        "oumi": read_oumi,
        "torchtitan": read_torchtitan,
        "trainer": read_trainer,
        "neox": read_neox,
        "peft": read_peft,
        "fsdp_config": _read_fsdp_config,
    }
