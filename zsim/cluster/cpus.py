"""What is known of a CPU by its name (catalog/cpus.yaml): which core it has, and how fast that issues kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

# The core that `cost/profiles/stacks.yaml` was measured on: an EPYC of Zen 4 at 3.63 GHz, by a chain of additions.
_MEASURED_ON = ("Zen 4", 3.63)
UNKNOWN = "a CPU whose cores issue kernels as fast as an EPYC's of Zen 4 at 3.6 GHz"
_NO_AVX512 = ("Zen 1", "Zen 2", "Zen 3", "Haswell", "Broadwell", "Golden Cove", "Neoverse", "Apple")
# By what cpuid says, as NCCL's XML has it: with AMD's extended family beside the base (175) or added to it (25).
_INTEL = {63: "Haswell", 79: "Broadwell", 85: "Skylake", 106: "Ice Lake", 143: "Sapphire Rapids",
          207: "Emerald Rapids", 173: "Granite Rapids"}  # fmt: skip


@dataclass(frozen=True)
class Cpu:
    """`pace`: how many times as long it interprets the same as the core that host times were measured on."""

    core: str
    pace: float
    avx512: bool


@cache
def known(model: str) -> Cpu | None:
    """The CPU that `model` names, as lscpu and data sheets do; None for one that the catalog has not."""
    catalog, plain = _catalog(), re.sub(r"\(R\)|\(TM\)", "", model)
    cycles = catalog["cores"]
    for pattern, core, clock in catalog["clocks"]:
        if re.search(pattern, plain, re.IGNORECASE):
            pace = cycles[core] / clock / (cycles[_MEASURED_ON[0]] / _MEASURED_ON[1])
            return Cpu(core, pace, not core.startswith(_NO_AVX512))
    return None


def core_of(vendor: str, family: int, model: int) -> str:
    """The name of a core by cpuid's numbers, "" where they are unknown."""
    if vendor == "intel":
        return _INTEL.get(model, "") if family == 6 else ""
    if vendor != "amd":
        return ""
    if family in (23, 143):
        return "Zen 2" if model >= 48 else "Zen 1"
    if family in (25, 175):
        return "Zen 4c" if model >= 160 else "Zen 4" if model // 16 in (1, 6, 7, 9) else "Zen 3"
    return "Zen 5" if family in (26, 191) else ""


@cache
def _catalog() -> dict[str, Any]:
    with (Path(__file__).parent / "catalog" / "cpus.yaml").open(encoding="utf-8") as file:
        return yaml.load(file, Loader=yaml.CSafeLoader)
