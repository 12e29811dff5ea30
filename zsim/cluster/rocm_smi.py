"""Reads `rocm-smi --showtopo`: weights, hops and link types between GPUs, NUMA nodes."""

from __future__ import annotations

import re

from zsim.cluster.matrix import NO_HINTS, Hints, Matrix, Reading, to_document
from zsim.errors import InputError

RUN = "run `rocm-smi --showtopo` and paste all of it"
_TITLE = re.compile(r"=+\s*(.+?)\s*=+\s*$")


def read(text: str, hints: Hints = NO_HINTS) -> Reading:
    """A topology document. Raises InputError where the table of link types is missing or cut."""
    return to_document(parse(text), hints, "rocm-smi --showtopo")


def parse(text: str) -> Matrix:
    """Link types decide; hops tell sockets apart where no NUMA node is printed."""
    tables = _tables(text)
    types = next(
        (table for table in tables if any(cell in ("XGMI", "PCIE") for row in table.values() for cell in row)), None
    )
    if types is None:
        raise InputError("no table of link types (XGMI, PCIE)", accepted=RUN)
    count = len(next(iter(types.values())))
    for name, row in types.items():
        if len(row) != count:
            raise InputError(f"row {name} has {len(row)} of {count} cells: the paste is cut", accepted=RUN)
    if len(types) != count:
        raise InputError(f"{len(types)} rows of {count}: the paste is cut", accepted=RUN)
    names = list(types)
    local = {name: f"gpu{index}" for index, name in enumerate(names)}
    matrix = Matrix(list(local.values()), [], fabric="xgmi", numa=_numa(text, len(names)))
    same = [table for table in tables if table is not types and list(table) == names]
    hops = next((table for table in same if _is_hops(table) and all(len(row) == count for row in table.values())), None)
    unreadable = 0
    for name, row in types.items():
        for column, cell in enumerate(row):
            if names[column] == name:
                continue
            a, b = local[name], local[names[column]]
            if cell == "XGMI":
                matrix.wires[a, b] = 1
            elif cell == "PCIE":
                far = hops is not None and hops[name][column] not in ("1", "2")
                matrix.cells[a, b] = "SYS" if far else "PHB"
            else:
                unreadable += 1
                matrix.wires[a, b] = 1
    if unreadable:
        matrix.notes.append(
            f"{unreadable} cells are {_odd(types)}: partitions of one package, taken as linked like the others"
        )
    return matrix


def _tables(text: str) -> list[dict[str, list[str]]]:
    """Every table with a header of GPU columns: row name -> cells."""
    found: list[dict[str, list[str]]] = []
    columns: list[str] = []
    for line in text.splitlines():
        tokens = line.split()
        if tokens and all(re.fullmatch(r"GPU\d+", token) for token in tokens) and len(tokens) > len(columns[:0]):
            columns = tokens
            found.append({})
        elif found and tokens and tokens[0] in columns:
            if tokens[0] in found[-1]:
                raise InputError(f"a second row of {tokens[0]}", accepted=RUN)
            found[-1][tokens[0]] = tokens[1:]
        elif _TITLE.match(line):
            columns = []
    return [table for table in found if table]


def _is_hops(table: dict[str, list[str]]) -> bool:
    return max((int(cell) for row in table.values() for cell in row if cell.isdecimal()), default=99) < 10


def _odd(table: dict[str, list[str]]) -> str:
    return ", ".join(sorted({cell for row in table.values() for cell in row if cell not in ("XGMI", "PCIE", "0")}))


def _numa(text: str, count: int) -> dict[str, str]:
    found = re.findall(r"GPU\[(\d+)\]\s*:\s*\(Topology\) Numa Node:\s*(\d+)", text)
    return {f"gpu{gpu}": node for gpu, node in found if int(gpu) < count}
