"""pydantic's complaints in the words of somebody who writes scenario files."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from zsim.document import Document, Path_, nearest
from zsim.errors import InputError, NotModeled
from zsim.scenario.fields import ScenarioFields
from zsim.scenario.kinds import Section

_SHOULD_BE = {
    "bool_type": ("true or false", "true or false"),
    "bool_parsing": ("true or false", "true or false"),
    "string_type": ("text", 'text; a number in "quotes"'),
    "list_type": ("a list", "[first, second]"),
    "tuple_type": ("a list", "[first, second]"),
    "float_type": ("a number", "a number"),
    "float_parsing": ("a number", "a number"),
    "finite_number": ("a finite number", "a number"),
}
_BEYOND = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def first_error(document: Document, invalid: ValidationError) -> InputError:
    """The complaint that stands first in the file; of several about one field, the one about its value's kind."""

    def order(detail: Any) -> tuple[float, bool]:
        _, line = document.place(_path_in_document(document, detail["loc"]))
        return line or math.inf, detail["type"] in ("literal_error", "bool_type", "bool_parsing", "missing")

    errors = invalid.errors(include_url=False)
    first = min(errors, key=order)
    place = _path_in_document(document, first["loc"])
    words = [  # of a field that takes a few words besides
        detail["ctx"]["expected"].replace("'", "")
        for detail in errors
        if detail["type"] == "literal_error" and _path_in_document(document, detail["loc"]) == place
    ]
    return _translate(document, first, words if first["type"] in ("bool_type", "bool_parsing") else [])


def _translate(document: Document, detail: Any, words: list[str]) -> InputError:
    path = _path_in_document(document, detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = names_at(path[:-1])
        if own := _deepspeeds_own(document, path):
            return own
        close = nearest(str(path[-1]), known)
        return document.error(path, f"unknown field{f'; did you mean {close}?' if close else ''}", ", ".join(known))
    if kind == "missing":
        return document.error(path, "is missing", _description_at(path))
    if kind == "count":
        return document.error(path, context["why"], context["accepted"])
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
        close = nearest(value, expected.replace(" or ", ", ").split(", ")) if isinstance(value, str) else None
        return document.error(path, f"{value!r} is not known{f'; did you mean {close}?' if close else ''}", expected)
    if kind in _BEYOND:
        return document.error(path, f"{value!r} is out of range", detail["msg"].replace("Input should be", "a number"))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return document.error(path, f"{value!r} is not a section", f"fields such as {', '.join(names_at(path)[:5])}")
    if kind in _SHOULD_BE:
        wanted, accepted = _SHOULD_BE[kind]
        if words:
            wanted = accepted = ", ".join([*wanted.split(" or "), *words])
        return document.error(path, f"{value!r} is not {wanted}", accepted)
    return document.error(path, f"{value!r}: {detail['msg']}")


def _deepspeeds_own(document: Document, path: Path_) -> InputError | None:
    """About a key that DeepSpeed has and the scenario's section `zero` has not."""
    from zsim.plan.deepspeed_keys import NONE, SECTIONS

    section = "zero_optimization" + "".join(f".{part}" for part in path[1:-1])
    key = SECTIONS.get(section, {}).get(str(path[-1])) if path[0] == "zero" else None
    if key is None:
        return None
    if key.effect == NONE:
        return document.error(path, f"has no effect on a simulation ({key.why}); leave it out")
    return document.error(path, key.why, kind=NotModeled)


def _path_in_document(document: Document, location: tuple[str | int, ...]) -> Path_:
    """pydantic's location without what is no field of the document: the names of a union's members."""
    path: list[str | int] = []
    data: Any = document.data
    for part in location:
        if isinstance(data, dict) and (part in data or str(part).isidentifier()):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def section_at(path: Path_) -> type[Section] | None:
    """The pydantic model of the section at `path`; None for a plain field."""
    section: type[Section] | None = ScenarioFields
    for part in path:
        field = section.model_fields.get(str(part)) if section else None
        candidates = (field.annotation, *getattr(field.annotation, "__args__", ())) if field else ()
        section = next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)
    return section


def takes_text(path: Path_) -> bool:
    """Whether the field at `path` is of text alone, as releases are."""
    section = section_at(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return field is not None and field.annotation in (str, str | None)


def names_at(path: Path_) -> list[str]:
    """The fields of the section at `path`."""
    section = section_at(path)
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _description_at(path: Path_) -> str | None:
    section = section_at(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return field.description if field else None
