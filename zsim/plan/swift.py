"""Reads arguments of ms-swift (`swift sft`, `swift pt`): the Trainer's, with names and defaults of its own.

As of 4.6 (arguments/sft_args.py, tuner_args.py, base_args/, trainers/arguments.py), and by their older names; what
defaults were in 2 where the arguments are those of 2.
"""

from __future__ import annotations

import math
import re
from typing import Any

from zsim.document import Document, read_text
from zsim.errors import NotModeled
from zsim.plan import preference
from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants
from zsim.plan.hjson import parse_hjson
from zsim.plan.reading import Reading
from zsim.plan.recipe import ULYSSES, Recipe
from zsim.plan.swift_keys import DTYPES, FSDP, HARMLESS, LISTED, OTHERS_OWN, REFUSED, RENAMED, RLHF, deepspeed_config
from zsim.plan.swift_start import processes, task_of
from zsim.plan.trainer import attention, checkpointing, model_length, name_model, training
from zsim.plan.trainer_keys import HARMLESS as TRAINERS
from zsim.plan.trainer_keys import OTHER_TRAINERS
from zsim.plan.values import names_in

_NAMES_OF_3 = ("model", "train_type", "tuner_type")
_ONLY_IN_2 = ("sft_type", "model_id_or_path", "model_type", "template_type", "batch_size", "lora_target_modules")
_LORA = {
    "r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules",
    "save": "modules_to_save", "parameters": "target_parameters",
}  # fmt: skip
_ALL_LINEAR = ("all-linear", "ALL")
_WHOLE_SETS = {"all-embedding": "embed_tokens", "EMBEDDING": "embed_tokens"}
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "false", "False")
# Loss scales of 0 and 1 alone: they become labels, and no weights (loss_scale/base.py).
_BINARY = {"default", "base", "last_round", "all", "ignore_empty_think", "ignore_think_prefix"}
_SIZES = re.compile(r"(.+_)?(MAX|MIN)_(PIXELS|TOKEN_NUM)|FPS_MAX_FRAMES")  # variables that templates read
_VALIDATION = ("val_dataset", "cached_val_dataset", "custom_val_dataset_path", "eval_dataset")


