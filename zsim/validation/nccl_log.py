"""Reads the tables of nccl-tests and rccl-tests from logs as people keep them, and two others of the same content.

Survives launcher prefixes ("[1,0]<stdout>:", a bare "[0]" inside rows), other programs' lines between rows, tables
without redop or root, one group of columns or two, several tests in one file; reads torch's all_reduce_bench and
DeepSpeed's comms log too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from zsim import units
from zsim.errors import InputError

_PREFIX = re.compile(r"\[\d+(?:,\d+)?\](?:<std(?:out|err)>)?:?")
_TYPES = r"float|half|bfloat16|double|int8|uint8|int32|uint32|int64|uint64|fp8_e4m3|fp8_e5m2|f8e4m3|f8e5m2"
_ROW = re.compile(rf"^\s*(\d+)\s+(\d+)\s+(?:{_TYPES})\b\s*(sum|prod|min|max|avg|none|all|mulsum)?\s*(.*)$")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|N/A", re.IGNORECASE)
_HEADER = re.compile(r"size\s+count")
_TITLE = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall|sendrecv)_perf")
_DEVICE = re.compile(r"Rank\s+(\d+)\b(?:.*?\bon\s+(\S+))?.*?device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_THREADS = re.compile(r"nThread (\d+) nGpus (\d+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


@dataclass(frozen=True)
class Row:
    """One size, out of place. Bytes, seconds, bytes/s."""

    nbytes: int
    seconds: float
    algbw: float
    busbw: float


@dataclass
class Table:
    """One test. `op` and `ranks` are None where neither the log nor its numbers tell."""

    op: str | None = None
    ranks: int | None = None
    gpus_per_process: int = 1
    devices: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)  # names of the machines that the log lists
    version: str | None = None
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read(path: str | Path) -> list[Table]:
    """All tables of a log. Raises InputError where there is none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    tables = parse(text)
    if not tables:
        raise InputError("no row of a collective benchmark in it", file=path, accepted="the output of nccl-tests")
    return tables


def parse(text: str) -> list[Table]:
    """Tables in order; without rows they are dropped."""
    if re.search(r"^\s*Comm\. Op\s+Message Size", text, re.MULTILINE):
        return _comms_logger(text)
    if re.search(r"^\|\s*payload\s*\|", text, re.MULTILINE):
        return _markdown(text)
    tables = [Table()]
    kinds: list[tuple[str, int]] = []  # (redop, root) of the current table's rows
    for raw in text.splitlines():
        line = _PREFIX.sub(" ", raw)
        version, device, title = _VERSION.search(line), _DEVICE.search(line), _TITLE.search(line)
        threads = _THREADS.search(line)
        row = _ROW.match(line.replace("#", " ", 1) if line.lstrip().startswith("#") else line)
        if (
            row is None
            and (threads or device or _HEADER.search(line) or (title and "concluded" not in line))
            and tables[-1].rows
        ):
            _finish(tables[-1], kinds)
            before = tables[-1]
            tables.append(Table(version=before.version, gpus_per_process=before.gpus_per_process))
            if not device and not threads:  # only a new header: the same ranks
                tables[-1].ranks, tables[-1].devices, tables[-1].hosts = before.ranks, before.devices, before.hosts
            kinds = []
        if threads:
            tables[-1].gpus_per_process = int(threads.group(1)) * int(threads.group(2))
        elif version:
            tables[-1].version = version.group(1)
        elif device:
            tables[-1].devices.append(device.group(3))
            tables[-1].hosts.add(device.group(2) or "")
            tables[-1].ranks = max(tables[-1].ranks or 0, int(device.group(1)) + 1)  # often only the last line is kept
        elif title:
            tables[-1].op = _OPS.get(title.group(1), title.group(1))
        elif row:
            _add(tables[-1], kinds, int(row.group(1)), row.group(3) or "", row.group(4))
    _finish(tables[-1], kinds)
    return [table for table in tables if table.rows]


def _add(table: Table, kinds: list[tuple[str, int]], nbytes: int, redop: str, rest: str) -> None:
    """A row's numbers: [root] (time algbw busbw wrong) once or twice; an odd count starts with the root."""
    numbers = _NUMBER.findall(rest)
    root = -1
    if len(numbers) in (5, 7, 9) and re.fullmatch(r"-?\d{1,6}", numbers[0]):
        root, numbers = int(numbers[0]), numbers[1:]
    if len(numbers) < 3 or "N/A" in (values := [number.upper() for number in numbers])[:3]:
        table.warnings.append(f"row of {nbytes} bytes is cut")
        return
    micro, algbw, busbw = (float(value) for value in values[:3])
    kinds.append((redop, root))
    if nbytes > 0 and micro > 0:
        table.rows.append(Row(nbytes, micro * 1e-6, algbw * 1e9, busbw * 1e9))


