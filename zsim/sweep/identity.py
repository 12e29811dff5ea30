"""What makes two scenarios the same: their fields, the content of the files they name, and the simulator itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import zsim
from zsim.sweep.expression import field

# Rooms that decide no number of a row.
_NO_NUMBERS = ("cli", "validation", "sweep", "result/render")
_FILES = (("model", "config"), ("cluster", "topology"), ("deepspeed_config",), ("profile",))


@cache
def engine_digest() -> str:
    """Hash of the code, catalogs and cost profiles that decide outcomes, so that no two versions' rows ever mix."""
    root = Path(zsim.__file__).parent
    digest = sha256(zsim.__version__.encode())
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_NO_NUMBERS):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def files_of(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The fields of a scenario that name a file, each with its path as it stands there."""
    for path in _FILES:
        name = field(data, path)
        if isinstance(name, str) and (path != ("profile",) or name.endswith((".yaml", ".yml"))):  # else a stack's name
            yield path, name


class Identity:
    """Keys of scenarios. Files are read once: a sweep means what they say when it starts."""

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], str] = {}

    def inputs(self, data: Mapping[str, Any]) -> str:
        """The fields as canonical JSON; the name is none of them."""
        return _encode({name: data[name] for name in data if name != "name"})

    def sources(self, data: Mapping[str, Any], file: Path | str) -> str:
        """Digests of the files that a scenario in `file` names, in one text."""
        named = dict(files_of(data))
        key = (file, *named.items())
        if key not in self._sources:
            folder = Path(file).parent
            self._sources[key] = ",".join(_digest(folder / named[path]) if path in named else "" for path in _FILES)
        return self._sources[key]

    def key(self, inputs: str, sources: str, memory_only: bool) -> bytes:
        text = f"{engine_digest()}\n{sources}\n{'memory' if memory_only else 'clock'}\n{inputs}"
        return sha256(text.encode()).digest()[:16]


def _digest(path: Path) -> str:
    if path.is_dir():
        path /= "config.json"
    try:
        return sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "unreadable"


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
