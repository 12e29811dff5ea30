"""DeepSpeed's dialect of JSON, Hjson (comments, trailing commas, quoteless strings), with the line of every field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zsim.document import Document, Path_, Place
from zsim.errors import InputError

_SPACE_AND_COMMENTS = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.S)
_KEY = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s{}\[\],:'"]+""")
_VALUE = re.compile(
    r"""'''.*?'''|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""  # quoted
    r"""|(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=\s*(?:[,\]}#\n]|//|/\*|$))"""
    r"""|[^\n]*""",  # quoteless: to the end of the line
    re.S,
)


def parse_hjson(text: str, file: Path | str) -> Document:
    """The fields of an Hjson text, read by the library that DeepSpeed uses. Raises InputError, also for a key twice."""
    import hjson

    try:
        data = hjson.loads(text, object_pairs_hook=list_of_pairs)
    except hjson.HjsonDecodeError as error:
        line, message = error.lineno, error.msg.split(" (")[0]
        raise _unreadable(text, file, line, message) from None
    except RecursionError:
        raise InputError("not JSON: nested too deeply", file) from None
    except (OverflowError, ValueError) as error:  # of float and int: 1e999, a number of many thousand digits
        raise InputError(f"not JSON: a number is too large ({error})", file) from None
    if not isinstance(data, Pairs):
        raise InputError("holds no fields", file, accepted="{ ... }")
    document = Document(file, {}, _places(text, file))
    document.data = _plain(data, document, ())
    return document


class Pairs(list):
    """The fields of one object in file order, a repeated one twice."""


def list_of_pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    return Pairs(pairs)


def _plain(value: Any, document: Document, path: Path_) -> Any:
    if isinstance(value, Pairs):
        mapping: dict[str, Any] = {}
        for key, inner in value:
            if key in mapping:
                raise document.error((*path, key), "stands here twice")
            mapping[key] = _plain(inner, document, (*path, key))
        return mapping
    if isinstance(value, list):
        return [_plain(inner, document, (*path, index)) for index, inner in enumerate(value)]
    return value


def _unreadable(text: str, file: Path | str, line: int, message: str) -> InputError:
    """What the parser met is often not a slip of JSON but something that was never filled in."""
    for number, content in enumerate(text.splitlines(), start=1):
        if content.strip().rstrip(",").strip("\"'") in ("...", "…"):
            return InputError("`...` stands for something that was left out", file, number, accepted="a whole file")
    return InputError(f"not JSON: {message}", file, line)


def _places(text: str, file: Path | str) -> dict[Path_, Place]:
    """Where each field stands. Follows the text as far as it understands it; a field without a place has none."""
    places: dict[Path_, Place] = {}
    position, size = 0, len(text)
    line, counted = 1, 0  # the line of the character `counted`
    open_: list[tuple[Path_, bool]] = []  # path and whether it is an object
    index: list[int] = []
    pending: Path_ | None = ()  # the path that the next value belongs to

    while position < size:
        position = _SPACE_AND_COMMENTS.match(text, position).end()  # type: ignore[union-attr]
        if position >= size:
            break
        character = text[position]
        if pending is None and open_ and not open_[-1][1] and character not in "],":
            pending = (*open_[-1][0], index[-1])
        if character in "{[" and pending is not None:
            open_.append((pending, character == "{"))
            index.append(0)
            pending = None
            position += 1
        elif character in "}]":
            if open_:
                open_.pop()
                index.pop()
            pending = None
            position += 1
        elif character == ",":
            if open_ and not open_[-1][1]:
                index[-1] += 1
            pending = None
            position += 1
        elif pending is not None:
            position = max(_VALUE.match(text, position).end(), position + 1)  # type: ignore[union-attr]
            pending = None
        else:
            key = _KEY.match(text, position)
            if key is None or not open_:
                position += 1
                continue
            pending = (*open_[-1][0], key.group().strip("\"'"))
            line, counted = line + text.count("\n", counted, position), position
            places[pending] = file, line  # of a repeated key: the last
            colon = text.find(":", key.end())
            position = size if colon < 0 else colon + 1
    return places
