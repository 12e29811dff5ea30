"""Reads arguments of the Hugging Face Trainer (transformers 5.24 TrainingArguments) and of tools built on it."""

from __future__ import annotations

from typing import Any

from zsim.document import Document, read_text
from zsim.errors import NotModeled
from zsim.plan import evaluation, preference
from zsim.plan.fsdp_args import read_fsdp
from zsim.plan.hjson import parse_hjson
from zsim.plan.own_options import OWN, own_switches, refuse_own, refuse_tasks
from zsim.plan.reading import FSDP, LOADED_IN, NOT_SHARDED, Reading
from zsim.plan.recipe import ULYSSES, Recipe, as_flag, hub_attention
from zsim.plan.trainer_keys import HARMLESS, LISTED, OF_RELEASE_4, OTHER_TRAINERS, REFUSED
from zsim.plan.trl import LENGTHS, fill_in, is_newer_trl

KIND = "Hugging Face Trainer arguments"
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash3", "flash_attention_4": "flash4", "sdpa": "sdpa",
    "eager": "eager", "fa2": "flash", "fa3": "flash3", "auto": "sdpa", "disabled": "eager",
}  # fmt: skip
_READ_HERE = ("tune_mm_mlp_adapter", "freeze_backbone", "load_in_4bit", "load_in_8bit")
_LORA = {
    "r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
    "save": "lora_modules_to_save", "parameters": "lora_target_parameters",
}  # fmt: skip
_OF_ADAPTERS = ("use_dora", "use_rslora", "lora_task_type", "bnb_4bit_quant_type", "use_bnb_nested_quant")
_PEFT = ("use_peft", "use_lora", "lora_r", "lora_target_modules")


