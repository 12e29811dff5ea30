"""Which release of transformers a scenario runs where it is an old one, and what follows for what it leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from zsim.errors import InputError
from zsim.model.architecture import Architecture
from zsim.model.families import COMPILED_LOSS, GEMMA, LLAMA_LIKE, MOE
from zsim.model.fused_attention import WIDEST_FLASH
from zsim.plan.version import parse_version

if TYPE_CHECKING:
    from zsim.model.spec import ModelSpec
    from zsim.scenario.fields import ScenarioFields
    from zsim.scenario.load import Scenario

Release = tuple[int, ...]

# A framework older than the first is taken to run with the second, the transformers of its time.
OF_ITS_TIME: dict[str, tuple[tuple[str, Release], ...]] = {
    "deepspeed": (
        ("0.9.3", (4, 28)), ("0.10", (4, 30)), ("0.12.5", (4, 35)), ("0.15.3", (4, 45)), ("0.16.4", (4, 48)),
        ("0.18.5", (4, 57)),
    ),
    "torch": (("2.0.1", (4, 28)), ("2.2", (4, 35)), ("2.5", (4, 45)), ("2.7", (4, 48)), ("2.11", (4, 57))),
}  # fmt: skip
WIDENED = (*LLAMA_LIKE, *GEMMA, *MOE)  # their logits; GPT-2 and its like left them in the dtype of the run
LOW_SOFTMAX = ("gpt_neox", "opt")  # in the dtype of the scores until 4.48
BIASED = ("t5", "mt5", "umt5")  # learn a bias of attention, which FlashAttention does not take
# With a tower or an indexer: under masks that FlashAttention does not take (`_supports_flash_attn = False` in
# transformers 5.24).
# What they run in its place; SDPA with such a mask in all layers is `efficient`.
MASKED = {
    "mllama": "sdpa", "gemma4": "sdpa", "deepseek_v32": "sdpa", "glm_moe_dsa": "sdpa", "gemma3": "efficient",
    "paligemma": "efficient",
}  # fmt: skip
OWN_KERNEL = ("falcon",)  # calls scaled_dot_product_attention itself, since it is in transformers (4.33)


def transformers_release(scenario: Scenario) -> Release | None:
    """Of before 4.49; None for a later one, and for models that are not transformers'. Raises InputError."""
    release = stated_release(scenario)
    return release if release and release < (4, 49) else None


def stated_release(scenario: Scenario) -> Release | None:
    """The one that is given, or that an old framework is taken to run with. Raises InputError."""
    fields = scenario.fields
    framework = fields.framework
    if fields.implementation != "hf":
        return None
    if framework.transformers is not None:
        try:
            release: Release | None = parse_version(framework.transformers)
        except InputError as error:
            raise scenario.error(("framework", "transformers"), error.message, error.accepted) from None
    else:
        table = OF_ITS_TIME["deepspeed" if framework.name == "deepspeed" else "torch"]
        version = parse_version(framework.version) if framework.version else None
        release = next((then for newer, then in table if version and version < parse_version(newer)), None)
    return release


def fsdp1_defaults(scenario: Scenario) -> dict[str, bool]:
    """What accelerate hands to FSDP1, whatever torch's own defaults are, and the Trainer leaves to it: false until 0.25
    of December 2023, and until 0.26 of January 2024 (utils/dataclasses.py), which is taken to be of transformers' time.
    """
    release = stated_release(scenario)
    return {
        "use_orig_params": release is None or release >= (4, 36),
        "limit_all_gathers": release is None or release >= (4, 37),
    }


def experts_of(model: ModelSpec, release: Release | None) -> tuple[ModelSpec, list[str], list[str]]:
    """The model with its experts as `release` had them, notes on that, and what of it is not modeled."""
    if getattr(model.arch, "moe", None) is None:
        return model, [], []
    from zsim.model.expert_modules import FIRST_PACKED, UNCHANGED, had_modules, with_modules

    if release is None:
        text = "the experts of a layer in one tensor, as in transformers 5; routing is even"
        if had_modules(model):
            text += " (framework.transformers: 4.57 for a module each, which ZeRO-3 takes several times as long for)"
        return model, [text], []

    found = with_modules(model, release)
    if found is not model:
        why = (
            f"a module for each expert, as in transformers {_text(release)} (framework.transformers: 5.0 for all in "
            "one): the host waits for the GPU before it calls one; routing is even"
        )
        return found, [why], []
    if release < FIRST_PACKED and model.family not in UNCHANGED:
        why = (
            f"how transformers {_text(release)} ran the experts of {model.family}, one after the other: they run as in "
            "5.24"
        )
        return model, [], [why]
    return model, [], []


