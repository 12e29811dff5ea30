"""Every command of docs/questions.md does what it is there for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from zsim.cli.app import main

ROOT = Path(__file__).parents[2]
FSDP, DEEPSPEED = (
    ROOT / "scenarios" / name for name in ("llama31_8b_512xh100_fsdp2.yaml", "llama31_8b_4xa100_zero2.yaml")
)


def commands() -> list[tuple[str, str]]:
    """Question and command of each row of its tables; what stands after another command is an option of it."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs" / "questions.md").read_text(encoding="utf-8"), re.M)
    found = [(question, re.findall(r"`([^`]+)`", text)) for question, text in rows]
    first = {code: question for question, codes in reversed(found) for code in codes[:1] if code.startswith("zsim ")}
    return [(question, code) for code, question in reversed(first.items())]


def test_all_of_them_are_found() -> None:
    assert len(commands()) >= 14


@pytest.mark.parametrize(("question", "command"), commands(), ids=[question for question, _ in commands()])
def test_command(question: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = DEEPSPEED if "--stages" in command else FSDP
    arguments = [str(scenario) if part == "S" else part for part in shlex.split(command)[1:]]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)
    said = capsys.readouterr().out
    assert said.startswith(("FITS", "(A)"))
