"""The planner against published runs; the fast two of the ten in `published.py`, which prints all."""

from pathlib import Path

import pytest

from zsim.validation.rows import read_folder

from .published import PUBLISHED, RUNS, compare
from .test_runs import Inline


@pytest.mark.parametrize("name", ["gist-a800-1", "tt-h100-202412-8b-n8-fsdp"])
def test_the_choice_is_not_worse_than_the_published_one(name: str, tmp_path: Path) -> None:
    found = compare(next(row for row in read_folder(PUBLISHED) if row.id == name), tmp_path, Inline(), 1)
    assert found.published["status"] == "ok"
    assert found.no_worse


def test_they_are_ten_of_several_sources_machines_and_sizes() -> None:
    rows = [row for row in read_folder(PUBLISHED) if row.id in RUNS]
    assert len(rows) == 10
    assert len({row.source for row in rows}) >= 6
    assert len({row["gpu"] for row in rows}) >= 4
    assert len({row["model"] for row in rows}) >= 5
