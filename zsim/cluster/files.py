"""Any file that describes a machine, told apart by its content: our YAML, nvidia-smi, rocm-smi, NCCL's XML."""

from __future__ import annotations

import re
from pathlib import Path

from zsim.cluster import nccl_xml, nvidia_smi, rocm_smi
from zsim.cluster.load import cluster_from, load_topology
from zsim.cluster.matrix import NO_HINTS, Hints, Reading
from zsim.cluster.spec import Cluster
from zsim.errors import InputError

ACCEPTED = "a topology YAML, `nvidia-smi topo -m`, `rocm-smi --showtopo`, or what NCCL_TOPO_DUMP_FILE writes"
# nccl-tests (head or bare rows), torch benchmarks, DeepSpeed's communication log, p2pBandwidthLatencyTest, nvbandwidth.
_MEASURED = re.compile(
    r"algbw|Bandwidth *=|Bandwidth Matrix|memcpy (CE|SM)|P2P=Enabled|Comm\. Op|"
    r"^[^\n]*\b\d+\s+\d+\s+(float|half|bfloat16|double|u?int\d+)\b",
    re.IGNORECASE | re.MULTILINE,
)


def read_machine(path: str | Path, hints: Hints = NO_HINTS, nodes: int | None = None) -> tuple[Cluster, Reading]:
    """The cluster that `path` describes and how it was read. Raises InputError with file and line."""
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        cluster = load_topology(path, nodes)
        return cluster, Reading({}, "topology file", list(cluster.assumptions))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    try:
        reading = read_text(text, hints)
        return cluster_from(reading.document, nodes), reading
    except InputError as error:
        error.file = error.file or path
        raise


def assumed(path: Path, reading: Reading) -> tuple[str, ...]:
    """What reading `path` took for granted, and, for a command without the flags that these name, who has them."""
    if not any("(--" in text for text in reading.assumptions):
        return tuple(reading.assumptions)
    how = f"zsim topo {path.name} takes these flags; with --yaml it writes a topology to name instead of {path.name}"
    return (*reading.assumptions, how)


def write_yaml(reading: Reading, path: str | Path) -> None:
    """The topology as a file for `topologies/`. Raises InputError where it already is one."""
    if not reading.document:
        raise InputError("this already is a topology file", field="--yaml")
    import yaml

    lines = [f"# Read from {reading.source}."]
    for key, value in reading.document.items():
        flow = not isinstance(value, str | int)
        lines.append(
            yaml.safe_dump(
                {key: value}, sort_keys=False, default_flow_style=None if flow else False, width=110
            ).rstrip()
        )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_query(path: str | Path) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """(GPU names, PCIe (generation, lanes)) from what `nvidia-smi -q` or `lspci -vv` prints. Raises InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from None
    names, slots = nvidia_smi.query_hints(text)
    if not names:
        raise InputError("no GPU in it", file=path, accepted="the output of `nvidia-smi -q` or `lspci -vv`")
    return tuple(names), tuple(slots)


def read_text(text: str, hints: Hints = NO_HINTS) -> Reading:
    """The topology document in `text`, whichever tool printed it."""
    if not text.strip():
        raise InputError("the file is empty", accepted=ACCEPTED)
    start = text.lstrip("\ufeff \t\r\n")[:1]
    matrix = "CPU Affinity" in text  # which stands above nvidia-smi's alone
    if start == "<" and not matrix:
        return nccl_xml.read(text, hints)
    if "ROCm System Management" in text or re.search(r"\b(XGMI|(Weight|Hops|Link Type) between two GPUs)\b", text):
        return rocm_smi.read(text, hints)
    if _MEASURED.search(text) and not matrix:
        raise InputError(
            "these are measurements, not a topology",
            accepted=ACCEPTED,
            notes=("compare them: zsim validate collectives FILE",),
        )
    if "NCCL INFO" in text and not re.search(r"GPU0\s+GPU1", text):
        raise InputError(
            "this is NCCL's log (NCCL_DEBUG=INFO), which tells the paths it chose and not the machine",
            accepted="NCCL_TOPO_DUMP_FILE=topo.xml in the same run, which writes it",
        )
    return nvidia_smi.read(text, hints)
