"""Reads an oumi training configuration (YAML): sections of its own, which become arguments of the Hugging Face Trainer,
variables of accelerate, or what its own trainer does.

As of 0.9: core/configs/params, core/distributed.py, builders/models.py, train.py, core/trainers/oumi_trainer.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from zsim.document import Document, Path_, nearest, subsection
from zsim.errors import InputError, NotModeled
from zsim.plan.adapters import in_8_bits, lora, quantized
from zsim.plan.oumi_deepspeed import deepspeed_config, without_bf16
from zsim.plan.oumi_keys import DTYPES, FUSED, HARMLESS, OTHER_TRAINERS, PARTS, TRAINERS, USED
from zsim.plan.reading import Reading
from zsim.plan.recipe import Recipe
from zsim.plan.trainer import attention, checkpointing, model_length, name_model, training
from zsim.plan.trainer_keys import HARMLESS as OF_TRAINER

_LORA = {
    "r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
    "save": "lora_modules_to_save", "parameters": "lora_target_parameters",
}  # fmt: skip
_FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_SWITCHES = (
    ("fsdp", "enable_fsdp", "enable_fsdp"), ("fsdp", "mixed_precision", "fsdp.mixed_precision"),
    ("deepspeed", "enable_deepspeed", "enable_deepspeed"), ("deepspeed", "precision", "precision"),
)  # fmt: skip


@dataclass
class Flattened(Document):
    """A document whose `data` has other names at the top than the file; `names`: what the file calls each."""

    names: dict[str, Path_] = field(default_factory=dict)

    def error(
        self,
        path: Path_,
        message: str,
        accepted: str | None = None,
        notes: tuple[str, ...] = (),
        kind: type[InputError] = InputError,
    ) -> InputError:
        own = (*self.names[str(path[0])], *path[1:]) if path and path[0] in self.names else path
        return super().error(own, message, accepted, notes, kind)


def read_oumi(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in an oumi recipe. Raises InputError, NotModeled."""
    sections = {name: subsection(document, document.data, (), name) for name in USED}
    flat = _flattened(document, sections)
    reading = Reading("oumi recipe", flat, ranks=ranks)
    recipe = Recipe(reading)
    _check(recipe, sections)
    own = _trainer(recipe, sections["training"]) == "OUMI"
    dtype = _dtype(recipe, sections, own)
    _lengths(recipe, document)
    attention(recipe, "attn_implementation")
    if recipe.flag("use_deterministic"):
        flat.data |= {"gradient_checkpointing": False, "ddp_find_unused_parameters": False}
    checkpointing(recipe, default=False)
    _model(recipe, own)
    if recipe.flag("use_peft"):
        _adapters(recipe, dtype)
    elif sections["peft"]:
        reading.without_effect.append("peft (training.use_peft is false)")
    sharded = recipe.flag("enable_fsdp"), recipe.flag("enable_deepspeed")
    if all(sharded):
        raise flat.error(("enable_deepspeed",), "oumi refuses DeepSpeed and FSDP together", "one of them")
    if sharded[1]:
        if own:
            raise flat.error(("enable_deepspeed",), "oumi's own trainer leaves DeepSpeed out", "trainer_type: TRL_SFT")
        flat.data["deepspeed"] = deepspeed_config(flat, sections["deepspeed"])
        del flat.data["torch_dtype"]  # of which DDP and FSDP make something (without_bf16)
    if sharded[0]:
        _fsdp(recipe, sections["fsdp"], own)
    training(recipe)
    _types(recipe, own, dtype)
    _load(recipe, own)
    name_model(recipe, "model_name")
    recipe.rest(OF_TRAINER)
    return reading


def _flattened(document: Document, sections: dict[str, dict[str, Any]]) -> Flattened:
    """Keys of all sections side by side, those of `training` as the Trainer calls them, and the switches of the two
    sections that shard, whose other keys are read apart."""
    data, names = dict[str, Any](), dict[str, Path_]()
    for section in ("model", "training", "peft"):
        for key, value in sections[section].items():
            name = TRAINERS.get(key, key) if section == "training" else key
            name = "model.compile" if name == "compile" else name
            data[name], names[name] = _number(value), (section, key)
    for section, key, name in _SWITCHES:
        if key in sections[section]:
            data[name], names[name] = sections[section][key], (section, key)
    names["fsdp_config"] = ("fsdp",)
    places = document.places | {(name,): document.place(path) for name, path in names.items()}
    return Flattened(
        document.file, data, places, program=document.program, ranks=document.ranks, launch=document.launch,
        environment=document.environment, given=document.given, names=names,
    )  # fmt: skip


