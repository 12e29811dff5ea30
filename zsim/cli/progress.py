"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says what goes on, on standard error, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def track(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """`items` as they come, with a bar of `total` that disappears at the end."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    return rich_track(items, what, total, console=console, transient=True, disable=not console.is_terminal)
