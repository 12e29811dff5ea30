"""A config.json as typed fields: every complaint names the file, the line, the field and what is accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from zsim.errors import InputError, NotModeled


class Fields:
    """The fields of one JSON object. Methods take aliases: the first that is present and not null counts."""

    def __init__(self, path: Path, text: str, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self._text, self._values, self._prefix = path, text, values, prefix

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Raises InputError if the file cannot be read or is no JSON object."""
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot be read: {error}", file=path, accepted="a Hugging Face config.json") from None
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"is not JSON: {error.msg}", file=path, line=error.lineno) from None
        except RecursionError:
            raise InputError("is nested too deeply", file=path) from None
        if not isinstance(values, dict):
            raise InputError(f"is a JSON {_kind(values)}", file=path, accepted="a JSON object of model settings")
        return cls(path, text, values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def absent(self, name: str) -> bool:
        """Left out, which null is not: the configuration class takes that in place of its default."""
        return name not in self._values

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """These, and of `defaults` what is left out."""
        return Fields(self.path, self._text, {**defaults, **self._values}, self._prefix)

    def replaced(self, name: str, value: Any) -> Fields:
        """These, with another value of one."""
        return Fields(self.path, self._text, {**self._values, name: value}, self._prefix)

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """These by other names (old -> new), where they are not there by the new one."""
        values = {names.get(name, name): value for name, value in self._values.items()}
        return Fields(self.path, self._text, values | self._values, self._prefix)

    def raw(self, *names: str) -> Any:
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def given(self, name: str, default: bool) -> bool:
        """Whether an optional setting is on: present and not null, or absent and on by default."""
        return self._values[name] is not None if name in self._values else default

    def section(self, name: str) -> Fields:
        """A nested object; empty if absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            self.fail(name, f"is {_show(value)}", "an object")
        return Fields(self.path, self._text, value or {}, f"{self._prefix}{name}.")

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = 10**9) -> int:
        """An integer in least..most; required unless there is a default."""
        name, value = self._pick(names)
        accepted = f"an integer from {least} to {most}"
        if value is None:
            if default is not None:
                return default
            self.fail(names[0], "is missing", accepted)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(name, f"is {_show(value)}", accepted)
        return value

    def number(self, *names: str, default: float, low: float, high: float) -> float:
        """A finite number in low..high."""
        name, value = self._pick(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(name, f"is {_show(value)}", f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        name, value = self._pick(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"is {_show(value)}", "true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        name, value = self._pick(names)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, f"is {_show(value)}", "a string")
        return value

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list (of that length), or None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fail(name, f"is {_show(value)}", "a list")
        if length is not None and len(value) != length:
            self.fail(name, f"has {len(value)} entries", f"{length} entries, one per layer")
        return value

    def fail(self, name: str, message: str, accepted: str | None = None) -> NoReturn:
        raise InputError(message, file=self.path, line=self.line(name), field=self._prefix + name, accepted=accepted)

    def refuse(self, name: str, message: str, accepted: str) -> NoReturn:
        """Of what the model's class accepts and zsim does not simulate."""
        raise NotModeled(message, file=self.path, line=self.line(name), field=self._prefix + name, accepted=accepted)

    def line(self, name: str) -> int | None:
        """Where the field stands; nested ones are looked for behind their section's name."""
        start = 0
        for part in self._prefix.split(".")[:-1]:
            found = re.compile(rf'"{re.escape(part)}"\s*:').search(self._text, start)
            start = found.end() if found else start
        found = re.compile(rf'"{re.escape(name)}"\s*:').search(self._text, start)
        return self._text.count("\n", 0, found.start()) + 1 if found else None

    def _pick(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(((n, self._values[n]) for n in names if self._values.get(n) is not None), (names[0], None))


def _kind(value: object) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
