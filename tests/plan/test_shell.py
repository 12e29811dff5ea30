"""What bash makes of a script, as far as it decides about the command that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.recipes import read_file, said
from zsim.plan.shell import Command, commands

TRAIN = "python t.py --per_device_train_batch_size"


def last(text: str) -> Command:
    return commands(text.splitlines())[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (': "${A:=4}"\nrun $A', ["run", "4"]),
        (': "${A:=4}"\n: "${A:=5}"\nrun $A', ["run", "4"]),
        ("A=3\n: ${A:=4}\nrun $A", ["run", "3"]),
        ('B=8\nrun "${A:-${B}}"', ["run", "8"]),
        ('run "${A:-${B:-${C:-9}}}"', ["run", "9"]),
        ("run ${A:-${B}}", ["run", "${A:-${B}}"]),  # neither is known
        ("n=4\nrun $(expr 64 / $n / 2)", ["run", "8"]),
        ("n=4\nrun `expr 8 \\* $n + 1`", ["run", "33"]),
        ("run $(expr 64 / $n)", ["run", "$(expr\N{NO-BREAK SPACE}64\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}$n)"]),
    ],
)
def test_values(text: str, words: list[str]) -> None:
    assert last(text).words == words


def test_a_default_is_not_set_in_a_branch_that_is_not_taken() -> None:
    assert last('if [ 1 -gt 2 ]; then\n  : "${A:=4}"\nfi\nrun ${A:-5}').words == ["run", "5"]


def test_a_here_document_within_what_a_command_prints() -> None:
    text = 'N="$(python - <<PY\nprint("it\'s a quotation: \\"")\nPY\n)"\nrun --a 1\n'
    assert last(text).words == ["run", "--a", "1"]


@pytest.mark.parametrize("between", ["", "# the rest", "\n\n# the rest"])
def test_a_blank_line_after_a_backslash(between: str) -> None:
    """bash ends the command there; options are nothing else than its own, and another command is another one."""
    assert last(f"run --a 1 \\\n{between}\n  --b 2").words == ["run", "--a", "1", "--b", "2"]
    assert [each.words for each in commands(f"run --a 1 \\\n{between}\nother b".splitlines())] == [
        ["run", "--a", "1"],
        ["other", "b"],
    ]


def test_an_array_of_variables_before_a_command() -> None:
    command = last('S=(A=1 B=2)\nenv "${S[@]}" run')
    assert command.words == ["run"]
    assert {name: value for name, (value, _) in command.environment.items()} == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("value", "then"),
    [
        ("$[$ALL/($NODES*$EACH)]", "8"), ("$[ALL / 16 - 1]", "7"), ("$(($ALL/($NODES*$EACH)))", "8"),
        ("$[$ALL/$UNKNOWN]", "$[128/$UNKNOWN]"),
    ],
)  # fmt: skip
def test_arithmetic_in_both_of_bashs_forms(value: str, then: str) -> None:
    assert last(f"ALL=128\nNODES=2\nEACH=8\nACC={value}\nrun --a $ACC").words[-1].replace("\xa0", " ") == then


@pytest.mark.parametrize("program", ["$(which swift)", "`which swift`", '"$(command -v swift)"', "$( which swift )"])
def test_where_a_program_lies(program: str) -> None:
    assert last(f"torchrun --nproc_per_node 2 {program} sft").words[-2:] == ["swift", "sft"]


def test_variables_that_another_command_fills() -> None:
    assert last("mapfile -t ARGS < <(list)\nrun $ARGS").unknown == {"ARGS"}


def test_how_often_it_saves_may_stay_unknown(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text(f"{TRAIN} 2 --save_steps $EVERY\n")
    assert said(read_file(tmp_path / "t.sh")[1])["saving.by"] == "trainer"


def test_fsdps_checkpointing_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_activation_checkpointing: true\n"
    )
    (tmp_path / "t.sh").write_text(
        "accelerate launch --config_file a.yaml t.py --per_device_train_batch_size 2 --gradient_checkpointing false\n"
    )
    assert said(read_file(tmp_path / "t.sh")[1])["checkpointing"] == "full"
