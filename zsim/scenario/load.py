"""From a YAML file and overrides to a checked `Scenario`; every error names file, line and field."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from zsim.document import Document, Path_, dotted, parse_yaml, read_yaml
from zsim.errors import InputError
from zsim.plan.reading import Reading
from zsim.scenario.fields import ScenarioFields
from zsim.scenario.kinds import Section
from zsim.scenario.messages import first_error, section_at, takes_text

if TYPE_CHECKING:
    from zsim.scenario.resolve import Setup

SECTION_OF = {"deepspeed": "zero", "fsdp2": "fsdp", "fsdp1": "fsdp", "ddp": "ddp"}
_OVERRIDE = "--set "


@dataclass(frozen=True)
class Scenario:
    """A checked scenario. `folder` is where its relative paths start; `document` still knows the lines.

    `notes` and `not_modeled` come from a framework's configuration file that it names, one of `sources`.
    """

    fields: ScenarioFields
    document: Document
    folder: Path
    notes: tuple[str, ...] = ()
    not_modeled: tuple[str, ...] = ()
    sources: tuple[Path, ...] = field(default=())

    def resolve(self) -> Setup:
        """Read the model and the cluster, and build the plan. Raises InputError or NotModeled."""
        from zsim.scenario.resolve import resolve

        try:
            return resolve(self)
        except InputError as error:
            if error.file is not None:
                raise
            path = tuple(error.field.split(".")) if error.field else ()
            raise self.error(path, error.message, error.accepted, error.notes, type(error)) from None

    def error(
        self,
        path: Path_,
        message: str,
        accepted: str | None = None,
        notes: tuple[str, ...] = (),
        kind: type[InputError] = InputError,
    ) -> InputError:
        """An error that points at the field `path`."""
        return self.document.error(path, message, accepted, notes, kind)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario and apply `overrides` ("zero.stage=2"; a value is YAML, text is itself). Raises InputError."""
    if isinstance(overrides, (str, dict)) or not all(isinstance(override, str) for override in overrides):
        raise TypeError(f"overrides are a list of texts, such as ['micro_batch=2'], not {overrides!r}")
    path = Path(path)
    document = read_yaml(path, "scenario")
    _refuse_configurations(document)
    for override in overrides:
        apply(document, override)
    renamed = any(override.partition("=")[0].strip() == "name" for override in overrides)
    if overrides and not renamed:  # the file's own name may no longer be true
        document.data["name"] = f"{document.data.get('name') or path.stem}, with {', '.join(overrides)}"
    return check(document, path.parent)


def check(document: Document, folder: Path) -> Scenario:
    """Validate a scenario's fields. Raises InputError for the first field that is wrong, in file order."""
    sources, notes, not_modeled = [Path(document.file)], [], []
    allocator_notes = _expand_allocator(document)
    config = document.data.get("deepspeed_config")
    if isinstance(config, str):
        from zsim.plan.deepspeed import with_trainers_groups

        reading = _read_deepspeed(document, folder / config)
        own = document.data.get("optimizer")
        if not isinstance(own, dict) or own.get("decay_groups") is None:
            reading = with_trainers_groups(reading)
        notes = reading.notes + _merge(document, reading) + _left_open(document, reading)
        not_modeled = reading.not_modeled
        sources.append(folder / config)
    try:
        fields = ScenarioFields.model_validate(document.data)
    except ValidationError as invalid:
        raise first_error(document, invalid) from None
    notes = [*allocator_notes, *notes]
    scenario = Scenario(fields, document, folder, tuple(notes), tuple(not_modeled), tuple(sources))
    _refuse_other_frameworks(scenario)
    return scenario


def _refuse_configurations(document: Document) -> None:
    """A tool's configuration in the place of a scenario is called one; all its fields would be unknown."""
    if {"model", "cluster", "framework"} & document.data.keys():
        return
    from zsim.plan import detect

    try:
        kind = detect.identify(document)
    except InputError:
        return
    what = "a model" if kind == "model" else f"a configuration of {kind.replace('_', '-')}"
    raise InputError(
        f"is {what}, not a scenario",
        document.file,
        notes=("zsim from writes a scenario from configurations, zsim read says what this one holds",),
    )


def _refuse_other_frameworks(scenario: Scenario) -> None:
    framework = scenario.fields.framework.name
    for section in ("zero", "deepspeed_config", "fsdp", "ddp"):
        owners = [name for name, its in SECTION_OF.items() if its == section.replace("deepspeed_config", "zero")]
        if getattr(scenario.fields, section) is not None and framework not in owners:
            owner = " or ".join(owners)
            raise scenario.error(
                (section,),
                f"belongs to framework {owner}, and this scenario's framework is {framework}",
                accepted=f"a section {SECTION_OF[framework]}, or framework: {owner}",
                notes=(f"--set {section}=null leaves it out",),
            )


