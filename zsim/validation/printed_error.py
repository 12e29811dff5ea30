"""The section of validation/REPORT.md on the error that a report prints: sources left out in turn, against their first.

For each source of the blind rounds: the error that a report of its runs would print if no evidence were of that source,
and how far off these runs were when they were first predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from zsim.cost.profile import Evidence
from zsim.errors import InputError
from zsim.result.accuracy import UNSEEN_SOURCES, expected, near
from zsim.result.measure import framework_of, own_profile
from zsim.validation.evidence import setup_of
from zsim.validation.published_report import read_yaml
from zsim.validation.rows import read_folder


@dataclass(frozen=True)
class Seen:
    """A run of a blind round: the evidence near it that others published, and its first error in percent."""

    source: str
    near: Sequence[Evidence]
    first: float


def section(folders: Sequence[Path]) -> Iterator[str]:
    """Markdown lines. `folders`: of the blind rounds, as in `zsim.validation.holdout`."""
    seen = [run for folder in folders for run in _seen(folder)]
    sources = sorted({run.source for run in seen})
    yield (
        "A report prints the average error of measured runs like it, drawn towards that of runs never seen as if these "
        f"were {UNSEEN_SOURCES} sources more. What it would print of {len(sources)} sources of these rounds if none of "
        "the evidence were theirs, against how far off they were when first predicted, in percent.\n"
    )
    yield "| runs never seen count as | printed | was | more than twice as far off | less than half |"
    yield "|---|--:|--:|--:|--:|"
    for weight, name in ((0, "nothing"), (UNSEEN_SOURCES, f"{UNSEEN_SOURCES} sources"), (inf, "all there is")):
        pairs = [_pair(source, seen, weight) for source in sources]
        printed, was = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        more = sum(was > 2 * said for said, was in pairs)
        less = sum(was < said / 2 for said, was in pairs)
        yield f"| {name} | {printed:.1f} | {was:.1f} | {more} of {len(pairs)} | {less} of {len(pairs)} |"


def _pair(source: str, seen: Sequence[Seen], weight: float) -> tuple[float, float]:
    """What would be printed of the source's runs on average, and what they were off."""
    own, others = [run for run in seen if run.source == source], [run.first for run in seen if run.source != source]
    unseen = sum(others) / len(others)
    said = [unseen if weight == inf or not (weight or run.near) else expected(run.near, unseen, weight) for run in own]
    return sum(said) / len(own), sum(run.first for run in own) / len(own)


def _seen(folder: Path) -> Iterator[Seen]:
    errors = read_yaml(folder / "blind.yaml")["errors"]
    for row in read_folder(folder):
        if "step" not in errors.get(row.id, {}):
            continue
        try:
            setup = setup_of(row)
        except InputError:
            continue
        others = [entry for entry in own_profile(setup).evidence if entry.source != row.source]
        found = near(others, framework_of(setup.plan), setup.workload.tokens)
        yield Seen(row.source, found, abs(errors[row.id]["step"]))
