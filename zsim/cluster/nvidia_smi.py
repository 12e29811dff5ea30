"""Reads `nvidia-smi topo -m` as people paste it, and GPU names and PCIe links from `nvidia-smi -q` or `lspci -vv`."""

from __future__ import annotations

import re
from dataclasses import replace

from zsim.cluster import catalog
from zsim.cluster.matrix import NO_HINTS, Hints, Matrix, Reading, to_document
from zsim.errors import InputError

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Of a message that quotes another, of mpirun's tagged output, of a log with times.
_QUOTE = re.compile(r"^\s*(?:>\s?|\[\d+,\d+\]<std(?:out|err)>:|\d{4}-\d\d-\d\d[T ][\d:.]+Z?(?:[+-]\d\d:?\d\d)?[ \t])")
# A GPU's name in what people paste along: nvidia-smi, its -L, its --query-gpu=index,name --format=csv, and what torch,
# vLLM and SGLang say of their environment ("GPU 0,1: NVIDIA H100 80GB HBM3").
_NAMED = re.compile(
    r"^\|\s+(?P<a>\d+)\s+(?P<banner>(?:NVIDIA|Tesla|Quadro|GeForce)\b.*?)\s+(?:On|Off|N/A)\s*\||"
    r"^GPU (?P<b>\d+): (?P<listed>.+?) \(UUID|^(?P<c>\d+), (?P<query>(?:NVIDIA|Tesla) [^,]+)|"
    r"^GPU (?P<d>[\d,]+): (?P<environment>(?:NVIDIA|Tesla|Quadro|GeForce)[^(\n]*?)\s*$",
    re.MULTILINE,
)
_NO_NVLINKS = re.compile(r"topo\s+-mp\b")  # its other spelling of the matrix: PCIe alone
_CELL = re.compile(r"X|SYS|SOC|NODE|PHB|PXB|PIX|NV\d+|MX\d*")
_GLUED = re.compile(r"(?:SYS|SOC|NODE|PHB|PXB|PIX|NV\d+){2,}")
_AFFINITY = re.compile(r"\b(CPU|NUMA|GPU NUMA|Node) (Affinity|ID)\b")
_P2P_STATUS = re.compile(
    r"\b(GNS|CNS|TNS)\b|Chipset not supported|Status Ok|^\s*GPU\d+\s+(X\s+)?(OK|NS|DR|U)\b", re.MULTILINE
)
_DEVICE = re.compile(r"GPU\d+")

RUN = "run `nvidia-smi topo -m` and paste all of it"


def read(text: str, hints: Hints = NO_HINTS) -> Reading:
    """A topology document from the matrix in `text`.

    Raises InputError for another table (`-p2p`), a truncated paste, or a matrix that contradicts itself.
    """
    matrix = parse(text)
    if not hints.gpu and not hints.gpus:
        hints = replace(hints, gpus=_named(text, matrix))
    return to_document(matrix, hints, "nvidia-smi topo -m")


def _named(text: str, matrix: Matrix) -> tuple[str, ...]:
    """Names of the GPUs in what stands around the matrix: one for all, or as many as it has."""
    lines = "\n".join(_QUOTE.sub("", _ANSI.sub("", line)) for line in text.splitlines())
    names: tuple[str, ...] = ()
    for found in _NAMED.finditer(lines):
        said = found.groupdict()
        indices = next(said[group] for group in "abcd" if said[group])
        name = next(said[group] for group in ("banner", "listed", "query", "environment") if said[group])
        names += (name,) * len(indices.strip(",").split(","))
    if re.search(r"^\s+MIG \d+g\.\d+gb", lines, re.MULTILINE):
        matrix.notes.append("MIG partitions stand beside the matrix: whole GPUs are simulated")
    unknown = [name for name in names if not catalog.known_name(name)]
    if unknown and len(set(names)) == 1:
        accepted = "a GPU of the catalog that it is to be taken for: zsim topo FILE --gpu NAME --yaml NEW_FILE"
        raise InputError(f"{unknown[0]} is not in the catalog", field="gpu", accepted=accepted)
    if not names or unknown:
        return ()
    same = len(set(names)) == 1
    if not same and len(names) != len(matrix.gpus):
        return ()
    matrix.notes.append("the GPUs are named beside the matrix")
    return names[:1] * len(matrix.gpus) if same else names


