"""Follows a shell script's variables down to its commands, in their order; of branches, those that can be taken.

A script is taken to be started without arguments of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from zsim.plan.shell_values import calculated, holds, sheltered, without_redirections

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SEVERAL_ASSIGNED = re.compile(r"[A-Z_]+=\S*(?: [A-Z_]+=\S*)+")
_DECLARED = r"\s*(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?"
_ARRAY = re.compile(_DECLARED + r"([A-Za-z_]\w*)(\+?)=\((.*)\)\s*", re.DOTALL)
_ARRAY_OPENS = re.compile(_DECLARED + r"\w+\+?=\(")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?([-=])([^{}]*))?\}|\$(\w+)")
_COMMENTS = 50  # lines within one command
_DEEPEST = 8  # defaults within defaults: ${A:-${B:-c}}
_BUILTINS = ("export", "local", "readonly", "declare", "typeset", "-x", "-a", "-r", "-g", "-i")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_BRANCHES, _KEYWORDS = ("elif", "else", ";;"), ("then", "do", "{", "}", "!", "time")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*[\"']?(\w+)")
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
    always: bool = False  # one of its branches runs: it has an `else`, or a condition that holds
    opening: bool = True  # up to `then` or `do`
    live: bool | None = None  # whether the branch at hand is taken; None: not known


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
        filled = self.filled(text)
        try:
            words = without_redirections(shlex.split(filled))
        except ValueError:  # a variable that holds half of a quotation
            words = filled.split()
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
                self.branch(";;", [])
        self.simple(part, line, conditional)

    def simple(self, words: list[str], line: int, conditional: bool) -> None:
        """One command; `conditional`: it follows && or ||."""
        while words and words[0] in (*_KEYWORDS, *_OPENS, *_CLOSES, *_BRANCHES):
            word, *words = words
            if word in _OPENS:
                block = _Block(dict(self.values), live=self.condition(word, words))
                self.blocks.append(block)
                if word in ("for", "select") and words:
                    self.values[words[0]] = None
                    return
                if word == "case":
                    return
                words = [] if words[:1] in (["["], ["[["], ["test"]) else words
            elif word in _CLOSES:
                self.close()
            elif word in _BRANCHES:
                self.branch(word, words)
                words = [] if word == "elif" and words[:1] in (["["], ["[["], ["test"]) else words
            elif word in ("then", "do") and self.blocks:
                self.blocks[-1].opening = False
                self.blocks[-1].always |= self.blocks[-1].live is True
        if self.blocks and words and words[0].endswith(")") and "(" not in words[0].lstrip("("):
            words = words[1:]  # a pattern of `case`
        if words and self.blocks and self.blocks[-1].opening:
            self.blocks[-1].live = None  # a condition of several commands
        if any(block.live is False for block in self.blocks):
            return
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
        elif words and words[0] in ("read", "mapfile", "readarray"):
            self.values.update(dict.fromkeys(word for word in words[1:] if not word.startswith("-")))
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
            if words and _SEVERAL_ASSIGNED.fullmatch(words[0]):  # an array of them
                words = [*words[0].split(), *words[1:]]
        unknown = frozenset(name for name, value in self.values.items() if value is None)
        if words:
            self.found.append(Command(line, _flat(words), environment, unknown))

    def assign(self, name: str, value: str, adds: bool, line: int, gap: str = "") -> None:
        if adds:
            before = self.values.get(name, "")
            value = f"${name}{gap}{value}" if before is None else f"{before}{gap}{value}"
        computed = ("$(" in value or "`" in value) and "--" not in value  # by another command
        self.values[name] = None if computed else value
        if name in self.exported:
            self.exported[name] = line

    def condition(self, word: str, words: list[str]) -> bool | None:
        """Whether what follows `if`, `elif`, `while` or `until` holds, before its first round; None: not known."""
        if word in ("for", "select"):
            own = words[:1] != [] and words[0].isidentifier() and words[1:] in (["in", "$@"], ["in", "$*"], [])
            return False if own else None
        known = holds(words)
        if word in ("while", "until"):  # how often it runs is not known
            return False if known is (word == "until") else None
        return known

    def branch(self, word: str, words: list[str]) -> None:
        if not self.blocks:
            return
        block = self.blocks[-1]
        self.end(block)
        taken = block.always
        self.values = dict(block.before)
        block.opening = word == "elif"
        block.live = False if taken else self.condition(word, words) if word == "elif" else None
        block.always |= word == "else"

    def end(self, block: _Block) -> None:
        if block.live is not False:
            block.ends.append(self.values)

    def close(self) -> None:
        """After a block a variable is known if every way through it leaves the same value.

        One that some way does not set at all has the value of the others, as a command could not do without; but not
        where it holds options, which a command can.
        """
        if not self.blocks:
            return
        block = self.blocks.pop()
        self.end(block)
        ends = block.ends + ([] if block.always else [block.before])
        names = dict.fromkeys(name for end in ends for name in end)
        self.values = {}
        for name in names:
            left = {end[name] for end in ends if name in end}
            bare = any(name not in end for end in ends) and any(str(value).lstrip().startswith("-") for value in left)
            self.values[name] = None if len(left) > 1 or bare else left.pop()

    def filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, sets, default = match.group(1) or match.group(4), match.group(2) == "=", match.group(3)
            found = self.values.get(name, default)
            if sets and name not in self.values and not any(block.live is False for block in self.blocks):
                self.values[name] = default  # ${A:=b}
            return match.group() if found is None else found

        text = text.replace("$#", "0")
        for _ in range(_DEEPEST if text.count("${") > 1 else 1):
            before, text = text, _VARIABLE.sub(value, text)
            if text == before:
                break
        return sheltered(calculated(text, self.values))


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(first line, text) of commands: what a backslash, an open quotation or an open parenthesis continues."""
    command, start, until, quote = "", 0, "", ""
    for number, line in enumerate(lines, start=1):
        if until:
            until = "" if line.strip() == until else until
            continue
        quoted = bool(quote)
        text = line if quoted else re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if command and not quoted and not text.strip() and _goes_on(lines, number):
            continue  # a comment between continued lines
        start = start or number
        if text.endswith("\\") and not quoted:
            command += text.removesuffix("\\") + " "
            quote = _quote_after(text.removesuffix("\\"), quote)
            continue
        command += text
        quote = _quote_after(text, quote)
        if quote:
            command += "\n"
            if (here := _HERE_DOCUMENT.search(line)) and "$(" in command:  # of a command whose output this is
                until, command = here.group(1), command.replace(here.group(), "")
            continue
        if _ARRAY_OPENS.match(command) and command.count("(") > command.count(")"):
            command += " "
            continue
        yield start, command.replace("\\\n", " ")
        if here := _HERE_DOCUMENT.search(command):
            until = here.group(1)
        command, start = "", 0
    if command:
        yield start, command  # its last line ends with a backslash


def _goes_on(lines: list[str], number: int) -> bool:
    """Whether options follow line `number`, which is empty or a comment: bash would end the command here, but then they
    would be none."""
    following = (line.strip() for line in lines[number : number + _COMMENTS])
    return next((line for line in following if line and not line.startswith("#")), "").startswith("-")


def _quote_after(text: str, quote: str) -> str:
    """The quotation mark that is open after `text`, where `quote` is before it; empty: none."""
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
    return quote


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
