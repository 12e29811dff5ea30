"""Reads the command in a shell script that starts a training run, as the arguments that it hands over.

Variables that the script itself sets are filled in; what a launcher (torchrun, deepspeed, accelerate) is told about
processes says for how many GPUs it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from zsim.document import Document, read_text
from zsim.errors import InputError
from zsim.plan.script_recipe import from_launcher, nothing_trains, parse_recipe, program_at, program_name, recipe_of
from zsim.plan.shell import Command, commands
from zsim.plan.swift_start import task_of

# What a command must have to be one that trains.
_MARKS = ("per_device_train_batch_size", "deepspeed", "fsdp", "model_name_or_path")
_NAMED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_UNKNOWN = re.compile(r"\$(?:\{?(\w+)|\()|`")
_OWN_ARGUMENTS = re.compile(r"\$(?:[\d#]|\{\d)")
_PER_NODE = ("nproc_per_node", "num_gpus")
# torch/distributed/run.py, determine_local_world_size; deepspeed/launcher/runner.py: -1 is all
_OWN_COUNT: dict[str, tuple[Any, ...]] = {
    "nproc_per_node": ("gpu", "auto"), "num_gpus": (-1,), "num_nodes": (-1,),
}  # fmt: skip
MOST_CHARACTERS = 131_072  # of a line; Linux passes no longer argument on (MAX_ARG_STRLEN)
_NODES = ("nnodes", "num_nodes", "num_machines")
_COUNTS = (*_PER_NODE, *_NODES, "num_processes", "include")


def parse_script(path: Path) -> Document:
    """The options of the one command in a script that trains, by name, with their lines. Raises InputError."""
    lines = read_text(path, "script").splitlines()
    for number, text in enumerate(lines, start=1):
        if len(text) > MOST_CHARACTERS:
            raise InputError(f"a line of {len(text):,} characters is no command", path, number)
    said = (each for each in commands(lines) if each.words[0] not in ("echo", "printf"))
    found = [replace(each, words=from_launcher(each.words)) for each in said]
    training = [each for each in found if _trains(each.words) or recipe_of(_launched(each.words)[1])]
    if not training:
        raise nothing_trains(path, found)
    if len(training) > 1:
        raise InputError(
            f"{len(training)} commands that train, at lines {', '.join(str(each.line) for each in training)}", path,
            accepted="a script with one",
        )  # fmt: skip
    (command,) = training
    unknown = _refuse_unknown(command, path, lines)
    launcher, words = _launched(command.words)
    at = program_at(words)
    starting = Document(path, _options(words[:at] if launcher is None else launcher))
    if recipe := recipe_of(words):
        document = _recipe(path, command, words, recipe, lines, launcher is not None)
    else:
        program = program_name(words, launcher is not None)
        own = {name: value for name, value in _options(words[at:]).items() if at is not None or name not in _COUNTS}
        document = Document(path, own, script=True, program=program, environment=dict(command.environment))
        document.places[()] = path, command.line
        _locate(document, lines, command.line)
    if any(_OWN_ARGUMENTS.search(text) for text in lines if not text.lstrip().startswith("#")):
        document.notes.append(
            "the script is taken to be started without arguments of its own: $1 and the like are empty"
        )
    _locate(starting, lines, command.line)
    for options in (document, starting):
        for name, value in options.data.items():
            if isinstance(value, str) and (named := _UNKNOWN.match(value)):
                options.unknown[name] = _why(value, named.group(1), command)
    document.ranks = None if unknown else _ranks(starting)
    document.notes += unknown
    if launcher is None:
        document.notes += starting.notes
        return document
    document.launch = starting
    if (threads := starting.data.get("num_cpu_threads_per_process")) is not None:
        line = starting.place(("num_cpu_threads_per_process",))[1]
        document.environment["OMP_NUM_THREADS"] = str(threads), line if recipe is None else None
    return document


def _recipe(path: Path, command: Command, words: list[str], recipe: str, lines: list[str], launched: bool) -> Document:
    """The recipe that a command names, with the options that stand behind it."""
    given = words[(program_at(words) or 0) + 1 :]
    own = {name: value for name, value in _options(given).items() if value != recipe}
    own |= _options([f"--{word}" for word in given if re.match(r"[a-z]\w*=", word)])  # LLaMA-Factory's
    options = Document(path, own)
    _locate(options, lines, command.line)
    document = parse_recipe(command, recipe, options, launched)
    document.environment = {name: (value, None) for name, (value, _) in command.environment.items()}
    return document


def _locate(document: Document, lines: list[str], first: int) -> None:
    """Where each option of the command at line `first` stands: the last time that it is given there, as that counts."""
    last = next((n for n, text in enumerate(lines, 1) if n >= first and not text.rstrip().endswith("\\")), len(lines))
    for name in document.data:
        spelling = re.compile(rf"--{name.replace('_', '[_-]')}\b")
        said = [n for n, text in enumerate(lines, 1) if spelling.search(text) and not text.lstrip().startswith("#")]
        inside = [n for n in said if first <= n <= last]  # else in a variable, which may stand before, or in an array
        line = inside[-1] if inside else next((n for n in said if n >= first), said[-1] if said else first)
        document.places[(name,)] = document.file, line


def _refuse_unknown(command: Command, path: Path, lines: list[str]) -> list[str]:
    """Notes of variables that are not known among options of torchrun or deepspeed, which choose processes alone.

    Raises InputError for one where it could hold options of the training.
    """
    program = program_at(command.words) if _launched(command.words)[0] is None else None
    notes = []
    for n, (before, word) in enumerate(pairwise(["", *command.words])):
        named = _NAMED.fullmatch(word)
        if not named or (before.startswith("-") and "=" not in before):
            continue
        if n < (program or 0):
            notes.append(f"{_why(word, named.group(1), command)}, nor for how many GPUs it is")
            continue
        spelling = re.compile(rf"\$\{{?{named.group(1)}\b")
        at = [n for n, text in enumerate(lines, 1) if spelling.search(text) and not text.lstrip().startswith("#")]
        line = next((n for n in at if n >= command.line), at[-1] if at else command.line)
        raise InputError(_why(word, named.group(1), command), path, line, accepted="a variable that is set")
    return notes


def _why(text: str, name: str | None, command: Command) -> str:
    if name is None:
        return f"{text} is not known here: another command prints it, or it is calculated of what is not known"
    if name.isdecimal():
        return f"{text} is not known here: it is an argument of the script, taken to be started without any"
    if name in command.unknown:
        return f"{text} is not known here: it is set by what is not simulated (an if, a loop or another command)"
    return f"{text} is not known here: the script does not set it"


def _launched(words: list[str]) -> tuple[list[str] | None, list[str]]:
    """Options of `accelerate launch`, up to the script that it starts, and what follows; None: another launcher."""
    from zsim.plan.launch import SWITCHES

    at = next((n for n, pair in enumerate(pairwise(words)) if pair == ("accelerate", "launch")), None)
    if at is None:
        if "accelerate-launch" not in words and "accelerate.commands.launch" not in words:
            return None, words
        at = next(n - 1 for n, word in enumerate(words) if word in ("accelerate-launch", "accelerate.commands.launch"))
    end = at + 2
    while end < len(words) and words[end].startswith("-"):
        name, equals, _ = words[end].lstrip("-").replace("-", "_").partition("=")
        end += 1 if equals or name in (*SWITCHES, "m", "q") else 2
    module = ["-m"] if {"-m", "--module"} & set(words[at + 2 : end]) else []
    return words[at + 2 : end], module + words[end:]


def _trains(words: list[str]) -> bool:
    marked = any(word.startswith(f"--{mark}") for word in words for mark in _MARKS)
    return marked or task_of(program_name(words, False)) is not None


def _options(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--switch` as a mapping; of a repeated one the last counts, as in argparse."""
    import yaml

    def plain(value: str) -> Any:
        if re.fullmatch(r"\d+(:\d+)+", value):
            return value  # not YAML's number of base 60
        try:
            return yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):  # of a date that is none
            return value

    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = plain(value) if equals else True
            name = "" if equals else name
        elif name and options[name] is True:
            options[name] = plain(word)
        elif not word.strip():
            continue
        elif name and not word.endswith(".py") and word != "-m":
            before = options[name]
            options[name] = [*(before if isinstance(before, list) else [before]), plain(word)]
        else:
            name = ""
    return options