def parse(text: str) -> Matrix:
    """The matrix itself. Rows of NICs may be missing; rows of GPUs may not."""
    lines = [_QUOTE.sub("", _ANSI.sub("", line)).rstrip("\r") for line in text.lstrip("\ufeff").splitlines()]
    headers = [number for number, line in enumerate(lines) if _is_header(line)]
    header = headers[0] if headers else None
    end = headers[1] if len(headers) > 1 else len(lines)
    if _P2P_STATUS.search("\n".join(lines[:end])):
        raise InputError(
            "this is the peer-to-peer status (`topo -p2p`), which does not say how GPUs are connected", accepted=RUN
        )
    if header is None and re.search("GPU0GPU1", text):
        raise InputError("GPU0GPU1: the tabs between the columns are lost", accepted=RUN)
    if header is None:
        raise InputError("no header line of GPU columns", accepted=RUN)
    columns = _columns(lines[header])
    rows: dict[str, tuple[int, list[str], list[str]]] = {}
    status = _P2P_STATUS.search("\n".join(lines[end:]))
    for number, line in enumerate(lines[header + 1 : end if status else None], header + 2):
        row = _row(line, columns, number)
        if row is not None:
            if row[0] in rows:
                raise InputError(f"a second row of {row[0]}: two matrices in one file?", line=number)
            rows[row[0]] = (number, row[1], row[2])
        elif line.strip().lower().startswith("legend"):
            break
    matrix = _matrix(columns, rows, lines, _affinities(lines[header]))
    if status:
        matrix.notes.append("the peer-to-peer status below the matrix is not read (--p2p)")
    elif any(_is_header(line) and _columns(line) == columns for line in lines[header + 1 :]):
        matrix.notes.append("of several matrices the first one is read")
    legend = re.search(r"^\s*PIX\s+= ", text, re.MULTILINE) and not re.search(r"^\s*NV#\s+= ", text, re.MULTILINE)
    if _NO_NVLINKS.search(text) or legend:
        matrix.notes.append("the matrix is of `topo -mp`, which leaves NVLinks out: the GPUs are taken to have none")
    return matrix


def _is_header(line: str) -> bool:
    tokens = line.replace("|", " ").split()
    if not tokens or not _DEVICE.fullmatch(tokens[0]):
        return False
    return len(tokens) == 1 or not _CELL.fullmatch(tokens[1])


def _columns(header: str) -> list[str]:
    cut = _AFFINITY.search(header)
    return (header[: cut.start()] if cut else header).replace("|", " ").split()


def _affinities(header: str) -> list[str]:
    return [f"{match.group(1)} {match.group(2)}" for match in _AFFINITY.finditer(header)]


def _row(line: str, columns: list[str], number: int) -> tuple[str, list[str], list[str]] | None:
    """(name, cells, what follows them) of a row of the matrix; None for any other line."""
    stripped = line.replace("|", " ").strip()
    name = stripped.split(maxsplit=1)[0] if stripped else ""
    if name not in columns:
        return None
    rest = stripped[len(name) :]
    cells: list[str] = []
    while len(cells) < len(columns):
        token = rest.split(maxsplit=1)[0] if rest.strip() else ""
        if _GLUED.fullmatch(token):
            raise InputError(
                f"row {name} has {token!r}: two cells without the tab between them", line=number, accepted=RUN
            )
        if not _CELL.fullmatch(token):
            break
        cells.append(token)
        rest = rest[rest.index(token) + len(token) :]
    return name, cells, rest.split()


