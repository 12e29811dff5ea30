"""Follows a shell script's variables down to its commands, in their order; of branches, what all of them leave."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:export\s+|local\s+|declare\s+-a\s+)?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*", re.DOTALL)
_COMPUTED = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=[\"']?(?:\$\(|`)")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_BUILTINS = ("export", "local", "readonly", "declare", "typeset", "-x", "-a", "-r", "-g", "-i")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_BRANCHES, _KEYWORDS = ("elif", "else", ";;"), ("then", "do", "{", "}", "!", "time")
_JOINTS = ("&&", "||", "|", "&", ";", ";;")


@dataclass(frozen=True)
class Command:
    """`environment`: what is set for it, with the line of each; `unknown`: variables that have no one value there."""

    line: int
    words: list[str]
    environment: dict[str, tuple[str, int]]
    unknown: frozenset[str]


@dataclass
class _Block:
    """An `if`, a loop or a `case`: values of its variables before it and after each of its branches."""

    before: dict[str, str | None]
    ends: list[dict[str, str | None]] = field(default_factory=list)
    always: bool = False  # it has an `else`: one of its branches runs


def commands(lines: list[str]) -> list[Command]:
    """Every command of a script, with continued lines joined and variables filled in."""
    shell = _Shell()
    for line, text in _joined(lines):
        shell.run(text, line)
    return shell.found


class _Shell:
    def __init__(self) -> None:
        self.values: dict[str, str | None] = {}  # None: not known
        self.exported: dict[str, int] = {}  # lines
        self.blocks: list[_Block] = []
        self.found: list[Command] = []

    def run(self, text: str, line: int) -> None:
        if array := _ARRAY.fullmatch(text):
            name, adds, items = array.groups()
            self.assign(name, self.filled(" ".join(items.split())), bool(adds), line, gap=" ")
            return
        words = shlex.split(self.filled(text))
        if (computed := _COMPUTED.match(text)) and len(words) > 1 and "--" not in text:  # spaces in $( ... )
            self.values[computed.group(1)] = None
            return
        part: list[str] = []
        conditional = False
        for word in words:
            ends = word in _JOINTS or word.endswith(";")
            if word not in _JOINTS:
                part.append(word.rstrip(";") if ends else word)
            if ends or word in (*_KEYWORDS, "else"):
                self.simple(part, line, conditional)
                conditional = word in ("&&", "||")
                part = []
            if word == ";;" or word.endswith(";;"):
                self.branch(";;")
        self.simple(part, line, conditional)

    def simple(self, words: list[str], line: int, conditional: bool) -> None:
        """One command; `conditional`: it follows && or ||."""
        while words and words[0] in (*_KEYWORDS, *_OPENS, *_CLOSES, *_BRANCHES):
            word, *words = words
            if word in _OPENS:
                self.blocks.append(_Block(dict(self.values)))
                if word in ("for", "select") and words:
                    self.values[words[0]] = None
                    return
                if word == "case":
                    return
            elif word in _CLOSES:
                self.close()
            elif word in _BRANCHES:
                self.branch(word)
        if self.blocks and words and words[0].endswith(")") and "(" not in words[0].lstrip("("):
            words = words[1:]  # a pattern of `case`
        own = [word for word in words if word not in _BUILTINS]
        if words and words[0] in _BUILTINS:
            for word in own:
                self.exported.update({word.partition("=")[0]: line} if words[0] == "export" else {})
        if own and all(_ASSIGNED.fullmatch(word) for word in own):
            for word in own:
                name, adds, value = _ASSIGNED.fullmatch(word).groups()  # type: ignore[union-attr]
                before = self.values.get(name)
                self.assign(name, value, bool(adds), line)
                if conditional and self.values[name] != before:
                    self.values[name] = None
        elif words and words[0] == "unset":
            for name in words[1:]:
                self.values.pop(name, None)
                self.exported.pop(name, None)
        elif words and words[0] == "read":
            self.values.update(dict.fromkeys(words[1:]))
        elif words and words[0] not in _BUILTINS:
            self.command(words, line)

    def command(self, words: list[str], line: int) -> None:
        environment = {
            name: (f"${name}" if (value := self.values.get(name)) is None else value, at)
            for name, at in self.exported.items()
            if name in self.values
        }
        while words and (words[0] == "env" or _ASSIGNED.fullmatch(words[0])):
            if words[0] != "env":
                name, _, value = words[0].partition("=")
                environment[name] = value, line
            words = words[1:]
        unknown = frozenset(name for name, value in self.values.items() if value is None)
        if words:
            self.found.append(Command(line, _flat(words), environment, unknown))

    def assign(self, name: str, value: str, adds: bool, line: int, gap: str = "") -> None:
        if adds:
            before = self.values.get(name, "")
            value = f"${name}{gap}{value}" if before is None else f"{before}{gap}{value}"
        self.values[name] = value
        if name in self.exported:
            self.exported[name] = line

    def branch(self, word: str) -> None:
        if self.blocks:
            block = self.blocks[-1]
            block.ends.append(self.values)
            block.always |= word == "else"
            self.values = dict(block.before)

    def close(self) -> None:
        """After a block a variable is known if every way through it leaves the same value.

        One that some way does not set at all has the value of the others, as a command could not do without; but not
        where it holds options, which a command can.
        """
        if not self.blocks:
            return
        block = self.blocks.pop()
        ends = [*block.ends, self.values] + ([] if block.always else [block.before])
        names = dict.fromkeys(name for end in ends for name in end)
        self.values = {}
        for name in names:
            left = {end[name] for end in ends if name in end}
            bare = any(name not in end for end in ends) and any(str(value).lstrip().startswith("-") for value in left)
            self.values[name] = None if len(left) > 1 or bare else left.pop()

    def filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match.group(1) or match.group(3), match.group(2)
            found = self.values.get(name, default)
            return match.group() if found is None else found

        return _VARIABLE.sub(value, text)


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
        if re.match(r"\s*(?:export\s+)?\w+\+?=\(", command) and command.count("(") > command.count(")"):
            command += " "
            continue
        yield start, command.replace("\\\n", " ")
        command, start = "", 0


def _flat(words: list[str]) -> list[str]:
    """A quoted word that holds options, as a variable does, is several."""
    flat: list[str] = []
    for word in words:
        several = re.search(r"(^|\s)--[A-Za-z]", word) and re.search(r"\s", word)
        try:
            flat += shlex.split(word) if several else [word]
        except ValueError:
            flat.append(word)
    return [word for word in flat if word not in ("$@", "$*", "${@}")]  # taken to be started without arguments
