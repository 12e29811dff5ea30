"""Writes a Result for people and for their tools. Each format is one file; heavy libraries load inside functions."""

from __future__ import annotations

import json
from pathlib import Path

from zsim.result.spec import Result


def write_all(result: Result, directory: Path | str) -> list[Path]:
    """Writes result.json, timeline.json and the plots to `directory` (created); returns what was written."""
    from zsim.result.render import chrome_trace, plots

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "result.json", folder / "timeline.json"]
    written[0].write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    chrome_trace.write(result, written[1])
    return written + plots.write(result, folder)
