"""Values of a configuration file as DeepSpeed's pydantic takes them, and what was never filled in."""

from __future__ import annotations

import json
import re
from typing import Any

from zsim.document import Document, Path_

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a section",
}


def coerce(value: Any, kind: type) -> Any:
    """`value` as pydantic's lax mode takes it for `kind`: 5e8 and "500000000" are ints. Raises ValueError."""
    from pydantic import TypeAdapter, ValidationError

    if kind is int and isinstance(value, bool):
        raise ValueError
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        raise ValueError from None


def refuse_unfilled(document: Document, path: Path_, value: str) -> None:
    """Raises InputError for a shell variable, a placeholder, Python or a calculation where JSON has a value."""
    text = value.strip().rstrip(",").strip()
    if text.startswith("$") or "${" in text:
        raise document.error(path, f"{text} is a shell variable that was not filled in", accepted="its value")
    if text in ("True", "False", "None"):
        right = {"True": "true", "False": "false", "None": "null"}[text]
        raise document.error(path, f"{text} is Python; JSON writes {right}", accepted=right)
    if re.fullmatch(r"[\d.eE+_ ]+([*/+-]+[\d.eE+_ ]+)+", text) and not _is_number(text):
        raise document.error(path, f"{text} is a calculation, which JSON has not", accepted="its result")
    if re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", text) or text in ("...", "…") or re.fullmatch(r"[<{].*[>}]", text):
        raise document.error(path, f"{text} is a placeholder that was not filled in", accepted="its value")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shown(value: Any) -> str:
    """A value as JSON shows it."""
    return json.dumps(value)


def leaves(value: Any) -> list[Any]:
    """All scalars and lists inside nested sections."""
    return [leaf for inner in value.values() for leaf in leaves(inner)] if isinstance(value, dict) else [value]


def names_in(document: Document, path: Path_, value: Any) -> list[str]:
    """The names of a list, or of a text with commas between them. Raises InputError."""
    found = value.split(",") if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise document.error(path, f"{value!r} is not a list of names", accepted="[first, second]")
    return [name.strip() for name in found if name.strip()]
