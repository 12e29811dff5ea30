"""The parts of a step: those that a source timed, and that they make up the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.validation.parts import parts

FOLDER = Path(__file__).parents[2] / "validation" / "published"


def test_parts_of_llama_405b() -> None:
    found = {part.name: part for part in parts(FOLDER)}
    assert sum(found[name].predicted_s for name in ("forward", "backward", "update")) == pytest.approx(
        found["step"].predicted_s
    )
    assert abs(found["forward"].error) < 15
    assert abs(found["backward"].error) < 15
    assert abs(found["update"].error) < 15
    assert abs(found["step"].error) < 10
