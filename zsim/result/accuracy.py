"""The error to expect of a step time: that of measured runs like this one, drawn towards that of runs never seen."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.profile import Evidence, Profile
from zsim.result.reported import NEVER_SEEN
from zsim.result.spec import Accuracy, Time

_TITLES = {"deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP"}
# The sources of a GPU say little of the next one: left out in turn, every fourth was more than twice as far off as the
# others' average. Drawn towards the first errors of all sources as if these were four sources more, every seventh; two
# or eight of them serve as well. Chosen on four rounds, it held in the fifth; of all 72 sources of seven rounds 11 are
# so far off, 15 without it (validation/REPORT.md, "What the printed error is worth").
UNSEEN_SOURCES = 4
HELD_UP = 0.2
LINEAR_ATTENTION = "linear attention"


def accuracy(
    profile: Profile,
    gpus: int,
    framework: str,
    on_cpu: bool = False,
    adapters: bool = False,
    tokens: int = 4096,
    full: bool = False,
    unmeasured: Sequence[str] = (),
    float8: bool = False,
    held_up: bool = False,
) -> Accuracy:
    """The error to expect in a step of `framework` ("deepspeed", "fsdp2", "fsdp1" or "ddp") on `gpus` GPUs.

    `on_cpu`: of the optimizer's step. `tokens`: in a micro-batch. `full`: of a GPU whose allocator gives memory back in
    every step. `unmeasured`: kinds of layers that none of these runs had, so that their error says nothing of this one.
    `float8`: of products in it. `held_up`: by the host, as `waits_for_host` has it.

    No evidence is of offload alone, and the rows of validation/published that are furthest off all offload.
    """
    if unmeasured:
        kinds = " or ".join(unmeasured)
        text = f"no run of validation/published has {kinds}"
        if tuple(unmeasured) == (LINEAR_ATTENTION,):
            text += "; two published steps of Qwen3.5-9B alone were compared (docs/linear-attention.md)"
        return Accuracy(profile.device, profile.stack, None, text)
    if float8 and profile.float8 is None:
        return Accuracy(profile.device, profile.stack, None, "no run in float8 on this kind of GPU has been measured")
    found = near(profile.evidence, framework, tokens)
    error = expected(found)
    text = f"{_said_of(found, profile, framework, tokens, gpus, adapters)}; {_NEVER_SEEN}"
    if on_cpu:
        text += "; with the optimizer on the CPU, steps up to twice as long as predicted were measured"
    for others in (profile.full_memory if full else None, profile.held_up if held_up else None):
        if others:
            error = max(error, others.mape)
            way = f"{abs(others.bias):.0f}% too {'fast' if others.bias < 0 else 'slow'} on average"
            text += f"; {others.source}: {others.mape:.0f}% on {others.rows} runs, {way}"
    if float8 and (own := profile.float8):
        error = max(error, own.mape)
        text = f"{own.mape:.0f}% on {own.rows} {own.source} on this kind of GPU; in 16 bits {text}"
    return Accuracy(profile.device, profile.stack, error / 100, text)


def waits_for_host(time: Time) -> bool:
    """Whether the host holds up so much of the step that how fast it is, which few sources state, decides."""
    return time.host_s > HELD_UP * time.step_s


def near(evidence: Sequence[Evidence], framework: str, tokens: int) -> list[Evidence]:
    """Runs of the same framework with micro-batches alike; where there are none, all."""
    return [entry for entry in evidence if entry.speaks_for(framework, tokens)] or list(evidence)


def expected(found: Sequence[Evidence], unseen: float = NEVER_SEEN.mape, weight: float = UNSEEN_SOURCES) -> float:
    """Percent: the average over the runs `found`, drawn towards `unseen`, which counts as `weight` sources."""
    sources = len({entry.source for entry in found})
    return (sources * mean(found) + weight * unseen) / (sources + weight)


def mean(found: Sequence[Evidence]) -> float:
    """Percent, over all runs; 0 where there are none."""
    return sum(entry.mape * entry.rows for entry in found) / max(1, sum(entry.rows for entry in found))


_NEVER_SEEN = (
    f"{NEVER_SEEN.mape:.0f}% on {NEVER_SEEN.runs} runs of sources never looked at before (half within "
    f"{NEVER_SEEN.median:.0f}%), which counts as {UNSEEN_SOURCES} more"
)


def _said_of(
    found: Sequence[Evidence], profile: Profile, framework: str, tokens: int, gpus: int, adapters: bool
) -> str:
    if not found:
        return "nothing measured on this device stands behind the times"
    rows, sources = sum(entry.rows for entry in found), sorted({entry.source for entry in found})
    low, high = min(entry.min_gpus for entry in found), max(entry.max_gpus for entry in found)
    on = f"{low} to {high} GPUs" if high > low else f"{low} GPU{'s' * (low > 1)}"
    alike, largest = found[0].speaks_for(framework, tokens), max(found, key=lambda entry: entry.rows)
    text = f"{mean(found):.0f}% on {rows} run{'s' * (rows > 1)}"
    text += f" with {_TITLES[framework]}" if alike else ""
    if not largest.device:
        return f"no run on this kind of GPU; {text} of {largest.source}, on {on}"
    devices = sorted({entry.device for entry in found})
    if profile.device in devices:
        text += f" on {profile.device}"
    else:
        text = f"none on {profile.device} itself; {text} on {', '.join(devices)}"
    others = f" and {len(sources) - 1} more source{'s' * (len(sources) > 2)}" if len(sources) > 1 else ""
    text += f" ({on}, by {largest.source}{others})"
    if not alike:
        known = any(entry.is_of(framework) for entry in profile.evidence)
        such = f" and about {tokens:,} tokens in a micro-batch" if known else ""
        text += f", none with {_TITLES[framework]}{such}"
    elif all(entry.adapters != adapters for entry in found):
        text += f", {'none' if adapters else 'all'} of adapters"
    return text if low <= gpus <= high else f"{text}, and this is on {gpus}"


def unmeasured(arch: object) -> tuple[str, ...]:
    """Kinds of layers of a `zsim.model.architecture.Architecture` that no model of validation/published has: those are
    of attention to the same sequence and dense MLPs."""
    kinds = getattr(arch, "kinds", ())
    parts = {name for name in ("mamba", "moe", "latent", "vision", "seq2seq") if getattr(arch, name, None) is not None}
    found = {
        LINEAR_ATTENTION: any(kind.mixer == "delta" for kind in kinds),
        "state spaces": "mamba" in parts,
        "short convolutions": any(kind.mixer == "conv" for kind in kinds),
        "experts": "moe" in parts,
        "latent attention": "latent" in parts,
        "a vision tower": "vision" in parts,
        "cross-attention": "seq2seq" in parts or any(kind.crossed for kind in kinds),
    }
    return tuple(name for name, there in found.items() if there)
