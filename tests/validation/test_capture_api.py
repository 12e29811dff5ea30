"""The GPU half of the capture cannot run here: each name of torch that it uses exists, with the arguments it passes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).parents[2] / "zsim" / "validation"
FILES = sorted(FOLDER.glob("capture*.py"))
SHORT = {"dist": "torch.distributed", "F": "torch.nn.functional"}


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return SHORT.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def resolved(name: str) -> object:
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def names(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(line, dotted name, keywords of the call)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        keywords: list[str] = []
        if isinstance(node, ast.Call):
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            node = node.func
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name and name.startswith("torch."):
            yield node.lineno, name, keywords


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_of_torch_exist_and_take_these_arguments(path: Path) -> None:
    for line, name, keywords in names(path):
        try:
            found = resolved(name)
        except AttributeError as error:
            pytest.fail(f"{path.name}:{line}: {name}: {error}")
        try:
            parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue  # written in C
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        assert set(keywords) <= set(parameters), f"{path.name}:{line}: {name} takes {list(parameters)}"


def test_the_check_sees_the_gpu_half() -> None:
    used = {name for path in FILES for _, name, _ in names(path)}
    assert {"torch.cuda.Event", "torch.cuda.max_memory_allocated", "torch.cuda.mem_get_info"} <= used
