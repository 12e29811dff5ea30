"""CSV files that people keep of measurements."""

from __future__ import annotations

import csv
from pathlib import Path

from zsim.errors import InputError


def read_table(path: str | Path, required: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """(line, cells by column) of every row; empty lines are none.

    Raises InputError for a file that is no table separated by commas, a column that is missing or there twice, and a
    row with more or fewer cells than the header, as a comma without quotes around it makes it.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            _check(path, header, required)
            rows = []
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    message = f"has {len(cells)} cells, and the header {len(header)}"
                    raise InputError(message, path, reader.line_num, accepted="quotes around a cell with a comma in it")
                rows.append((reader.line_num, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}))
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path) from None


def _check(path: Path, header: list[str], required: tuple[str, ...]) -> None:
    accepted = ", ".join(required)
    if missing := [column for column in required if column not in header]:
        alone = header[0] if len(header) == 1 else ""
        separator = next((name for sign, name in ((";", "semicolons"), ("\t", "tabs")) if sign in alone), None)
        why = f"its columns are separated by {separator}, not by commas" if separator else ""
        lower = {name.lower() for name in header}
        notes = ("names of columns are in lower case",) if any(name in lower for name in missing) else ()
        raise InputError(why or f"missing columns: {', '.join(missing)}", path, 1, accepted=accepted, notes=notes)
    if twice := [name for name in dict.fromkeys(header) if name and header.count(name) > 1]:
        raise InputError("this column is there twice", path, 1, twice[0])
