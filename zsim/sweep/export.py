"""A sweep's rows as CSV or Parquet, written as they are read."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zsim.document import flat
from zsim.errors import InputError
from zsim.sweep.evaluate import COLUMNS
from zsim.sweep.store import Store

BATCH = 10_000
_EXTRA = ("wall_s", "zsim", "engine", "sources")


def export(store: Store, path: Path) -> int:
    """Write the store's sweep to `path`, one column per input and per outcome; returns the number of rows.

    Raises InputError for an ending that is not known, or where pyarrow is missing for Parquet.
    """
    if path.suffix == ".csv":
        return _csv(store, path)
    if path.suffix == ".parquet":
        return _parquet(store, path)
    raise InputError("is not known by its ending", path, accepted=".csv or .parquet")


def records(store: Store, order: str = "position") -> Iterator[dict[str, Any]]:
    """The rows as flat mappings: inputs under their dotted names, then the outcome."""
    names = ("inputs", *COLUMNS, *_EXTRA)
    for inputs, *values in store.rows(names, order):
        yield dict(flat(json.loads(inputs))) | dict(zip(names[1:], values, strict=True))


def _inputs(store: Store) -> list[str]:
    """All input columns, in the order of their first appearance."""
    names: dict[str, None] = {}
    for (inputs,) in store.rows(("inputs",)):
        names.update(dict(flat(json.loads(inputs))))
    return list(names)


def _csv(store: Store, path: Path) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        names = [*_inputs(store), *COLUMNS, *_EXTRA]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for record in records(store):
            writer.writerow(map(record.get, names))
            count += 1
    return count


def _parquet(store: Store, path: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError("needs pyarrow", path, accepted="pip install pyarrow, or a name that ends in .csv") from None
    kinds = {"TEXT": pa.string(), "REAL": pa.float64(), "INTEGER": pa.int64()}
    names = _inputs(store)
    schema = pa.schema(
        [(name, pa.string()) for name in names]
        + [(name, pa.bool_() if name == "fits" else kinds[kind]) for name, kind in COLUMNS.items()]
        + [(name, pa.float64() if name == "wall_s" else pa.string()) for name in _EXTRA]
    )
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for batch in _batches(records(store)):
            columns: dict[str, list[Any]] = {name: [_text(record.get(name)) for record in batch] for name in names}
            columns |= {name: [record[name] for record in batch] for name in (*COLUMNS, *_EXTRA)}
            columns["fits"] = [None if fits is None else bool(fits) for fits in columns["fits"]]
            writer.write_table(pa.table(columns, schema))
            count += len(batch)
    return count


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _batches(items: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
