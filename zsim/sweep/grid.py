"""Which scenarios a sweep has: a base scenario and axes along which its fields change, expanded one at a time.

    scenario: ../qwen32b_8xh100.yaml     # or a list of files
    set: {seq_len: 8192}                 # in every scenario
    grid:                                # every combination
      zero.stage: [0, 1, 2, 3]
      micro_batch: 1..16*2               # 1, 2, 4, 8, 16; 1..4 is 1, 2, 3, 4; 0..90+30 is 0, 30, 60, 90
    zip:                                 # go together: the first with the first, ...
      model: [models/a/config.json, models/b/config.json]
      cluster: [a.yaml, b.yaml]
    list:                                # each of these
      - {checkpointing: full}
      - {checkpointing: none, loss: fused}
    where: ["micro_batch * grad_accum <= 16"]     # only those for which all of these hold
    skip: ["zero.stage == 0 and micro_batch > 4"] # not those for which any of these holds

Paths inside values are relative to the base scenario's file, as its own are.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zsim.document import Document, Path_, dotted, nearest, read_yaml
from zsim.errors import InputError
from zsim.scenario.load import apply, value_of
from zsim.scenario.messages import names_at, section_at, takes_text
from zsim.sweep.expression import Condition, condition

Setting = tuple[Path_, Any]
Axis = tuple[tuple[Setting, ...], ...]  # the points of an axis, each with what it sets

FIELDS = ("scenario", "set", "grid", "zip", "list", "where", "skip")
RANGE = re.compile(r"(\d+)\.\.(\d+)(?:([*+])(\d+))?")
MAX_POINTS = 1_000_000  # of one range


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario of a sweep: number `position` of the whole grid. `document` is shared by all cases of a base."""

    position: int
    document: Document
    settings: tuple[Setting, ...]
    data: dict[str, Any]

    @property
    def overrides(self) -> list[str]:
        """What `--set` would be given to run this case alone."""
        return [f"{dotted(path)}={json.dumps(value)}" for path, value in self.settings]


@dataclass(frozen=True)
class Sweep:
    """Iterate to get its cases in a fixed order, without ever holding them all."""

    bases: tuple[Document, ...]
    axes: tuple[Axis, ...]
    where: tuple[Condition, ...] = ()
    skip: tuple[Condition, ...] = ()

    @property
    def size(self) -> int:
        """Combinations before conditions."""
        return len(self.bases) * prod(map(len, self.axes))

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields that axes set, in their order."""
        paths = (dotted(path) for axis in self.axes for point in axis for path, _ in point)
        return tuple(dict.fromkeys(paths))

    def __iter__(self) -> Iterator[Case]:
        return self.part(1, 1)

    def part(self, shard: int, shards: int) -> Iterator[Case]:
        """Every `shards`-th combination, beginning with number `shard` (from 1). Raises InputError (conditions)."""
        combinations = ((base, points) for base in self.bases for points in itertools.product(*self.axes))
        for position, (base, points) in itertools.islice(enumerate(combinations), shard - 1, None, shards):
            settings = tuple(setting for point in points for setting in point)
            data = merged(base.data, settings)
            if all(holds(data) for holds in self.where) and not any(holds(data) for holds in self.skip):
                yield Case(position, base, settings, data)


def merged(data: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """A copy of `data` with `settings` in it; what they do not touch is shared with `data`."""
    result = dict(data)
    for path, value in settings:
        level: dict[Any, Any] = result
        for depth, name in enumerate(path[:-1], start=1):
            inner = level.get(name)
            if isinstance(inner, dict):
                inner = dict(inner)
            elif inner is None:
                inner = {}
            else:  # a section written as a plain value keeps that value's meaning
                section = section_at(path[:depth])
                if section is None or section.shorthand is None:
                    raise InputError("is a plain value, not a section", field=dotted(path[:depth]))
                inner = {section.shorthand: inner}
            level[name] = inner
            level = inner
        level[path[-1]] = value
    return result


def from_options(scenarios: Sequence[Path], vary: Sequence[str], overrides: Sequence[str] = ()) -> Sweep:
    """The grid of `--vary field=values` options over scenario files. Raises InputError."""
    axes = []
    for text in vary:
        name, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise InputError(f"{text!r} has no values", field="--vary", accepted="such as micro_batch=1,2,4 or 1..64")
        path = _path(name.strip(), "--vary", None)
        found = values_of(values, path)
        axes.append(tuple(((path, value),) for value in found))
    return Sweep(tuple(_base(path, overrides) for path in scenarios), tuple(axes))


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file. `overrides` ("field=value") go into every base scenario. Raises InputError."""
    document = read_yaml(path, "sweep")
    data = document.data
    for name in data:
        if name not in FIELDS:
            close = nearest(name, FIELDS)
            hint = f"; did you mean {close}?" if close else ""
            raise document.error((name,), f"unknown field{hint}", ", ".join(FIELDS))
    named = data.get("scenario")
    files = named if isinstance(named, list) else [named]
    bases = [path.parent / file for file in files if isinstance(file, str)]
    if not files or len(bases) < len(files):
        raise document.error(("scenario",), "the base scenario is missing", "the path of a scenario file, or a list")
    fixed = []
    for name, value in _mapping(document, "set").items():
        if isinstance(value, int | float) and takes_text(tuple(str(name).split("."))):
            raise document.error(("set", name), f"{value!r} is not text", 'text; a number in "quotes"')
        fixed.append(f"{name}={json.dumps(value)}")
    return Sweep(
        tuple(_base(base, [*fixed, *overrides]) for base in bases),
        (*_grid(document), *_zips(document), *_listed(document)),
        _conditions(document, "where"),
        _conditions(document, "skip"),
    )