def release_of_models(release: Release | None, family: str, framework: str) -> Release | None:
    """For `Workload.transformers`. The autocast that the Trainer has with FSDP, which is not simulated, makes of an old
    softmax what it is today."""
    return None if family in LOW_SOFTMAX and framework.startswith("fsdp") else release


def attention_of(fields: ScenarioFields, release: Release | None, model: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """FlashAttention where nobody asks for another and the model takes it; SDPA, by which it runs then, came with 4.36
    of December 2023."""
    family, arch = model.family, cast(Architecture, model.arch)
    if fields.attention == "sdpa" and _masks_when_compiled(fields, release, family):
        why = "transformers gives SDPA a mask where torch.compile takes the model (loss: hf where its blocks alone are)"
        return "efficient", (f"attention: efficient, for {why}",)
    if fields.attention:
        return fields.attention, ()
    if family in BIASED:
        if release is None:
            return "sdpa", (f"attention: sdpa, as transformers 5.24 has it for {family}; releases without it: eager",)
        return "eager", (f"attention: eager, all that {family} had in transformers {_text(release)}",)
    if family in MASKED and arch.softcap:
        return "eager", (f"attention: eager, for FlashAttention does not take {family}'s masks, nor SDPA its softcap",)
    if family in MASKED:
        found = MASKED[family]
        return found, (f"attention: {found}, for FlashAttention does not take {family}'s masks",)
    if max(arch.head_dim, arch.gemma4.full_head_dim if arch.gemma4 else 0) > WIDEST_FLASH:
        return "sdpa", (f"attention: sdpa, for FlashAttention takes no heads as wide as those of {family}",)
    stated = fields.kernels.startswith(("flash-attn", "unsloth"))
    if stated:
        return "flash", ()
    if release is None or release >= (4, 36) or family in OWN_KERNEL:
        other = _OF_TRANSFORMERS if fields.implementation == "hf" else ""
        return "flash", (f"attention: flash (FlashAttention 2), zsim's own choice, as nothing says which{other}",)
    return "eager", (f"attention: eager, all that transformers {_text(release)} had unless asked for flash",)


_OF_TRANSFORMERS = "; transformers runs sdpa unless attn_implementation asks for another (attention: sdpa)"


def _masks_when_compiled(fields: ScenarioFields, release: Release | None, family: str) -> bool:
    """Whether a causal mask is made that an uncompiled model leaves to SDPA, as reading the padding cannot be compiled.

    transformers 5.24 masking_utils.py `_ignore_causal_mask_sdpa` (with torch before 2.14 without padding, too), since
    4.45 (pull request 32613); issue 48925. Recorded with torch 2.13 for Llama, Qwen3 and GPT-2.
    """
    whole = fields.compile and fields.implementation == "hf" and fields.loss != "hf"
    return whole and family in COMPILED_LOSS and (release is None or release >= (4, 45))


def loss_of(fields: ScenarioFields, release: Release | None, family: str) -> tuple[str, tuple[str, ...]]:
    """Logits of all tokens but the last were copied until 4.48 (labels are padded since 4.49 of February 2025), in
    float32 from 4.31 on; before that autocast widens the copy, where it is on, which it is not with DeepSpeed. Where
    torch.compile takes the model it takes the loss, which is in its forward."""
    compiled = fields.compile and (fields.implementation, fields.kernels) == ("hf", "torch") and not fields.loss
    if compiled and release is None and family in COMPILED_LOSS:
        return "compiled", ("loss: compiled with the model (loss: hf where its blocks alone are)",)
    if fields.loss or release is None or family not in WIDENED:
        return fields.loss or "hf", ()
    if release >= (4, 31):
        return "copied", ("loss: copied, as transformers had it before 4.49 (loss: hf for later ones)",)
    loss = "copied_uncast" if fields.framework.name == "deepspeed" else "copied_cast"
    return loss, (f"loss: {loss}, as transformers had it before 4.31",)


def _text(release: Release) -> str:
    return ".".join(map(str, release))
