"""Reads recipes for tests, from a file or from the data of a made-up one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from zsim.document import Document, parse_yaml
from zsim.plan import detect
from zsim.plan.reading import Reading


def read_file(path: Path, ranks: int | None = None) -> tuple[str, Reading]:
    document = detect.parse(path)
    kind = detect.identify(document)
    return kind, detect.read(document, kind, ranks)


def read(kind: str, data: dict[str, Any], ranks: int | None = None) -> Reading:
    return detect.read(parse_document(data), kind, ranks)


def parse_document(data: dict[str, Any]) -> Document:
    return parse_yaml(yaml.safe_dump(data), "recipe.yaml")


def said(reading: Reading) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in reading.fields.items()}