def is_sweep(path: Path) -> bool:
    """Whether a file states a sweep; else it is taken for a scenario."""
    return "scenario" in read_yaml(path, "sweep or scenario").data


def _base(path: Path, overrides: Sequence[str]) -> Document:
    document = read_yaml(path, "scenario")
    for override in overrides:
        apply(document, override)
    return document


def _grid(document: Document) -> Iterator[Axis]:
    for name, given in _mapping(document, "grid").items():
        path = _path(name, "grid", document)
        yield tuple(((path, value),) for value in _values(document, ("grid", name), given))


def _zips(document: Document) -> Iterator[Axis]:
    """`zip` is one mapping of lists of equal length, or a list of such mappings."""
    given = document.data.get("zip") or []
    for index, group in enumerate(given if isinstance(given, list) else [given]):
        where: Path_ = ("zip", index) if isinstance(given, list) else ("zip",)
        if not isinstance(group, dict) or not group:
            raise document.error(where, f"{group!r} is not a mapping of lists")
        paths = [_path(name, "zip", document) for name in group]
        columns = [_values(document, (*where, name), values) for name, values in group.items()]
        lengths = {name: len(column) for name, column in zip(group, columns, strict=True)}
        if len(set(lengths.values())) > 1:
            raise document.error(where, f"lists of different lengths go together: {lengths}")
        yield tuple(tuple(zip(paths, row, strict=True)) for row in zip(*columns, strict=True))


def _listed(document: Document) -> Iterator[Axis]:
    given = document.data.get("list")
    if given is None:
        return
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise document.error(("list",), f"{given!r} is not a list of mappings", "- {checkpointing: full}")
    yield tuple(tuple((_path(name, "list", document), value) for name, value in item.items()) for item in given)


def _mapping(document: Document, name: str) -> dict[str, Any]:
    value = document.data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise document.error((name,), f"{value!r} is not a mapping", "field: values")
    return value


def _conditions(document: Document, name: str) -> tuple[Condition, ...]:
    given = document.data.get(name) or []
    return tuple(condition(text, name) for text in (given if isinstance(given, list) else [given]))


def _values(document: Document, where: Path_, given: Any) -> list[Any]:
    if isinstance(given, str) and RANGE.fullmatch(given.strip()):
        return expand(given.strip())
    if not isinstance(given, list) or not given:
        raise document.error(where, f"{given!r} is no list of values", "[1, 2, 4] or 1..64 or 1..64*2")
    return [item for one in given for item in (_range_or_self(one))]


def _range_or_self(value: Any) -> list[Any]:
    return expand(value) if isinstance(value, str) and RANGE.fullmatch(value) else [value]


def values_of(text: str, path: Path_) -> list[Any]:
    """The values of an option for the field `path`: what commas separate outside brackets, each as in --set or
    a range."""
    pieces = [piece.strip() for piece in re.split(r",(?![^\[{]*[\]}])", text)]
    values: list[Any] = []
    for piece in filter(None, pieces):
        is_range = RANGE.fullmatch(piece)
        values += expand(piece) if is_range else [value_of(path, piece, "--vary")]
    return values


def expand(text: str) -> list[int]:
    """ "1..4" is 1, 2, 3, 4; "1..64*2" doubles; "0..90+30" adds 30. Raises InputError where nothing comes out."""
    match = RANGE.fullmatch(text)
    assert match is not None
    first, last, kind, by = int(match[1]), int(match[2]), match[3], int(match[4] or 1)
    if first > last or by < 1 or (kind == "*" and (by < 2 or first < 1)) or (last - first > MAX_POINTS and kind != "*"):
        raise InputError(f"{text!r} is no range", accepted="1..64, 1..64*2 (doubling) or 0..90+30, rising")
    if kind != "*":
        return list(range(first, last + 1, by))
    values = [first]
    while values[-1] * by <= last:
        values.append(values[-1] * by)
    return values


def _path(name: object, where: str, document: Document | None) -> Path_:
    """The path of a field that may vary. Raises InputError for one that no scenario has."""
    path = tuple(str(name).split("."))
    known = names_at(path[:-1])
    if path[-1] in known:
        return path
    close = nearest(path[-1], known)
    message = f"{name!r} is no field of a scenario" + (
        f"; did you mean {dotted((*path[:-1], close))}?" if close else ""
    )
    if document is not None:
        raise document.error((where, str(name)), message)
    raise InputError(message, field=where)