def _finish(table: Table, kinds: list[tuple[str, int]]) -> None:
    """Work out op and number of ranks from what the numbers say, and doubt impossible ones."""
    fastest = max(table.rows, key=lambda row: row.algbw, default=None)
    ratio = fastest.busbw / fastest.algbw if fastest and fastest.algbw > 1e9 else None  # two digits are too few below
    if table.op is None and kinds:
        table.op = _guess_op(kinds[-1], ratio)
    if ratio is not None:
        deduced = _ranks(table.op or "all_gather", ratio)
        table.ranks = table.ranks or deduced
    if ratio == 0.0:
        table.ranks = table.ranks or 1
        table.warnings.append("one rank: nothing crosses a link, the bandwidths mean nothing")
    if any(row.algbw > 5e12 for row in table.rows):
        table.warnings.append("faster than any memory: not a link rate")


def _guess_op(kind: tuple[str, int], ratio: float | None) -> str | None:
    redop, root = kind
    if root >= 0:
        return "broadcast" if redop in ("", "none") else "reduce"
    if redop in ("sum", "avg", "min", "max", "prod"):
        return "all_reduce" if ratio is None or ratio >= 1 else "reduce_scatter"
    return None  # all_gather and alltoall look alike


def _ranks(op: str, ratio: float) -> int | None:
    """From bus over algorithm bandwidth, 2 (n-1)/n or (n-1)/n."""
    share = ratio / 2 if op == "all_reduce" else ratio
    if op in ("broadcast", "reduce", "send_recv") or not 0.4 < share < 0.9995:
        return None
    return round(1 / (1 - share))


def _markdown(text: str) -> list[Table]:
    """`| 32KiB | 1.44GBps | 0.82GBps |`: payload, busbw, algbw of torch's all_reduce_bench."""
    table = Table(op="all_reduce")
    for cells in (line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")):
        rates = [re.fullmatch(r"([\d.]+)([GMT])(B|b)ps", cell.strip()) for cell in cells[1:3]]
        if len(cells) < 3 or not all(rates):
            continue
        busbw, algbw = (_rate(match) for match in rates if match)
        nbytes = units.parse_size(cells[0].strip())
        if not algbw or not nbytes:
            continue
        table.rows.append(Row(nbytes, nbytes / algbw, algbw, busbw))
    _finish(table, [("sum", -1)])
    return [table] if table.rows else []


def _rate(match: re.Match[str]) -> float:
    scale = {"M": 1e6, "G": 1e9, "T": 1e12}[match.group(2)]
    return float(match.group(1)) * scale / (1 if match.group(3) == "B" else 8)


def _comms_logger(text: str) -> list[Table]:
    """DeepSpeed's log_summary: op, then size, count, total ms, average ms, Gb/s. Negative totals overflowed there.

    Its KB are 1024 bytes, of the tensor that the caller passes: of an all-gather a rank's part. The world's size
    follows from the rates (0.19.8 utils/comms_logging.py, `convert_size` and `calc_bw_log`).
    """
    tables: list[Table] = []
    worlds: list[int] = []
    for line in text.splitlines():
        named = re.fullmatch(r"\s*(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|reduce|barrier)\s*", line)
        row = re.match(r"\s+([\d.]+)\s*([KMGT]?)B\s+\d+\s+(-?[\d.]+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", line)
        if named:
            op = named.group(1)
            tables.append(
                Table(op=next((known for known in ("all_gather", "reduce_scatter") if op.startswith(known)), op))
            )
        elif row and tables:
            if float(row.group(3)) < 0:
                tables[-1].warnings.append(f"{row.group(1)} {row.group(2)}B: its total latency is negative, left out")
                continue
            nbytes = round(float(row.group(1)) * 1024 ** " KMGT".index(row.group(2) or " "))
            seconds, rate, busbw = float(row.group(4)) * 1e-3, float(row.group(5)) / 8e-9, float(row.group(6)) / 8e-9
            if nbytes and seconds:
                worlds += _world(tables[-1].op, nbytes, seconds, rate, busbw)
                tables[-1].rows.append(Row(nbytes, seconds, nbytes / seconds, busbw))
    ranks = round(median(worlds)) if worlds else None
    for table in tables:
        table.ranks = ranks
        if table.op == "all_gather" and ranks:
            table.rows = [replace(r, nbytes=r.nbytes * ranks, algbw=r.algbw * ranks) for r in table.rows]
        elif table.op == "all_gather":
            table.warnings.append("sizes are those of a rank's part: the number of ranks is not known")
    return [table for table in tables if table.rows]


def _world(op: str | None, nbytes: int, seconds: float, rate: float, busbw: float) -> list[int]:
    """Number of ranks as a row's rates tell it; none where they are too small or too near their limit."""
    if rate < 1e8:
        return []
    if op in ("all_gather", "reduce_scatter"):
        told = rate * seconds / nbytes
    else:
        share = busbw / rate if op == "all_reduce" else 1.0
        told = 1 / (1 - share) if share < 0.98 else 0.0  # three digits tell no more than 50 ranks
    return [round(told)] if 1.5 <= told < 1e6 else []
