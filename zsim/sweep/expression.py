"""Conditions on scenarios, such as "zero.stage == 3 or micro_batch * grad_accum <= 16".

A small part of Python's expressions, walked here rather than given to `eval`: comparisons, `and`/`or`/`not`,
arithmetic, `in`, constants, lists, and the fields of a scenario by their dotted paths. A field that is not set is None.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zsim.errors import InputError
from zsim.scenario.messages import names_at, section_at

ACCEPTED = "comparisons, and/or/not, in, + - * / // %, numbers, 'text', [lists] and fields such as zero.stage"

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
# YAML's words beside Python's.
_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Condition:
    """A checked expression; call it with a scenario's plain data."""

    text: str
    tree: ast.expr
    where: str

    def __call__(self, data: Mapping[str, Any]) -> bool:
        """Raises InputError where the values do not go together, as in None < 3."""
        try:
            return bool(_value(self.tree, data))
        except (TypeError, ZeroDivisionError) as error:
            raise InputError(f"{self.text!r}: {error}", field=self.where, notes=("a field not set is null",)) from None


def condition(text: object, where: str) -> Condition:
    """Parse `text`. Raises InputError at `where` for anything that is not part of the language."""
    if not isinstance(text, str):
        raise InputError(f"{text!r} is not a condition", field=where, accepted=ACCEPTED)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{text!r} is not a condition: {error}", field=where, accepted=ACCEPTED) from None
    for node in ast.walk(tree):
        _check(node, text, where)
    return Condition(text, tree, where)


def _check(node: ast.AST, text: str, where: str) -> None:
    allowed = (
        ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare, ast.Constant, ast.List,
        ast.Tuple, ast.Name, ast.Attribute, ast.Load, *_OPERATORS,
    )  # fmt: skip
    if not isinstance(node, allowed):
        raise InputError(f"{text!r} has a {type(node).__name__}", field=where, accepted=ACCEPTED)
    if isinstance(node, ast.Attribute) and _path(node) is None:
        raise InputError(f"{text!r} takes a field of something that is no field", field=where, accepted=ACCEPTED)
    if isinstance(node, ast.Name | ast.Attribute) and getattr(node, "id", None) not in _NAMES:
        path = _path(node)
        assert path is not None
        if path[-1] not in names_at(path[:-1]):
            raise InputError(f"{text!r}: {'.'.join(path)} is no field of a scenario", field=where, accepted=ACCEPTED)


def _path(node: ast.expr) -> tuple[str, ...] | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        above = _path(node.value)
        return None if above is None else (*above, node.attr)
    return None


def _value(node: ast.expr, data: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Name() | ast.Attribute():
            path = _path(node)
            assert path is not None
            return field(data, path)
        case ast.List() | ast.Tuple():
            return [_value(item, data) for item in node.elts]
        case ast.BoolOp():
            stop = isinstance(node.op, ast.Or)
            result: Any = not stop
            for part in node.values:
                result = _value(part, data)
                if bool(result) is stop:
                    break
            return result
        case ast.UnaryOp():
            operand = _value(node.operand, data)
            return not operand if isinstance(node.op, ast.Not) else -operand
        case ast.BinOp():
            left, right = _value(node.left, data), _value(node.right, data)
            if not isinstance(left, int | float) or not isinstance(right, int | float):  # "x" * 1e9 is no condition
                raise TypeError(f"{left!r} and {right!r} are not both numbers")
            return _OPERATORS[type(node.op)](left, right)
        case ast.Compare():
            left = _value(node.left, data)
            for compare, right_node in zip(node.ops, node.comparators, strict=True):
                right = _value(right_node, data)
                if not _OPERATORS[type(compare)](left, right):
                    return False
                left = right
            return True
    raise AssertionError(node)  # `_check` has let nothing else through


def field(data: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The value of a dotted path; None where it is not set. A section with a shorthand stands for that value."""
    value: Any = data
    for depth, part in enumerate(path):
        if not isinstance(value, dict):
            shorthand = _shorthand(path[:depth])
            value = {shorthand: value} if shorthand else {}
        value = value.get(part)
    if isinstance(value, dict):
        value = value.get(_shorthand(path), value)
    return _number(value)


@cache
def _shorthand(path: tuple[str, ...]) -> str | None:
    section = section_at(path)
    return section.shorthand if section is not None else None


def _number(value: Any) -> Any:
    """YAML 1.1 reads 5e8 as text; a scenario's fields take it for the number it is."""
    if isinstance(value, str) and value[:1].isdecimal():
        try:
            return float(value)
        except ValueError:
            return value
    return value
