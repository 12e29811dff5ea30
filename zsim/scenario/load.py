"""From a YAML file and overrides to a checked `Scenario`; every error names file, line and field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from zsim.errors import InputError
from zsim.plan.document import Document, Path_, dotted, nearest, parse_yaml, read_yaml
from zsim.scenario.fields import ScenarioFields, Section

if TYPE_CHECKING:
    from zsim.scenario.resolve import Setup

_SECTION_OF = {"deepspeed": "zero", "fsdp2": "fsdp", "fsdp1": "fsdp", "ddp": "ddp"}


@dataclass(frozen=True)
class Scenario:
    """A checked scenario. `folder` is where its relative paths start; `document` still knows the lines."""

    fields: ScenarioFields
    document: Document
    folder: Path

    def resolve(self) -> Setup:
        """Read the model and the cluster, and build the plan. Raises InputError or NotModeled."""
        from zsim.scenario.resolve import resolve

        return resolve(self)

    def error(self, path: Path_, message: str, accepted: str | None = None, notes: tuple[str, ...] = ()) -> InputError:
        return self.document.error(path, message, accepted, notes)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file and apply `overrides` ("zero.stage=2", the value as YAML). Raises InputError."""
    path = Path(path)
    document = read_yaml(path, "scenario")
    for override in overrides:
        _override(document, override)
    return check(document, path.parent)


def check(document: Document, folder: Path) -> Scenario:
    """Validate a scenario's fields. Raises InputError for the first field that is wrong, in file order."""
    try:
        fields = ScenarioFields.model_validate(document.data)
    except ValidationError as invalid:
        errors = [_translate(document, detail) for detail in invalid.errors(include_url=False)]
        raise min(errors, key=lambda error: error.line or math.inf) from None
    scenario = Scenario(fields, document, folder)
    own = _SECTION_OF[fields.framework.name]
    for section in ("zero", "fsdp", "ddp"):
        if section != own and getattr(fields, section) is not None:
            owner = " or ".join(name for name, its in _SECTION_OF.items() if its == section)
            raise scenario.error(
                (section,),
                f"belongs to framework {owner}, and this scenario's framework is {fields.framework.name}",
                accepted=f"a section {own}, or framework: {owner}",
            )
    return scenario


def _override(document: Document, text: str) -> None:
    """Apply one "field.path=value" to the document."""
    where = f"--set {text}"
    dotted_path, equals, value = text.partition("=")
    names = dotted_path.strip().split(".")
    if not equals or not all(names):
        raise InputError("is not field=value", where, accepted="for example --set zero.stage=2")
    data = document.data
    for depth, name in enumerate(names[:-1]):
        inner = data.get(name)
        if inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            section = _section_at(tuple(names[: depth + 1]))
            if section is None or section.shorthand is None:
                raise InputError(
                    f"{name} is a plain value, not a section", where, field=dotted(tuple(names[: depth + 1]))
                )
            inner = {section.shorthand: inner}
        data[name] = inner
        data = inner
    document.set(tuple(names), parse_yaml(f"value: {value}", where).data["value"], (where, None))


def _translate(document: Document, detail: Any) -> InputError:
    """One of pydantic's complaints in the user's words."""
    path = _path_in_document(document, detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = _names_at(path[:-1])
        close = nearest(str(path[-1]), known)
        message = f"unknown field; did you mean {close}?" if close else "unknown field"
        return document.error(path, message, accepted=", ".join(known))
    if kind == "missing":
        return document.error(path, "is missing", accepted=_description_at(path))
    if kind == "count":
        return document.error(path, context["why"], accepted=context["accepted"])
    if kind == "literal_error":
        close = nearest(
            str(detail["input"]), [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        )
        hint = f"; did you mean {close}?" if close and isinstance(detail["input"], str) else ""
        return document.error(
            path, f"{detail['input']!r} is not known{hint}", accepted=context["expected"].replace("'", "")
        )
    message = detail["msg"].replace("Input should be", "should be")
    return document.error(path, f"{detail['input']!r} {message}" if message.startswith("should") else message)


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


def _section_at(path: Path_) -> type[Section] | None:
    """The pydantic model of the section at `path`; None for a plain field."""
    section: type[Section] | None = ScenarioFields
    for part in path:
        field = section.model_fields.get(str(part)) if section else None
        candidates = (field.annotation, *getattr(field.annotation, "__args__", ())) if field else ()
        section = next((item for item in candidates if isinstance(item, type) and issubclass(item, Section)), None)
    return section


def _names_at(path: Path_) -> list[str]:
    section = _section_at(path)
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _description_at(path: Path_) -> str | None:
    section = _section_at(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return field.description if field else None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file. Sections that may be written as a plain value say so."""
    schema = ScenarioFields.model_json_schema()
    definitions = schema["$defs"]
    for section in Section.__subclasses__():
        if section.shorthand:
            full = definitions[section.__name__]
            definitions[section.__name__] = {"anyOf": [full["properties"][section.shorthand], full]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
