"""Rows of published training runs: reading them, and which of them fit profiles and which test them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from zlib import crc32

from zsim.cluster import catalog
from zsim.errors import InputError
from zsim.validation.tables import read_table

REQUIRED = ("id", "source", "model", "seq_len", "gpu", "n_gpus", "framework", "strategy", "precision", "micro_batch")


@dataclass(frozen=True)
class Row:
    """One line of a CSV file with the columns of validation/published; empty cells are absent from `cells`."""

    file: str
    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """The cell. Raises InputError where it is empty."""
        value = self.cells.get(column)
        if value is None:
            raise InputError("not stated by the source", self.file, self.line, column)
        return value

    def get(self, column: str, default: str = "") -> str:
        return self.cells.get(column, default)

    def number(self, column: str) -> float | None:
        text = self.cells.get(column)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{text!r} is not a number", self.file, self.line, column) from None
        if not isfinite(value):
            raise InputError(f"{text} is not finite", self.file, self.line, column)
        return value

    def measured(self, column: str) -> float | None:
        """A number greater than 0; None where the cell is empty."""
        value = self.number(column)
        if value is not None and value <= 0:
            raise InputError(f"{value:g} is not greater than 0", self.file, self.line, column)
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` where the cell is empty."""
        value = self.number(column)
        if value is None and default is not None:
            return default
        if value is None or value < 1 or value != int(value):
            self[column]
            raise InputError(f"{value} is not a whole number of at least 1", self.file, self.line, column)
        return int(value)

    @property
    def id(self) -> str:
        return self["id"]

    @property
    def source(self) -> str:
        """Short name of who published it: what stands before the address."""
        return re.split(r"\s+(?:https?:|\(|docs/|scripts/|benchmarking)", self["source"])[0].strip()

    @property
    def split(self) -> str:
        """ "fit" or "test": as marked, else by the rule."""
        return self.get("split") or split_of(self)

    @property
    def step_s(self) -> float | None:
        """Seconds per optimizer step, printed or from tokens/s; None where the source has neither."""
        printed, rate = self.measured("step_time_s"), self.measured("tokens_per_s_per_gpu")
        if printed is not None:
            return printed
        if rate is None:
            return None
        return self.count("micro_batch") * self.count("grad_accum", 1) * self.count("seq_len") / rate


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a CSV file. Raises InputError where it is no table of them."""
    return [
        Row(str(path), line, {column: text for column, text in cells.items() if column and text})
        for line, cells in read_table(path, REQUIRED)
    ]


def read_folder(folder: str | Path) -> list[Row]:
    """The rows of all CSV files of a folder, in order of their names. Raises InputError where there are none."""
    if not Path(folder).is_dir():
        raise InputError("no such folder", folder)
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise InputError("holds no CSV files", folder)
    return [row for file in files for row in read_rows(file)]


def split_of(row: Row) -> str:
    """ "fit" or "test": by a checksum of source, model, GPU and sequence length, so that runs of one setup at several
    scales or in several versions of a table stay on one side."""
    key = "|".join((row.source, row["model"], gpu_name(row), row.get("seq_len")))
    return "fit" if crc32(key.encode()) % 2 else "test"


def gpu_name(row: Row) -> str:
    """The catalog's name of the row's GPU; what the catalog does not know comes back as the source writes it."""
    text = row["gpu"]
    stated = re.sub(r"\s*\(.*", "", text).strip()
    if stated.startswith("H100") and re.search(r"\b9[56](\.\d+)? ?Gi?B", text):
        return "H100-SXM-96GB"
    try:
        return catalog.device(stated).name
    except InputError:
        return stated
