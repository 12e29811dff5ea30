"""Reads the command in a shell script that starts a training run, as the arguments that it hands over.

Variables that the script itself sets are filled in; what a launcher (torchrun, deepspeed, accelerate) is told about
processes says for how many GPUs it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.plan.document import Document, read_text

# What a command must have to be one that trains.
_MARKS = ("per_device_train_batch_size", "deepspeed", "fsdp", "model_name_or_path")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:export\s+|local\s+|declare\s+-a\s+)?([A-Za-z_]\w*)=\((.*)\)\s*", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_PER_NODE = ("nproc_per_node", "num_gpus")
_NODES = ("nnodes", "num_nodes", "num_machines")


def parse_script(path: Path) -> Document:
    """The options of the one command in a script that trains, by name, with their lines. Raises InputError."""
    lines = read_text(path, "script").splitlines()
    commands = [(number, words) for number, words in _commands(lines) if _trains(words)]
    if not commands:
        raise InputError(
            "no command in it that trains with Hugging Face's Trainer", path,
            accepted="a command with --per_device_train_batch_size, --deepspeed or --fsdp",
        )  # fmt: skip
    if len(commands) > 1:
        raise InputError(
            f"{len(commands)} commands that train, at lines {', '.join(str(number) for number, _ in commands)}", path,
            accepted="a script with one",
        )  # fmt: skip
    first, words = commands[0]
    launcher, words = _launched(words)
    document = Document(path, _options(words))
    _locate(document, lines, first)
    if launcher is not None:
        document.launch = Document(path, _options(launcher))
        _locate(document.launch, lines, first)
    document.ranks = _ranks(document)
    return document


def _locate(document: Document, lines: list[str], first: int) -> None:
    """Where each option of the command at line `first` stands."""
    for name in document.data:
        spelling = re.compile(rf"--{name.replace('_', '[_-]')}\b")
        said = [n for n, text in enumerate(lines, 1) if spelling.search(text) and not text.lstrip().startswith("#")]
        line = next((n for n in said if n >= first), said[-1] if said else first)  # a variable may stand before
        document.places[(name,)] = document.file, line


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
    return words[at + 2 : end], words[end:]


def _commands(lines: list[str]) -> list[tuple[int, list[str]]]:
    """(line, words) of every command, continued lines joined and variables filled in."""
    variables: dict[str, str | None] = {}  # None: it has had several values
    found: list[tuple[int, list[str]]] = []
    for start, command in _joined(lines):
        if array := _ARRAY.fullmatch(command):
            _assign(variables, array.group(1), _filled(" ".join(array.group(2).split()), variables))
            continue
        words = shlex.split(_filled(command, variables))
        own = [word for word in words if word not in ("export", "local")]
        if own and all(_ASSIGNED.fullmatch(word) for word in own):
            for word in own:
                name, value = _ASSIGNED.fullmatch(word).groups()  # type: ignore[union-attr]
                _assign(variables, name, value)
        elif "=$((" in command:  # a calculation, which has spaces
            _assign(variables, command.strip().removeprefix("export ").partition("=")[0], None)
        elif words:
            found.append((start, _flat(words)))
    return found


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(first line, text) of commands: what a backslash, an open quotation or an open parenthesis continues."""
    command, start = "", 0
    for number, line in enumerate(lines, start=1):
        quoted = bool(command) and not command.endswith(" ")
        text = line if quoted else re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if command and not quoted and not text.strip():
            continue  # a comment between continued lines
        start = start or number
        command += text.removesuffix("\\") + " " if text.endswith("\\") and not quoted else text
        if text.endswith("\\") and not quoted:
            continue
        try:
            shlex.split(command)
        except ValueError:
            command += "\n"
            continue
        if re.match(r"\s*(?:export\s+)?\w+=\(", command) and command.count("(") > command.count(")"):
            command += " "
            continue
        yield start, command.replace("\\\n", " ")
        command, start = "", 0


def _assign(variables: dict[str, str | None], name: str, value: str | None) -> None:
    variables[name] = value if variables.get(name, value) == value else None


def _filled(text: str, variables: dict[str, str | None]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        found = variables.get(name, default)
        return match.group() if found is None else found

    return _VARIABLE.sub(value, text)


def _flat(words: list[str]) -> list[str]:
    """A quoted word that holds options, as a variable does, is several."""
    flat: list[str] = []
    for word in words:
        several = re.search(r"(^|\s)--[A-Za-z]", word) and re.search(r"\s", word)
        try:
            flat += shlex.split(word) if several else [word]
        except ValueError:
            flat.append(word)
    return flat


def _trains(words: list[str]) -> bool:
    return words[0] not in ("echo", "printf") and any(word.startswith(f"--{mark}") for word in words for mark in _MARKS)


def _options(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--switch` as a mapping; of a repeated one the last counts, as in argparse."""
    import yaml

    def plain(value: str) -> Any:
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
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


def _ranks(document: Document) -> int | None:
    """Number of processes that the launcher is told, whose options are no arguments of the training script."""
    data = dict(document.launch.data) if document.launch else document.data
    per_node = [data.pop(name) for name in _PER_NODE if name in data]
    nodes = [data.pop(name) for name in _NODES if name in data]
    whole = data.pop("num_processes", None)
    included = data.pop("include", None)
    if isinstance(whole, int):
        return whole
    if isinstance(included, str) and (listed := re.fullmatch(r"[\w.]+:([\d,]+)", included)):
        return len(listed.group(1).split(","))
    if per_node and isinstance(per_node[0], int) and (not nodes or isinstance(nodes[0], int)):
        return int(per_node[0] * (nodes[0] if nodes else 1))
    return None
