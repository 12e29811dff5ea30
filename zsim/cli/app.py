"""The command line: which commands there are, and what their failures look like.

Only the module of the command that was asked for is imported; `--help` lists the others from the table below.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from zsim.errors import InputError

# command -> module and what --help says. Each module has a typer app named `app` with one command.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("zsim.cli.run", "Simulate a scenario: does it fit, how fast is it, what holds it back? (the default)"),
    "compare": ("zsim.cli.compare", "Several scenarios, or one under several ZeRO stages, side by side."),
    "sweep": ("zsim.cli.sweep", "Every scenario of a grid into one table; continues where it stopped."),
    "plan": ("zsim.cli.plan", "Which setup is the fastest or cheapest that fits? Searches, and writes it."),
    "merge": ("zsim.cli.merge", "Join the stores of a sweep's shards, and export."),
    "explain": ("zsim.cli.explain", "The critical path of a step, where every second goes, and what would help."),
    "program": ("zsim.cli.program", "What one rank's host issues, in order: phase, layer, lane, op, size, waits."),
    "memory": ("zsim.cli.memory", "The textbook's bytes per GPU for DDP, ZeRO-1, 2, 3 and CPU offload."),
    "topo": ("zsim.cli.topo", "Show and check a machine: its tree, links, paths between GPUs and rings."),
    "collectives": ("zsim.cli.collectives", "What nccl-tests would print on a machine: time and bandwidth by size."),
    "calibrate": ("zsim.cli.calibrate", "Fit the cost profiles to evidence."),
    "validate": ("zsim.cli.validate", "Predictions against published, measured and recorded runs."),
    "read": ("zsim.cli.read", "What a file is (DeepSpeed, accelerate, model, topology ...) and what it says."),
    "from": ("zsim.cli.convert", "Write a scenario from the configuration files you have."),
    "schema": ("zsim.cli.schema", "Print the JSON Schema of scenario files, for editors."),
}

# A simulation makes some hundred thousand objects that live until its end. Searching them for cycles at Python's usual
# pace would take a fifth of the command's time; a long sweep still gets rid of what it has finished with.
COLLECT_AFTER = 1_000_000

USAGE = "zsim [COMMAND] [OPTIONS] [ARGUMENTS]"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 ok, 2 bad input, 3 does not fit in memory."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(COLLECT_AFTER)
    try:
        sys.exit(dispatch(arguments))
    except InputError as error:
        print(f"zsim: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = _named(error, arguments)
        if where is None:
            raise
        print(f"zsim: {where}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def dispatch(arguments: list[str]) -> int:
    """The exit code of the command that `arguments` ask for, where that does not exit by itself.

    A first argument that is no command is a scenario.
    """
    first = arguments[0] if arguments else "--help"
    if first in ("--help", "-h", "help"):
        print(help_text())
        return 0
    if first == "--version":
        from zsim import __version__

        print(f"zsim {__version__}")
        return 0
    name = first if first in COMMANDS else "run"
    if name == "run" and first != "run":
        _refuse_misspelt_command(first)
    else:
        arguments = arguments[1:]
    if name == "calibrate" and arguments and arguments[0] not in ("capture", "published", "--help"):
        arguments = ["capture", *arguments]
    app = importlib.import_module(COMMANDS[name][0]).app
    import typer

    usage_error: Any = typer.BadParameter.__bases__[0]  # click's UsageError, wherever this typer keeps its click
    try:
        result = app(arguments, prog_name=f"zsim {name}", standalone_mode=False)
    except usage_error as error:
        raise InputError(error.format_message(), notes=(f"zsim {name} --help lists what it takes",)) from None
    return result if isinstance(result, int) else 0


def _named(error: OSError, arguments: Sequence[str]) -> str | None:
    """The file of the command line, or in a folder of it, that could not be written or read; None: a bug."""
    import errno

    if error.filename is None:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        return "standard output, or a file that was to be written" if error.errno in full else None
    given = [text.partition("=")[2] if text.startswith("--") else text for text in arguments]
    path = os.path.abspath(str(error.filename))
    inside = (os.path.commonpath([path, os.path.abspath(text)]) == os.path.abspath(text) for text in given if text)
    return str(error.filename) if any(inside) else None


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"usage: {USAGE}", "       zsim SCENARIO.yaml", "", "commands (zsim COMMAND --help says more):"]
    lines += [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "exit codes: 0 ok, 2 bad input, 3 does not fit in memory"]
    return "\n".join(lines)


def _refuse_misspelt_command(first: str) -> None:
    """`zsim memroy` is no scenario."""
    if first.startswith("-") or os.path.exists(first) or "." in first or os.sep in first:
        return
    import difflib

    close = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = (f"did you mean zsim {close[0]}?",) if close else ()
    raise InputError(
        f"{first!r} is neither a command nor a file", accepted=", ".join(COMMANDS) + ", or a scenario.yaml", notes=hint
    )
