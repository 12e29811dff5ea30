"""Options that scripts built on the Trainer have of their own, where they decide about what is computed or kept.

What such a script does with them is in its own code: where a name says it, it is taken at its word and a note says so;
where it decides which parameters train, or in how many bits, the run is refused rather than taken for a plain one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import NotModeled
from zsim.plan.preference import DPO_LOSSES, MORE_MODELS, REWARD, others
from zsim.plan.recipe import Recipe, as_flag
from zsim.plan.trl import is_newer_trl

_OFF = (None, False, 0, "", "none", "None", "no", "false", "False")
_ADAPTERS = (
    "use_qlora", "use_adapter", "low_rank_training", "use_qllama_lora", "train_mode", "train_type", "finetuning_type",
    "tuning_type", "use_lisa", "use_galore",
)  # fmt: skip
_LORA = re.compile(
    r"^((use|apply|enable|include|with|train|add|peft|llm|backbone|vision|audio|model|experts?|q)_)*q?lora(_enable)?$"
)
_QUANTIZED = (
    "q_lora",
    "qlora",
    "use_qlora",
    "use_q_lora",
)  # switched off, they say nothing of adapters on whole weights
_WHOLE = ("full", "all", "pretrain", "sft")  # kinds of training in which everything trains
# Of peft: they say nothing where a switch says that there are no adapters.
_RANKS = ("lora_r", "lora_rank", "lora_target_modules", "trainable", "lora_trainable")
_PLAIN = ("rank", "alpha")  # of adapters, where a script has both
_OTHER_RANKS = ("peft_lora_r", "peft_target_modules")  # which stand beside trl's own use_peft
_PARAMETERS = re.compile(r"(^|_)(un)?freeze(_|$)|^fix_|^(mm_)?tunable_|^tune_|^train_(modules|params|layers)$")
_LANGUAGE = re.compile(r"llm|language|backbone|(^|_)lm(_|$)")
_EVERY_PART = {"mm_vision_tower", "mm_mlp_adapter", "mm_language_model"}  # LLaVA-NeXT, train.py
_FEW_BITS = re.compile(
    r"(^|_)(load_in_)?(kbits|[48]_?bits?)(_quantization)?$|(^|_)int8(_|$)|^quant_bit|^quantization_bit$"
)
_REFUSED = {
    "spectrum_config_path": "the layers alone that Spectrum has chosen train",
    "pre_seq_len": "prompts that train before a frozen model (P-tuning)",
    "moe_enable": "experts in place of the model's own MLPs",
    "medusa_num_heads": "heads beside the model's own (Medusa)",
    "use_unsloth": "Unsloth's kernels and checkpointing",
    "use_customized_optim": "an optimizer of the script's own",
    "use_onebitllms": "training for weights in few bits",
}
_FLASH = ("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "use_flash_attn_2", "flash_attn")
_WITHOUT_FLASH = ("disable_flash_attn2", "disable_flash_attn")  # sdpa, in Qwen2-VL-Finetune's train_sft.py
# Names for what trl's ModelConfig has, where the switch is trl's use_peft.
_OF_PEFT = {"lora_rank": "lora_r", "target_modules": "lora_target_modules", "lora_target": "lora_target_modules"}
_CHECKPOINTING = ("grad_checkpoint", "gradient_checkpoint", "use_gradient_checkpointing", "use_grad_checkpoint")
OWN = "as the script's own code has it"
_WHOLE_MODEL = "a run in which the whole model trains, or trl's use_peft, lora_r and lora_target_modules"
_WHOLE_WEIGHTS = "weights in 16 bits, or trl's use_peft with load_in_4bit or load_in_8bit"

_EMBEDDINGS = "training of embeddings, whose batch is of queries with several passages each"
HEAD = "another task than language modelling, with a head and a loss of its own"
_ADAPTED = re.compile(r"(^|[_-])(q?lora|peft)([_.-]|$)")
OTHER_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")  # of peft's TaskType
# Of trl's DPO, KTO, CPO, GRPO and ORPO configurations.
_PREFERENCES = {
    *DPO_LOSSES, "sft", "kto", "apo_zero_unpaired", "bco", "simpo", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo",
    "vespo", "luspo", "alphapo",
}  # fmt: skip
# Options that only scripts of other tasks have.
_OTHER_TASKS = {
    **dict.fromkeys(
        ("train_group_size", "train_n_passages", "query_max_len", "q_max_len", "passage_max_len", "p_max_len",
         "sentence_pooling_method", "pooling_method", "pooling_mode", "pooling_strategy", "pooler_type",
         "encoder_pooling", "negatives_cross_device", "rerank_max_length"), _EMBEDDINGS
    ),
    **dict.fromkeys(
        ("sigmoid_loss_weight", "bco_pair_loss_weight", "rpo_alpha", "dpo_beta", "simpo_gamma"), MORE_MODELS
    ),
    "knowledge_distillation": "distillation, whose loss takes a teacher's logits",
    "teacher_model_name_or_path": "distillation, whose loss takes a teacher's logits",
    "doc_stride": HEAD,
    "mask_time_prob": HEAD,
}  # fmt: skip
# Words in the name of the program.
_OTHER_PROGRAMS = (
    (re.compile(r"(^|[ _-])(reward|rm)([_.-]|$)|reward_model"), REWARD),
    (
        re.compile(r"(^|[ _-])(dpo|ppo|grpo|kto|orpo|simpo|mpo|rlhf|rloo|raft|bco|gkd|nash_md|xpo|prm)([_.-]|$)"),
        MORE_MODELS,
    ),
    (re.compile(r"bi_?encoder|cross_?encoder|rerank|retriev|embedding|(^|_)dense\."), _EMBEDDINGS),
    (re.compile(r"squad|glue|swag|classif|speech|wav2vec|_(qa|ner|ctc|mim|mae)\."), HEAD),
)
# What scripts of vision-language models say of a tower, beside LLaVA's vision_tower.
_TOWERS = ("vision_path", "force_image_size", "image_tower", "video_tower", "image_encoder_name_or_path")


def refuse_tasks(recipe: Recipe, pairs: str | None) -> None:
    """Raises NotModeled for a script that trains something else than one language model on sequences. `pairs`: on which
    answer is preferred, by which of trl's trainers."""
    for name, why in others(_OTHER_TASKS, pairs).items():
        recipe.refuse(name, _OFF, why, "a script that trains a language model")
    document = recipe.document
    for words, why in _OTHER_PROGRAMS:
        if words.search(document.program.lower()) and (pairs is None or why != MORE_MODELS):
            raise document.error(
                (), f"{document.program}: {why}", "a script that trains a language model", kind=NotModeled
            )
    for name in ("lora_task_type", "task_type"):
        if recipe.get(name) in OTHER_HEADS:
            raise document.error((name,), f"{recipe.get(name)}: {HEAD}", "CAUSAL_LM", kind=NotModeled)
    loss = None if pairs is not None else recipe.get("loss_type")
    if loss in ("dft", "chunked_nll"):  # trl's SFTConfig
        recipe.reading.not_modeled.append(f"loss_type: {loss}, another loss, or the same one in chunks")
    elif loss not in (None, "nll"):
        why = MORE_MODELS if set(str(loss).split(",")) <= _PREFERENCES else f"another loss, {OWN}"
        raise document.error(("loss_type",), f"{loss}: {why}", "nll", kind=NotModeled)
    fused = any(recipe.flag(name) for name in ("use_liger_kernel", "use_liger"))
    if loss is None and pairs is None and is_newer_trl(recipe) and not fused:  # trl's pull request 5846
        text = "loss_type: from trl 1.7 on in chunks unless it says nll, whose logits need less memory than said here"
        recipe.reading.not_modeled.append(text)
    tower = next((name for name in _TOWERS if recipe.get(name)), None)
    if tower:
        text = f"vision_tower: {tower} names a tower, unless the config.json is that of the whole model"
        recipe.reading.not_modeled.append(text)


