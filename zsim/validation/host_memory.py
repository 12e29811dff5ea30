"""Holds host memory of a Program with offload against a real run of CPU ranks (`validation.oracles.host`).

By category from the tensors that the framework holds for it; in total from the resident bytes of the process, in which
the GPU's share counts too. Of those the same run with a tiny model is taken off, here and there: what torch, DeepSpeed
and the process need by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.validation.memory import Line, Outcome
from zsim.validation.sequences import reason
from zsim.validation.storage import STEPS, Level, predict, read

RESIDENT = "resident peak"


def compare(path: Path) -> Outcome:
    """Raises InputError on a file that `validation.oracles.host` has not written."""
    header, rows = read(path)
    if not all(key in row for row in rows for key in ("rss_peak", "base_rss_peak", "held")):
        raise InputError("no resident bytes", file=path, accepted="what validation.oracles.host writes")
    tiny = {**header, "model": header["base_model"], "params": header["base_params"]}
    try:
        large, base = predict(header, staged=True), predict(tiny, staged=True)
    except InputError as error:
        return Outcome(path, header["name"], refused=reason(error))
    rows = list(_moments(rows))
    if [level.before for level in large] != [row["before"] for row in rows]:
        return Outcome(path, header["name"], refused="the run has other phases than the Program")
    return Outcome(path, header["name"], tuple(_lines(large, base, rows)))


def _moments(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Without the call of DeepSpeed's `step` after a micro-step that is not the last one, which does nothing."""
    last_micro = max(row["micro"] for row in rows)
    skipped = {"rss_peak": 0, "base_rss_peak": 0}
    for row in rows:
        found = {**row, **{name: max(row[name], peak) for name, peak in skipped.items()}}
        idle = row["before"] == "step" and row["micro"] < last_micro
        skipped = {name: found[name] if idle else 0 for name in skipped}
        if not idle:
            yield found


def _lines(large: Sequence[Level], base: Sequence[Level], rows: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Categories when training starts and in the last step; resident peaks of start-up, the first and the last step."""
    for level, row in zip(large, rows, strict=True):
        if row["step"] in (0, STEPS):
            moment = "start" if row["step"] == 0 else f"before {row['before']}"
            for category in sorted({*level.host, *row["held"]}):
                yield Line(moment, category, level.host.get(category, 0), row["held"].get(category, 0))
    for moment, steps in (("start-up", {0}), ("first step", {1}), ("last step", {STEPS})):
        of = [index for index, row in enumerate(rows) if row["step"] in steps]
        predicted = max(large[index].peak for index in of) - max(base[index].peak for index in of)
        recorded = max(rows[index]["rss_peak"] for index in of) - max(rows[index]["base_rss_peak"] for index in of)
        yield Line(moment, RESIDENT, predicted, recorded)
