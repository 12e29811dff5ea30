"""The JSON of a Chrome trace, read in pieces: of hundreds of MB, memory holds one event at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zsim.errors import InputError

ACCEPTED = "a Chrome trace written by torch.profiler (.json or .json.gz)"


def entries(path: Path) -> Iterator[tuple[str | None, Any]]:
    """(None, event) for each trace event, (key, value) for what stands beside them."""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            yield from Json(path, stream).entries()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"its compressed data is damaged or cut off ({error})", path, accepted=ACCEPTED) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path, accepted=ACCEPTED) from None


class Json:
    """Walks the top of a JSON document and decodes its events one by one."""

    PIECE = 1 << 20

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.stream = path, stream
        self.text, self.at, self.ended, self.line = "", 0, False, 1
        self.decode = json.JSONDecoder(strict=False).raw_decode

    def entries(self) -> Iterator[tuple[str | None, Any]]:
        first = self._next()
        if first == "[":
            yield from ((None, event) for event in self._array())
        elif first == "{":
            found = False
            for key in self._keys():
                if key == "traceEvents" and self._peek() == "[":
                    self._next()
                    found = True
                    yield from ((None, event) for event in self._array())
                else:
                    yield key, self._value()
            if not found:
                raise InputError("has no list `traceEvents`", self.path, accepted=ACCEPTED)
        else:
            raise self._error("is not JSON")

    def _keys(self) -> Iterator[str]:
        if self._peek() == "}":
            self._next()
            return
        while True:
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                raise self._error("is not JSON: a key and a colon should stand here")
            yield key
            if (mark := self._next()) == "}":
                return
            if mark != ",":
                raise self._error("is not JSON: a comma or } should stand here")

    def _array(self) -> Iterator[Any]:
        if self._peek() == "]":
            self._next()
            return
        while True:
            yield self._value()
            mark = self._next()
            if mark == "," and self._peek() == "]":  # the profiler of torch 1.x left one after the last event
                mark = self._next()
            if mark == "]":
                return
            if mark != ",":
                raise self._error("is not JSON: a comma or ] should stand here")

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not isinstance(error, json.JSONDecodeError) or not self._more():
                    raise self._error("is not JSON, or damaged here") from None
                continue
            if end < len(self.text) or not self._more():  # a number may go on in the next piece
                self.at = end
                return value

    def _peek(self) -> str:
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in " \t\r\n":
                    return self.text[self.at]
                self.at += 1
            if not self._more():
                return ""

    def _next(self) -> str:
        mark = self._peek()
        self.at += 1
        return mark

    def _more(self) -> bool:
        """Read on; pieces grow with what is undecoded, so that a long value is not tried too often."""
        if self.ended:
            return False
        rest = self.text[self.at :]
        piece = self.stream.read(max(self.PIECE, len(rest)))
        if not piece:
            self.ended = True
            return False
        self.line += self.text.count("\n", 0, self.at)
        # A character cut in two at the border of pieces is one of a name: a replacement mark does no harm.
        self.text, self.at = rest + piece.decode("utf-8", "replace"), 0
        return True

    def _error(self, what: str) -> InputError:
        if self.ended and self.at >= len(self.text.rstrip()):
            return InputError("ends too early: cut off, or still being written", self.path, accepted=ACCEPTED)
        line = self.line + self.text.count("\n", 0, self.at)
        cut = "; it may be cut off" if self.ended else ""
        return InputError(what + cut, self.path, line, accepted=ACCEPTED)
