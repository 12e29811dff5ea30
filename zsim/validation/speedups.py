"""What published runs in float8 gained on the same runs in 16 bits, and what is predicted of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean

from zsim.validation import stated
from zsim.validation.published import Prediction, predict
from zsim.validation.rows import Row

_SAME = ("source", "gpu", "n_gpus", "seq_len", "micro_batch", "activation_checkpoint", "compile")


def pairs(rows: Iterable[Row], others: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Each row in float8 with the one in 16 bits of the same source, machine and batch, of `rows` or `others`."""
    listed = list(rows)
    plain = {_key(row): row for row in (*others, *listed) if row["precision"].startswith("bf16")}
    return [(row, plain[_key(row)]) for row in listed if stated.float8(row) and _key(row) in plain]


def table(rows: Iterable[Row], others: Iterable[Row]) -> Iterator[str]:
    """Markdown lines."""
    found = [(predict(low), predict(plain)) for low, plain in pairs(rows, others)]
    yield "\n| speedup by float8 | over | measured | predicted | error |\n|---|---|--:|--:|--:|"
    errors = []
    for low, plain in found:
        measured, predicted = _times(low, plain)
        errors.append(100 * (predicted / measured - 1))
        yield f"| {low.row.id} | {plain.row.id} | {measured:.2f} | {predicted:.2f} | {errors[-1]:+.1f} % |"
    if errors:
        yield f"\nMean error {fmean(map(abs, errors)):.1f} %, bias {fmean(errors):+.1f} %."


def _times(low: Prediction, plain: Prediction) -> tuple[float, float]:
    assert low.step is not None
    assert plain.step is not None
    measured = [p.measured_s or float("nan") for p in (plain, low)]
    return measured[0] / measured[1], plain.step.step_s / low.step.step_s


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row.get(column) for column in _SAME)
