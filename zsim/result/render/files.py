"""What `--out DIR` writes."""

from __future__ import annotations

import json
from pathlib import Path

from zsim.result.render import chrome_trace, html, memory_snapshot, plots
from zsim.result.spec import Result


def write(result: Result, directory: Path | str) -> list[Path]:
    """Writes everything to `directory` (created); returns what was written."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "result.json"
    said.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    snapshot, report = folder / "memory.pickle", folder / "report.html"
    memory_snapshot.write(result, snapshot)
    html.write(result, report)
    return [said, snapshot, report, *chrome_trace.write(result, folder / "timeline.json"), *plots.write(result, folder)]