def refuse_own(recipe: Recipe, read_elsewhere: tuple[str, ...] = ()) -> None:
    """Raises NotModeled for an option of a script's own that changes which parameters train, or their bits."""
    document = recipe.document
    switches = [name for name in map(str, document.data) if name in _ADAPTERS or _LORA.search(name)]
    given = {name: recipe.get(name) for name in switches if name not in read_elsewhere}
    for name, value in given.items():
        if value not in (*_OFF, *_WHOLE):
            raise _refusal(recipe, name, "which parameters train", _WHOLE_MODEL)
    if not recipe.flag("use_peft") and all(recipe.says(name) for name in _PLAIN):
        raise _refusal(recipe, _PLAIN[0], "which parameters train", _WHOLE_MODEL)
    for name in (*_RANKS, *_REFUSED):
        recipe.get(name)
    silent = all(value is None or name in _QUANTIZED for name, value in given.items())
    if silent and document.data.get("use_peft") is None and "use_peft" not in read_elsewhere:
        for name in _RANKS:
            recipe.refuse(name, _OFF, f"which parameters train, {OWN}", _WHOLE_MODEL)
        if _ADAPTED.search(document.program.lower()):
            raise document.error((), f"{document.program}: adapters, {OWN}", _WHOLE_MODEL, kind=NotModeled)
    for name in _OTHER_RANKS:
        if recipe.flag("use_peft"):
            recipe.refuse(name, _OFF, f"which parameters train, {OWN}", _WHOLE_MODEL)
    for name, value in document.data.items():
        if name in read_elsewhere:
            continue
        if _PARAMETERS.search(str(name)):
            recipe.get(str(name))
            if not _trains_all(document.data, str(name), value):
                raise _refusal(recipe, str(name), "which parameters train", _WHOLE_MODEL)
        if _FEW_BITS.search(str(name)) and value not in (*_OFF, 16, 32):
            raise _refusal(recipe, str(name), "weights in few bits", _WHOLE_WEIGHTS)
        if name in _REFUSED and value not in _OFF:
            raise document.error((name,), _REFUSED[str(name)], "a run without it", kind=NotModeled)


