"""A file that people write, as plain data with the line of every field, so that an error can point at it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.errors import InputError

Path_ = tuple[str | int, ...]  # ("zero", "stage"), ("fsdp", 0)
Place = tuple[Path | str, int | None]  # file and line

MOST_VALUES = 100_000  # of a configuration; aliases of aliases multiply to more within a few lines


@dataclass
class Given:
    """Configuration files that are read together, by kind (detect.identify), and which of them another one names."""

    files: list[tuple[str, Path]] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)

    def find(self, name: str, kind: str | None) -> Path | None:
        """The one that `name` means: of that file name, else the only one of that kind."""
        alike = [path for _, path in self.files if path.name == Path(name).name]
        alike = alike or [path for its, path in self.files if its == kind]
        if len(alike) != 1:
            return None
        self.named.add(alike[0])
        return alike[0]


@dataclass
class Document:
    """`data` is plain dicts, lists and scalars; `places` maps the path of a field to its file and line (from 1)."""

    file: Path | str
    data: dict[str, Any]
    places: dict[Path_, Place] = field(default_factory=dict)
    repeated: list[Path_] = field(default_factory=list)  # fields that stand here more than once: the last one counts
    script: bool = False  # these are the options of a command
    program: str = ""  # the Python file that the command starts
    ranks: int | None = None  # processes that a launcher in the file starts
    launch: Document | None = None  # options of `accelerate launch`, before those of the script that it starts
    environment: dict[str, tuple[str, int | None]] = field(default_factory=dict)  # that it sets, with lines
    unknown: dict[str, str] = field(default_factory=dict)  # options whose value is not known, and why
    given: Given = field(default_factory=lambda: Given())
    notes: list[str] = field(default_factory=list)

    def error(
        self,
        path: Path_,
        message: str,
        accepted: str | None = None,
        notes: tuple[str, ...] = (),
        kind: type[InputError] = InputError,
    ) -> InputError:
        """An InputError (or NotModeled: `kind`) that points at the field `path`, else at the whole."""
        file, line = self.place(path)
        if line is None:
            file, line = self.places.get((), (file, None))
        return kind(message, file, line, dotted(path) or None, accepted, notes)

    def place(self, path: Path_) -> Place:
        """File and line of the field, of the nearest one that encloses it, or of the first one in it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        inside = (place for its, place in self.places.items() if path and its[: len(path)] == path)
        return next(inside, (self.file, None))

    def beside(self, name: str, kind: str | None = None) -> Path:
        """A file that this one names: from its own folder or from where one works, else among those read with it, else,
        with its folder ("scripts/zero3.json"), from a folder above, as the commands of a repository are run there."""
        own = Path(self.file).parent
        for path in (own / name, Path(name)):
            if path.exists():
                return path
        if given := self.given.find(name, kind):
            return given
        above = own.absolute().parents if len(Path(name).parts) > 1 else ()
        return next((folder / name for folder in above if (folder / name).is_file()), own / name)

    def set(self, path: Path_, value: Any, place: Place) -> None:
        """Write a field, whose enclosing sections exist. What it replaces loses its place."""
        data: Any = self.data
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value
        self.places = {other: its for other, its in self.places.items() if other[: len(path)] != path} | {path: place}


def dotted(path: Path_) -> str:
    return ".".join(str(part) for part in path)


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its dotted name, as `--set` takes it."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that `name` most likely means, if one is near."""
    close = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def read_text(path: Path, what: str = "file") -> str:
    """The text of a file. Raises InputError where it is missing, a folder or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no such {what}", path, notes=siblings(path)) from None
    except UnicodeDecodeError as error:
        start = error.object[:2]
        kinds = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "compressed by gzip", b"PK": "a zip file"}
        why = f"cannot be read: it is {kinds[start]}" if start in kinds else f"cannot be read: {error}"
        raise InputError(why, path, accepted="text in UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path) from None


def siblings(path: Path) -> tuple[str, ...]:
    """A hint at a file of nearly this name in the same folder."""
    if not os.path.isdir(path.parent):
        return (f"there is no folder {path.parent}",)
    close = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1, cutoff=0.6)
    return (f"did you mean {path.parent / close[0]}?",) if close else ()


def read_yaml(path: Path, what: str = "file") -> Document:
    """A YAML mapping with its lines. Raises InputError: missing, not YAML, not a mapping, a key twice."""
    return parse_yaml(read_text(path, what), path)


def parse_yaml(text: str, file: Path | str, repeats: bool = False) -> Document:
    """`repeats`: a field may stand there twice, as PyYAML itself has it. Raises as read_yaml."""
    import yaml

    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        loader = loader_class(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and error.problem == "but found another document":
            raise InputError("holds several documents, parted by ---", file, mark.line + 1, accepted="one") from None
        raise InputError(f"not YAML: {error.problem}", file, mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {error}", file) from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError("holds no fields", file, accepted="lines of `field: value`")
    document = Document(file, {})
    try:
        document.data = _construct(root, loader, document, ())
        if document.repeated and not repeats:
            raise document.error(document.repeated[0], "stands here twice")
    except RecursionError:
        raise InputError("not plain YAML: an anchor that contains itself, or nested too deeply", file) from None
    return document


def _construct(node: Any, loader: Any, document: Document, path: Path_) -> Any:
    import yaml

    if len(document.places) > MOST_VALUES:
        raise InputError(f"holds more than {MOST_VALUES:,} values, or aliases that multiply to that", document.file)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                document.repeated += [(*path, key_node.value)] if key_node.value in seen else []
                seen.add(key_node.value)
        try:
            loader.flatten_mapping(node)  # YAML's merge keys: <<: *defaults; what follows them wins
        except yaml.MarkedYAMLError as error:
            raise InputError(f"not plain YAML: {error.problem}", document.file, node.start_mark.line + 1) from None
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node, loader, document, path)
            here = (*path, key)
            document.places[here] = document.file, key_node.start_mark.line + 1
            mapping[key] = _construct(value_node, loader, document, here)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            document.places[(*path, index)] = document.file, item.start_mark.line + 1
            items.append(_construct(item, loader, document, (*path, index)))
        return items
    return _scalar(node, loader, document, path)


def _scalar(node: Any, loader: Any, document: Document, path: Path_) -> Any:
    import yaml

    try:
        value = loader.construct_object(node, deep=True)
        hash(value)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = getattr(error, "problem", None) or error
        raise InputError(f"not plain YAML: {problem}", document.file, node.start_mark.line + 1, dotted(path)) from None
    return value


def subsection(document: Document, data: Mapping[str, Any], path: Path_, name: str) -> dict[str, Any]:
    """The mapping `name` inside `data`; empty where it is absent or null. Raises InputError for anything else."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise document.error((*path, name), f"{value!r} is not a section", accepted="a mapping of fields")
    return value