def read_swift(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in arguments of ms-swift. Raises InputError, NotModeled."""
    reading = Reading("ms-swift arguments", document, ranks=ranks)
    recipe = Recipe(reading)
    data = document.data
    is_of_2 = not any(data.get(name) is not None for name in _NAMES_OF_3) and bool(data.keys() & set(_ONLY_IN_2))
    reading.ranks = processes(recipe) or ranks
    task = task_of(document.program) or "sft"
    pairs = _preference(recipe, task)
    _rename(recipe, is_of_2)
    for name, (harmless, why) in preference.others(REFUSED, pairs).items():
        recipe.refuse(name, harmless, why)
    for name, why in preference.others(OTHER_TRAINERS, pairs).items():
        recipe.refuse(name, (False,), why)
    recipe.refuse("device_map", ("",), "a model whose layers are spread over GPUs")
    recipe.refuse("sequence_parallel_size", (1,), "Ulysses and ring attention of ms-swift's own", ULYSSES)
    tuner = _tuner(recipe)
    _refuse_named_parameters(recipe)
    _precision(recipe, tuner, is_of_2)
    _lengths(recipe, is_of_2)
    _attention(recipe)
    checkpointing(recipe, default=True)
    if tuner == "lora":
        _adapters(recipe, is_of_2)
    else:
        recipe.refuse("quant_method", (), "quantized weights without adapters")
    _parts(recipe, tuner, is_of_2)
    _batch(recipe)
    _evaluation(recipe, is_of_2)
    _deepspeed(recipe)
    _fsdp(recipe, is_of_2)
    if is_of_2 and data.get("ddp_find_unused_parameters") is None:  # argument.py of 2, _init_training_args
        data["ddp_find_unused_parameters"] = not recipe.flag("gradient_checkpointing", True)
    if recipe.flag("resume_only_model"):
        data.pop("resume_from_checkpoint", None)
    training(recipe)
    if pairs is not None:
        preference.of_trl(recipe, pairs, "rlhf_type")
    _after(recipe, task, is_of_2)
    name_model(recipe, "model")
    recipe.rest((*TRAINERS, *HARMLESS, *(name for name in data if str(name).startswith(OTHERS_OWN))))
    return reading


def _preference(recipe: Recipe, task: str) -> str | None:
    """Of `swift rlhf`, by trl's trainers. Raises NotModeled for what is none of them."""
    kind = recipe.get("rlhf_type", "dpo" if task == "rlhf" else None)
    if kind is None or kind in ("dpo", "orpo", "cpo", "simpo"):
        return kind
    why = f"rlhf_type {kind}: {RLHF.get(str(kind), 'which is not known here')}"
    raise recipe.document.error(("rlhf_type",), why, "dpo, orpo, cpo, simpo", kind=NotModeled)


def _rename(recipe: Recipe, is_of_2: bool) -> None:
    """Older names, and values that have other names now."""
    document, data = recipe.document, recipe.document.data
    older = dict(RENAMED)
    if is_of_2:
        older["model_type"] = "model"  # which names a model alone where model_id_or_path is not given
    for old, new in older.items():
        value = recipe.get(old)
        if value is not None and data.get(new) is None:
            data[new] = value
            document.places[(new,)] = document.place((old,))
            document.unknown |= {new: document.unknown[old]} if old in document.unknown else {}
    data.pop("dtype", None)  # another one in the Trainer's arguments
    flash = recipe.get("use_flash_attn") if is_of_2 else None
    if flash is not None and data.get("attn_impl") is None:  # get_model_tokenizer_... of 2, by model
        data["attn_impl"] = "flash_attn" if recipe.flag("use_flash_attn") else "eager"
        document.places[("attn_impl",)] = document.place(("use_flash_attn",))


def _tuner(recipe: Recipe) -> str:
    tuner = str(recipe.get("tuner_type", "lora"))
    if tuner not in ("full", "lora"):
        names = ("train_type", "sft_type", "tuner_type")
        said = next(name for name in names if recipe.document.data.get(name) is not None)
        raise recipe.document.error((said,), f"{said} {tuner}", "full, lora", kind=NotModeled)
    if recipe.get("tuner_backend") == "swift" and tuner == "lora":
        recipe.reading.not_modeled.append("tuner_backend: LoRA layers of ms-swift's own; peft's are simulated")
    return tuner


def _refuse_named_parameters(recipe: Recipe) -> None:
    """args.json has there what freeze_vit, freeze_aligner and freeze_llm stand for, too (tuner_args.py)."""
    for name in ("freeze_parameters", "trainable_parameters"):
        if "model_meta" not in recipe.document.data:
            recipe.refuse(name, ([], ""), "which parameters train, by names", "freeze_vit, freeze_aligner, freeze_llm")
        elif recipe.get(name) not in _OFF:
            what = f"{name}: {recipe.get(name)}, taken for what freeze_vit, freeze_aligner and freeze_llm stand for"
            recipe.reading.not_modeled.append(what)


def _precision(recipe: Recipe, tuner: str, is_of_2: bool) -> None:
    """model_args.py, _init_mixed_precision: autocast to float16 for all but bfloat16. 2 had none for float32, and
    trained a whole model in float16 as one in float32 (argument.py, select_dtype)."""
    data, document = recipe.document.data, recipe.document
    value = str(recipe.get("torch_dtype", "auto")).removeprefix("torch.")
    dtype = DTYPES.get(value, value)
    if dtype.lower() == "auto":
        dtype = "bfloat16"
        recipe.reading.notes.append("torch_dtype: that of the config.json by default; bfloat16 is taken")
    if dtype not in DTYPES.values():
        raise document.error(("torch_dtype",), f"{value!r} is not known", ", ".join(DTYPES.values()))
    half = {"bfloat16": "bf16", "float32": None if is_of_2 else "fp16"}.get(dtype, "fp16")
    if is_of_2 and tuner == "full" and dtype == "float16":
        dtype = "float32"
        recipe.reading.notes.append("dtype: fp16 is float32 under float16's autocast, where the whole model trains")
    if tuner == "lora" and dtype == "float32":
        accepted = "bfloat16, float16"
        raise document.error(("torch_dtype",), "frozen float32 weights beside adapters", accepted, kind=NotModeled)
    data["torch_dtype"] = dtype
    if half and not any(recipe.flag(name) for name in ("bf16", "fp16")) and data.get(half) is None:
        data[half] = True
        document.places[(half,)] = document.place(("torch_dtype",))


def _lengths(recipe: Recipe, is_of_2: bool) -> None:
    """base_args.py: as long as the model allows by default; 2,048 in 2."""
    data, notes = recipe.document.data, recipe.reading.notes
    if is_of_2 and data.get("max_length") is None:
        data["max_length"] = 2048
        notes.append("max_length: 2048, the default of ms-swift 2")
    if recipe.get("max_length") == -1:
        data["max_length"] = None
    packing = recipe.flag("packing")
    model_length(recipe, ("max_length", "packing_length") if packing else ("max_length",))
    recipe.get("packing_length"), recipe.get("packing_strategy"), recipe.get("padding_free")
    if ("seq_len",) not in recipe.reading.fields:
        recipe.reading.lacks("seq_len", "(max_length is as long as the model allows by default)")
    elif packing:
        notes.append("sequences are packed to max_length")
    else:
        notes.append("every sequence is taken to be max_length long; without packing real ones are shorter")


def _attention(recipe: Recipe) -> None:
    """model/utils.py, AttnImpl."""
    if recipe.get("attn_impl") == "flash_attn":
        recipe.document.data["attn_impl"] = "flash_attention_2"
    attention(recipe, "attn_impl")
    flat = next((name for name in ("packing", "padding_free") if recipe.flag(name)), None)
    if flat and "flash" not in str(recipe.reading.fields.get(("attention",))):
        recipe.reading.notes.append(f"{flat}: ms-swift refuses it today without flash attention (sft_args.py)")


def _adapters(recipe: Recipe, is_of_2: bool) -> None:
    """tuner_args.py; pipelines/train/tuner.py. In 2 the tool chose the modules by model."""
    data, document, reading = recipe.document.data, recipe.document, recipe.reading
    if recipe.get("target_regex"):
        data["target_modules"] = data["target_regex"]
        document.places[("target_modules",)] = document.place(("target_regex",))
    targets = recipe.get("target_modules")
    names = targets if isinstance(targets, list) else [targets]
    if any(name in ("DEFAULT", "AUTO") for name in names):
        data["target_modules"] = targets = None
        is_of_2 = True
    elif any(name in _ALL_LINEAR for name in names) and len(names) == 1:
        data["target_modules"] = "all-linear"
    elif any(name in (*_ALL_LINEAR, *_WHOLE_SETS) for name in names):
        why = "adapters on embeddings, or on other modules beside all linear ones"
        raise document.error(("target_modules",), why, "all-linear, or names of linear modules", kind=NotModeled)
    saved = names_in(document, ("modules_to_save",), recipe.get("modules_to_save"))
    if {"all-norm", "LN"} & set(saved):
        why = "norms that train whole beside adapters"
        raise document.error(("modules_to_save",), why, "names of modules, all-embedding", kind=NotModeled)
    data["modules_to_save"] = [_WHOLE_SETS.get(name, name) for name in saved] or None
    if is_of_2 and targets is None:
        reading.lacks("lora.targets", "(chosen by model in ms-swift 2: q_proj, k_proj and v_proj of Llama and Qwen2)")
    lora(recipe, _LORA, {"r": 8, "alpha": 32, "dropout": 0.05, "targets": None if is_of_2 else "all-linear"})
    refuse_variants(recipe, ("use_dora",))
    recipe.get("use_rslora")
    if recipe.get("lora_dtype") not in (None, "AUTO", "float32", "fp32"):
        reading.not_modeled.append(f"lora_dtype: adapters in {recipe.get('lora_dtype')}; float32 is simulated")
    _quantized(recipe)


def _quantized(recipe: Recipe) -> None:
    """base_args/quant_args.py. `quantization_bit` of 2 stood for bitsandbytes' where no method was named."""
    bits, method = recipe.get("quant_bits"), recipe.get("quant_method")
    recipe.get("bnb_4bit_use_double_quant"), recipe.get("bnb_4bit_quant_type")
    if method is None and recipe.get("quantization_bit") in (4, 8):
        method = "bnb"
    if method not in (None, "bnb"):
        why = f"weights quantized by {method}"
        raise recipe.document.error(("quant_method",), why, "bnb", kind=NotModeled)
    if method is None:
        if bits not in _OFF:
            recipe.reading.notes.append("quant_bits: no effect without quant_method")
        return
    if bits not in (4, 8):
        raise recipe.error(("quant_bits",), f"{bits}-bit weights", "4, 8")
    recipe.reading.not_modeled.append(
        "quant_method: of a vision-language model the tower and its projector stay in 16 bits; here all is quantized"
    )
    if bits == 8:
        in_8_bits(recipe, "quant_bits")
        return
    quantized(recipe, "quant_bits", "bnb_4bit_use_double_quant")
    kind = recipe.get("bnb_4bit_quant_type", "nf4")
    if kind not in ("nf4", "fp4"):
        raise recipe.error(("bnb_4bit_quant_type",), f"{kind!r} is not known", "nf4, fp4")
    recipe.set("quantize.type", kind, "bnb_4bit_quant_type")


def _parts(recipe: Recipe, tuner: str, is_of_2: bool) -> None:
    """Of a vision-language model (tuner_args.py; utils/transformers_utils.py, get_multimodal_target_regex): what is
    frozen, or has no adapters where they are on all linear modules. A frozen tower runs without autograd from
    4.6 on (model/patcher.py, patch_frozen_module)."""
    names = {
        "vision_tower": recipe.flag("freeze_vit", not is_of_2),
        "multi_modal_projector": recipe.flag("freeze_aligner", not is_of_2),
        "language_model": recipe.flag("freeze_llm"),
    }
    frozen = [name for name, is_frozen in names.items() if is_frozen]
    reading = recipe.reading
    if tuner == "full" and frozen:
        reading.vision["model", "freeze"] = frozen
    elif tuner == "lora" and reading.fields.get(("lora", "targets")) == "all-linear":
        reading.vision["lora", "exclude"] = frozen
    checkpointed = recipe.flag("gradient_checkpointing", True)
    if names["vision_tower"] and checkpointed:
        reading.vision["checkpointing", "frozen_tower"] = False
    elif recipe.flag("vit_gradient_checkpointing", checkpointed) != checkpointed:
        reading.not_modeled.append("vit_gradient_checkpointing: a trained tower is checkpointed as the text model is")
    recipe.get("vit_gradient_checkpointing")
    sizes = [name for name in recipe.document.environment if _SIZES.fullmatch(name)]
    for name in [*sizes, *(["max_pixels"] if recipe.get("max_pixels") is not None else [])]:
        reading.notes.append(f"{name}: images.size says how large the images are after that")


def _batch(recipe: Recipe) -> None:
    """trainers/arguments.py: one sequence at a time, of 16 in all over the GPUs."""
    data, reading = recipe.document.data, recipe.reading
    if recipe.count("per_device_train_batch_size") is None:
        data["per_device_train_batch_size"] = 1
        reading.notes.append("per_device_train_batch_size: 1, ms-swift's default")
    data["per_device_eval_batch_size"] = data.get("per_device_eval_batch_size") or 1
    if recipe.count("gradient_accumulation_steps") is None and reading.ranks:
        steps = math.ceil(16 / data["per_device_train_batch_size"] / reading.ranks)
        data["gradient_accumulation_steps"] = steps
        reading.notes.append(f"gradient_accumulation_steps: {steps}, for 16 sequences in all, ms-swift's default")


def _evaluation(recipe: Recipe, is_of_2: bool) -> None:
    """It evaluates when it saves where something is held back (sft_args.py, _init_eval_strategy)."""
    data = recipe.document.data
    ratio = data.get("dataset_test_ratio", 0.01) if is_of_2 else data.get("split_dataset_ratio", 0)
    if not any(data.get(name) not in _OFF for name in _VALIDATION) and ratio in _OFF:
        data["eval_strategy"], data["evaluation_strategy"] = "no", None
    elif all(data.get(name) is None for name in ("eval_strategy", "evaluation_strategy")):
        data["eval_strategy"] = data.get("save_strategy") or "steps"


def _deepspeed(recipe: Recipe) -> None:
    """By name, or a file, or the configuration itself; `zero_hpz_partition_size` goes into it."""
    data, document = recipe.document.data, recipe.document
    value = data.get("deepspeed")
    config = deepspeed_config(value)
    if config is not None:
        since = "" if config["zero_optimization"]["overlap_comm"] else ", with overlap_comm off, as from 3.2.2 on"
        recipe.reading.notes.append(f"deepspeed: {value} is the configuration that ms-swift brings{since}")
        data["deepspeed"] = config
        document.places |= {("deepspeed", section): document.place(("deepspeed",)) for section in config}
    size = recipe.count("zero_hpz_partition_size")
    if size is None:
        return
    if isinstance(value, str) and config is None and (path := document.beside(value, "deepspeed")).is_file():
        data["deepspeed"] = parse_hjson(read_text(path), path).data
    if not isinstance(data.get("deepspeed"), dict):
        raise recipe.error(("zero_hpz_partition_size",), "has no effect without DeepSpeed's configuration", "deepspeed")
    data["deepspeed"].setdefault("zero_optimization", {})["zero_hpz_partition_size"] = size


def _fsdp(recipe: Recipe, is_of_2: bool) -> None:
    """sft_args.py, _init_fsdp: fsdp2, or a file with both `fsdp` and `fsdp_config`. 2 had the Trainer's own, FSDP1."""
    data, document = recipe.document.data, recipe.document
    value: Any = FSDP.get(str(data.get("fsdp")), data.get("fsdp"))
    if isinstance(value, str) and value.endswith(".json"):
        path = document.beside(value, "fsdp_config")
        if path.is_file():
            value = parse_hjson(read_text(path), path).data
        else:
            data["fsdp_config"], data["fsdp"] = value, "full_shard auto_wrap"
    elif is_of_2 and value and data.get("fsdp_config") is None:
        data["fsdp_config"] = {"fsdp_version": 1}
    if isinstance(value, dict):
        data["fsdp"], data["fsdp_config"] = value.get("fsdp", "full_shard auto_wrap"), value.get("fsdp_config", {})
    document.places.setdefault(("fsdp_config",), document.place(("fsdp",)))
    section = data.get("fsdp_config")
    if isinstance(section, dict) and value and section.get("activation_cpu_offload"):
        path_ = ("fsdp_config", "activation_cpu_offload")
        raise document.error(path_, "activations offloaded by ms-swift's own callback", "false", kind=NotModeled)


def _after(recipe: Recipe, task: str, is_of_2: bool) -> None:
    """What depends on how the run shards, and on its loss."""
    reading, data = recipe.reading, recipe.document.data
    fields = reading.fields
    if data.get("gradient_accumulation_steps") is None:
        del fields[("grad_accum",)]
        reading.lacks("grad_accum", "(by default as many micro-steps as make 16 sequences over all GPUs)")
    framework, stage = fields.get(("framework", "name")), fields.get(("zero", "stage"), 3)
    if framework == "ddp" or (framework == "deepspeed" and stage < 3):  # model/utils.py, get_default_device_map
        recipe.set("load", "gpu", "device_map")
    if framework == "ddp" and data["torch_dtype"] == "float16" and ("lora", "modules_to_save") in fields:
        recipe.set("lora.modules_dtype", "float32", "torch_dtype")  # pipelines/train/tuner.py, prepare_model
    if (reading.ranks or 1) > 1 and not recipe.document.launch:
        recipe.threads("torchrun")
    scales = set(re.split(r"[+,\s]+", str(recipe.get("loss_scale", "default"))))
    weighed = [name for name in ("enable_dft_loss", "enable_channel_loss") if recipe.flag(name)]
    weighed += [] if scales <= _BINARY else ["loss_scale"]
    weighed += ["loss_type"] if recipe.get("loss_type") else []
    if weighed and fields.pop(("loss",), None):
        reading.notes.append(f"{weighed[0]}: Liger's loss is not used with it (trainers/seq2seq_trainer.py)")
    elif weighed == ["loss_scale"]:
        reading.not_modeled.append("loss_scale: weights of tokens, which the loss multiplies")
    for name, what in LISTED.items():
        if recipe.says(name) and data[name] not in _OFF:
            reading.not_modeled.append(f"{name}: {what}")
    if recipe.get("use_logits_to_keep") not in (False, "false") and task != "pt" and not is_of_2:
        text = "use_logits_to_keep: from 3.5 on logits of the tokens that are trained on; here of all of them"
        reading.not_modeled.append(text)
