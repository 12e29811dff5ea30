"""Training by preference as a scenario asks for it: what is compared with what, and how a trainer's release does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture
from zsim.model.spec import ModelSpec, Preference
from zsim.plan.spec import TORCH_DTYPE, AnyPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.plan.version import parse_version
from zsim.scenario.releases import WIDENED, Release

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario

NO_REFERENCE = ("orpo", "cpo", "simpo")
# A transformers older than the first is taken to run with the second, the trl of its time.
TRL = (((4, 45), (0, 9)), ((4, 48), (0, 12)), ((5, 0), (0, 19)))
NEWEST, FUSED = (1, 14), (1, 15)  # whose heads never make all logits
MODELS_CAST_BEFORE = (4, 45)  # transformers, whose models cast their logits with or without labels


OWN_OPTIMIZER = (
    "the optimizer that the reference's engine gets, too, as the DeepSpeed configuration names one (LLaMA-Factory, and "
    "trl until 1.5): its states, which nobody uses"
)


def preference_of(
    scenario: Scenario, model: ModelSpec, release: Release | None
) -> tuple[Preference | None, list[str], list[str]]:
    """The setting, notes on it, and what of it is not modeled. `release` of transformers, where it is an old one.

    Raises InputError, NotModeled.
    """
    given = scenario.fields.objective
    assert given is not None
    _check(scenario, model)
    reference, notes = _reference(scenario)
    factory = given.trainer == "llama-factory"
    if factory:
        if given.version:
            raise scenario.error(("objective", "version"), "is that of trl", "null, or trainer: trl")
        how = Preference(log_probs="log_softmax", widened=True, held=1, metrics=8, sharded=False)
        notes.append("log-probabilities as LLaMA-Factory makes them, from float32 logits that it holds")
    else:
        version = _trl(scenario, release)
        how = _as_trl(given.kind, version)
        text = ".".join(map(str, version))
        chosen = "" if given.version else " (objective.version: ... says otherwise)"
        notes.append(f"log-probabilities as trl {text} makes them{chosen}")
    likelihood = given.likelihood
    if likelihood is None:
        likelihood = given.kind in NO_REFERENCE and not factory
    upcast = release is not None and release < MODELS_CAST_BEFORE and model.family in WIDENED
    fields = scenario.fields
    autocast = fields.framework.name != "deepspeed" and fields.precision != "fp32"
    widened = how.widened or upcast or autocast
    dtype = TORCH_DTYPE[fields.precision]
    own = fields.ddp.dtype if fields.ddp else None
    found = Preference(
        kind=given.kind,
        reference=reference,
        log_probs=how.log_probs,
        sharded=how.sharded,
        # LLaMA-Factory's loader casts what does not train to the type that is computed in
        stored=(own or "float32") if fields.framework.name == "ddp" and not factory else dtype,
        widened=widened,
        # of logits in float32 the copy is saved for the backward
        held=how.held - (how.log_probs == "shifted" and widened),
        averaged=how.averaged,
        likelihood=likelihood,
        surveyed=how.surveyed,
        metrics=how.metrics,
        gathered=how.gathered,
    )
    named = fields.deepspeed_config is not None and not fields.optimizer.decay_groups
    missing = [OWN_OPTIMIZER] if reference == "model" and named else []
    return found, [*_counted(scenario), *notes], missing


def _check(scenario: Scenario, model: ModelSpec) -> None:
    fields, path = scenario.fields, ("objective",)
    for name, what, accepted in (
        ("float8", "float8", "null"),
        ("images", "a vision-language model", "a text model"),
        ("loss", "a loss of its own", "null"),
    ):
        if getattr(fields, name) is not None:
            raise scenario.error(path, f"training by preference with {what}", f"{name}: {accepted}", kind=NotModeled)
    arch = cast(Architecture, model.arch)
    if not isinstance(model.arch, Architecture) or arch.vision is not None or arch.seq2seq is not None:
        raise scenario.error(
            path, f"training by preference of {model.family}", "a language model's config.json", kind=NotModeled
        )
    for name, plain in (("implementation", "hf"), ("compile", False), ("sequence_parallel_size", 1)):
        if getattr(fields, name) != plain:
            what = f"training by preference with {name}: {getattr(fields, name)}"
            raise scenario.error(path, what, f"{name}: {str(plain).lower()}", kind=NotModeled)
    if fields.kernels not in ("torch", "liger"):
        raise scenario.error(path, f"training by preference with kernels of {fields.kernels}", "kernels: torch, liger",
                             kind=NotModeled)  # fmt: skip
    lora = fields.lora
    if lora and (lora.modules_to_save or lora.target_parameters):
        what = "training by preference with modules_to_save or target_parameters"
        raise scenario.error(path, what, "lora.targets alone", kind=NotModeled)


def _reference(scenario: Scenario) -> tuple[str, list[str]]:
    """Without one that is stated: the same model without its adapters, or a second one."""
    given, adapted = scenario.fields.objective, scenario.fields.lora is not None
    assert given is not None
    path = ("objective", "reference")
    if given.kind in NO_REFERENCE:
        if given.reference is not None:
            raise scenario.error(path, f"{given.kind} has none", "null")
        return "none", []
    wanted = given.reference or ("adapters" if adapted else "model")
    if wanted == "precomputed":
        return "none", ["the reference's log-probabilities were computed before training, which is not a part of it"]
    if wanted == "adapters" and not adapted:
        raise scenario.error(path, "adapters are switched off where there are any", "model, precomputed; or lora: ...")
    if wanted == "model" and adapted:
        raise scenario.error(path, "a second model beside one with adapters", "adapters, precomputed", kind=NotModeled)
    if wanted == "adapters":
        return wanted, ["the reference is the model without its adapters, after the forward of each micro-step"]
    return wanted, ["the reference is a second model, whose forward follows that of each micro-step"]


def _trl(scenario: Scenario, release: Release | None) -> Release:
    given = scenario.fields.objective
    assert given is not None
    if given.version is None:
        return next((then for newer, then in TRL if release and release < newer), NEWEST)
    try:
        version = parse_version(given.version)
    except InputError as error:
        raise scenario.error(("objective", "version"), error.message, error.accepted) from None
    if version >= FUSED:
        what = f"trl {given.version}, whose output projection and log-probabilities are one kernel in tiles"
        raise scenario.error(("objective", "version"), what, "1.14 and earlier", kind=NotModeled)
    return version


def _as_trl(kind: str, trl: Release) -> Preference:
    """By its releases (0.8 to 1.14 read): DPOTrainer, whose selective_log_softmax came with 0.15, metrics of all ranks
    with 0.14, prepare_fsdp with 0.16 and one function for a whole step with 0.29; CPOTrainer and ORPOTrainer, whose
    metrics the host waits for as well."""
    gathered, selects = trl >= (0, 14), trl >= (0, 15)
    if kind in NO_REFERENCE:
        return Preference(log_probs="sliced" if selects else "log_softmax", metrics=9, gathered=gathered)
    if trl >= (0, 29):
        return Preference(log_probs="shifted", held=2, surveyed=True, metrics=15, gathered=True)
    return Preference(
        log_probs="selective" if selects else "log_softmax",
        sharded=trl >= (0, 16),
        # the logits until 0.12, with a cross-entropy of the chosen ones since 0.9
        held=0 if trl >= (0, 12) else 1.5 if trl >= (0, 9) else 1,
        averaged=trl >= (0, 12),
        metrics=8,
        gathered=gathered,
    )


def _counted(scenario: Scenario) -> list[str]:
    length = scenario.fields.seq_len
    return [
        f"a micro-batch counts pairs, two sequences of {length:,} tokens each: every one is padded to that length, and "
        "tokens/s counts them all"
    ]


def check_placed(preference: Preference | None, plan: AnyPlan) -> None:
    """What a second model does not go with. Raises NotModeled."""
    if preference is None or preference.reference == "none":
        return
    field = "objective.reference"
    if isinstance(plan, DeepSpeedPlan):
        quantized = plan.zero_quantized_weights or plan.zero_quantized_nontrainable_weights
        if plan.autoep_size or quantized or plan.mics_shard_size > 0 or plan.offload_param == "nvme":
            what = "a reference with AutoEP, quantized gathers, MiCS or parameters on NVMe"
            raise NotModeled(what, field=field, accepted="precomputed")
    if isinstance(plan, Fsdp1Plan | Fsdp2Plan) and plan.cpu_offload:
        raise NotModeled("a reference with fsdp.cpu_offload", field=field, accepted="precomputed")
