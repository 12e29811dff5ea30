"""CSV files as people save them: with other separators, cut rows and numbers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.validation.published import predict
from zsim.validation.rows import REQUIRED, read_rows
from zsim.validation.tables import read_table

HEADER = [*REQUIRED, "tokens_per_s_per_gpu", "peak_mem_gib_allocated"]
CELLS = ["a", "s", "llama-7b", "2048", "A100-80GB", "8", "DeepSpeed", "zero3", "bf16", "1", "100", "40"]


def table(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("lines", "line", "says"),
    [
        ([";".join(HEADER), ";".join(CELLS)], 1, "separated by semicolons, not by commas"),
        (["\t".join(HEADER), "\t".join(CELLS)], 1, "separated by tabs, not by commas"),
        ([",".join(HEADER).upper(), ",".join(CELLS)], 1, "names of columns are in lower case"),
        ([",".join(HEADER[1:]), ",".join(CELLS[1:])], 1, "missing columns: id"),
        ([",".join([*HEADER, "gpu"]), ",".join([*CELLS, "H100"])], 1, "gpu: this column is there twice"),
        ([",".join(HEADER), "", ",".join([*CELLS, "9"])], 3, "has 13 cells, and the header 12"),
        ([",".join(HEADER), ",".join(CELLS[:5])], 2, "has 5 cells, and the header 12"),
        ([""], 1, "missing columns"),
    ],
)
def test_what_is_no_table_is_refused_at_its_line(tmp_path: Path, lines: list[str], line: int, says: str) -> None:
    path = table(tmp_path, *lines)
    with pytest.raises(InputError) as refused:
        read_rows(path)
    assert says in str(refused.value)
    assert (refused.value.file, refused.value.line) == (path, line)


def test_spaces_marks_and_empty_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbf a , b \r\n\r\n 1 , \r\n,\r\n")
    assert read_table(path, ("a", "b")) == [(3, {"a": "1", "b": ""})]


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("n_gpus", "nan", "nan is not finite"),
        ("micro_batch", "1e400", "1e400 is not finite"),
        ("seq_len", "4k", "'4k' is not a number"),
        ("tokens_per_s_per_gpu", "0", "0 is not greater than 0"),
        ("tokens_per_s_per_gpu", "-5", "-5 is not greater than 0"),
        ("tokens_per_s_per_gpu", "inf", "inf is not finite"),
        ("peak_mem_gib_allocated", "-1", "-1 is not greater than 0"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused_by_row(tmp_path: Path, column: str, value: str, says: str) -> None:
    cells = [value if name == column else cell for name, cell in zip(HEADER, CELLS, strict=True)]
    (row,) = read_rows(table(tmp_path, ",".join(HEADER), ",".join(cells)))
    assert predict(row).refused == f"{column}: {says}"
