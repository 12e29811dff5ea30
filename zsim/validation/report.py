"""validation/REPORT.md: every comparison with evidence in one file, from one command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zsim.errors import InputError

INTRODUCTION = """# How far zsim's predictions are off

Written by `zsim validate report`; nothing here is edited by hand. Every table compares what zsim predicts with what was
recorded, tracked or measured, rows that it refuses included."""


ROUNDS = {
    "": "holdout",
    ", second round": "second_holdout",
    ", third round": "third_holdout",
    ", fourth round": "fourth_holdout",
    ", fifth round": "fifth_holdout",
    ", sixth round": "sixth_holdout",
    ", seventh round": "seventh_holdout",
}


def markdown(evidence: Path) -> Iterator[str]:
    """The sections, each over one folder of `evidence` (the project's `validation/`)."""
    if not (evidence / "oracles").is_dir():
        raise InputError("no evidence here", file=evidence, accepted="the validation/ folder of a checkout")
    yield INTRODUCTION
    for title, section in (
        ("Sequences of collectives", _sequences(evidence / "oracles" / "sequences")),
        ("Memory", _memory(evidence / "oracles")),
        ("", _collectives(evidence / "measured" / "collectives.csv")),
        ("Host time", _host_time(evidence / "measured" / "host_time.jsonl")),
        ("Published runs", _published(evidence / "published")),
        *(
            (f"Runs never seen before{which}", _holdout(evidence / "published" / name))
            for which, name in ROUNDS.items()
        ),
        ("What the printed error is worth", _printed_error(evidence / "published")),
        ("Float8", _float8(evidence / "published")),
        ("What users reported", _cases(evidence / "cases" / "cases.yaml")),
        ("Reports never seen before", _blind(evidence / "cases", "blind")),
        ("Reports never seen before, second round", _blind(evidence / "cases", "blind2")),
        ("Reports never seen before, third round", _blind(evidence / "cases", "blind3")),
        ("Reports never seen before, fourth round", _blind(evidence / "cases", "blind4")),
        ("Reports never seen before, fifth round", _blind(evidence / "cases", "blind5")),
        ("Reports never seen before, sixth round", _blind(evidence / "cases", "blind6")),
        ("Reports never seen before, seventh round", _blind(evidence / "cases", "blind7")),
        ("Reports never seen before, eighth round", _blind(evidence / "cases", "blind8")),
        ("Reports never seen before, ninth round", _blind(evidence / "cases", "blind9")),
        ("Reports of saving", _blind(evidence / "cases", "saving")),
    ):
        yield f"\n## {title}\n" if title else ""
        yield from section


def _sequences(folder: Path) -> Iterator[str]:
    from zsim.validation.recording import read
    from zsim.validation.sequences import compare, files

    matched: Counter[str] = Counter()
    total: Counter[str] = Counter()
    remarks = []
    for path in files([folder]):
        recording = read(path)
        outcome = compare(recording)
        engine = recording.header["engine"]
        total[engine] += 1
        matched[engine] += outcome.matches
        if not outcome.matches:
            remarks.append(f"- {outcome.name}: {outcome.refused or outcome.difference}")
    yield (
        "Real runs on gloo ranks; op, dtype, elements, group and order of every collective of initialization and three "
        "steps. `zsim validate sequences validation/oracles/sequences`\n"
    )
    yield "| engine | equal | recordings |\n|---|--:|--:|"
    for engine in total:
        yield f"| {engine} | {matched[engine]} | {total[engine]} |"
    yield f"| all | {matched.total()} | {total.total()} |"
    yield from ["", *remarks] if remarks else []


def _memory(oracles: Path) -> Iterator[str]:
    from zsim.validation.memory import validate

    yield (
        "FSDPMemTracker on real FSDP2; counts of every storage alive in real DeepSpeed, FSDP and DDP runs; of runs "
        "with offload what the host holds, and resident bytes of the process; what ranks hold to save and to resume. "
        "`zsim validate memory validation/oracles/{memory,storage,host,saving}`\n"
    )
    yield "| oracle | outcome |\n|---|---|"
    for outcome in validate([oracles / name for name in ("memory", "storage", "host", "saving")]):
        yield f"| {outcome.name} | {outcome.refused or outcome.summary}{'' if outcome.matches else ' **differs**'} |"
        for line in outcome.differing:
            yield f"| | {line} |"


def _collectives(path: Path) -> Iterator[str]:
    from zsim.validation.collectives_report import report, to_markdown

    yield to_markdown(report(path))


def _host_time(path: Path) -> Iterator[str]:
    from zsim.validation.host_time import section

    yield from section(path)


def _published(folder: Path) -> Iterator[str]:
    from zsim.validation.published_report import section

    yield from section(folder)


def _holdout(folder: Path) -> Iterator[str]:
    from zsim.validation.holdout import section

    yield from section(folder)


def _printed_error(folder: Path) -> Iterator[str]:
    from zsim.validation.printed_error import section

    yield from section([folder / name for name in ROUNDS.values()])


def _float8(folder: Path) -> Iterator[str]:
    from zsim.validation.rows import read_folder
    from zsim.validation.speedups import table

    yield from _holdout(folder / "float8")
    yield from table(read_folder(folder / "float8"), read_folder(folder))


def _cases(path: Path) -> Iterator[str]:
    from zsim.validation.cases import report

    yield from report(path).markdown()


def _blind(folder: Path, name: str) -> Iterator[str]:
    from zsim.validation.cases import blind

    yield from blind(folder / f"{name}.yaml", folder / f"{name}_first.yaml")
