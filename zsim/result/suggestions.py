"""Which changes are worth simulating for the report, and which of them to show.

`sensitivity` lists every change there is; simulating them all takes a multiple of the run itself. Here those are left
out that cannot gain much, because the part of the step that they save from is small. What is left is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from zsim.result import sensitivity
from zsim.result.sensitivity import Change, Variant
from zsim.result.spec import Result
from zsim.result.tables import link_rows

WORTH = 0.01  # of the step: with less at stake a change is not tried
GAINS = 0.005  # a change that gains less helps nothing
MOST = 4  # settings tried
PER_STAKE = 2  # of those that save from the same part of the step


def candidates(result: Result) -> list[Variant]:
    """Up to `MOST` settings with most at stake, and the part of the machine that the step waits for most."""
    at_stake = stakes(result)
    hopeful = [variant for variant in sensitivity.settings(result) if at_stake.get(variant.saves, 0.0) >= WORTH]
    hopeful.sort(key=lambda variant: -at_stake[variant.saves])
    settings = [variant for _, same in groupby(hopeful, lambda v: v.saves) for variant in list(same)[:PER_STAKE]]
    weakest = weakest_part(result)
    machine = [variant for variant in sensitivity.hardware(result) if variant.saves == weakest]
    return settings[:MOST] + machine


def best(changes: Iterable[Change | None], number: int) -> list[Change]:
    """The `number` that gain most: settings that fit, then what faster hardware would do."""
    helpful = [change for change in changes if change is not None and change.fits and change.gain >= GAINS]
    helpful.sort(key=lambda change: (change.kind != "setting", -change.gain))
    settings = [change for change in helpful if change.kind == "setting"]
    machine = helpful[len(settings) :][:number]
    return settings[: max(number - len(machine), 0)] + machine


def stakes(result: Result) -> dict[str, float]:
    """By what a setting saves from (`Variant.saves`): the share of the step that it can save, roughly.

    "batch": twice the batch halves, per token, the optimizer and whatever else happens once per step.
    """
    time = result.time
    seconds = {
        "communication": time.exposed_comm_s,
        "offload": time.idle_s,
        "recompute": time.compute_by_phase.get("recompute", 0.0),
        "batch": (time.compute_by_phase.get("optimizer", 0.0) + time.exposed_comm_s + time.idle_s + time.host_s) / 2,
    }
    return {name: each / time.step_s for name, each in seconds.items()} if time.step_s else {}


def weakest_part(result: Result) -> str:
    """What `Variant.saves` of the hardware that the bottleneck names."""
    bottleneck = result.bottleneck
    if bottleneck.group == "compute":
        return "matrix units" if bottleneck.name.startswith(("matrix", "attention")) else "GPU memory"
    if bottleneck.group in ("host", "cpu optimizer"):
        return "host" if bottleneck.group == "host" else "cpu"
    if bottleneck.link is not None and " " in bottleneck.link:
        return bottleneck.link.split()[0]  # "staging n0/gpu0>n0/host"
    fullest = next(iter(link_rows(result)), None)
    return str(fullest["kind"]) if fullest else ""
