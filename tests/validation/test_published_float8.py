"""Published runs in float8: all are read, their first errors stay, and what float8 gains is near what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from zsim.errors import NotModeled
from zsim.model.spec import Float8
from zsim.validation import stated
from zsim.validation.evidence import setup_of
from zsim.validation.rows import Row, read_folder
from zsim.validation.speedups import pairs, table

PUBLISHED = Path(__file__).parents[2] / "validation" / "published"
FOLDER = PUBLISHED / "float8"
ROWS = {row.id: row for row in read_folder(FOLDER)}


def row(precision: str, framework: str = "torchtitan (FSDP2)") -> Row:
    return Row("rows.csv", 2, {"precision": precision, "framework": framework})


def test_the_first_errors_are_on_record_for_every_row() -> None:
    record = yaml.safe_load((FOLDER / "blind.yaml").read_text())
    assert set(record["errors"]) == set(ROWS)
    assert {r["split"] for r in ROWS.values()} == {"test"}
    assert set(yaml.safe_load((FOLDER / "explained.yaml").read_text())) <= set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_read(name: str) -> None:
    setup = setup_of(ROWS[name])
    assert (setup.workload.float8 is None) == ("fp8" not in ROWS[name]["precision"])
    assert setup.workload.compile


def test_words_of_a_precision() -> None:
    assert stated.float8(row("bf16")) is None
    assert stated.float8(row("fp8 linear")) == Float8("tensorwise", ("output",))
    assert stated.float8(row("fp8 rowwise_with_gw_hp")) == Float8("rowwise_with_gw_hp", ("output",))
    gathered = Float8("tensorwise", ("output",), all_gather=True, precompute=True)
    assert stated.float8(row("fp8 tensorwise, fp8 all-gather")) == gathered
    for other in (row("fp8 matmul, bf16 params"), row("fp8 linear", "LLMQ (own C++/CUDA engine)")):
        with pytest.raises(NotModeled, match="float8 that is not torchao's"):
            stated.float8(other)


def test_speedups_of_fitted_gpus() -> None:
    """Over the same run in 16 bits, which is predicted by what was fitted; float8 adds nothing fitted."""
    rows, others = read_folder(FOLDER), read_folder(PUBLISHED)
    found = pairs(rows, others)
    assert len(found) == 11
    hopper = [r for r in rows if r["gpu"] == "H100"]
    lines = [line for line in table(hopper, others) if line.startswith("| ao-")]
    assert len(lines) == 2
    for line in lines:
        *_, measured, predicted, _, _ = line.split("|")
        assert float(predicted) == pytest.approx(float(measured), rel=0.03)
