"""Reads an axolotl training recipe (YAML)."""

from __future__ import annotations

from zsim.document import Document, subsection
from zsim.errors import NotModeled
from zsim.plan import evaluation, preference
from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants
from zsim.plan.axolotl_keys import (
    HARMLESS,
    LISTED,
    LISTED_PLUGINS,
    OTHER_ADAPTERS,
    OTHER_TRAINING,
    OTHERS_OWN,
    QUIET,
    REFUSED,
)
from zsim.plan.float8 import switch_on
from zsim.plan.fsdp_args import read_fsdp
from zsim.plan.reading import LOADED_IN, NOT_SHARDED, Reading
from zsim.plan.recipe import ULYSSES, Recipe
from zsim.plan.trainer import ATTENTION, attention, checkpointing, legacy_options, name_model, saving
from zsim.plan.values import names_in

_LORA = {
    "r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
    "save": "lora_modules_to_save", "parameters": "lora_target_parameters",
}  # fmt: skip
# utils/schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL: the first one counts.
_ATTENTION_FLAGS = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip


def read_axolotl(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in an axolotl recipe. Raises InputError, NotModeled."""
    reading = Reading("axolotl recipe", document, ranks=ranks)
    recipe = Recipe(reading)
    plugins = _plugins(recipe)
    for name, why in REFUSED.items():
        recipe.refuse(name, (False, "", 1, [], {}), why)
    pairs = _preference(recipe)
    recipe.refuse("lisa_n_layers", (), "LISA, which trains other layers in turn")
    for name in ("context_parallel_size", "sequence_parallel_degree"):  # monkeypatch/ring_attn
        recipe.refuse(name, (False, "", 1), "context parallelism by ring-flash-attn", ULYSSES)
    length = recipe.count("sequence_len") or 512  # axolotl's default
    recipe.set("seq_len", length, "sequence_len")
    if recipe.flag("sample_packing"):
        if pairs:  # utils/schemas/validation.py, check_sample_packing_w_rl
            raise recipe.error(("sample_packing",), "axolotl refuses it with rl", "false, or no rl")
        reading.notes.append("sequences are packed to sequence_len")
    else:
        reading.notes.append("every sequence is taken to be sequence_len long; without packing real ones are shorter")
    recipe.set("micro_batch", recipe.count("micro_batch_size") or 1, "micro_batch_size")
    _accumulation(recipe)
    recipe.set("grad_clip", recipe.get("max_grad_norm", 1.0), "max_grad_norm")
    for name, what in LISTED.items():
        if recipe.get(name) not in (None, False, "", 0, {}, [], "false"):
            reading.not_modeled.append(f"{name}: {what}")
    _precision(recipe)
    recipe.optimizer("optimizer", "adamw_torch_fused")
    saving(recipe, ("save_strategy", "save_steps", "saves_per_epoch", "save_total_limit"))
    evaluation.of_axolotl(recipe)
    checkpointing(recipe, default=False)
    _attention(recipe)
    if recipe.flag("torch_compile") if recipe.get("torch_compile") != "auto" else False:
        recipe.set("compile", True, "torch_compile")
    _kernels(recipe, plugins)
    _adapters(recipe)
    _shard(recipe)
    gathers = recipe.flag("fp8_enable_fsdp_float8_all_gather")
    if recipe.flag("fp8"):
        switch_on(reading, ("fp8",), gathers)
    recipe.threads("accelerate launch")
    recipe.allocator("expandable_segments:True", "axolotl")  # utils/__init__.py; with torch 2.9 and later, no more
    if pairs is not None:
        preference.of_trl(recipe, pairs, "rl")
        if recipe.flag("rl_adapter_ref_model") and pairs == "dpo":
            recipe.set("objective.reference", "model", "rl_adapter_ref_model")
    name_model(recipe, "base_model")
    reading.lacks("cluster")
    _bits(recipe)
    recipe.rest((*HARMLESS, *(name for name in document.data if str(name).startswith(OTHERS_OWN))))
    return reading


def _preference(recipe: Recipe) -> str | None:
    """utils/schemas/enums.py, RLType: those of trl's DPOTrainer, ORPOTrainer and CPOTrainer. Raises NotModeled."""
    kinds = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo"}
    said = str(recipe.get("rl") or "")
    if said in ("", "1"):
        return None
    if said not in kinds:
        why = f"rl {said}: {preference.MORE_MODELS}"
        raise recipe.document.error(("rl",), why, ", ".join(kinds), kind=NotModeled)
    return kinds[said]


def _plugins(recipe: Recipe) -> set[str]:
    """Folders in axolotl.integrations of the plugins that the recipe names. Raises InputError, NotModeled for another
    training."""
    found = set()
    for plugin in names_in(recipe.document, ("plugins",), recipe.get("plugins")):
        parts = plugin.split(".")
        folder = parts[2] if parts[:2] == ["axolotl", "integrations"] and len(parts) > 2 else ""
        found.add(folder)
        if folder in OTHER_TRAINING:
            why, key, default = OTHER_TRAINING[folder]
            if key is None or bool(recipe.get(key, default)):
                raise recipe.document.error(("plugins",), why, "the recipe without that plugin", kind=NotModeled)
        elif folder in LISTED_PLUGINS:
            recipe.reading.not_modeled.append(f"{plugin}: {LISTED_PLUGINS[folder]}")
        elif folder not in QUIET:
            recipe.reading.not_modeled.append(f"{plugin}: a plugin that is not known here")
    return found


def _kernels(recipe: Recipe, plugins: set[str]) -> None:
    """Fused losses and Liger's kernels, which the plugins bring: cut_cross_entropy is on wherever its plugin is, and
    without the plugin no such key has an effect."""
    reading = recipe.reading
    names = [str(name) for name in recipe.document.data if str(name).startswith("liger_")]
    liger = [name for name in names if recipe.flag(name)]
    cut = recipe.flag("cut_cross_entropy", "cut_cross_entropy" in plugins)
    for plugin, switched_on in (("liger", liger), ("cut_cross_entropy", ["cut_cross_entropy"] if cut else [])):
        if switched_on and plugin not in plugins:
            names_of = ", ".join(switched_on)
            reading.notes.append(f"{names_of}: no effect, as plugins does not name axolotl.integrations.{plugin}")
    liger, cut = liger if "liger" in plugins else [], cut and "cut_cross_entropy" in plugins
    if cut or "liger_fused_linear_cross_entropy" in liger:
        recipe.set("loss", "fused", "cut_cross_entropy" if cut else "liger_fused_linear_cross_entropy")
        if not cut:
            evaluation.with_all_logits(recipe)
        if cut and recipe.document.data.get("cut_cross_entropy") is None:
            reading.places["loss",] = recipe.document.place(("plugins",))
            reading.notes.append("cut_cross_entropy: true, as its plugin is named")
    others = [name for name in liger if name not in ("liger_fused_linear_cross_entropy", "liger_use_token_scaling")]
    both = [name for name in others if name in ("liger_rms_norm", "liger_glu_activation", "liger_swiglu")]
    if "liger_rms_norm" in both and len(both) > 1:
        recipe.set("kernels", "liger", "liger_rms_norm")
        others = [name for name in others if name not in (*both, "liger_rope")]  # rotates in place, saves the same
    if others:
        reading.not_modeled.append(f"{', '.join(others)}: fused kernels other than the loss")


def _bits(recipe: Recipe) -> None:
    """Overrides of bitsandbytes' and other quantized checkpoints' configuration (loaders/model.py)."""
    options = subsection(recipe.document, recipe.document.data, (), "bnb_config_kwargs")
    recipe.get("bnb_config_kwargs")
    if ("quantize", "type") in recipe.reading.fields:
        for name, value in options.items():
            if name == "bnb_4bit_use_double_quant":
                recipe.reading.set(("quantize", "double_quant"), value, ("bnb_config_kwargs", name))
            elif name == "bnb_4bit_quant_type" and value in ("nf4", "fp4"):
                recipe.reading.set(("quantize", "type"), value, ("bnb_config_kwargs", name))
            else:
                recipe.reading.not_modeled.append(f"bnb_config_kwargs.{name}: which weights are quantized, or how")
    kind = recipe.get("model_quantization_config")
    ways = subsection(recipe.document, recipe.document.data, (), "model_quantization_config_kwargs")
    recipe.get("model_quantization_config_kwargs")
    if kind and ways.get("dequantize") is not True:
        why = f"{kind}: weights that stay in few bits"
        accepted = "model_quantization_config_kwargs: {dequantize: true}"
        raise recipe.document.error(("model_quantization_config",), why, accepted, kind=NotModeled)
    if recipe.get("peft_autocast_adapter_dtype") is False:
        recipe.reading.not_modeled.append("peft_autocast_adapter_dtype: false keeps adapters in the type of the model")


def _adapters(recipe: Recipe) -> None:
    adapter, in_4bit = str(recipe.get("adapter", "")), recipe.flag("load_in_4bit")
    if adapter not in ("", "lora", "qlora"):
        raise recipe.document.error(("adapter",), f"adapter {adapter}", "lora, qlora", kind=NotModeled)
    if not adapter:
        recipe.refuse("load_in_4bit", (False,), "4-bit weights without adapters")
        recipe.refuse("load_in_8bit", (False, ""), "8-bit weights without adapters")
        recipe.refuse("quantize_moe_experts", (False,), "quantized experts without adapters")
        for name in _LORA.values():
            recipe.get(name)
        return
    if adapter == "qlora" and not in_4bit and recipe.get("load_in_4bit") is not None:
        raise recipe.error(("load_in_4bit",), "qlora needs 4-bit weights", "true")
    lora(recipe, _LORA, {"r": 8, "alpha": 16, "targets": "all-linear" if recipe.flag("lora_target_linear") else None})
    if recipe.flag("lora_target_linear"):  # loaders/adapter.py: beside what lora_target_modules names
        recipe.set("lora.targets", "all-linear", "lora_target_linear")
    if recipe.flag("peft_ensure_weight_tying"):
        recipe.set("lora.ensure_weight_tying", True, "peft_ensure_weight_tying")
    refuse_variants(recipe, OTHER_ADAPTERS)
    recipe.get("peft_use_rslora")  # another scale
    in_8bit = recipe.flag("load_in_8bit")
    if in_4bit or adapter == "qlora":
        quantized(recipe, "load_in_4bit")
    elif in_8bit:
        in_8_bits(recipe, "load_in_8bit")
    if recipe.flag("quantize_moe_experts"):
        if ("quantize", "type") not in recipe.reading.fields:
            why = "experts in few bits beside weights in 16"
            raise recipe.error(("quantize_moe_experts",), why, "load_in_4bit: true")
        recipe.set("quantize.experts", True, "quantize_moe_experts")


def _accumulation(recipe: Recipe) -> None:
    """utils/config, normalize_config: batch_size, of one GPU, stands for the steps that it takes."""
    steps, whole = recipe.count("gradient_accumulation_steps"), recipe.count("batch_size")
    name = "gradient_accumulation_steps" if steps or not whole else "batch_size"
    if not steps and whole:
        steps = whole // (recipe.count("micro_batch_size") or 1)
        if not steps:
            raise recipe.error(("batch_size",), f"{whole} is less than micro_batch_size", "a multiple of it")
    recipe.set("grad_accum", steps or 1, name)


def _precision(recipe: Recipe) -> None:
    """bf16 is auto by default; null is off."""
    on = any(recipe.flag(name) for name in ("bfloat16", "fp16", "float16"))
    if recipe.document.data.get("bf16", "auto") == "full":
        recipe.get("bf16")
        recipe.set("precision", "bf16", "bf16")
    elif recipe.document.data.get("bf16", "auto") == "auto" and not on:
        recipe.set("precision", "bf16", "bf16")
        recipe.reading.notes.append("bf16: auto is bf16 where the GPU has it")
        recipe.get("bf16")
    else:
        bf16 = recipe.get("bf16") != "auto" and recipe.flag("bf16")
        recipe.precision(bf16 or recipe.flag("bfloat16"), recipe.flag("fp16") or recipe.flag("float16"))


def _attention(recipe: Recipe) -> None:
    on = [name for name in _ATTENTION_FLAGS if recipe.document.data.get(name) != "" and recipe.flag(name)]
    name = "attn_implementation" if recipe.get("attn_implementation") is not None or not on else on[0]
    if name in _ATTENTION_FLAGS:
        if _ATTENTION_FLAGS[name] not in ATTENTION:
            others = ", ".join(flag for flag, kind in _ATTENTION_FLAGS.items() if kind in ATTENTION)
            why = f"attention {_ATTENTION_FLAGS[name]}"
            raise recipe.document.error((name,), why, others, kind=NotModeled)
        recipe.document.data["attn_implementation"] = _ATTENTION_FLAGS[name]
        recipe.document.places["attn_implementation",] = recipe.document.place((name,))
    attention(recipe, "attn_implementation")


def _own_fsdp2(recipe: Recipe) -> None:
    """monkeypatch/accelerate/fsdp2.py takes the place of accelerate's fsdp2_prepare_model: what is no block and no
    adapter is the root's, and nothing is widened to float32."""
    reading = recipe.reading
    reading.fields[("fsdp", "grouping")] = "hf"
    if recipe.get("adapter"):
        reading.fields[("fsdp", "adapter_units")] = True
    if ("lora", "modules_to_save") in reading.fields:
        reading.not_modeled.append(
            "lora_modules_to_save: axolotl's FSDP2 leaves the copies to the root's unit, and in the model's type"
        )
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(reading.fields[("precision",)])
    if dtype and not recipe.get("adapter"):
        reading.fields[("fsdp", "storage_dtype")] = dtype
        reading.notes.append(LOADED_IN.format(dtype))


def _shard(recipe: Recipe) -> None:
    reading, document = recipe.reading, recipe.document
    options, replicate, shard = recipe.get("fsdp"), recipe.count("dp_replicate_size"), recipe.count("dp_shard_size")
    recipe.get("fsdp_config")
    config = subsection(document, document.data, (), "fsdp_config")
    version = recipe.count("fsdp_version")
    if recipe.deepspeed("deepspeed"):
        if options or config:
            raise recipe.error(("fsdp_config",), "deepspeed and fsdp cannot both be used", "one of them")
    elif options or config or version:
        legacy = legacy_options(recipe, options)
        if version:
            legacy["version"] = version
        read_fsdp(reading, legacy | config, ("fsdp_config",), default_version=1)
        if replicate and replicate > 1 and shard:
            recipe.set("fsdp.mesh", [replicate, shard], "dp_replicate_size")
        if reading.fields[("framework", "name")] == "fsdp2":
            _own_fsdp2(recipe)
        elif document.data.get("bf16") == "full" and not recipe.get("adapter"):  # accelerate widens nothing
            recipe.set("fsdp.storage_dtype", "bfloat16", "bf16")
            reading.notes.append(LOADED_IN.format("bfloat16"))
    else:
        recipe.set("framework.name", "ddp", "framework")
        reading.notes.append(NOT_SHARDED)
        found = recipe.flag("ddp_find_unused_parameters")  # core/builders/causal.py: off unless said
        recipe.set("ddp.find_unused_parameters", found, "ddp_find_unused_parameters")
        if reading.fields[("precision",)] == "bf16" and not recipe.get("adapter"):
            reading.fields[("ddp", "dtype")] = "bfloat16"
            reading.notes.append(LOADED_IN.format("bf16"))
