"""A Result for people and for their tools: one file per format. Heavy libraries load inside functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.result.compare import Impossible
    from zsim.result.sensitivity import Change
    from zsim.result.spec import Result


def write_all(result: Result, directory: Path | str, changes: Sequence[Change] = ()) -> list[Path]:
    """Writes result.json, timeline.json, memory.pickle, report.html and the plots to `directory` (created).

    The report shows `changes` as what would help. Returns what was written.
    """
    from zsim.result.render import chrome_trace, html, memory_snapshot, plots

    folder = _folder(directory)
    snapshot, report = folder / "memory.pickle", folder / "report.html"
    memory_snapshot.write(result, snapshot)
    html.write(result, report, changes=changes)
    said = _json(result.to_dict(), folder / "result.json")
    return [said, report, snapshot, *chrome_trace.write(result, folder / "timeline.json"), *plots.write(result, folder)]


def write_comparison(
    results: Sequence[Result], directory: Path | str, impossible: Sequence[Impossible] = ()
) -> list[Path]:
    """Writes compare.json, report.html of the first with all of them side by side, and plots. Returns the paths."""
    from zsim.result.compare import compare
    from zsim.result.render import html, plots

    folder = _folder(directory)
    comparison, report = compare(results, impossible), folder / "report.html"
    html.write(results[0], report, results[1:], impossible=impossible)
    return [_json(comparison.to_dict(), folder / "compare.json"), report, *plots.write_comparison(results, folder)]


def write_explanation(result: Result, changes: Sequence[Change], directory: Path | str) -> list[Path]:
    """Writes explain.json, and report.html with what would help. Returns the paths."""
    from zsim.result.render import explanation, html

    folder = _folder(directory)
    report = folder / "report.html"
    html.write(result, report, changes=changes)
    return [_json(explanation.to_dict(result, changes), folder / "explain.json"), report]


def _folder(directory: Path | str) -> Path:
    """The output directory, made if need be. Raises InputError where that is not possible."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", file=folder, accepted="a directory to write to") from None
    return folder


def _json(value: object, path: Path) -> Path:
    import json

    path.write_text(json.dumps(value, indent=2) + "\n")
    return path
