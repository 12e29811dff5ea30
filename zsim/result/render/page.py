"""Text for a terminal, a pipe or a log file: lines that are not too wide, and in colour where a terminal shows them."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

NARROWEST, WIDEST = 40, 100
STYLES = {"bold": "1", "bold green": "1;32", "bold yellow": "1;33", "bold red": "1;31"}  # ANSI


class Page:
    """Lines of at most `width` columns, or of the terminal's, in `file`, or on standard output.

    NO_COLOR and FORCE_COLOR say whether they are styled, otherwise whether the file is a terminal that can show it.
    """

    def __init__(self, file: TextIO | None = None, width: int | None = None) -> None:
        self.file = sys.stdout if file is None else file
        self.width = max(NARROWEST, min(width or shutil.get_terminal_size().columns, WIDEST))
        self.blocks = "utf" in (self.file.encoding or "utf-8").lower()
        # Windows' older consoles print the codes themselves
        plain = os.name == "nt" or os.environ.get("TERM") in ("dumb", "unknown") or not self.file.isatty()
        self.styled = not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or not plain)

    def line(self, text: str = "", style: str = "") -> None:
        if style and self.styled:
            text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
        print(text, file=self.file, flush=True)  # whoever reads a pipe has the report while changes are simulated

    def say(self, text: str, style: str = "", indent: int = 0) -> None:
        for line in wrap(text, self.width - indent):
            self.line(" " * indent + line, style)

    def section(self, title: str, lines: Iterable[str]) -> None:
        self.line()
        self.say(title, "bold")
        for line in lines:
            self.say(line, indent=2)


def wrap(line: str, width: int) -> list[str]:
    """Lines of at most `width` columns, or of one word; what follows the first is indented."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