def _ranks(launcher: Document) -> int | None:
    """Number of processes that the launcher is told."""
    data = launcher.data
    counts = {name: _processes(launcher, name) for name in (*_PER_NODE, *_NODES, "num_processes") if name in data}
    whole = counts.get("num_processes")
    included = data.get("include")
    if whole is not None:
        return whole
    if isinstance(included, str) and (listed := re.fullmatch(r"[\w.]+:([\d,]+)", included)):
        return len(listed.group(1).split(","))
    per_node, nodes = ([counts[name] for name in names if name in counts] for names in (_PER_NODE, _NODES))
    if per_node and per_node[0] and (not nodes or nodes[0]):
        return per_node[0] * (nodes[0] or 1 if nodes else 1)
    return None


def _processes(launcher: Document, name: str) -> int | None:
    """A count that a launcher is told; None where it counts itself, or where the count is not known. InputError."""
    value = launcher.data[name]
    if name in launcher.unknown:
        launcher.notes.append(f"{name}: {launcher.unknown[name]}, nor for how many GPUs it is")
        return None
    own = _OWN_COUNT.get(name, ())
    if value in own or (name == "nnodes" and re.fullmatch(r"\d+:\d+", str(value))):
        launcher.notes.append(f"{name} {value}: for as many GPUs as there are")
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise launcher.error((name,), f"{value!r} is not a number of processes or nodes", "a whole number from 1")
    return value