def _matrix(
    columns: list[str], rows: dict[str, tuple[int, list[str], list[str]]], lines: list[str], affinities: list[str]
) -> Matrix:
    gpus = [name for name in columns if _DEVICE.fullmatch(name)]
    nics = [name for name in columns if name not in gpus]
    local = {name: f"gpu{index}" for index, name in enumerate(gpus)}
    local |= {name: f"nic{index}" for index, name in enumerate(nics)}
    matrix = Matrix([local[name] for name in gpus], [local[name] for name in nics])
    matrix.nic_names = {local[name]: name for name in nics} | _legend(lines, local)
    for gpu in gpus:
        if gpu not in rows:
            raise InputError(f"no row for {gpu}: the paste is cut", accepted=RUN)
    for name, (number, cells, trailing) in rows.items():
        if len(cells) < len(columns) and name in gpus:
            raise InputError(
                f"row {name} has {len(cells)} of {len(columns)} cells: the paste is cut", line=number, accepted=RUN
            )
        own = columns.index(name)
        if own < len(cells) and cells[own] != "X":
            raise InputError(
                f"row {name} has {cells[own]} where X is due: a cell is missing", line=number, accepted=RUN
            )
        for other, cell in zip(columns, cells, strict=False):
            _cell(matrix, local[name], local[other], cell)
        if name in gpus:
            numa = _numa(trailing, affinities)
            if numa:
                matrix.numa[local[name]] = numa
    return matrix


def _cell(matrix: Matrix, a: str, b: str, cell: str) -> None:
    if cell == "X":
        return
    if cell.startswith("MX"):
        raise InputError(
            "MetaXLink: the catalog has no MetaX GPUs", field="gpu", accepted="a machine with NVIDIA or AMD GPUs"
        )
    if cell.startswith("NV"):
        matrix.wires[a, b] = int(cell[2:])
    else:
        matrix.cells[a, b] = "SYS" if cell == "SOC" else cell


def _numa(trailing: list[str], affinities: list[str]) -> str:
    """Something equal for GPUs of one socket: the NUMA node, else the CPU list. Empty cells leave no trace."""
    if not affinities:  # a hand-written "NUMA 0" behind the cells
        return trailing[1] if len(trailing) == 2 and trailing[0].upper() == "NUMA" else ""
    values = trailing[: -1 if affinities[-1] == "GPU NUMA ID" and len(trailing) > 1 else None]
    if len(values) == 1 and not re.search("[-,]", values[0]):
        return values[0]  # no CPU list, as under Slurm for GPUs of the other socket
    named = dict(zip(affinities, values, strict=False))
    numa = named.get("NUMA Affinity") or named.get("Node Affinity") or "N/A"
    if re.fullmatch(r"\d+", numa):  # a range says which nodes the process may use, not where the GPU is
        return numa
    return named.get("CPU Affinity", "") if numa == "N/A" else ""


def _legend(lines: list[str], local: dict[str, str]) -> dict[str, str]:
    found = {}
    for line in lines:
        match = re.fullmatch(r"\s*(NIC\d+)\s*:\s*(\S+)\s*", line)
        if match and match.group(1) in local:
            found[local[match.group(1)]] = match.group(2)
    return found


def query_hints(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """(GPU names, (PCIe generation, lanes) of each) from `nvidia-smi -q` or `lspci -vv`, in the order listed."""
    names = re.findall(r"^\s*Product Name\s*:\s*(.+?)\s*$", text, flags=re.MULTILINE)
    if names:
        # The current generation drops while a GPU idles; the current width does not.
        gens = re.findall(r"PCIe Generation\s*\n\s*Max\s*:\s*(\d)", text)
        widths = re.findall(r"Link Width\s*\n(?:\s*Max\s*:\s*\d+x\s*\n)?\s*Current\s*:\s*(\d+)x", text)
        return names, [(int(gen), int(width)) for gen, width in zip(gens, widths, strict=False)]
    slots = []
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        named = re.search(r"(?:VGA compatible|3D) controller: NVIDIA.*?\[(.+?)\]", block)
        if not named:
            continue
        names.append(named.group(1))
        link = re.search(r"LnkSta:\s*Speed ([\d.]+)GT/s.*?Width x(\d+)", block)
        if link:
            slots.append((generation(float(link.group(1))), int(link.group(2))))
    return names, slots


def generation(gigatransfers: float) -> int:
    """PCIe generation of a link speed in GT/s."""
    speeds = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
    if gigatransfers not in speeds:
        raise InputError(f"{gigatransfers} GT/s is no PCIe speed", accepted=", ".join(map(str, speeds)))
    return speeds[gigatransfers]
