"""What recipes and scripts say of training by preference: which of two answers is better (trl's DPO, CPO and ORPO).

Online methods, which generate between their steps, KTO, which takes single answers and estimates of a divergence, and
reward models are refused where they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from zsim.errors import NotModeled
from zsim.plan.recipe import Recipe

T = TypeVar("T")
MORE_MODELS = "preference tuning or reinforcement learning, which runs more than one model"
REWARD = "a reward model, whose head is no language model's, on pairs of sequences"
# trl 0.9 to 1.16, DPOConfig.loss_type: all of one cost
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair",
    "aot_unpaired", "discopop", "apo_zero", "apo_down", "sigmoid_norm", "kto_pair",
)  # fmt: skip
_WORDS = re.compile(r"(?:^|[ _/.-])(dpo|orpo|cpo|simpo)(?:[_/.-]|$)")
# Methods whose options are the same, in the name of a program or a folder
_OTHERS = re.compile(
    r"(?:^|[ _/.-])(kto|grpo|rloo|bco|gkd|nash|xpo|spin|ppo|prm|distill\w*|online|iterative|sft)(?:[ _/.-]|$)"
)
# Of trl's configurations, beside which nothing else says what trains
_MARKS = ("precompute_ref_log_probs", "rpo_alpha", "cpo_alpha", "simpo_gamma", "max_prompt_length", "beta")
# Of GRPO, PPO, online DPO and KTO
_OF_OTHERS = (
    "num_generations", "kl_coef", "num_ppo_epochs", "reward_model_path", "judge", "missing_eos_penalty",
    "desirable_weight", "undesirable_weight",
)  # fmt: skip
OPTIONS = (
    "beta", "max_prompt_length", "max_completion_length", "label_smoothing", "label_pad_token_id", "padding_value",
    "generate_during_eval", "disable_dropout", "simpo_gamma", "cpo_alpha", "rpo_alpha", "f_divergence_type",
    "reference_free", "precompute_ref_log_probs", "precompute_ref_batch_size", "use_logits_to_keep", "loss_type",
    "loss_weights", "ld_alpha", "use_num_logits_to_keep", "f_alpha_divergence_coef", "is_encoder_decoder",
    "ref_adapter_name", "model_adapter_name", "force_use_ref_model", "max_target_length", "truncation_mode",
    "discopop_tau", "tools", "orpo_alpha", "rl_beta",
)  # fmt: skip
_UNTIL_0_28 = ("rpo_alpha", "use_logits_to_keep", "max_prompt_length")  # in DPOConfig of 0.26, not of 0.29
_LISTED = {
    "use_logits_to_keep": "logits of completions alone, which need less memory than said here",
    "padding_free": "sequences of a batch one after the other, without padding",
    "use_weighting": "weights by the policy's own probabilities (WPO), a pass over all logits",
    "sync_ref_model": "a reference that follows the model every few steps",
    "use_liger_loss": "log-probabilities in chunks (Liger), whose logits need less memory than said here",
}


def others(table: Mapping[str, T], pairs: str | None) -> Mapping[str, T]:
    """Of options by name those that training by preference, if a file says `pairs`, does not read."""
    return table if pairs is None else {name: value for name, value in table.items() if name not in OPTIONS}


def kind_in(recipe: Recipe) -> str | None:
    """dpo, orpo, cpo or simpo, of trl's arguments or a script's name; None: none of these."""
    document = recipe.document
    program = document.program.lower()
    if any(document.data.get(name) is not None for name in _OF_OTHERS) or _OTHERS.search(program):
        return None
    loss = document.data.get("loss_type")
    losses = loss if isinstance(loss, list) else [loss]
    if loss == "simpo":
        return "simpo"
    if named := _WORDS.search(program):
        return named.group(1)
    if losses[0] is not None and set(map(str, losses)) <= {*DPO_LOSSES, "sft"}:
        return "dpo"
    if loss is not None or all(document.data.get(name) is None for name in _MARKS):
        return None
    if document.data.get("cpo_alpha") is not None:
        return "cpo"
    place = "/".join(Path(document.file).parts[-3:]).lower()  # recipes/zephyr-7b/orpo/config_full.yaml
    if _OTHERS.search(place):
        return None
    beside = _WORDS.search(place)
    kind = beside.group(1) if beside else "dpo"
    recipe.reading.notes.append(
        f"beta and the like: taken for those of trl's {kind.upper()} (objective: ... for another)"
    )
    return kind


def of_trl(recipe: Recipe, kind: str, name: str = "loss_type") -> None:
    """What trl's trainers are told besides. Raises NotModeled."""
    reading = recipe.reading
    if ("seq_len",) not in reading.fields:
        recipe.set("seq_len", 1024, "max_length")
        reading.notes.append("max_length: 1024, trl's default from 0.13 on")
    recipe.set("objective.kind", kind, name)
    old = next((option for option in _UNTIL_0_28 if recipe.document.data.get(option) is not None), None)
    if old and kind == "dpo" and name == "loss_type":  # of trl's own files; ms-swift has such options in any release
        recipe.set("objective.version", "0.28", old)
        reading.notes.append(f"{old}: an option of trl until 0.28, which is taken (objective.version for an older one)")
    for option, what in _LISTED.items():
        if recipe.get(option) not in (None, False, "false"):
            reading.not_modeled.append(f"{option}: {what}")
    if kind == "dpo" and recipe.flag("precompute_ref_log_probs"):
        recipe.set("objective.reference", "precomputed", "precompute_ref_log_probs")
    alpha = recipe.get("rpo_alpha" if kind == "dpo" else "cpo_alpha")
    if alpha is not None and kind in ("dpo", "cpo", "simpo"):
        # DPOTrainer takes the likelihood for any rpo_alpha, 0 as well, CPOTrainer for any but 0
        recipe.set("objective.likelihood", kind == "dpo" or bool(alpha), "rpo_alpha" if kind == "dpo" else "cpo_alpha")
    own = _reference(recipe, "ref_model") or _reference(recipe, "ref_model_name_or_path")
    if own and any(path[0] == "lora" for path in reading.fields):
        recipe.set("objective.reference", "model", "ref_model")
    for option in OPTIONS:
        recipe.get(option)
    without_fused_loss(recipe)


