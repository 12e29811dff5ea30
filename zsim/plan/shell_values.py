"""What a shell script calculates and asks of its variables, as far as their values are known."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)|\$\[([^\[\]]*)\]")  # the second is bash's old form
_EXPR = re.compile(r"(?:\$\(\s?|`\s?)expr\s([\d\s+*/%\\'\"-]{1,80})(?:\)|`)")  # of numbers alone
_SUBSTITUTED = re.compile(
    r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$\[[^\[\]]*\]|`[^`]*`"
)
_WHICH = re.compile(r"(?:\$\(\s*|`\s*)(?:which|command\s+-v)\s+([\w.-]+)\s*[)`]")
_REDIRECTION = re.compile(r"(?:\d*|&)(>>?|<|<<<|<<-?|>\|)(?!\()(&?\S*)")
_GAP = "\N{NO-BREAK SPACE}"  # which ends no word
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}  # fmt: skip
_NUMBERS = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip


def calculated(text: str, values: Mapping[str, str | None]) -> str:
    """`text` with $(( ... )), $[ ... ] and $(expr ...) of whole numbers calculated where all variables are known, and
    $(which PROGRAM) as its name."""

    def result(match: re.Match[str]) -> str:
        number = _number(match.group(match.lastindex or 0), values)
        return match.group() if number is None else str(number)

    return _WHICH.sub(r"\1", _EXPR.sub(result, _ARITHMETIC.sub(result, text)))


def _number(expression: str, values: Mapping[str, str | None]) -> int | None:
    def of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(values.get(node.id) or "?")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](of(node.left), of(node.right))
        raise ValueError

    try:
        plain = re.sub(r"[\\'\"]", "", expression).strip()  # 2 \* 4, else the shell's pattern
        return of(ast.parse(plain.replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return None


def sheltered(text: str) -> str:
    """`text` with what commands would print, and what is not known, as one word each: $(nvidia-smi -L)."""
    return _SUBSTITUTED.sub(lambda match: re.sub(r"\s+", _GAP, match.group()).replace('"', "").replace("'", ""), text)


def without_redirections(words: list[str]) -> list[str]:
    """The words of a command without `> log`, `2>&1` and the like."""
    left: list[str] = []
    skip = False
    for word in words:
        redirection = _REDIRECTION.fullmatch(word)
        if not skip and redirection is None:
            left.append(word)
        skip = not skip and redirection is not None and not redirection.group(2)
    return left


def holds(words: list[str]) -> bool | None:
    """Whether a condition such as [ "$A" = "b" ] is true; None where that is not known.

    A script is taken to be started without arguments, as to whether there are any; not where one chooses: "$1" = big.
    """
    negated = words[:1] == ["!"]
    words = words[1:] if negated else words
    if words in (["true"], [":"], ["false"]):
        return (words != ["false"]) != negated
    if len(words) < 2 or words[0] not in ("[", "[[", "test"):
        return None
    words = words[1:] if words[0] == "test" else words[1:-1]
    if words[:1] == ["!"]:
        negated, words = not negated, words[1:]
    if words[0:1] in (["-z"], ["-n"]) or "" in words[1:]:
        words = [re.sub(r"\$\{?\d+\}?", "", word) for word in words]
    if any("$" in word or "`" in word for word in words):
        return None
    known = _test(words)
    return None if known is None else known != negated


def _test(words: list[str]) -> bool | None:
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, operation, right = words
    if operation in ("=", "==", "!=") and not set(right) & set("*?["):
        return (left == right) != (operation == "!=")
    if operation in _NUMBERS and all(re.fullmatch(r"-?\d+", each) for each in (left, right)):
        return bool(_NUMBERS[operation](int(left), int(right)))
    return None