def _number(value: Any) -> Any:
    """OmegaConf takes 1e-3 for a number, which is a text in YAML 1.1."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _check(recipe: Recipe, sections: dict[str, dict[str, Any]]) -> None:
    """Sets apart keys without an effect here. Raises InputError for one that oumi does not have, which OmegaConf
    refuses."""
    for section, given in sections.items():
        known = (*USED[section], *HARMLESS[section])
        for key in given:
            if key not in known:
                close = nearest(key, known)
                hint = f"; did you mean {close}?" if close else ""
                why = f"oumi, for whose recipe this is taken, has no such key (as of 0.9) and refuses it{hint}"
                raise recipe.document.error((section, key), why)
        harmless = [str(key) for key in given if key in HARMLESS[section]]
        for key in harmless:
            recipe.document.data.pop(key, None)
        if harmless:
            recipe.reading.without_effect.append(f"{section}: {', '.join(harmless)} (data, rate, logging, output)")


def _trainer(recipe: Recipe, given: dict[str, Any]) -> str:
    """What trains; its further arguments as if they stood in the section itself."""
    document = recipe.document
    kind = str(recipe.get("trainer_type", "HF")).upper()
    if kind in OTHER_TRAINERS:
        why = f"trainer_type {kind}: {OTHER_TRAINERS[kind]}"
        raise document.error(("trainer_type",), why, "TRL_SFT, HF, OUMI", kind=NotModeled)
    if kind not in ("TRL_SFT", "HF", "OUMI"):
        raise document.error(("trainer_type",), f"{kind} is no trainer of oumi's", "TRL_SFT, HF, OUMI")
    further = recipe.get("trainer_kwargs", {})
    if not isinstance(further, dict):
        raise document.error(("trainer_kwargs",), f"{further!r} is not a section", "a mapping of arguments")
    for name, value in further.items() if kind != "OUMI" else ():
        if name not in document.data:
            document.data[name] = value
            document.places[(name,)] = document.place(("training", "trainer_kwargs", name))
    if "max_grad_norm" in given and given["max_grad_norm"] is None:
        document.data["max_grad_norm"] = 0.0
    name = str(document.data.get("optim") or "adamw_torch")
    document.data["optim"] = "adamw_torch_fused" if kind == "OUMI" and name.lower() in FUSED else name
    if kind == "OUMI":
        document.data["ddp_find_unused_parameters"] = bool(document.data.get("ddp_find_unused_parameters"))
    _saving(recipe, given, own=kind == "OUMI")
    return kind


def _saving(recipe: Recipe, given: dict[str, Any], own: bool) -> None:
    """to_hf: every 500 steps by default. oumi's own trainer writes by torch.distributed.checkpoint, and whole state
    dicts on every GPU first."""
    document, steps, epoch = recipe.document, given.get("save_steps", 500), recipe.flag("save_epoch")
    if own and (steps or epoch):
        recipe.reading.not_modeled.append("memory while oumi's own trainer saves")
    if own or {"save_steps", "save_epoch"} & given.keys():
        document.places[("save_strategy",)] = document.place(("save_steps",))
        document.data["save_strategy"] = "no" if own else "steps" if steps else "epoch" if epoch else "no"


def _dtype(recipe: Recipe, sections: dict[str, dict[str, Any]], own: bool) -> str:
    """The type of the weights, and the Trainer's flag of mixed precision: by `mixed_precision_dtype`, which oumi takes
    with float32 weights alone, or by accelerate where fsdp.mixed_precision asks for it."""
    document, reading = recipe.document, recipe.reading
    said = str(recipe.get("torch_dtype_str", "auto")).lower()
    if said == "auto":
        reading.notes.append("torch_dtype_str: that of the checkpoint by default; bfloat16 is taken")
    elif said not in DTYPES:
        raise document.error(("torch_dtype_str",), f"{said!r} is not known", "float32, bfloat16, float16")
    dtype = DTYPES.get(said, "bfloat16")
    mixed = str(recipe.get("mixed_precision_dtype", "NONE")).lower()
    if mixed not in ("none", "bf16", "fp16"):
        raise document.error(("mixed_precision_dtype",), f"{mixed!r} is not known", "NONE, BF16, FP16")
    if mixed != "none" and dtype != "float32":
        why = f"oumi refuses mixed precision of weights that are loaded in {dtype}"
        raise document.error(("mixed_precision_dtype",), why, "NONE, or model.torch_dtype_str: float32")
    shards = recipe.get("fsdp.mixed_precision")
    if shards not in (None, "bf16", "fp16"):
        raise document.error(("fsdp.mixed_precision",), f"{shards!r} is not known", "bf16, fp16")
    if own and mixed != "none" and recipe.flag("enable_fsdp"):
        why = "torch.autocast around FSDP"
        raise document.error(("mixed_precision_dtype",), why, "NONE, and fsdp.mixed_precision", kind=NotModeled)
    name = "mixed_precision_dtype"
    if mixed == "none" and recipe.flag("enable_fsdp") and shards:
        mixed, name = shards, "fsdp.mixed_precision"
    if mixed != "none":
        document.data[mixed] = True
        document.places[(mixed,)] = document.place((name,))
    document.data["torch_dtype"] = dtype
    document.places[("torch_dtype",)] = document.place(("torch_dtype_str",))
    return dtype


def _lengths(recipe: Recipe, document: Document) -> None:
    data = recipe.document.data
    train = subsection(document, subsection(document, document.data, (), "data"), ("data",), "train")
    for name in ("max_length", "max_seq_length"):  # which model_max_length overrides
        if data.get("model_max_length") is not None or not isinstance(data.get(name), int):
            data.pop(name, None)
    model_length(recipe, ("max_length", "max_seq_length", "model_max_length"))
    packed = recipe.flag("packing") or bool(train.get("pack"))
    if ("seq_len",) not in recipe.reading.fields:
        recipe.reading.lacks("seq_len", "(model_max_length is as long as the model allows by default)")
    elif packed:
        recipe.reading.notes.append("sequences are packed to model_max_length")
    else:
        what = "every sequence is taken to be model_max_length long; without packing real ones are shorter"
        recipe.reading.notes.append(what)


def _model(recipe: Recipe, own: bool) -> None:
    reading, document = recipe.reading, recipe.document
    recipe.refuse("model.compile", (False,), "oumi takes training.compile where it trains", "training.compile")
    if recipe.flag("enable_liger_kernel"):
        document.data["use_liger_kernel"] = True
        document.places[("use_liger_kernel",)] = document.place(("enable_liger_kernel",))
        if own:  # it replaces classes when the model is there already: the forward with its loss, no module
            document.data["liger_kernel_config"] = {"rms_norm": False, "swiglu": False}
    others = [str(name) for name in recipe.get("model_kwargs", {}) if name != "disable_dropout"]
    if others:
        reading.not_modeled.append(f"model_kwargs: {', '.join(others)}, which change the model's config.json")
    if recipe.get("adapter_model"):
        reading.not_modeled.append("adapter_model: adapters that are there already, whose own rank and targets count")
    recipe.get("adapter_trainable")
    if recipe.flag("text_only"):
        reading.not_modeled.append("text_only: no vision tower, unless the config.json is that of the text model alone")
    frozen = recipe.get("freeze_layers", [])
    if not isinstance(frozen, list):
        raise document.error(("freeze_layers",), f"{frozen!r} is not a list", "names of modules")
    if frozen and all(name in PARTS for name in frozen):
        reading.vision["model", "freeze"] = list(dict.fromkeys(PARTS[name] for name in frozen))
    elif frozen:
        recipe.set("model.freeze", [PARTS.get(name, f"{name}.*") for name in frozen], "freeze_layers")


def _adapters(recipe: Recipe, dtype: str) -> None:
    """peft_params.py, to_lora and to_bits_and_bytes."""
    document, reading, data = recipe.document, recipe.reading, recipe.document.data
    if data.get("lora_target_modules") == ["all-linear"]:
        data["lora_target_modules"] = "all-linear"
    lora(recipe, _LORA, {"r": 8, "alpha": 8, "dropout": 0.0})
    recipe.refuse("lora_bias", ("none",), "biases that train beside adapters", "none")
    task = str(recipe.get("lora_task_type", "CAUSAL_LM")).rpartition(".")[2].upper()
    if task != "CAUSAL_LM":
        raise document.error(("lora_task_type",), f"{task}: another head", "CAUSAL_LM", kind=NotModeled)
    recipe.get("lora_init_weights")
    excluded = recipe.get("lora_exclude_modules", [])
    parts = [PARTS[name] for name in (str(each).strip(".*") for each in excluded) if name in PARTS]
    if parts:
        reading.vision["lora", "exclude"] = parts
    others = [str(each) for each in excluded if str(each).strip(".*") not in PARTS]
    if others:
        reading.not_modeled.append(f"lora_exclude_modules: {', '.join(others)}, of which nothing is left out here")
    bits, kind = recipe.get("q_lora_bits", 4), recipe.get("bnb_4bit_quant_type", "fp4")
    compute = DTYPES.get(str(recipe.get("bnb_4bit_compute_dtype", "float32")), "float32")
    storage, skipped = recipe.get("bnb_4bit_quant_storage", "uint8"), recipe.get("llm_int8_skip_modules")
    nested = recipe.flag("use_bnb_nested_quant")
    if not recipe.flag("q_lora"):
        return
    if skipped:
        reading.not_modeled.append(f"llm_int8_skip_modules: {', '.join(map(str, skipped))} stay in 16 bits")
    if bits == 8:
        in_8_bits(recipe, "q_lora")
        return
    if bits != 4 or kind not in ("fp4", "nf4"):
        name = "q_lora_bits" if bits != 4 else "bnb_4bit_quant_type"
        raise document.error((name,), f"{recipe.get(name)} is not known", "4, 8" if bits != 4 else "fp4, nf4")
    if compute != dtype:
        why = f"products of 4-bit weights in {compute}, beside a model in {dtype}"
        raise document.error(("bnb_4bit_compute_dtype",), why, dtype, kind=NotModeled)
    if recipe.flag("enable_fsdp") and DTYPES.get(str(storage)) != dtype:
        why = f"oumi refuses 4-bit weights stored in {storage} under FSDP beside a model in {dtype}"
        raise document.error(("bnb_4bit_quant_storage",), why, dtype)
    quantized(recipe, "q_lora")
    recipe.set("quantize.type", kind, "bnb_4bit_quant_type")
    recipe.set("quantize.double_quant", nested, "use_bnb_nested_quant")


def _fsdp(recipe: Recipe, given: dict[str, Any], own: bool) -> None:
    """core/distributed.py: accelerate's variables for FSDP1, or FullyShardedDataParallel itself, as the Trainer's
    options say the same."""
    document = recipe.document
    if document.launch:
        recipe.reading.notes.append("fsdp has no effect where accelerate launches, which has its own configuration")
        return
    adapted = recipe.flag("use_peft")
    if own and adapted:
        why = "adapters under FSDP in units of oumi's own trainer"
        raise document.error(("trainer_type",), why, "TRL_SFT", kind=NotModeled)
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("enable_fsdp", "mixed_precision"):
        options.pop(name, None)
    options = {
        "version": 1, "sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE",
        "state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "NO_WRAP", "min_num_params": 100_000,
        "cpu_ram_efficient_loading": not own, "use_orig_params": recipe.flag("torch_compile") or not adapted, **options,
    }  # fmt: skip
    wrapped = options.pop("transformer_layer_cls", None)
    if options["auto_wrap_policy"] != "SIZE_BASED_WRAP":
        del options["min_num_params"]
    if wrapped and options["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
        options["transformer_layer_cls_to_wrap"] = [name.rpartition(".")[2] for name in str(wrapped).split(",")]
    if not own and recipe.flag("gradient_checkpointing"):
        options["activation_checkpointing"] = True
    document.data |= {"fsdp": "true", "fsdp_config": options}
    document.places |= {("fsdp_config", name): document.place(("fsdp", name)) for name in ("", *options)}
    document.places["fsdp_config", "activation_checkpointing"] = document.place(("gradient_checkpointing",))


def _types(recipe: Recipe, own: bool, dtype: str) -> None:
    """What trains in which type, where no mixed precision widens it."""
    reading, fields = recipe.reading, recipe.reading.fields
    framework, low = fields.get(("framework", "name")), {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    mixed, adapted = recipe.flag("bf16") or recipe.flag("fp16"), ("lora", "r") in fields
    if framework == "ddp" and ("quantize", "type") in fields:  # builders/models.py, prepare_model_for_kbit_training
        fields[("quantize", "prepared")] = True
    if low is None or recipe.document.launch:
        return
    if framework == "deepspeed" and not mixed:
        without_bf16(recipe, low)
    elif adapted and not mixed:
        fields[("precision",)] = low
        what = "autocast is simulated" if framework == "ddp" else "they are gathered in the type of the model"
        reading.not_modeled.append(f"use_peft: without mixed precision adapters multiply in float32; here {what}")
    elif own and mixed and framework == "fsdp1":  # nothing widens what FSDP itself is given
        recipe.set("fsdp.storage_dtype", dtype, "torch_dtype")


def _load(recipe: Recipe, own: bool) -> None:
    """builders/models.py: straight to the GPU, but where accelerate's FSDP has rank 0 read. The model is built before
    the Trainer's arguments are, and so never under zero.Init."""
    reading, pretrained = recipe.reading, recipe.flag("load_pretrained_weights", True)
    if reading.fields.get(("zero", "stage")) == 3:
        reading.fields[("zero", "zero_init")] = False
        reading.notes.append("the model is built before oumi tells transformers of DeepSpeed: without zero.Init")
        return
    placed = pretrained and recipe.get("device_map", "auto") not in (None, "cpu")
    if placed and ("load",) not in reading.fields and not recipe.document.launch:
        recipe.set("load", "gpu", "device_map")