def apply(document: Document, text: str) -> None:
    """Set one "field.path=value" in the document. Raises InputError."""
    where = f"{_OVERRIDE}{text}"
    dotted_path, equals, value = text.partition("=")
    path = tuple(dotted_path.strip().split("."))
    if not equals or not all(path) or not value.strip():
        raise InputError(
            "is not field=value", where, accepted="for example --set zero.stage=2; --set zero=null leaves a field out"
        )
    try:
        parsed = value_of(path, value, where)
    except InputError as error:
        raise InputError(error.message, where, field=dotted(path)) from None
    _open_sections(document, path, where)
    document.set(path, parsed, (where, None))


def value_of(path: Path_, text: str, where: str) -> Any:
    """The value of an option: YAML, but for a field of text, where 2.10, whose quotes the shell has taken, is no 2.1.

    Raises InputError.
    """
    parsed = parse_yaml(f"value: {text}", where).data["value"]
    return text.strip() if isinstance(parsed, int | float) and takes_text(path) else parsed


def _open_sections(document: Document, path: Path_, where: Path | str) -> None:
    """Make every section that encloses `path` a mapping; one written as a plain value keeps that value's meaning."""
    data: Any = document.data
    for depth, name in enumerate(path[:-1], start=1):
        inner = data.get(name)
        if not isinstance(inner, dict):
            section = section_at(path[:depth])
            if inner is not None and (section is None or section.shorthand is None):
                raise InputError("is a plain value, not a section", where, field=dotted(path[:depth]))
            inner = {} if inner is None or section is None else {section.shorthand: inner}
        data[name] = inner
        data = inner


def _expand_allocator(document: Document) -> list[str]:
    """Replace PYTORCH_ALLOC_CONF by its fields; returns notes on settings without effect."""
    section = document.data.get("allocator")
    conf = section.get("conf") if isinstance(section, dict) else section
    if not isinstance(conf, str):
        return []
    from zsim.plan.alloc_conf import parse

    try:
        found, notes = parse(conf)
    except InputError as error:
        raise document.error(("allocator",), error.message, error.accepted, kind=type(error)) from None
    beside = {name: value for name, value in section.items() if name != "conf"} if isinstance(section, dict) else {}
    for name in found.keys() & beside.keys():
        if not str(document.place(("allocator", name))[0]).startswith(_OVERRIDE):
            raise document.error(("allocator", name), "stands here twice, once in conf", "one of them")
    document.data["allocator"] = found | beside
    return notes


def _read_deepspeed(document: Document, path: Path) -> Reading:
    from zsim.plan.deepspeed import read_deepspeed
    from zsim.plan.version import VERSION

    framework = document.data.get("framework")
    version = framework.get("version") if isinstance(framework, dict) else None
    if not os.path.exists(path):
        raise document.error(("deepspeed_config",), f"no such file: {path}")
    return read_deepspeed(path, str(version or VERSION))


def _merge(document: Document, reading: Reading) -> list[str]:
    """Add what a framework's file says to the scenario's own fields; returns notes about overridden values.

    The same field with another value is a contradiction, unless it was set on the command line.
    """
    notes = []
    for path, value in reading.fields.items():
        _open_sections(document, path, document.file)
        data: Any = document.data
        for part in path[:-1]:
            data = data[part]
        own = data.get(path[-1])
        section = section_at(path)
        if isinstance(own, dict) and section is not None and section.shorthand:
            own = own.get(section.shorthand)
        if own is None and path not in document.places:
            document.set(path, value, reading.places.get(path, (reading.document.file, None)))
            continue
        if _same(own, value):
            continue
        file, line = reading.places.get(path, (reading.document.file, None))
        says = f"{file}{f':{line}' if line else ''} says {value}"
        if str(document.place(path)[0]).startswith(_OVERRIDE):
            notes.append(f"{dotted(path)}: {own} on the command line; {says}")
        else:
            raise document.error(path, f"is {own} here, and {says}", accepted="one of them")
    return notes


def _left_open(document: Document, reading: Reading) -> list[str]:
    """Notes on what the file leaves to the Trainer's arguments and the scenario does not say: its default holds."""
    notes = []
    for name, default in (("precision", "bf16"), ("grad_accum", 1), ("grad_clip", 1.0)):
        implied = name == "grad_accum" and "train_batch_size" in document.data
        left = any(what.startswith(f"{name} (auto") for what in reading.missing)
        if left and not implied and document.data.get(name) is None:
            notes.append(f"{name}: auto is {default} unless the scenario sets it")
    return notes


def _same(own: object, other: object) -> bool:
    try:
        return float(own) == float(other)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return own == other


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file. Sections that may be written as a plain value say so."""
    schema = ScenarioFields.model_json_schema()
    definitions = schema["$defs"]
    for section in Section.__subclasses__():
        if section.shorthand:
            full = definitions[section.__name__]
            definitions[section.__name__] = {"anyOf": [full["properties"][section.shorthand], full]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
