"""Reads a LLaMA-Factory training recipe (YAML): Trainer arguments with its own names for model and data."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.plan.adapters import in_8_bits, lora, quantized, refuse_variants
from zsim.plan.document import Document
from zsim.plan.reading import Reading
from zsim.plan.recipe import ULYSSES, Recipe
from zsim.plan.trainer import HARMLESS, attention, model_length, name_model, training


def read_llama_factory(document: Document, ranks: int | None = None) -> Reading:
    """The plan and workload in a LLaMA-Factory recipe. Raises InputError, NotModeled."""
    reading = Reading("LLaMA-Factory recipe", document, ranks=ranks)
    recipe = Recipe(reading)
    method = str(recipe.get("finetuning_type", "lora"))  # hparams/finetuning_args.py: lora is the default
    if method not in ("full", "lora"):
        raise document.error(("finetuning_type",), f"finetuning_type {method}", "full, lora", kind=NotModeled)
    stage = str(recipe.get("stage", "sft"))
    if stage not in ("pt", "sft"):
        raise document.error(("stage",), f"stage {stage}, which runs more than one model", "pt, sft", kind=NotModeled)
    for name in ("do_eval", "do_predict"):
        if recipe.flag(name) and not recipe.flag("do_train"):
            raise document.error((name,), "without do_train: a run that does not train", "do_train: true")
    if method == "lora":
        _lora(recipe)
    else:
        recipe.refuse("quantization_bit", (), "quantized weights without adapters")
    for name in (
        "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_unsloth", "use_llama_pro", "use_muon",
        "mixture_of_depths", "fp8", "use_asft_loss",
    ):  # fmt: skip
        recipe.refuse(name, (False,), name.removeprefix("use_"))
    for name in ("use_distributed_optimizer", "overlap_param_gather", "recompute_granularity"):
        recipe.refuse(name, (), "training by Megatron, whose optimizer shards otherwise")
    for name in ("use_dft_loss", "use_eaft_loss"):
        if recipe.flag(name):
            reading.not_modeled.append(f"{name}: another loss")
    recipe.refuse("use_kt", (False,), "KTransformers' experts on the CPU")
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        recipe.refuse(name, (1,), name.replace("_model_parallel_size", " parallelism of Megatron"))
    for name in ("cp_size", "context_parallel_size", "sequence_parallel_size", "hyper_parallel_cp_size"):
        recipe.refuse(name, (1,), "context parallelism of LLaMA-Factory's own, or of Megatron", ULYSSES)
    recipe.refuse("tensor_model_parallel_size", (1,), "tensor parallelism")
    model_length(recipe, ("cutoff_len",))
    if ("seq_len",) not in reading.fields:
        recipe.set("seq_len", 2048, "cutoff_len")
        reading.notes.append("cutoff_len: 2048, LLaMA-Factory's default")
    if recipe.flag("packing") or stage == "pt":
        reading.notes.append("sequences are packed to cutoff_len")
    else:
        reading.notes.append("every sequence is taken to be cutoff_len long; without packing real ones are shorter")
    attention(recipe, "flash_attn")
    # LLaMA-Factory checkpoints unless told not to, whatever gradient_checkpointing says.
    recipe.get("gradient_checkpointing")
    off = recipe.flag("disable_gradient_checkpointing")
    if recipe.flag("use_unsloth_gc") and not off:
        recipe.set("checkpointing.offload", True, "use_unsloth_gc")
    else:
        recipe.set("checkpointing", "none" if off else "full", "disable_gradient_checkpointing")
    if recipe.flag("enable_liger_kernel"):
        recipe.set("loss", "fused", "enable_liger_kernel")
        recipe.set("kernels", "liger", "enable_liger_kernel")
    _parts(recipe, method)
    training(recipe)
    if recipe.flag("pure_bf16"):
        _pure_bf16(recipe)
    _load(recipe, method)
    recipe.threads("torchrun")
    name_model(recipe, "model_name_or_path")
    recipe.rest(HARMLESS)
    return reading


def _parts(recipe: Recipe, method: str) -> None:
    """Of a vision-language model (model/model_utils/visual.py, checkpointing.py and misc.py): what is frozen or has no
    adapters, and that blocks without a trained parameter are not checkpointed."""
    names = {
        "vision_tower": recipe.flag("freeze_vision_tower", True),
        "multi_modal_projector": recipe.flag("freeze_multi_modal_projector", True),
        "language_model": recipe.flag("freeze_language_model"),
    }
    vision = recipe.reading.vision
    frozen = [name for name, is_frozen in names.items() if is_frozen]
    if method == "lora":
        everywhere = recipe.reading.fields.get(("lora", "targets")) == "all-linear"
        vision["lora", "exclude"] = [n for n in names if n in frozen or (everywhere and n == "multi_modal_projector")]
    elif frozen:
        vision["model", "freeze"] = frozen
    if not recipe.flag("disable_gradient_checkpointing"):
        vision["checkpointing", "frozen_tower"] = False
    for name in ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps"):
        if recipe.get(name) is not None:
            recipe.reading.notes.append(f"{name}: images.size says how large the images are after that")


def _load(recipe: Recipe, method: str) -> None:
    """Straight to the GPU (hparams/parser.py, device_map; model/patcher.py), where what is trained is widened to
    float32 before DeepSpeed or FSDP get it (model/adapter.py, cast_trainable_params_to_fp32); neither in ZeRO-3, nor
    where rank 0 alone reads for FSDP."""
    fields = recipe.reading.fields
    by_rank_0 = fields.get(("zero", "stage")) == 3 or fields.get(("load",)) == "rank0"
    if by_rank_0 or not recipe.flag("low_cpu_mem_usage", True):
        return
    recipe.set("load", "gpu", "low_cpu_mem_usage")
    if method == "full" and not recipe.flag("pure_bf16"):
        recipe.set("load_dtype", "float32", "pure_bf16")


def _pure_bf16(recipe: Recipe) -> None:
    """Everything in bfloat16, without master weights and autocast (hparams/parser.py, model/adapter.py)."""
    if recipe.reading.fields[("framework", "name")] != "ddp":
        raise recipe.document.error(("pure_bf16",), "pure bf16 with DeepSpeed or FSDP", "bf16", kind=NotModeled)
    recipe.set("precision", "bf16", "pure_bf16")
    recipe.set("ddp.dtype", "bfloat16", "pure_bf16")


def _lora(recipe: Recipe) -> None:
    """hparams/finetuning_args.py LoraArguments: rank 8, alpha twice the rank, all linear modules."""
    names = {"r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}
    lora(recipe, names, {"r": 8, "targets": "all"})
    refuse_variants(recipe, ("use_dora", "pissa_init", "additional_target"))
    bits = recipe.get("quantization_bit")
    if bits not in (None, 4, 8):
        raise recipe.document.error(("quantization_bit",), f"{bits}-bit weights", "4, 8", kind=NotModeled)
    if bits == 8:
        in_8_bits(recipe, "quantization_bit")
        recipe.refuse("quantization_method", ("bnb", "bitsandbytes"), "quantization by another library")
    if bits == 4:
        quantized(recipe, "quantization_bit", "double_quantization")
        recipe.refuse("quantization_method", ("bnb", "bitsandbytes"), "quantization by another library")
        recipe.refuse("quantization_type", ("nf4", "fp4"), "another 4-bit type")
