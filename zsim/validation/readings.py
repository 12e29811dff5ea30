"""Memory readings of a row that contradict each other or its setup: these are not compared, whatever zsim predicts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zsim.model.spec import Compute, Module
from zsim.plan.spec import DeepSpeedPlan
from zsim.scenario import Setup
from zsim.validation.rows import Row

GIB = 2**30
ROUNDING = 0.02  # of what a source prints, and of sums here that leave small things out


def contradiction(row: Row, setup: Setup, states: float) -> str:
    """Why the peak that the row states is not one of its setup's steady steps; empty where nothing speaks against it.

    Some sources print, beside the peak, what is allocated between steps. It cannot be less than weights and optimizer
    states (`states`: bytes on one GPU), and under DeepSpeed, which keeps nothing else there that a step frees first,
    the peak must leave room above it for what one micro-batch saves.
    """
    steady, peak = _steady(row), row.number("peak_mem_gib_allocated")
    other = re.search(r"memory later ([\d.]+ GiB)", row.get("notes"))
    if other:
        return f"the source gives another value for the same setup, {other[1]}"
    if steady is None or peak is None:
        return ""
    if steady < (1 - ROUNDING) * states:
        return (
            f"allocated between steps {steady / GIB:.1f} GiB, less than weights and states ({states / GIB:.1f}): "
            "read before the first update"
        )
    saved, above = sum(_saved(setup.tree)), peak * GIB - steady
    if isinstance(setup.plan, DeepSpeedPlan) and above < (1 - ROUNDING) * saved:
        return (
            f"the peak is {above / GIB:.1f} GiB above what is allocated between steps, and a micro-batch of "
            f"{setup.workload.micro_batch} saves {saved / GIB:.1f}: another micro-batch was measured"
        )
    return ""


def _steady(row: Row) -> float | None:
    """Bytes allocated between steps, as notes have it: "steady allocated 19.4" (GiB) or "... 43468269568 bytes"."""
    found = re.search(r"steady allocated ([\d.]*\d)( bytes)?", row.get("notes"))
    return None if found is None else float(found[1]) * (1 if found[2] else GIB)


def _saved(module: Module) -> Iterator[int]:
    for item in module.body:
        if isinstance(item, Compute):
            yield item.saved_bytes
        else:
            yield from _saved(item)