def _trains_all(options: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether an option that chooses what trains chooses everything."""
    if name == "mm_tunable_parts":
        return set(str(value).split(",")) >= _EVERY_PART
    if not name.startswith("tune_"):
        return value in _OFF or value in _WHOLE
    # tune_mm_mlp_adapter alone freezes the rest; where a script has a switch for each part, all of them are on
    return value not in _OFF and any(
        str(other).startswith("tune_") and _LANGUAGE.search(str(other)) and on not in _OFF
        for other, on in options.items()
    )


def _refusal(recipe: Recipe, name: str, what: str, accepted: str) -> NotModeled:
    error = recipe.document.error((name,), f"{what}, {OWN}", accepted, kind=NotModeled)
    assert isinstance(error, NotModeled)
    return error


def own_switches(recipe: Recipe) -> None:
    """What a script calls flash attention, checkpointing and adapters, as arguments of the Trainer and of trl.

    Raises InputError.
    """
    for names, to, on, off in (
        (_FLASH, "attn_implementation", "flash_attention_2", None),
        (_WITHOUT_FLASH, "attn_implementation", "sdpa", "flash_attention_2"),
        (_CHECKPOINTING, "gradient_checkpointing", True, None),
    ):
        for name in names:
            if recipe.get(name) is None:
                continue
            said = as_flag(recipe.get(name), lambda text, name=name: recipe.error((name,), text, "true or false"))  # type: ignore[misc]
            _take(recipe, name, to, on if said else off)
    if recipe.flag("use_peft"):
        for name, to in _OF_PEFT.items():
            _take(recipe, name, to, recipe.get(name))


def _take(recipe: Recipe, name: str, to: str, value: Any) -> None:
    """The script's `name` for `to`, unless that is there as well, or nothing is said."""
    if value is not None and recipe.document.data.get(to) is None:
        recipe.document.data[to] = value
        recipe.document.places[(to,)] = recipe.document.place((name,))
        recipe.reading.notes.append(f"{name}: taken for {to}: {str(value).lower()}, {OWN}")
