"""The one error that a user's input can cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class InputError(Exception):
    """Bad input, said once and clearly: where, which field, what was wrong, what is accepted.

    The command line prints it without a traceback and exits with 2. Anything else that escapes is a bug
    and shows its traceback.
    """

    message: str
    file: Path | str | None = None
    line: int | None = None
    field: str | None = None
    accepted: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = str(self.file) if self.file is not None else ""
        if where and self.line is not None:
            where += f":{self.line}"
        parts = [part for part in (where, self.field, self.message) if part]
        text = ": ".join(parts)
        if self.accepted:
            text += f"\n  accepted: {self.accepted}"
        for note in self.notes:
            text += f"\n  {note}"
        return text


class NotModeled(InputError):
    """The framework accepts this, zsim does not simulate it (yet); refused rather than guessed."""