def _reference(recipe: Recipe, name: str) -> Any:
    """The reference that is named: mostly another checkpoint of the model that is trained."""
    named = recipe.get(name)
    trained = recipe.document.data.get("model_name_or_path") or recipe.document.data.get("model")
    if named and named != trained:
        recipe.reading.notes.append(f"{name}: {named} is taken to have the config.json of the model that is trained")
    return named


def without_fused_loss(recipe: Recipe) -> None:
    """Liger's fused loss is that of the next token; trl has one of its own for pairs."""
    reading = recipe.reading
    if reading.fields.pop(("loss",), None) is not None:
        reading.places.pop(("loss",), None)
        reading.not_modeled.append(_LISTED["use_liger_loss"])


def of_llama_factory(recipe: Recipe, method: str) -> None:
    """hparams/finetuning_args.py: pref_loss sigmoid, whose orpo and simpo have no reference. Raises NotModeled."""
    loss = str(recipe.get("pref_loss", "sigmoid"))
    kind = {"orpo": "orpo", "simpo": "simpo"}.get(loss, "dpo")
    if kind == "dpo" and loss not in ("sigmoid", "hinge", "ipo", "kto_pair"):
        raise recipe.document.error(("pref_loss",), f"pref_loss {loss}", "sigmoid, hinge, ipo, kto_pair, orpo, simpo",
                                    kind=NotModeled)  # fmt: skip
    recipe.set("objective.kind", kind, "pref_loss" if recipe.get("pref_loss") else "stage")
    recipe.set("objective.trainer", "llama-factory", "stage")
    for name in ("ref_model_quantization_bit", "ref_model_adapters"):
        recipe.refuse(name, (), "a reference of another kind than the model", "a recipe without it")
    if _reference(recipe, "ref_model") and method == "lora" and kind == "dpo":
        recipe.set("objective.reference", "model", "ref_model")
    for name in ("pref_beta", "pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "simpo_gamma", "ld_alpha",
                 "dpo_beta", "dpo_loss", "dpo_ftx"):  # fmt: skip
        recipe.get(name)