def read_trainer(document: Document, ranks: int | None = None, kind: str = KIND) -> Reading:
    """The plan and workload in Trainer arguments. Raises InputError, NotModeled."""
    reading = Reading(kind, document, ranks=ranks)
    recipe = Recipe(reading)
    kind_of_pairs = preference.kind_in(recipe)
    for name, why in preference.others(OTHER_TRAINERS, kind_of_pairs).items():
        recipe.refuse(name, (False,), why, "training of one model, or by preference with trl's DPO, CPO or ORPO")
    refuse_tasks(recipe, kind_of_pairs)
    if own := recipe.get("accelerate_config"):  # of trl's commands: a name of theirs, or a file
        why = f"{own} names accelerate's configuration, whose file is not read through it"
        raise document.error(("accelerate_config",), why, "accelerate launch --config_file FILE ... in its place")
    _model_arguments(recipe)
    _llava(recipe)
    refuse_own(recipe, _READ_HERE + (_PEFT if recipe.flag("use_peft") else ()))
    recipe.refuse("bits", (16, 32), f"weights in few bits, {OWN}")
    own_switches(recipe)
    if is_newer_trl(recipe):
        fill_in(recipe)
    model_length(recipe, LENGTHS)
    attention(recipe, "attn_implementation")
    checkpointing(recipe, default=False)
    if recipe.flag("use_peft"):
        _peft(recipe)
    else:
        without = (*_LORA.values(), *_OF_ADAPTERS) if recipe.get("use_peft") is not None else ()
        for name in without:  # switched off: they have no effect
            recipe.get(name)
        recipe.refuse("load_in_4bit", (False,), "4-bit weights without adapters")
        recipe.refuse("load_in_8bit", (False,), "8-bit weights without adapters")
    for name in (
        "sequence_parallel_size",
        "ulysses_sequence_parallel_size",
        "context_parallel_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ):
        recipe.refuse(name, (1,), f"{name}, {OWN}", ULYSSES)
    recipe.refuse("parallelism_config", (), "an object of Python, which no file holds", "an accelerate configuration")
    training(recipe)
    if kind_of_pairs is not None:
        preference.of_trl(recipe, kind_of_pairs)
    recipe.get("model_name_or_path")
    name_model(recipe, "model_name_or_path")
    recipe.rest(HARMLESS)
    return reading


def _model_arguments(recipe: Recipe) -> None:
    """trl's `model_init_kwargs`, as if its arguments stood at the top."""
    given = recipe.get("model_init_kwargs") or {}
    if not isinstance(given, dict):
        raise recipe.error(("model_init_kwargs",), f"{given!r} is not a section", "a mapping of arguments")
    document = recipe.document
    for name in ("attn_implementation", "torch_dtype", "dtype"):
        if name in given and document.data.get(name) is None:
            document.data[name] = given[name]
            document.places[name,] = document.place(("model_init_kwargs", name))
    others = [name for name in given if name not in ("attn_implementation", "torch_dtype", "dtype", *HARMLESS)]
    if others:
        recipe.reading.not_modeled.append(f"model_init_kwargs: {', '.join(map(str, others))}, of which nothing is read")


def _llava(recipe: Recipe) -> None:
    """LLaVA 1.5's train.py: the tower is frozen and runs without autograd; `tune_mm_mlp_adapter` trains the projector
    alone, `freeze_backbone` all but the text model without its head."""
    if not recipe.get("vision_tower"):
        for name in ("tune_mm_mlp_adapter", "freeze_backbone"):
            recipe.refuse(name, (False,), f"which parameters train, {OWN}")
        return
    frozen = ["vision_tower"]
    if recipe.flag("tune_mm_mlp_adapter"):
        frozen.append("language_model")
    elif recipe.flag("freeze_backbone"):
        frozen.append("model.language_model.*")
    recipe.reading.vision |= {("model", "freeze"): frozen, ("checkpointing", "frozen_tower"): False}
    recipe.reading.not_modeled.append(
        "vision_tower: the tower and its projector, unless the config.json is that of the whole model (llava)"
    )


def _peft(recipe: Recipe) -> None:
    """trl's ModelConfig: rank 16, alpha 32, dropout 0.05."""
    from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants

    lora(recipe, _LORA, {"r": 16, "alpha": 32, "dropout": 0.05})
    refuse_variants(recipe, ("use_dora",))
    recipe.get("use_rslora")
    if recipe.flag("load_in_4bit"):
        quantized(recipe, "load_in_4bit", "use_bnb_nested_quant")
    if recipe.flag("load_in_8bit"):
        in_8_bits(recipe, "load_in_8bit")


def saving(recipe: Recipe, names: tuple[str, ...] = ("save_strategy", "save_steps", "save_total_limit")) -> None:
    """How checkpoints are written, of a recipe that says so: the Trainer would write them where nothing does."""
    said = next(iter([name for name in names if recipe.says(name)]), None)
    without = recipe.flag("save_only_model")
    resumes = recipe.get("resume_from_checkpoint")
    never = str(recipe.get("save_strategy", "")).lower() in ("no", "false")
    resumes = bool(resumes) and str(resumes).lower() not in ("false", "no", "none")
    if never and resumes:
        recipe.set("saving.by", "none", "save_strategy")
    if said and not never:
        recipe.set("saving.by", "trainer", said)
        if without:
            recipe.set("saving.only_model", True, "save_only_model")
    if resumes:
        recipe.set("saving.resume", True, "resume_from_checkpoint")


def training(recipe: Recipe) -> None:
    """What every tool built on the Trainer passes through: batch, precision, optimizer, and how it shards."""
    reading = recipe.reading
    micro_batch = recipe.count("per_device_train_batch_size")
    recipe.set("micro_batch", micro_batch or 8, "per_device_train_batch_size")
    if micro_batch is None:
        reading.notes.append("per_device_train_batch_size: 8, the Trainer's default")
    recipe.set("grad_accum", recipe.count("gradient_accumulation_steps") or 1, "gradient_accumulation_steps")
    recipe.set("grad_clip", recipe.get("max_grad_norm", 1.0), "max_grad_norm")
    recipe.precision(recipe.flag("bf16"), recipe.flag("fp16"))
    adafactor = recipe.get("optim") is None and recipe.flag("adafactor")  # of transformers 4
    recipe.optimizer("optim", "adafactor" if adafactor else "adamw_torch_fused")
    saving(recipe)
    evaluation.of_trainer(recipe)
    compiled = [name for name in ("torch_compile_backend", "torch_compile_mode") if recipe.get(name)]
    if recipe.flag("torch_compile", bool(compiled)) or compiled:  # training_args.py: either switches it on
        recipe.set("compile", True, compiled[0] if compiled else "torch_compile")
    if recipe.flag("auto_find_batch_size"):
        reading.not_modeled.append("auto_find_batch_size: a smaller batch after running out of memory")
    liger(recipe)
    for name, what in LISTED.items():
        if recipe.get(name) not in (None, False, 0, "", {}, "none"):
            reading.not_modeled.append(f"{name}: {what}")
    for name, (harmless, why) in REFUSED.items():
        recipe.refuse(name, harmless, why)
    _accelerator(recipe)
    shard(recipe)
    if recipe.document.launch:
        from zsim.plan.launch import read_launch

        read_launch(recipe, recipe.document.launch)
    _loaded_dtype(recipe)
    for field in ("model", "cluster", "seq_len"):
        reading.lacks(field)


def liger(recipe: Recipe) -> None:
    """transformers 5.24 integrations/liger.py: the fused loss, norm and SwiGLU are on unless liger_kernel_config says
    otherwise."""
    name = next((name for name in ("use_liger_kernel", "use_liger") if recipe.flag(name)), None)  # use_liger: older trl
    given = recipe.get("liger_kernel_config") or {}
    if name is None:
        return
    off = [kernel for kernel in ("rms_norm", "swiglu") if given.get(kernel) is False]
    if given.get("fused_linear_cross_entropy", True):
        recipe.set("loss", "fused", name)
    if not off:
        recipe.set("kernels", "liger", name)
    elif len(off) == 1:
        recipe.reading.not_modeled.append(f"liger_kernel_config: {off[0]} alone is off; neither kernel is simulated")


def _accelerator(recipe: Recipe) -> None:
    """trainer_pt_utils.py, AcceleratorConfig."""
    given = recipe.get("accelerator_config")
    if not isinstance(given, dict):
        return
    if given.get("split_batches"):
        path = ("accelerator_config", "split_batches")
        raise recipe.document.error(path, "a batch that the processes share", "false", kind=NotModeled)
    accumulation = given.get("gradient_accumulation_kwargs") or {}
    if accumulation.get("sync_each_batch"):
        path = ("accelerator_config", "gradient_accumulation_kwargs")
        raise recipe.document.error(path, "gradients reduced in every micro-step", "false", kind=NotModeled)


def shard(recipe: Recipe) -> None:
    """DeepSpeed, FSDP or plain DDP."""
    reading, document = recipe.reading, recipe.document
    options = recipe.get("fsdp")
    config, least = recipe.get("fsdp_config") or {}, recipe.get("fsdp_min_num_params")
    for name in _DDP:
        recipe.get(name)
    if recipe.deepspeed("deepspeed"):
        if options:
            raise recipe.error(("fsdp",), "deepspeed and fsdp cannot both be used", "one of them")
        return
    if not options or as_switch(options) is False:
        recipe.set("framework.name", "ddp", "framework")
        reading.notes.append(NOT_SHARDED)
        values = list(config.values()) if isinstance(config, dict) else [config]
        if any(value not in (None, False, 0, "", [], {}) for value in values):  # training_args.py, _process_fsdp_args
            reading.notes.append("fsdp_config has no effect without fsdp")
        ddp(recipe)
        return
    if isinstance(config, str):
        path = document.beside(config, "fsdp_config")
        if not path.is_file():
            recipe.set("framework.name", "fsdp2", "fsdp")
            reading.lacks("fsdp_config", f"(names {config}, which is not there)")
            return
        config = parse_hjson(read_text(path, "FSDP configuration"), path).data
    if not isinstance(config, dict):
        raise recipe.error(("fsdp_config",), f"{config!r} is not a section", "a mapping of options")
    old = next((name for name in OF_RELEASE_4 if document.data.get(name) is not None), None)
    of_4 = old is not None and reading.kind == KIND  # LLaMA-Factory has arguments of its own by these names
    merged = legacy_options(recipe, options) | config
    if of_4 and "auto_wrap" in str(options):  # training_args.py of 4.57, _process_fsdp_args
        least = least or merged.get("min_num_params") or merged.get("fsdp_min_num_params")
        merged |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": least} if least else {}
        if wrapped := recipe.get("fsdp_transformer_layer_cls_to_wrap"):
            document.places[("fsdp_config", _CLASSES)] = document.place(("fsdp_transformer_layer_cls_to_wrap",))
            merged.setdefault(_CLASSES, wrapped)
    elif of_4:  # which sets no policy then
        merged = {"auto_wrap_policy": "NO_WRAP"} | merged
    read_fsdp(reading, merged, ("fsdp_config",), default_version=1 if of_4 else 2)
    if of_4 and "version" not in merged and "fsdp_version" not in merged:
        reading.notes.append(f"{old} is an argument of transformers 4, whose fsdp is FSDP1")
    if ("saving", "by") in reading.fields:  # training_args.py, _process_fsdp_args, whatever accelerate's default
        reading.fields.setdefault(("fsdp", "state_dict_type"), "FULL_STATE_DICT")


_CLASSES = "transformer_layer_cls_to_wrap"
_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph", "ddp_broadcast_buffers")


def ddp(recipe: Recipe, adapters: bool = False) -> None:
    """DistributedDataParallel as the Trainer makes it (trainer.py, 5.24): it looks for parameters without gradients
    unless the model is checkpointed, and always around peft's adapters."""
    data, fields = recipe.document.data, recipe.reading.fields
    adapters = adapters or any(path[0] == "lora" for path in fields)
    checkpointed = fields.get(("checkpointing",)) == "full" or ("checkpointing", "offload") in fields
    if data.get("ddp_find_unused_parameters") is not None or adapters or not checkpointed:
        found = recipe.flag("ddp_find_unused_parameters", adapters or not checkpointed)
        recipe.set("ddp.find_unused_parameters", found, "ddp_find_unused_parameters")
    if recipe.get("ddp_bucket_cap_mb") is not None:
        recipe.set("ddp.bucket_cap_mb", recipe.get("ddp_bucket_cap_mb"), "ddp_bucket_cap_mb")
    if recipe.flag("ddp_static_graph"):
        recipe.set("ddp.static_graph", True, "ddp_static_graph")


def _loaded_dtype(recipe: Recipe) -> None:
    """trl's and the examples' `dtype` (torch_dtype until transformers 4.56), in which DDP trains the whole model, and
    FSDP does without mixed precision: under it accelerate widens FSDP's shards to float32, DeepSpeed has master
    weights, and under adapters the type is that of the run anyway."""
    fields, notes = recipe.reading.fields, recipe.reading.notes
    if "architectures" in recipe.document.data:  # W&B's config.yaml, where it is the checkpoint's
        return
    name = "dtype" if recipe.get("dtype") is not None else "torch_dtype"
    dtype = str(recipe.get(name, "float32")).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if any(path[0] == "lora" for path in fields) or (short is None and dtype != "auto"):
        return
    framework, precision = fields.get(("framework", "name")), fields.get(("precision",))
    if framework is None or precision is None:
        return
    sharded = framework in FSDP
    if framework != "ddp" and not (sharded and precision == "fp32" and short == "bf16"):
        if precision == "fp32":
            notes.append(f"{name}: {dtype} without mixed precision; float32 is taken")
    elif short is None:
        notes.append(f"{name}: auto is the checkpoint's; float32 is taken, or what ddp.dtype says")
    elif short == precision == "fp16":
        why = "float16 weights, whose gradients torch's GradScaler refuses (Attempting to unscale FP16 gradients)"
        raise recipe.error((name,), why, "float32, or bfloat16 with bf16")
    else:
        recipe.set("fsdp.storage_dtype" if sharded else "ddp.dtype", dtype, name)
        notes.append(LOADED_IN.format(dtype))
        if precision == "fp32":
            recipe.set("precision", short, name)
            recipe.reading.loaded = dtype


def as_switch(options: Any) -> bool | None:
    """`fsdp: "false"` and the like; None for anything that is no switch."""
    return {"true": True, "false": False}.get(str(options).lower())


def legacy_options(recipe: Recipe, options: Any) -> dict[str, Any]:
    """`fsdp: "full_shard auto_wrap offload"` as the options of fsdp_config."""
    if isinstance(options, bool) or options is None:
        return {}
    if not isinstance(options, str | list):
        raise recipe.error(("fsdp",), f"{options!r} is not a list of options", "full_shard auto_wrap")
    words = options.split() if isinstance(options, str) else [str(word) for word in options]
    section: dict[str, Any] = {}
    for word in words:
        if word.lower() in _STRATEGIES:
            section["sharding_strategy"] = word.upper()
        elif word.lower() == "offload":
            section["cpu_offload"] = True
        elif word.lower() not in ("auto_wrap", "true", "1", ""):
            raise recipe.error(
                ("fsdp",), f"{word!r} is not an option", ", ".join((*_STRATEGIES, "offload", "auto_wrap"))
            )
    return section


def checkpointing(recipe: Recipe, default: bool) -> None:
    value = recipe.get("gradient_checkpointing", recipe.get("activation_checkpointing", default))
    recipe.get("activation_checkpointing")
    name = "gradient_checkpointing" if "gradient_checkpointing" in recipe.document.data else "activation_checkpointing"
    # axolotl (utils/schemas/config.py): `offload` stands for activation_offloading: true, `unsloth` for its `legacy`
    offload = recipe.get("activation_offloading", {"offload": True, "unsloth": "legacy"}.get(str(value).lower(), False))
    for said, its, accepted in (
        ("activation_offloading", offload, "true, false, legacy"),
        (name, value, "true, false, offload, unsloth"),
    ):
        if "disk" in str(its).lower():
            raise recipe.document.error((said,), "activations offloaded to disk", accepted, kind=NotModeled)
    legacy = str(offload).lower() == "legacy"
    offloads = legacy or as_flag(
        offload, lambda text: recipe.error(("activation_offloading",), text, "true, false, legacy")
    )
    on = str(value).lower() in ("offload", "unsloth") or as_flag(
        value, lambda text: recipe.error((name,), text, "true or false")
    )
    if offloads and not on:
        why = "offload of every saved tensor; of those that several operations save, versions keep some and not others"
        raise recipe.document.error(("activation_offloading",), why, "gradient_checkpointing: true", kind=NotModeled)
    if offloads:
        given = name if recipe.document.data.get("activation_offloading") is None else "activation_offloading"
        recipe.set("checkpointing.offload", True if legacy else "stream", given)
    else:
        recipe.set("checkpointing", "full" if on else "none", name)
        if not on:  # FSDP has an option of its own beside the Trainer's
            recipe.reading.defaults.add(("checkpointing",))


def attention(recipe: Recipe, name: str) -> None:
    value = recipe.get(name)
    if value is None:
        return
    kind = ATTENTION.get(str(value)) or hub_attention(str(value))
    if kind is None:
        raise recipe.document.error((name,), f"attention {value}", ", ".join(ATTENTION), kind=NotModeled)
    recipe.set("attention", kind, name)


def model_length(recipe: Recipe, names: tuple[str, ...]) -> None:
    for name in names:
        length = recipe.count(name)
        if length:
            recipe.set("seq_len", length, name)


def name_model(recipe: Recipe, name: str) -> None:
    value = recipe.get(name)
    recipe.reading.model_name = str(value or "")
    recipe.reading.lacks("model", f"(the config.json of {value})" if value else "")
