"""Values of a topology file, checked where they are read: each is refused with its field and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zsim.document import nearest
from zsim.errors import InputError


def mapping(value: Any, where: str, fields: Sequence[str]) -> Mapping[str, Any]:
    """A section with no other fields than these. `where` is empty for the whole file."""
    if not isinstance(value, Mapping):
        raise InputError(f"expected a mapping, got {shown(value)}", field=where or None)
    for key in value:
        if key not in fields:
            close = nearest(key, fields)
            hint = f"; did you mean {close!r}?" if close else ""
            field = f"{where}.{key}" if where else str(key)
            raise InputError(f"unknown field{hint}", field=field, accepted=", ".join(fields))
    return value


def one_of(value: Any, field: str, accepted: Sequence[Any]) -> Any:
    if value not in accepted or isinstance(value, bool):  # True is 1
        names = " | ".join(str(one) for one in accepted if one is not None)
        raise InputError(f"got {shown(value)}", field=field, accepted=names)
    return value


def number(value: Any, field: str, least: float = 0.001, most: float = 1e6) -> float:
    """In the units of the files no part of a machine is beyond these: GB/s, GiB, TB; a typo is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise InputError(f"got {shown(value)}", field=field, accepted=f"a number from {least:g} to {most:,.0f}")
    return float(value)


def whole(value: Any, field: str, most: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        accepted = f"a whole number from {least} to {most:,}"
        raise InputError(f"got {shown(value)}", field=field, accepted=accepted)
    return value


def truth(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{shown(value)} is not true or false", field=field, accepted="true or false")
    return value


def texts(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"got {shown(value)}", field=field, accepted="a list of texts")
    return tuple(value)


def shown(value: Any) -> str:
    """As an error names it: of a long one its beginning."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
