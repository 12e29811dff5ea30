"""The section of validation/REPORT.md on rows that were predicted before anything was known of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.validation.published import Prediction, Score, predict
from zsim.validation.published_report import by, far, read_yaml
from zsim.validation.rows import read_folder

READINGS = {"step": "step time", "allocated": "peak memory allocated", "reserved": "peak memory reserved"}


def section(folder: Path) -> Iterator[str]:
    """Markdown lines. `folder` holds the CSV files, blind.yaml (errors of the first prediction) and explained.yaml."""
    record, explained = read_yaml(folder / "blind.yaml"), read_yaml(folder / "explained.yaml")
    predictions = [predict(row) for row in read_folder(folder)]
    kind = record.get("kind", "of sources that no constant, rule or choice of zsim's had been looked at with").strip()
    yield (
        f"{len(predictions)} runs {kind}, all `test`. They were predicted once, on {record['date']}, by the code of "
        f"commit {record['commit']}: that is the blind error, and stays. Beside it what the present code says of the "
        f"same rows. In percent. `zsim validate published validation/published/{folder.name}/*.csv`\n"
    )
    if known := record.get("known_before"):
        yield f"Known before: {known.strip()}\n"
    yield from _table(predictions, record["errors"])
    for when, wrong in (
        ("blind", record["out_of_memory"]),
        ("now", [p.row.id for p in predictions if p.step and not p.step.fits]),
    ):
        yield f"\nCalled out of memory though they ran, {when}: {', '.join(wrong) or 'none'}"
    yield from (f"\nRefused: {p.row.id}: {p.refused}" for p in predictions if p.refused)
    yield from far([p for p in predictions if p.error is not None], explained)


def _table(predictions: list[Prediction], blind: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield (
        "| step time, rows of | rows | blind MAPE | median | worst | bias | beyond 10 % | now MAPE | median | bias |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    groups = {"all": predictions, **by(predictions, lambda p: p.row.source), **by(predictions, lambda p: p.gpu)}
    for name, members in groups.items():
        yield from _line(name, "step", members, blind)
    for reading in ("allocated", "reserved"):
        yield from _line(READINGS[reading], reading, predictions, blind)


def _line(name: str, reading: str, members: Iterable[Prediction], blind: Mapping[str, Any]) -> Iterator[str]:
    members = list(members)
    then = Score.of(blind.get(p.row.id, {}).get(reading) for p in members)
    now = Score.of(p.error if reading == "step" else p.memory_error(reading) for p in members)
    if then and now:
        yield (
            f"| {name} | {then.rows} | {then.mape:.1f} | {then.median:.1f} | {then.worst:+.1f} | {then.bias:+.1f} | "
            f"{then.beyond_10} | {now.mape:.1f} | {now.median:.1f} | {now.bias:+.1f} |"
        )
