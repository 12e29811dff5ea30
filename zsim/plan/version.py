"""Releases of frameworks: which one zsim reads by default, and how two compare."""

from __future__ import annotations

import re
from functools import lru_cache

from zsim.errors import InputError

VERSION = "0.19.8"  # of DeepSpeed


@lru_cache(maxsize=256)
def parse_version(version: str) -> tuple[int, ...]:
    """ "0.19.8" -> (0, 19, 8). Raises InputError."""
    parts = re.match(r"(\d{1,9}(?:\.\d{1,9})*)(?!\d)", version)
    if parts is None:
        raise InputError(f"{version!r} is not a version", field="framework.version", accepted=f"such as {VERSION}")
    return tuple(int(part) for part in parts.group(1).split("."))
